"""Known lengths: the same number of micro-batches on every rank, within the budget, balanced, with nothing lost. Spec: R13."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain, combinations
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from odb_ref.core.batching.known_lengths import PlanTerms, plan, prepare
from odb_ref.core.batching.layouts import Layout
from odb_ref.core.errors import UsageError

BUDGET = 60
RANKS = st.lists(st.lists(st.integers(1, BUDGET), max_size=30), min_size=1, max_size=5)


def measure(layout: str, lengths: list[int]) -> int:
    return sum(lengths) if layout == "packed" else len(lengths) * max(lengths, default=0)


@given(RANKS, st.sampled_from(["packed", "padded"]), st.integers(1, 4), st.integers(1, 6), st.booleans())
def test_every_rank_has_the_same_number_within_the_budget_and_nothing_is_lost(
    lengths: list[list[int]], layout: str, multiple_of: int, at_least: int, has_cost: bool
) -> None:
    """Spec: R13.1, R13.2."""
    cost = (lambda tokens: tokens + tokens**2 // 16) if has_cost else None
    found = plan(lengths, budget_tokens=BUDGET, layout=layout, cost=cost, multiple_of=multiple_of, at_least=at_least)
    assert len({len(rank) for rank in found}) == 1
    number = len(found[0])
    assert number % multiple_of == 0
    assert number >= at_least
    needs = [prepare(own, PlanTerms(budget_tokens=BUDGET, layout=Layout(layout))).need for own in lengths]
    assert number < max(at_least, *needs) + multiple_of
    for own, batches in zip(lengths, found, strict=True):
        assert sorted(chain.from_iterable(batches)) == list(range(len(own)))
        assert all(measure(layout, [own[index] for index in batch]) <= BUDGET for batch in batches)
        assert sum(map(bool, batches)) == min(number, len(own))  # idle only where there are too few samples


def list_partitions(items: list[int], parts: int) -> list[list[list[int]]]:
    """All partitions of items into at most so many parts."""
    if not items:
        return [[]]
    first, rest = items[0], items[1:]
    found = []
    for size in range(len(rest) + 1):
        for chosen in combinations(range(len(rest)), size):
            if parts:
                others = [item for index, item in enumerate(rest) if index not in chosen]
                part = [first, *(rest[index] for index in chosen)]
                found += [[part, *more] for more in list_partitions(others, parts - 1)]
    return found


def compute_best(lengths: list[int], parts: int, compute: Callable[[list[int]], int]) -> int:
    return min(max(map(compute, partition)) for partition in list_partitions(lengths, parts))


@given(st.lists(st.integers(1, BUDGET), min_size=1, max_size=7), st.integers(1, 4))
def test_the_largest_padded_micro_batch_is_as_small_as_can_be(lengths: list[int], at_least: int) -> None:
    """A group's padding and the fewest groups under a bound are exact (FEWEST), so the bisection finds the optimum."""
    batches = plan([lengths], budget_tokens=BUDGET, layout="padded", at_least=at_least)[0]
    largest = max(measure("padded", [lengths[index] for index in batch]) for batch in batches)
    assert largest == compute_best(lengths, len(batches), lambda part: measure("padded", part))


@given(st.lists(st.integers(1, BUDGET), min_size=1, max_size=7), st.integers(1, 4), st.booleans())
def test_the_largest_packed_micro_batch_is_near_the_smallest(lengths: list[int], at_least: int, has_cost: bool) -> None:
    """Bin packing has no quick optimum: best fit under a bisected bound stays within 13/11 of it (MULTIFIT)."""

    def cost(tokens: int) -> int:
        return tokens + tokens**2 // 16 if has_cost else tokens

    batches = plan([lengths], budget_tokens=10**6, cost=cost, at_least=at_least)[0]
    largest = max(sum(cost(lengths[index]) for index in batch) for batch in batches)
    best = compute_best(lengths, len(batches), lambda part: sum(map(cost, part)))
    assert 11 * largest <= 13 * best + 11


def test_units_stay_together() -> None:
    """Spec: R13.2. Pairs of a chosen and a rejected answer, in rows of at most 100 tokens."""
    pairs = [(30, 20), (10, 15), (60, 40), (5, 5)]
    found = plan([pairs], budget_tokens=100)[0]
    assert sorted(chain.from_iterable(found)) == [0, 1, 2, 3]
    assert {sum(sum(pairs[index]) for index in batch) for batch in found} == {100, 85}
    with pytest.raises(UsageError, match="sample 0 is a unit of 2 sequences, which needs layout='packed'"):
        plan([pairs], budget_tokens=100, layout="padded")


@pytest.mark.parametrize(
    ("lengths", "options", "message"),
    [
        ([[5], [5, 99]], {}, "rank 1: sample 1 has 99 tokens, more than the budget of 60: raise the budget"),
        ([[0]], {}, "rank 0: sample 0 has the length 0"),
        ([[()]], {}, r"rank 0: sample 0 has the length \(\)"),
        ([[5]], {"cost": lambda tokens: -tokens}, r"rank 0: cost\(5\) is -5"),
        ([[5]], {"layout": "folded"}, "layout must be one of padded, packed, got 'folded'"),
        ([[5]], {"multiple_of": 0}, "multiple_of must be at least 1, got 0"),
        ([[5]], {"at_least": 1.5}, "at_least must be an integer"),
        ([[5]], {"budget_tokens": 0}, "budget_tokens must be"),
    ],
)
def test_nonsense_is_refused(lengths: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        plan(lengths, **{"budget_tokens": BUDGET} | options)


def test_a_sample_beyond_the_budget_travels_alone_where_that_is_said() -> None:
    found = plan([[99, 10, 20, 70]], budget_tokens=BUDGET, may_exceed=True)[0]
    assert sorted(found) == [(0,), (1, 2), (3,)]


def test_a_rank_cannot_have_fewer_than_it_needs() -> None:
    with pytest.raises(UsageError, match="3 micro-batches are needed, got 2"):
        prepare([60, 60, 60], PlanTerms(budget_tokens=BUDGET)).divide(2)


def test_no_samples_at_all() -> None:
    assert plan([], budget_tokens=BUDGET) == ()
    assert plan([[], []], budget_tokens=BUDGET, multiple_of=2) == (((), ()), ((), ()))
