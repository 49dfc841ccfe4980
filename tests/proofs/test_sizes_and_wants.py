"""Friendly numbers of samples (R2.8), and what ranks want of a common order (R14.2): the Python beside the proved model."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from odb_ref.core.batching.alignment import align
from odb_ref.core.batching.cost import Cost
from odb_ref.core.batching.grouping import compute_sized_groups
from odb_ref.core.batching.layouts import Layout
from odb_ref.core.batching.shards import compute_want
from odb_ref.core.batching.sizes import Sizes
from odb_ref.core.types import compute_real_tokens
from tests.helpers.world import make_config
from tests.proofs.conftest import Model
from tests.proofs.test_extraction import SETTINGS, costs, lengths, some_limits, some_padding, write_padding
from tests.proofs.wire import show_group, show_groups, write_cost, write_integers, write_samples
from tests.proofs.worlds import make_samples

TOTAL = 500
"""The number of places in a common order."""

sizes = st.sampled_from(Sizes)


@SETTINGS
@given(st.lists(st.tuples(sizes, st.integers(0, 200), some_padding, some_limits, lengths), min_size=20, max_size=20))
def test_the_model_cuts_groups_as_the_python_does(
    model: Model, cases: list[tuple[Sizes, int, int | None, tuple[int, ...], list[int]]]
) -> None:
    """Spec: R2.8, R16.3. Checks: BUDGET, SIZES (the link from proof to code)."""
    asked, expected = [], []
    for kind, budget, most, limits, items in cases:
        samples = make_samples(items, len(limits))
        words = f"sized {kind} {budget} {write_padding(budget, most)}"
        asked.append(f"{words} {write_integers(limits)} {write_samples(samples)}")
        expected.append(show_groups(compute_sized_groups(samples, kind, budget, limits, most)))
    assert model(" ".join(asked)) == expected


@SETTINGS
@given(
    st.lists(
        st.tuples(sizes, st.integers(1, 200), lengths, st.integers(1, 60), st.integers(0, 40), costs),
        min_size=20,
        max_size=20,
    )
)
def test_the_model_splits_such_groups_as_the_python_does(
    model: Model, cases: list[tuple[Sizes, int, list[int], int, int, Cost]]
) -> None:
    """Spec: R2.8, R4.2. Checks: CONSERVE, SIZES (the link from proof to code)."""
    asked, expected = [], []
    for kind, budget, items, target, due, cost in cases:
        groups = compute_sized_groups(make_samples(items), kind, budget)
        head = f"sized_align {kind} {target} {due} {write_cost(cost)} fullest 0 {len(groups)}"
        asked.append(" ".join([head, *map(write_samples, groups)]))
        emitted, carried = align(groups, target, due, cost=cost, sizes=kind)
        expected.append(f"{show_groups(emitted)} {show_group(carried)}")
    assert model(" ".join(asked)) == expected


wants = st.tuples(
    st.integers(1, 70),
    st.integers(0, 400),
    st.sampled_from(Layout),
    st.integers(1, 40),
    lengths.filter(bool),
    st.integers(0, 40),
)


@SETTINGS
@given(st.lists(wants, min_size=20, max_size=20))
def test_the_model_wants_what_the_python_does(
    model: Model, cases: list[tuple[int, int, Layout, int, list[int], int]]
) -> None:
    """Spec: R14.2. Checks: DEAL (the link from proof to code), of either layout, near the end and far from it."""
    asked, expected = [], []
    for ranks, left, layout, size, items, kept in cases:
        held = make_samples(items)
        carried = held[:kept]
        drawn = TOTAL - left
        words = f"want {ranks} {TOTAL} {int(layout is Layout.PACKED)} {size} {drawn}"
        asked.append(f"{words} {write_samples(held)} {write_samples(carried)}")
        config = make_config(world_size=ranks, layout=layout, window_samples=size, ramp_rounds=0, shared_samples=TOTAL)
        room = config.compute_shared_window(0, drawn)
        tokens, carried_tokens = compute_real_tokens(held), compute_real_tokens(carried)
        expected.append(str(compute_want(room, samples=len(held), tokens=tokens, carried_tokens=carried_tokens)))
    assert model(" ".join(asked)) == expected


@pytest.mark.parametrize(
    ("asked", "answer"),
    [
        ("sized powers 12 12 0 3 0 0 1 1 0 1 1 1 1 0 2 2 1 1 0", "[[1 0] [2]]"),
        ("groups 12 1 0 3 0 0 1 1 0 1 1 2 1 0 2 2 2 1 0", "[[2 1 0]]"),
        ("groups 12 0 0 3 0 0 1 1 0 1 1 2 1 0 2 2 2 1 0", "[[0] [2 1]]"),
        ("want 2 13 1 4 8 1 0 0 8 8 0 0", "3"),
        ("want 2 13 0 4 8 1 0 0 8 8 0 0", "4"),
    ],
)
def test_what_the_comparison_would_notice(model: Model, asked: str, answer: str) -> None:
    """Three samples with a budget for all of them are cut to two, and separated if padding is not allowed. No more packed
    rows are wanted than are left for each."""
    assert model(asked) == [answer]
