"""Alignment: equal halves, odd ones, equal groups, and what is due. The rest is in `tests/spec/test_r4_alignment.py`."""

from __future__ import annotations

from odb_ref.core.batching.alignment import align, is_due
from odb_ref.core.types import Group, Sample


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
