"""Each vectorised twin gives the same result as the core's own function, on random windows."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from odb_ref.arrays.twins import (
    Runs,
    align_windows,
    arrange_runs,
    compute_block_offer,
    compute_group_bounds,
    compute_shared_wants,
    compute_wanted,
    count_groups,
    count_groups_to_emit,
    find_due,
    line_up_windows,
    pack_windows,
)
from odb_ref.arrays.windows import Windows, accumulate_rows, compute_ragged, encode_samples, sort_windows
from odb_ref.core.batching import alignment
from odb_ref.core.batching.alignment import align, is_due
from odb_ref.core.batching.cost import get_cost
from odb_ref.core.batching.grouping import compute_groups
from odb_ref.core.batching.layouts import Layout
from odb_ref.core.batching.order import StepOrder
from odb_ref.core.batching.shards import Draw
from odb_ref.core.batching.sizes import Sizes
from odb_ref.core.config import Config
from odb_ref.core.offer import reduce_offers
from odb_ref.core.rounds import (
    ask_for_samples,
    compute_due_before,
    compute_wanted_samples,
    is_quota_met,
    post_when_ready,
)
from odb_ref.core.state import State
from odb_ref.core.types import Group, Mode, Sample

Positions = tuple[tuple[int, ...], ...]

COSTS = ("tokens", "attention/1", "attention/30")
costs_by_name = st.sampled_from(COSTS)
lengths = st.one_of(st.integers(1, 6), st.integers(1, 50))


@st.composite
def draw_windows(draw: st.DrawFn, *, resources: int = 0) -> list[Group]:
    """Draws windows of a few ranks: by position, with gaps, some empty, and many of equal length."""
    windows = []
    for _ in range(draw(st.integers(1, 4))):
        positions = sorted(draw(st.sets(st.integers(0, 60), max_size=24)))
        costs = st.tuples(*[st.integers(0, 5)] * resources)
        windows.append(tuple(Sample(0, position, draw(lengths), 0, draw(costs)) for position in positions))
    return windows


def make_arrays(windows: Sequence[Group]) -> Windows:
    held = [sample for window in windows for sample in window]
    arrays = sort_windows(
        (
            encode_samples(
                np.array([sample.length for sample in held], dtype=np.int64),
                np.array([sample.position for sample in held], dtype=np.int64),
            ),
            np.array([len(window) for window in windows]),
        )
    )
    if not held or not held[0].costs:
        return arrays
    width = arrays.samples.shape[1]
    used = []
    for resource in range(len(held[0].costs)):
        values = np.zeros((len(windows), width), dtype=np.int64)
        for row, window in enumerate(windows):
            by_position = {sample.position: sample.costs[resource] for sample in window}
            values[row, : len(window)] = [by_position[p] for p in arrays.positions[row, : len(window)].tolist()]
        used.append(accumulate_rows(values))
    return Windows(arrays.samples, arrays.counts, arrays.lengths, arrays.sums, tuple(used))


def list_positions(groups: Sequence[Group]) -> Positions:
    return tuple(tuple(sample.position for sample in group) for group in groups)


def read_runs(arrays: Windows, row: int, begins: list[int], ends: list[int]) -> Positions:
    """Reads a group, which holds its run in reverse, longest first."""
    positions = arrays.positions[row].tolist()
    return tuple(tuple(reversed(positions[begin:end])) for begin, end in zip(begins, ends, strict=True))


def read_neighbours(arrays: Windows, row: int, begins: list[int], ends: list[int]) -> Positions:
    positions = arrays.positions[row].tolist()
    return tuple(tuple(positions[begin:end]) for begin, end in zip(begins, ends, strict=True))


@pytest.mark.parametrize(
    ("order", "layout"),
    [
        (StepOrder.FULLEST, Layout.PADDED),
        (StepOrder.FULLEST, Layout.PACKED),
        (StepOrder.SAMPLER, Layout.PADDED),
        (StepOrder.SAMPLER, Layout.PACKED),
    ],
)
@given(
    draw_windows(resources=2),
    st.integers(1, 200),
    st.tuples(st.integers(1, 12), st.integers(1, 12)),
    st.integers(1, 30),
    st.lists(st.integers(0, 60), min_size=4, max_size=4),
    st.tuples(costs_by_name, st.sampled_from(Sizes)),
)
def test_groups_and_their_alignment(
    order: StepOrder,
    layout: Layout,
    windows: list[Group],
    budget: int,
    limits: tuple[int, int],
    target: int,
    ages: list[int],
    how: tuple[str, Sizes],
) -> None:
    held = make_arrays(windows)
    is_grouped = order is StepOrder.FULLEST and layout is Layout.PADDED
    cost, sizes = get_cost(how[0]), how[1] if is_grouped else Sizes.ANY
    read = read_neighbours if order is StepOrder.SAMPLER else read_runs
    for bounding in ((), limits) if held.used else ((),):
        arrays = held if bounding else replace(held, used=())
        if order is StepOrder.SAMPLER:
            arrays, bounds = line_up_windows(arrays, layout, budget, bounding)
        elif layout is Layout.PACKED:
            arrays, bounds = pack_windows(arrays, budget, bounding)
        else:
            bounds = compute_group_bounds(arrays, budget, bounding, sizes=sizes)
        due = find_due(arrays, bounds, np.array(ages[: len(windows)]))
        runs = align_windows(arrays, bounds, target, due, layout=layout, step_order=order, cost=cost, sizes=sizes)
        to_emit = count_groups_to_emit(arrays, bounds, layout, budget)
        tokens, longest = runs.compute_tokens(arrays, layout), runs.compute_longest(arrays)
        for row, window in enumerate(windows):
            groups = order.compute_groups(window, layout, budget, bounding, sizes=sizes)
            edges = bounds[row, : len(groups) + 1].tolist()
            assert count_groups(bounds)[row] == len(groups)
            assert to_emit[row] == alignment.count_groups_to_emit(groups, layout, budget)
            assert read(arrays, row, edges[:-1], edges[1:]) == list_positions(groups)
            assert due[row, : len(groups)].tolist() == [is_due(group, ages[row]) for group in groups]
            assert not due[row, len(groups) :].any()
            steps, carried = align(groups, target, ages[row], layout, order, cost=cost, sizes=sizes)
            assert read(arrays, row, runs.begins[row].tolist(), runs.ends[row].tolist()) == list_positions(steps)
            emitted = {sample.position for step in steps for sample in step}
            assert {sample.position for sample in window} - emitted == {sample.position for sample in carried}
            assert tokens[row].tolist() == [layout.compute_tokens(step) for step in steps]
            assert longest[row].tolist() == [max((sample.length for sample in step), default=0) for step in steps]


@given(draw_windows(), st.integers(1, 60), st.integers(1, 30), st.integers(0, 2**63 - 1), st.integers(0, 99))
def test_shuffling(windows: list[Group], budget: int, target: int, seed: int, round_: int) -> None:
    arrays = make_arrays(windows)
    bounds = compute_group_bounds(arrays, budget)
    due = find_due(arrays, bounds, np.zeros(len(windows), dtype=np.int64))
    runs = arrange_runs(align_windows(arrays, bounds, target, due), seed, round_)
    for row, window in enumerate(windows):
        aligned, _ = align(compute_groups(window, budget), target, 0)
        steps = StepOrder.SHUFFLED.arrange(aligned, seed, round_)
        assert read_runs(arrays, row, runs.begins[row].tolist(), runs.ends[row].tolist()) == list_positions(steps)


def test_groups_are_halved_alike() -> None:
    """Spec: R4.2. Many groups cost the same and only some of them are halved, or no two cost the same."""
    draw = random.Random(0)
    for _ in range(600):
        lengths_of = draw.choice(((2, 3, 4, 6, 12), range(100, 400)))
        window = tuple(Sample(0, place, draw.choice(lengths_of), 0) for place in range(draw.randint(2, 60)))
        budget = lengths_of[-1] * draw.randint(1, 9)
        sizes, cost = draw.choice(list(Sizes)), get_cost(draw.choice(COSTS))
        arrays = make_arrays([window])
        groups = StepOrder.FULLEST.compute_groups(window, Layout.PADDED, budget, sizes=sizes)
        target = len(groups) + draw.randint(1, 6)
        bounds = compute_group_bounds(arrays, budget, sizes=sizes)
        runs = align_windows(
            arrays, bounds, target, find_due(arrays, bounds, np.zeros(1, dtype=np.int64)), cost=cost, sizes=sizes
        )
        steps, _ = align(groups, target, 0, cost=cost, sizes=sizes)
        assert read_runs(arrays, 0, runs.begins[0].tolist(), runs.ends[0].tolist()) == list_positions(steps)


@given(
    draw_windows(),
    st.lists(st.booleans(), min_size=4, max_size=4),
    st.lists(st.tuples(st.integers(0, 20), st.integers(0, 60)), min_size=4, max_size=4),
    st.integers(1, 3),
    st.sampled_from([None, 5]),
)
def test_offers(
    windows: list[Group], ended: list[bool], marks: list[tuple[int, int]], max_age: int, quota: int | None
) -> None:
    states = [
        State(window=window, is_ended=is_ended, marks=own, round=7, global_samples=5)
        for window, is_ended, own in zip(windows, ended, marks, strict=False)
    ]
    config = Config(
        rank=0,
        world_size=len(windows),
        budget_tokens=60,
        window_samples=8,
        max_age_rounds=max_age,
        mode=Mode.JOIN if quota is None else Mode.QUOTA,
        quota_samples=quota,
    )
    offers = []
    for state in states:
        _, (effect,) = post_when_ready(config, state)
        offers.append(effect.offer)
    arrays = make_arrays(windows)
    bounds = compute_group_bounds(arrays, config.budget_tokens)
    due_before = np.array([compute_due_before(config, state) for state in states])
    assert reduce_offers(offers) == compute_block_offer(
        config,
        7,
        held=np.zeros_like(arrays.counts) if is_quota_met(config, states[0]) else arrays.counts,
        groups=count_groups(bounds),
        to_emit=count_groups_to_emit(arrays, bounds, config.layout, config.budget_tokens),
        due=find_due(arrays, bounds, due_before),
        is_ended=np.array(ended[: len(windows)]),
    )


@given(st.integers(1, 2**70), st.integers(0, 5), st.lists(st.tuples(st.integers(0, 99), st.booleans()), min_size=1))
def test_wanted_samples(window: int, round_: int, ranks: list[tuple[int, bool]]) -> None:
    config = Config(rank=0, world_size=1, budget_tokens=1, window_samples=window)
    carried, ended = np.array([count for count, _ in ranks]), np.array([is_ended for _, is_ended in ranks])
    wanted = compute_wanted(config, round_, carried, ended).tolist()
    # From 2^61 samples on, wanted means everything.
    assert [min(count, 2**60) for count in wanted] == [
        min(compute_wanted_samples(config, round_, count, is_ended=is_ended), 2**60) for count, is_ended in ranks
    ]


@given(draw_windows(), st.integers(1, 40), st.integers(0, 3), st.integers(0, 99), st.data())
def test_wants_of_a_common_order(
    windows: list[Group], window: int, round_: int, drawn: int, data: st.DataObject
) -> None:
    config = Config(
        rank=0,
        world_size=len(windows),
        budget_tokens=1,
        window_samples=window,
        layout=data.draw(st.sampled_from(Layout)),
        shared_samples=data.draw(st.integers(drawn, 120)),
    )
    carried = [held[: data.draw(st.integers(0, len(held)))] for held in windows]
    tokens = np.array([sum(sample.length for sample in held) for held in carried])
    wants = compute_shared_wants(config, round_ + 1, make_arrays(windows), tokens, drawn).tolist()
    for held, kept, want in zip(windows, carried, wants, strict=True):
        is_ended = drawn == config.shared_samples
        state = State(round=round_, window=held, draw=Draw(0, 0, drawn), is_ended=is_ended)
        assert ask_for_samples(config, state, kept) == (0, want)


@given(draw_windows(), st.integers(1, 60), costs_by_name, st.sampled_from(Layout))
def test_tokens_and_costs(windows: list[Group], budget: int, cost_name: str, layout: Layout) -> None:
    cost, arrays = get_cost(cost_name), make_arrays(windows)
    bounds = compute_group_bounds(arrays, budget)
    runs = Runs(bounds[:, :-1], bounds[:, 1:])
    tokens, costs = runs.compute_tokens(arrays, layout), runs.compute_costs(arrays, layout, cost)
    for row, window in enumerate(windows):
        for place, group in enumerate(compute_groups(window, budget)):
            assert tokens[row, place] == layout.compute_tokens(group)
            assert costs[row, place] == layout.compute_cost(group, cost)


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 4))))
def test_ragged_ranges(ranges: list[tuple[int, int]]) -> None:
    begins = np.array([begin for begin, _ in ranges], dtype=np.int64)
    counts = np.array([count for _, count in ranges], dtype=np.int64)
    flat = [begin + i for begin, count in ranges for i in range(count)]
    assert compute_ragged(begins, counts).tolist() == flat
