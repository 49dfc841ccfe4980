"""The rules of padded groups, groups of neighbours and alignment, for the windows of many ranks at once.

Called rank by rank on these windows, the core's own functions take four to ten times as long (`python -m tests.arrays.speed`).
So these functions repeat their rules for arrays, except for packed groups, where the core is as fast and is called. Each names
the core function whose result it returns (*twin of*) and the rules, and a test compares the two. `odb_ref.core` remains the
authority.

Windows are rows of arrays (`windows`), and groups are runs of a row; the longest sample of a run comes last.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise, repeat
from typing import Final

import numpy as np
from numpy.typing import NDArray

from odb_ref.arrays.windows import Integers, Windows, accumulate_rows, compute_ragged, decode_lengths
from odb_ref.core.batching.alignment import align
from odb_ref.core.batching.cost import TOKENS, Cost
from odb_ref.core.batching.grouping import compute_rows
from odb_ref.core.batching.layouts import Layout
from odb_ref.core.batching.order import StepOrder, permute
from odb_ref.core.batching.sizes import Sizes
from odb_ref.core.config import Config
from odb_ref.core.offer import NONE, Offer
from odb_ref.core.types import Group, make_sample

Booleans = NDArray[np.bool_]

HUGE: Final = 1 << 61
"""More tokens or samples than can occur. Greater settings have the same effect, so they are cut to this."""


def compute_group_bounds(
    windows: Windows, budget_tokens: int, limits: tuple[int, ...] = (), *, sizes: Sizes = Sizes.ANY
) -> Integers:
    """Returns the bounds of the groups, of shape (ranks, most groups + 1). Group g of a row lies between columns g and g + 1.

    Rows with fewer groups repeat their last end. Twin of
    `odb_ref.core.batching.grouping.compute_groups` and of `odb_ref.core.batching.layouts.Layout.compute_groups`.
    Spec: R2.1, R2.2, R2.8.
    """
    budget_tokens = min(budget_tokens, HUGE)
    friendly = _list_friendly(sizes, windows.samples.shape[1])
    begins = np.zeros_like(windows.counts)
    columns = [begins]
    while (begins < windows.counts).any():
        begins = begins + friendly[_find_ends(windows, begins, budget_tokens, limits) - begins]
        columns.append(begins)
    return np.stack(columns, axis=1)


@lru_cache(maxsize=8)
def _list_friendly(sizes: Sizes, most: int) -> Integers:
    """Returns `Sizes.round_down` of each number of samples up to ``most``, and 0 for no samples."""
    return np.array([0, *map(sizes.round_down, range(1, most + 1))])


@lru_cache(maxsize=8)
def _list_middles(sizes: Sizes, most: int) -> Integers:
    """Returns `Sizes.find_middle` of each number of samples up to ``most``, and 0 for unfriendly numbers."""
    return np.array([sizes.find_middle(size) if sizes.is_friendly(size) else 0 for size in range(most + 1)])


def _find_ends(windows: Windows, begins: Integers, budget_tokens: int, limits: tuple[int, ...]) -> Integers:
    """Returns the end of the group that begins in each row: the first sample that does not fit, found by bisection.

    Along a sorted row both the padded tokens and the use of a resource only grow, so no later sample fits either.
    """
    rows = np.arange(len(begins))
    first_lengths = windows.lengths[rows, np.minimum(begins, windows.lengths.shape[1] - 1)]
    low = np.minimum(begins + 1, windows.counts)  # the first sample joins even if it does not fit
    # The first sample is the shortest, so no more samples fit than if all were this short.
    high = np.maximum(low, np.minimum(windows.counts, begins + budget_tokens // first_lengths))
    while True:
        rows = np.flatnonzero(low < high)
        if not len(rows):
            return low
        middle, begin = (low[rows] + high[rows]) // 2, begins[rows]
        is_over = (middle + 1 - begin) * windows.lengths[rows, middle] > budget_tokens
        for used, limit in zip(windows.used, limits, strict=True):
            is_over |= used[rows, middle + 1] - used[rows, begin] > limit
        high[rows] = np.where(is_over, middle, high[rows])
        low[rows] = np.where(is_over, low[rows], middle + 1)


def pack_windows(windows: Windows, budget_tokens: int, limits: tuple[int, ...] = ()) -> tuple[Windows, Integers]:
    """Returns the windows in an order in which packed groups are runs, and the bounds of these as in `compute_group_bounds`.

    The core's own function forms the groups, row by row.
    """
    samples = windows.samples.copy()
    bounds: list[list[int]] = []
    for row, count in enumerate(windows.counts.tolist()):
        held = _make_samples(windows, row, count, windows.positions[row, :count].tolist())
        groups = compute_rows(held, budget_tokens, limits)
        samples[row, :count] = windows.samples[row, [sample.id for group in groups for sample in reversed(group)]]
        bounds.append([0, *accumulate(map(len, groups))])
    most = max(map(len, bounds), default=1)
    lengths = decode_lengths(samples)
    packed = Windows(samples, windows.counts, lengths, accumulate_rows(lengths))
    return packed, np.array([ends + ends[-1:] * (most - len(ends)) for ends in bounds], dtype=np.int64)


def _make_samples(windows: Windows, row: int, count: int, positions: Sequence[int]) -> Group:
    """Returns the samples of a row as core samples, whose ids are their places in the row."""
    lengths = windows.lengths[row, :count].tolist()
    costs = zip(*(np.diff(used[row, : count + 1]).tolist() for used in windows.used), strict=True)
    return tuple(map(make_sample, range(count), positions, lengths, repeat(0), costs if windows.used else repeat(())))


def line_up_windows(
    windows: Windows, layout: Layout, budget_tokens: int, limits: tuple[int, ...] = ()
) -> tuple[Windows, Integers]:
    """Returns the windows in order of position, and the bounds of groups of neighbours as in `compute_group_bounds`.

    Twin of `odb_ref.core.batching.order.StepOrder.compute_groups`.
    Spec: R2.6.
    """
    ranks, width = windows.samples.shape
    is_held = np.arange(width) < windows.counts[:, None]
    order = np.argsort(np.where(is_held, windows.positions, HUGE), axis=1)
    samples = np.take_along_axis(windows.samples, order, axis=1)
    lengths = decode_lengths(samples)
    uses = [np.take_along_axis(np.diff(used, axis=1), order, axis=1) for used in windows.used]
    used = tuple(map(accumulate_rows, uses))
    lined = Windows(samples, windows.counts, lengths, accumulate_rows(lengths), used, is_sorted=False)
    begins_group = np.zeros((ranks, width), dtype=np.bool_)
    begins = np.zeros(ranks, dtype=np.int64)
    longest = np.zeros(ranks, dtype=np.int64)
    for place in range(width):
        longest = np.maximum(longest, lengths[:, place])
        tokens = (place + 1 - begins) * longest
        if layout is Layout.PACKED:
            tokens = lined.sums[:, place + 1] - np.take_along_axis(lined.sums, begins[:, None], axis=1)[:, 0]
        is_over = tokens > budget_tokens
        for amounts, limit in zip(used, limits, strict=True):
            is_over |= amounts[:, place + 1] - np.take_along_axis(amounts, begins[:, None], axis=1)[:, 0] > limit
        is_over |= place == 0
        begins_group[:, place] = is_over & is_held[:, place]
        begins = np.where(is_over, place, begins)
        longest = np.where(is_over, lengths[:, place], longest)
    counts = begins_group.sum(axis=1)
    bounds = np.repeat(windows.counts[:, None], int(counts.max(initial=0)) + 1, axis=1)
    rows, places = np.nonzero(begins_group)
    bounds[rows, compute_ragged(np.zeros_like(counts), counts)] = places
    return lined, bounds


def count_groups(bounds: Integers) -> Integers:
    """Returns the number of groups in each row."""
    counts: Integers = (bounds[:, 1:] > bounds[:, :-1]).sum(axis=1)
    return counts


def count_groups_to_emit(windows: Windows, bounds: Integers, layout: Layout, budget_tokens: int) -> Integers:
    """Returns how many of its groups each rank would emit. Twin of `odb_ref.core.batching.alignment.count_groups_to_emit`.

    Spec: R3.1.
    """
    groups = Runs(bounds[:, :-1], bounds[:, 1:])
    is_rest = (groups.sizes > 0) & (2 * groups.compute_tokens(windows, layout) < min(budget_tokens, HUGE))
    count = count_groups(bounds)
    return count - ((count > 1) & is_rest.any(axis=1))


def find_due(windows: Windows, bounds: Integers, due_before: Integers) -> Booleans:
    """Returns which groups are due, of shape (ranks, most groups). Twin of `odb_ref.core.batching.alignment.is_due`.

    Spec: R4.3.
    """
    if not due_before.any():
        return np.zeros((len(bounds), bounds.shape[1] - 1), dtype=np.bool_)
    places = np.arange(windows.samples.shape[1])
    is_due = (windows.positions < due_before[:, None]) & (places < windows.counts[:, None])
    counted = accumulate_rows(is_due.astype(np.int64))
    due: Booleans = np.diff(np.take_along_axis(counted, bounds, axis=1), axis=1) > 0
    return due


def compute_block_offer(
    config: Config,
    round_: int,
    *,
    held: Integers,
    groups: Integers,
    to_emit: Integers,
    due: Booleans,
    is_ended: Booleans,
) -> Offer:
    """Returns the reduced offer of some ranks.

    Twin of `odb_ref.core.rounds.post_when_ready`, for what it posts if nothing fails.
    Spec: R3.1.
    """
    return Offer(
        round_min=round_,
        round_max=round_,
        fingerprint_min=config.fingerprint,
        fingerprint_max=config.fingerprint,
        ready_min=1,
        failed_rank=NONE,
        stop_step=NONE,
        stop_rank=NONE,
        samples_min=int(held.min()),
        samples_max=int(held.max()),
        groups_min=int(to_emit[~is_ended].min(initial=NONE)),
        groups_max=int(groups.max()),
        due_max=int(due.sum(axis=1).max()),
    )


def compute_wanted(config: Config, round_: int, carried: Integers, is_ended: Booleans) -> Integers:
    """Returns the samples that fill the windows. Twin of `odb_ref.core.rounds.compute_wanted_samples`. Spec: R2.3."""
    return np.where(is_ended, 0, np.maximum(0, min(config.compute_window_samples(round_), HUGE) - carried))


def compute_shared_wants(
    config: Config, round_: int, windows: Windows, carried_tokens: Integers, drawn: int
) -> Integers:
    """Returns what each rank wants from a common order of which all ranks together have ``drawn`` places.

    Twin of `odb_ref.core.rounds.ask_for_samples`, except for updates (R16.4), which only events simulate.
    Spec: R2.3, R14.2, R16.4.
    """
    held = -(-windows.counts * carried_tokens // np.maximum(1, windows.tokens))
    is_ended = drawn == config.shared_samples
    return np.where(is_ended, 0, np.maximum(0, min(config.compute_shared_window(round_, drawn), HUGE) - held))


@dataclass(frozen=True, slots=True)
class Runs:
    """The steps of some ranks, of shape (ranks, steps), as runs of their windows. An idle step begins where it ends."""

    begins: Integers
    ends: Integers

    @property
    def sizes(self) -> Integers:
        """The number of samples in each step."""
        return self.ends - self.begins

    def compute_tokens(self, windows: Windows, layout: Layout) -> Integers:
        """Returns the tokens of each step's batch. Twin of `odb_ref.core.batching.layouts.Layout.compute_tokens`.

        Spec: R2.1, R2.4.
        """
        if layout is Layout.PACKED:
            return self.compute_sums(windows.sums)
        return self.sizes * self.compute_longest(windows)

    def compute_costs(self, windows: Windows, layout: Layout, cost: Cost) -> Integers:
        """Returns the cost of each step's batch. Twin of `odb_ref.core.batching.layouts.Layout.compute_cost`.

        Spec: R2.7.
        """
        if cost == TOKENS:
            return self.compute_tokens(windows, layout)
        if layout is Layout.PACKED:
            is_held = np.arange(windows.lengths.shape[1]) < windows.counts[:, None]
            return self.compute_sums(accumulate_rows(price(np.where(is_held, windows.lengths, 0), cost)))
        return self.sizes * price(self.compute_longest(windows), cost)

    def compute_sums(self, sums: Integers) -> Integers:
        """Returns the sum over each step of the values accumulated in ``sums``."""
        return np.take_along_axis(sums, self.ends, axis=1) - np.take_along_axis(sums, self.begins, axis=1)

    def compute_squares(self, windows: Windows) -> NDArray[np.float64]:
        """Returns the sum of the squared lengths of each step, as floats because it may exceed 64 bits."""
        squares = np.append(windows.lengths.astype(np.float64) ** 2, 0.0)
        return np.where(
            self.sizes > 0, np.add.reduceat(squares, self._list_places(windows))[::2].reshape(self.begins.shape), 0
        )

    def _list_places(self, windows: Windows) -> Integers:
        """Returns where each step begins and ends if all rows are laid end to end."""
        firsts = np.arange(len(self.begins))[:, None] * windows.lengths.shape[1]
        return np.stack([self.begins + firsts, self.ends + firsts], axis=2).reshape(-1)

    def compute_longest(self, windows: Windows) -> Integers:
        """Returns the length of the longest sample of each step, or 0 if it is idle."""
        if windows.is_sorted:
            longest = np.take_along_axis(windows.lengths, np.maximum(0, self.ends - 1), axis=1)
        else:
            ends = self._list_places(windows)
            longest = np.maximum.reduceat(np.append(windows.lengths, 0), ends)[::2].reshape(self.begins.shape)
        return np.where(self.ends > self.begins, longest, 0)


def price(lengths: Integers, cost: Cost) -> Integers:
    """Returns the cost of each length, and 0 for length 0. The cost function is called once per distinct length."""
    different, places = np.unique(lengths, return_inverse=True)
    costs = np.array([cost.of_tokens(tokens) if tokens else 0 for tokens in different.tolist()], dtype=np.int64)
    return costs[places].reshape(lengths.shape)


def align_windows(
    windows: Windows,
    bounds: Integers,
    target: int,
    due: Booleans,
    *,
    layout: Layout = Layout.PADDED,
    step_order: StepOrder = StepOrder.FULLEST,
    cost: Cost = TOKENS,
    sizes: Sizes = Sizes.ANY,
) -> Runs:
    """Returns exactly ``target`` steps for each rank; samples outside them are carried.

    Twin of `odb_ref.core.batching.alignment.align`.
    Spec: R4.1, R4.2, R4.3.
    """
    groups = Runs(bounds[:, :-1], bounds[:, 1:])
    count = count_groups(bounds)
    is_by_position = step_order is StepOrder.SAMPLER
    # The group that leaves first has the least rank. Columns without a group have the greatest.
    ranks = groups.begins if is_by_position else -groups.compute_costs(windows, layout, cost)
    fills = ranks if is_by_position else -groups.compute_tokens(windows, layout)
    ranks, fills = (np.where(groups.sizes > 0, values, HUGE) for values in (ranks, fills))
    # Like the core's sorts, `lexsort` is stable.
    chosen = np.lexsort((fills, ~due), axis=-1)[:, :target]
    chosen_ranks = np.take_along_axis(ranks, chosen, axis=1)
    order = np.argsort(chosen_ranks, axis=1, kind="stable")
    chosen_ranks = np.take_along_axis(chosen_ranks, order, axis=1)
    chosen = np.take_along_axis(chosen, order, axis=1)
    shape = (len(bounds), target)
    runs = Runs(np.zeros(shape, dtype=np.int64), np.zeros(shape, dtype=np.int64))
    runs.begins[:, : chosen.shape[1]] = np.take_along_axis(groups.begins, chosen, axis=1)
    runs.ends[:, : chosen.shape[1]] = np.take_along_axis(groups.ends, chosen, axis=1)
    # If nothing is carried, the core's groups come from a heap, whose order shows when some are equally full.
    is_tied = (count <= target) & _has_ties(chosen_ranks)
    is_split = (count < target) & (count < windows.counts)
    if windows.is_sorted and layout is Layout.PADDED:
        rows = np.flatnonzero(is_split)
        runs.begins[rows], runs.ends[rows], is_tied[rows] = _halve(
            windows, rows, groups, target, cost=cost, sizes=sizes
        )
    else:
        is_tied |= is_split
    for row in np.flatnonzero(is_tied).tolist():
        held = _make_samples(windows, row, int(windows.counts[row]), range(int(windows.counts[row])))
        own = [held[begin:end] for begin, end in pairwise(bounds[row, : count[row] + 1].tolist())]
        # Except in sampler order, a group lies reversed in its row.
        formed = tuple(own if is_by_position else [group[::-1] for group in own])
        steps, _ = align(formed, target, 0, layout, step_order, cost=cost, sizes=sizes)
        places = [sorted(sample.id for sample in step) for step in steps if step]
        runs.begins[row, : len(places)] = [held[0] for held in places]
        runs.ends[row, : len(places)] = [held[-1] + 1 for held in places]
    return runs


def _has_ties(ranks: Integers) -> Booleans:
    """Returns which rows, each sorted, hold two groups of equal rank."""
    is_tied: Booleans = ((ranks[:, 1:] == ranks[:, :-1]) & (ranks[:, 1:] < HUGE)).any(axis=1)
    return is_tied


def _halve(
    windows: Windows, rows: Integers, groups: Runs, target: int, *, cost: Cost, sizes: Sizes
) -> tuple[Integers, Integers, Booleans]:
    """Returns the begins and ends of the steps of some rows after halving padded groups until there are ``target``, or only
    single samples. The third result marks rows with equally full steps, whose order is still open.

    Columns are groups in the order they are made, empty once they are split. Spec: R4.2.
    """
    lengths = windows.lengths[rows]
    prices = lengths if cost == TOKENS else price(lengths, cost)
    middles = _list_middles(sizes, lengths.shape[1])
    begins, ends = (np.pad(places[rows], ((0, 0), (0, target))) for places in (groups.begins, groups.ends))
    every = np.arange(len(rows))

    def compute_costs() -> Integers:
        costs: Integers = (ends - begins) * np.take_along_axis(prices, np.maximum(0, ends - 1), axis=1)
        return costs

    while True:
        keys = np.where(ends - begins > 1, compute_costs(), 0)
        largest = keys.argmax(axis=1)
        is_open = ((ends > begins).sum(axis=1) < target) & (keys[every, largest] > 0)
        if not is_open.any():
            break
        begin, end = begins[every, largest], ends[every, largest]
        middle = end - np.where(
            is_open, middles[end - begin], 0
        )  # the first half has the longer samples, which come last
        ends[every[is_open], largest[is_open]] = begin[is_open]
        begins = np.column_stack([begins, middle, begin])
        ends = np.column_stack([ends, end, np.where(is_open, middle, begin)])
    ranks = np.where(ends > begins, -compute_costs(), HUGE)
    order = np.argsort(ranks, axis=1, kind="stable")[:, :target]
    ranks, begins, ends = (np.take_along_axis(values, order, axis=1) for values in (ranks, begins, ends))
    is_filled = ends > begins
    return np.where(is_filled, begins, 0), np.where(is_filled, ends, 0), _has_ties(ranks)


def arrange_runs(runs: Runs, seed: int, round_: int) -> Runs:
    """Returns the steps in the order they leave when shuffled.

    Twin of `odb_ref.core.batching.order.StepOrder.arrange`.
    Spec: R4.8, R4.9.
    """
    order = np.array(permute(runs.begins.shape[1], seed, round_))
    begins, ends = runs.begins[:, order], runs.ends[:, order]
    is_idle = begins == ends
    if is_idle.any():
        last = np.argsort(is_idle, axis=1, kind="stable")
        begins, ends = np.take_along_axis(begins, last, axis=1), np.take_along_axis(ends, last, axis=1)
    return Runs(begins, ends)
