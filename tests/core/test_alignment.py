"""Alignment: exactly the target, nothing lost, nothing over the budget, what is due first."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from odb_ref.core.batching.alignment import align, is_due
from odb_ref.core.batching.grouping import compute_groups
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


def make_group(*positions: int, length: int) -> Group:
    return tuple(Sample(0, position, length, 0) for position in positions)


def test_equal_halves_are_split_in_the_order_they_were_made() -> None:
    """Spec: R4.2."""
    aligned, _ = align((make_group(0, 1, 2, 3, length=5),), 3, 0)
    assert [[sample.position for sample in group] for group in aligned] == [[2, 3], [0], [1]]


def test_an_odd_group_is_split_after_its_greater_half() -> None:
    """Spec: R4.2."""
    aligned, _ = align((make_group(0, 1, 2, length=5),), 2, 0)
    assert [[sample.position for sample in group] for group in aligned] == [[0, 1], [2]]


def test_as_many_groups_as_steps_stand_in_the_order_of_the_heap_where_they_are_equal() -> None:
    """Spec: R4.2. An order like any other, but the same on every rank and in every version."""
    groups = (make_group(0, 1, length=5), make_group(2, 3, length=5), make_group(4, 5, length=6))
    aligned, carried = align(groups, 3, 0)
    assert aligned == (groups[2], groups[1], groups[0])
    assert carried == ()


def test_a_group_is_due_by_any_of_its_samples() -> None:
    """Spec: R4.3."""
    group = make_group(7, 4, length=5)
    assert [is_due(group, due_before) for due_before in (4, 5, 8)] == [False, True, True]
    assert not is_due((), 9)
