"""The quality of plans: no micro-batch is costlier than necessary."""

from __future__ import annotations

from itertools import chain, combinations

from hypothesis import given
from hypothesis import strategies as st

from odb_ref.plan import plan_rank
from tests.helpers.partitions import count_fewest
from tests.plan.judge import BUDGET, compute_cost

LENGTHS = st.lists(st.integers(1, BUDGET), min_size=1, max_size=30)


def divide(lengths: list[int], **terms: object) -> list[list[int]]:
    """Returns the lengths of each micro-batch of one rank."""
    plan = plan_rank(lengths, **{"budget": BUDGET} | terms)  # type: ignore[arg-type]
    return [[lengths[index] for index in batch] for batch in plan.micro_batches]


@given(LENGTHS, st.integers(1, 12))
def test_by_tokens_no_sample_can_move_to_where_both_cost_less(lengths: list[int], at_least: int) -> None:
    """Spec: R13.6."""
    batches = divide(lengths, at_least=at_least)
    for mine in batches:
        for theirs in batches:
            if mine is not theirs and len(mine) > 1:
                assert all(sum(theirs) + length >= sum(mine) for length in mine)


@given(LENGTHS, st.integers(1, 12))
def test_a_sample_of_the_mean_or_more_is_alone(lengths: list[int], at_least: int) -> None:
    """Spec: R13.6."""
    batches = divide(lengths, at_least=at_least)
    for place, batch in enumerate(batches):
        mean = sum(chain.from_iterable(batches[place:])) / len(batches[place:])
        assert len(batch) < 2 or max(batch) < mean


def list_partitions(items: list[int], parts: int) -> list[list[list[int]]]:
    """Returns all partitions of items into at most ``parts`` parts."""
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


FEW = st.lists(st.integers(1, BUDGET), min_size=1, max_size=7)


@given(FEW, st.integers(1, 4), st.booleans())
def test_the_costliest_padded_micro_batch_is_as_cheap_as_can_be(
    lengths: list[int], at_least: int, has_cost: bool
) -> None:
    """Spec: R13.6. If that one is a single sample, the costliest of the others is also as cheap as possible."""
    cost = compute_cost if has_cost else int

    def measure(batch: list[int]) -> int:
        return len(batch) * cost(max(batch, default=1))

    batches = divide(lengths, layout="padded", at_least=at_least, cost=compute_cost if has_cost else None)
    left = sorted(lengths)
    while left:
        fitting = [
            partition
            for partition in list_partitions(left, len(batches))
            if all(len(part) * max(part) <= BUDGET for part in partition)
        ]
        assert measure(batches[0]) == min(max(map(measure, partition)) for partition in fitting)
        if len(batches[0]) > 1:
            break
        left.remove(*batches.pop(0))


@given(FEW, st.integers(1, 4), st.booleans())
def test_the_costliest_packed_micro_batch_is_near_the_cheapest(
    lengths: list[int], at_least: int, has_cost: bool
) -> None:
    """Spec: R13.6. There is no quick optimum. The greedy has Graham's bound, and settling comes nearer."""
    cost = compute_cost if has_cost else int
    batches = divide(lengths, budget=10**6, at_least=at_least, cost=compute_cost if has_cost else None)

    def find_costliest(parts: list[list[int]]) -> int:
        return max(sum(map(cost, part)) for part in parts)

    costliest, best = find_costliest(batches), min(map(find_costliest, list_partitions(lengths, len(batches))))
    assert 3 * len(batches) * costliest <= (4 * len(batches) - 1) * best
    assert 11 * costliest <= 13 * best


@given(FEW)
def test_there_are_few_more_than_the_fewest(lengths: list[int]) -> None:
    """Spec: R13.4, R13.10. Best fit of the longest first: at most 11/9 of the fewest and 6/9 (Dosa)."""
    plan = plan_rank(lengths, budget=BUDGET)
    fewest = count_fewest(lengths, lambda group: sum(group) <= BUDGET)
    assert plan.report.least <= fewest <= plan.count
    assert 9 * plan.count <= 11 * fewest + 6
