"""Settling: what is moved or exchanged, in which order, and what it ends with. Spec: R13.5, R13.6."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from odb_sim.inputs.lengths import list_bundled_names, load_lengths

from odb_ref.plan import attention, plan_all, plan_rank
from odb_ref.plan.packing import Batch, list_starts, spread
from odb_ref.plan.settling import NEAR, Settling
from tests.plan.test_packing import make_units

BUDGET = 16_384


def settle(costs: list[int], batches: list[Batch], starts: list[int] | None = None) -> list[list[int]]:
    """The costs of each micro-batch, rising."""
    Settling(costs, batches, starts=starts or ()).run()
    return [sorted(costs[unit] for unit in batch) for batch in batches]


def find_plainly(costs: list[int], batches: list[Batch], source: int, bounds: list[tuple[list[int], int]]) -> object:
    """The exchange that R13.5 words, by trying every one."""
    loads = [sum(costs[unit] for unit in batch) for batch in batches]
    found: tuple[int, ...] | None = None
    chosen = None

    def list_first(batch: Batch) -> list[int]:
        return [min(unit for unit in batch if costs[unit] == cost) for cost in sorted({costs[unit] for unit in batch})]

    for place, (_, target) in enumerate(sorted((load, batch) for batch, load in enumerate(loads))[:NEAR]):
        if target == source:
            continue
        for unit in list_first(batches[source]):
            nothing = [None] if len(batches[source]) > 1 else []
            for other in [*nothing, *list_first(batches[target])]:
                fall = costs[unit] - (0 if other is None else costs[other])
                worst = max(loads[source] - fall, loads[target] + fall)
                after = [[*batches[source]], [*batches[target]]]
                after[0].remove(unit)
                after[1].append(unit)
                if other is not None:
                    after[1].remove(other)
                    after[0].append(other)
                fits = all(sum(column[unit] for unit in batch) <= bound for column, bound in bounds for batch in after)
                key = (worst, place, costs[unit], fall * -1)
                if fall > 0 and worst < loads[source] and fits and (found is None or key < found):
                    found, chosen = key, (target, unit, other)
    return chosen


@given(
    st.lists(st.lists(st.tuples(st.integers(1, 12), st.integers(0, 4)), max_size=5), min_size=2, max_size=5),
    st.integers(4, 12),
)
def test_the_exchange_is_the_one_that_the_rule_words(columns: list[list[tuple[int, int]]], bound: int) -> None:
    """Spec: R13.5. The search leaves out what cannot be better: here everything is tried."""
    costs = [cost for column in columns for cost, _ in column]
    uses = [used for column in columns for _, used in column]
    numbers = iter(range(len(costs)))
    batches: list[Batch] = [[next(numbers) for _ in column] for column in columns]
    bounds = [(uses, max(bound, *(sum(uses[unit] for unit in batch) for batch in batches)))]
    settling = Settling(costs, batches, bounds)
    loads = [sum(costs[unit] for unit in batch) for batch in batches]
    for source in sorted(range(len(batches)), key=lambda batch: -loads[batch]):
        if batches[source]:
            assert settling._find(source) == find_plainly(costs, batches, source, bounds)


def test_one_is_exchanged_for_a_cheaper_one_where_no_move_helps() -> None:
    """Spec: R13.5. 20 and 16 become 18 and 18; and a single unit is never given for none."""
    assert settle([11, 9, 9, 7], [[0, 1], [2, 3]]) == [[7, 11], [9, 9]]
    assert settle([8], [[0], []]) == [[8], []]
    assert settle([8, 8, 8], [[0, 1, 2], []]) == [[8, 8], [8]]


def test_a_step_that_costs_more_anyway_is_filled() -> None:
    """Spec: R13.5. Two ranks, two steps: beside the 100 there may be 100 more, and then 20 are left for each."""
    assert list_starts([100] + [10] * 14, 4, 2) == [0, 0, 80, 80]
    assert list_starts([30] + [10] * 14, 4, 2) == [0] * 4
    assert list_starts([], 4, 2) == [0] * 4
    plan = plan_all([100] + [10] * 14, ranks=2, budget=100)
    assert plan.report.wait == plan.report.least_wait == 1
    assert [[len(batch) for batch in rank.micro_batches] for rank in plan.ranks] == [[1, 2], [10, 2]]


def test_steps_have_no_levels_beside_units_alone() -> None:
    """Spec: R13.5. The steps of those that are alone would come between."""
    plan = plan_all([70, 70, 10, 5, 50, 25, 35], ranks=2, budget=60, at_least=3, oversize="alone")
    assert [rank.micro_batches for rank in plan.ranks] == [((0,), (4,), (2, 3)), ((1,), (6,), (5,))]


def test_one_that_is_empty_has_nothing_to_give() -> None:
    """Spec: R13.5. From more units than are exchanged, fewer than there are micro-batches."""
    assert plan_rank([1] * 32_769, budget=60, at_least=32_770).count == 32_770


@pytest.mark.parametrize("name", list_bundled_names())
def test_real_lengths_take_the_fewest_steps_and_wait_no_longer_than_they_must(name: str) -> None:
    """Spec: R13.10. Several draws of every trace, few ranks and many, by tokens and by attention."""
    lengths = [min(int(length), BUDGET) for length in load_lengths(name).tokens]
    for draw in range(3):
        drawn = random.Random(f"{name}{draw}").sample(lengths, min(2_048, len(lengths)))
        for number, ranks in ((2_048, 8), (2_048, 64), (512, 8), (256, 64)):
            for cost, most in ((None, 1.02), (attention(hidden_size=4_096), 1.03)):
                report = plan_all(drawn[:number], ranks=ranks, budget=BUDGET, cost=cost).report
                assert report.count == report.least
                assert report.wait is not None
                assert report.wait <= most * report.least_wait


def test_what_the_greedy_misses_evening_out_finds() -> None:
    """Spec: R13.4. 23.994 budgets of short samples: the greedy leaves one over, and so does best fit."""
    lengths = [min(int(length), BUDGET) for length in load_lengths("gsm8k").tokens]
    drawn = random.Random("gsm8k2").sample(lengths, 2_048)
    assert spread(make_units(drawn), range(2_048), 24, BUDGET) is None
    assert plan_rank(drawn, budget=BUDGET).count == 24
