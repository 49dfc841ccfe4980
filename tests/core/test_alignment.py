"""Alignment: exactly the target, nothing lost, nothing over the budget, what is due first."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from odb_ref.core.alignment import align, is_due
from odb_ref.core.grouping import compute_groups
from odb_ref.core.types import Group, Sample, compute_padded_tokens


def make_groups(lengths: list[int], budget: int) -> tuple[Group, ...]:
    return compute_groups([Sample(0, position, length, 0) for position, length in enumerate(lengths)], budget)


def positions(groups: tuple[Group, ...]) -> list[int]:
    return sorted(sample.position for group in groups for sample in group)


@given(st.lists(st.integers(1, 20), max_size=25), st.integers(1, 60), st.integers(1, 30), st.integers(0, 25))
def test_a_round_has_exactly_its_target_and_loses_nothing(
    lengths: list[int], budget: int, target: int, due_before: int
) -> None:
    groups = make_groups(lengths, budget)
    due = sum(is_due(group, due_before) for group in groups)
    aligned, carried = align(groups, max(target, due, 1), due_before)
    assert len(aligned) == max(target, due, 1)
    assert positions((*aligned, carried)) == list(range(len(lengths)))
    assert [sample.position for sample in carried] == sorted(sample.position for sample in carried)
    assert not any(sample.position < due_before for sample in carried)
    for group in aligned:
        assert len(group) <= 1 or compute_padded_tokens(group) <= budget
        assert not group or group[0].length == max(sample.length for sample in group)
    tokens = [compute_padded_tokens(group) for group in aligned]
    assert tokens == sorted(tokens, reverse=True)
    if carried:
        assert all(aligned), "a rank that carries is never idle"
    idle = sum(not group for group in aligned)
    assert idle == max(0, len(aligned) - len(lengths)) if not carried else idle == 0


def test_the_fullest_groups_are_emitted_and_the_others_carried() -> None:
    groups = make_groups([10, 1, 9, 10, 2], 20)  # [2 1] [10 9] [10]
    aligned, carried = align(groups, 1, 0)
    assert [sample.length for sample in aligned[0]] == [10, 9]
    assert [sample.length for sample in carried] == [1, 10, 2], "in sampler order"


def test_a_due_group_goes_before_a_fuller_one() -> None:
    groups = make_groups([1, 15, 20], 20)
    aligned, carried = align(groups, 1, 1)
    assert [sample.length for sample in aligned[0]] == [1]
    assert [sample.position for sample in carried] == [1, 2]


def test_the_group_with_most_padded_tokens_is_halved_first() -> None:
    groups = make_groups([5, 5, 5, 5, 1, 1], 20)
    aligned, _ = align(groups, 3, 0)
    assert [[sample.length for sample in group] for group in aligned] == [[5, 5], [5, 5], [1, 1]]


def test_single_samples_cannot_be_split_so_the_rest_is_idle() -> None:
    aligned, carried = align(make_groups([30, 5], 10), 4, 0)
    assert [[sample.length for sample in group] for group in aligned] == [[30], [5], [], []]
    assert carried == ()


def test_a_rank_with_nothing_is_idle() -> None:
    assert align((), 2, 0) == (((), ()), ())
