"""Grouping: every sample in one group that fits, whatever its length; the fewest groups are a matter of tests/spec."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from odb_ref.core.batching.grouping import compute_groups
from odb_ref.core.types import Sample, compute_padded_tokens, compute_real_tokens

LENGTHS = st.lists(st.integers(1, 20), max_size=30)


def make_samples(lengths: list[int]) -> list[Sample]:
    return [Sample(7 * position, position, length, 0) for position, length in enumerate(lengths)]


@given(LENGTHS, st.integers(1, 60))
def test_groups_partition_the_samples_and_fit_the_budget(lengths: list[int], budget: int) -> None:
    samples = make_samples(lengths)
    groups = compute_groups(samples, budget)
    assert sorted(sample.position for group in groups for sample in group) == list(range(len(lengths)))
    for group in groups:
        assert len(group) == 1 or compute_padded_tokens(group) <= budget
        assert group[0].length == max(sample.length for sample in group)
        assert compute_padded_tokens(group) >= compute_real_tokens(group)
    longest = [group[0].length for group in groups]
    assert longest == sorted(longest)


def test_a_sample_longer_than_the_budget_travels_alone() -> None:
    groups = compute_groups(make_samples([3, 50, 2, 50]), 10)
    assert [[sample.length for sample in group] for group in groups] == [[3, 2], [50], [50]]


def test_ties_in_length_fall_to_the_position() -> None:
    (group,) = compute_groups(make_samples([4, 4, 4]), 12)
    assert [sample.position for sample in group] == [2, 1, 0]


def test_a_limit_reached_exactly_is_kept_and_one_more_begins_the_next_group() -> None:
    costs = (2, 2, 0, 1, 3, 0)
    samples = [Sample(position, position, 1, 0, (cost, 1)) for position, cost in enumerate(costs)]
    groups = compute_groups(samples, 100, (4, 100))
    assert [[sample.costs[0] for sample in reversed(group)] for group in groups] == [[2, 2, 0], [1, 3, 0]]
    assert list(map(len, compute_groups(samples, 100, (100, 2)))) == [2, 2, 2]
    assert list(map(len, compute_groups(samples, 3, (100, 2)))) == [2, 2, 2]
    assert list(map(len, compute_groups(samples, 3, (100, 100)))) == [3, 3]


def test_a_sample_over_a_limit_travels_alone() -> None:
    samples = [Sample(position, position, 1, 0, (cost,)) for position, cost in enumerate((9, 0, 9, 0, 0))]
    groups = compute_groups(samples, 100, (4,))
    assert [[sample.costs[0] for sample in group] for group in groups] == [[9], [0], [9], [0, 0]]


def test_no_samples_make_no_group() -> None:
    assert compute_groups([], 10) == ()
    assert compute_padded_tokens(()) == 0
