"""Batches are counted when they are collated, and trained on when every rank has collated them."""

from __future__ import annotations

from dataclasses import fields

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from odb_sim.engine.batches import Batches, Shelf, count_batches

from odb_ref.core.batching.layouts import Layout
from odb_ref.core.errors import InvariantError
from odb_ref.core.types import ZERO_COUNTS, Group, Sample, Step
from tests.helpers.effort import few

groups = st.lists(st.integers(1, 50), max_size=5).map(
    lambda lengths: tuple(Sample(100 * place + length, place, length, 0) for place, length in enumerate(lengths))
)


def make_steps(first: int, row: list[Group]) -> list[Step]:
    return [Step(number, 3, group, ZERO_COUNTS) for number, group in enumerate(row, first)]


def list_values(batches: Batches) -> dict[str, list[int]]:
    return {item.name: getattr(batches, item.name).tolist() for item in fields(batches)}


@settings(max_examples=few(100), deadline=None)
@given(row=st.lists(groups, max_size=6), layout=st.sampled_from(Layout))
def test_batches_are_counted_as_the_layout_counts_them(row: list[Group], layout: Layout) -> None:
    values = list_values(count_batches(row, layout))
    assert values["samples"] == [len(group) for group in row]
    assert values["padded"] == [layout.compute_tokens(group) for group in row]
    assert values["real"] == [sum(sample.length for sample in group) for group in row]
    assert values["longest"] == [max((sample.length for sample in group), default=0) for group in row]
    assert values["pairs"] == [sum(sample.length**2 for sample in group) for group in row]
    assert values["ids"] == [sample.id for group in row for sample in group]
    assert values["positions"] == [sample.position for group in row for sample in group]


@st.composite
def rounds(draw: st.DrawFn) -> list[list[Group]]:
    """Draws the groups of a round's steps, by rank."""
    steps = draw(st.integers(1, 5))
    return draw(st.lists(st.lists(groups, min_size=steps, max_size=steps), min_size=1, max_size=5))


@settings(max_examples=few(100), deadline=None)
@given(ranks=rounds(), first=st.integers(0, 9))
def test_a_step_is_what_all_ranks_have_collated_for_it(ranks: list[list[Group]], first: int) -> None:
    """In any order of collations. The counts by rank, lined up, are the counts by step."""
    shelf = Shelf(len(ranks))
    for rank in reversed(range(len(ranks))):
        shelf.put(rank, make_steps(first, ranks[rank]), count_batches(ranks[rank]))
    for number, row in enumerate(zip(*ranks, strict=True), first):
        assert list_values(shelf.take(number)) == list_values(count_batches(row))


def test_a_step_that_a_rank_has_not_collated_is_not_there() -> None:
    """Checks: RELEASE."""
    row: list[Group] = [(Sample(0, 0, 4, 0),), ()]
    shelf = Shelf(2)
    shelf.put(1, make_steps(0, row), count_batches(row))
    with pytest.raises(InvariantError, match="RELEASE: step 0 is taken, and not collated on every rank"):
        shelf.take(0)
    shelf.put(0, [], count_batches([]))
    with pytest.raises(InvariantError, match="RELEASE"):
        shelf.take(0)
    shelf.put(0, make_steps(0, row), count_batches(row))
    assert shelf.take(1).samples.tolist() == [0, 0]
    assert shelf.take(0).samples.tolist() == [1, 1]
    with pytest.raises(InvariantError, match="RELEASE: step 0"):
        shelf.take(0)
