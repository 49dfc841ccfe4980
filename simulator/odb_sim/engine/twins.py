"""Vectorised twins of the core's pure functions: the windows of many ranks at once, as arrays.

A twin decides nothing of its own: each names the function whose answer it gives, and a test compares the two on random
windows. `odb_ref.core` stays the only authority; what it computes from an agreement alone is called, not copied.

Windows are rows of arrays (`windows`), and groups runs of a row; the longest sample of a run is the last.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from dataclasses import dataclass
from itertools import accumulate, pairwise, takewhile
from operator import add, gt, sub
from typing import Final

import numpy as np
from numpy.typing import NDArray

from odb_ref.core.batching.cost import TOKENS, Cost
from odb_ref.core.batching.layouts import Layout
from odb_ref.core.batching.order import StepOrder, permute
from odb_ref.core.batching.sizes import Sizes
from odb_ref.core.config import Config
from odb_ref.core.offer import NONE, Offer
from odb_sim.engine.windows import Windows, accumulate_rows, compute_ragged, decode_lengths
from odb_sim.inputs.lengths import Integers

Booleans = NDArray[np.bool_]

HUGE: Final = 1 << 61
"""More tokens and samples than there are: a setting beyond it is as good."""


def compute_group_bounds(
    windows: Windows, budget_tokens: int, limits: tuple[int, ...] = (), *, sizes: Sizes = Sizes.ANY
) -> Integers:
    """Returns where groups begin and end, of shape (ranks, most groups + 1): group g of a row lies between columns g and g
    + 1.

    The last end is repeated in rows with fewer groups. Twin of `odb_ref.core.batching.grouping.compute_groups`,
    and of `compute_sized_groups`.
    """
    budget_tokens = min(budget_tokens, HUGE)
    friendly = np.array([0, *map(sizes.round_down, range(1, int(windows.counts.max(initial=0)) + 1))])
    begins = np.zeros_like(windows.counts)
    columns = [begins]
    while (begins < windows.counts).any():
        begins = begins + friendly[_find_ends(windows, begins, budget_tokens, limits) - begins]
        columns.append(begins)
    return np.stack(columns, axis=1)


def _find_ends(windows: Windows, begins: Integers, budget_tokens: int, limits: tuple[int, ...]) -> Integers:
    """Returns where the sweep that begins a group in each row ends it: the first sample that does not fit, by bisection.

    Along a sorted row both the padded tokens and what is used of a resource only grow, so what follows fits neither.
    """
    rows = np.arange(len(begins))
    first_lengths = windows.lengths[rows, np.minimum(begins, windows.lengths.shape[1] - 1)]
    low = np.minimum(begins + 1, windows.counts)  # the first sample joins, whether it fits or not
    # The first sample is the shortest: no more fit than would if all were as short.
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
    """Returns the windows in an order in which packed groups are runs, and where these begin and end.

    Twin of `odb_ref.core.batching.grouping.compute_rows`; the bounds are as `compute_group_bounds` has them.
    """
    samples = windows.samples.copy()
    bounds: list[list[int]] = []
    for row, count in enumerate(windows.counts.tolist()):
        costs = [np.diff(used[row, : count + 1]).tolist() for used in windows.used]
        by_position = np.argsort(windows.positions[row, :count]).tolist()
        rows = _pack_row(windows.lengths[row, :count].tolist(), by_position, costs, budget_tokens, limits)
        samples[row, :count] = windows.samples[row, [place for group in rows for place in reversed(group)]]
        bounds.append([0, *accumulate(map(len, rows))])
    most = max(map(len, bounds), default=1)
    lengths = decode_lengths(samples)
    packed = Windows(samples, windows.counts, lengths, accumulate_rows(lengths))
    return packed, np.array([ends + ends[-1:] * (most - len(ends)) for ends in bounds], dtype=np.int64)


def _pack_row(
    lengths: list[int], by_position: list[int], costs: list[list[int]], budget_tokens: int, limits: tuple[int, ...]
) -> list[list[int]]:
    """Returns the groups of a sorted window, as places in it, in the order of R2.5; ``by_position`` are its places too."""
    uses = list(zip(lengths, *costs, strict=True))
    sums = accumulate((uses[place] for place in by_position), lambda sum_, more: tuple(map(add, sum_, more)))
    bounds = (budget_tokens, *limits)
    fitting = takewhile(lambda used: not any(map(gt, used, bounds)), sums)
    oldest = by_position[: max(1, sum(1 for _ in fitting))]
    groups: list[list[int]] = []
    rooms: list[tuple[int, int]] = []
    rests: list[list[int]] = []
    # Equal lengths stand by rising position, as they are to join: longest first, the run of equals in its own order.
    others = sorted(set(range(len(lengths))) - set(oldest), key=lambda place: (-lengths[place], place))
    for place in oldest + others:
        amounts = [amount[place] for amount in costs]
        found = bisect_left(rooms, (lengths[place], 0))
        while found < len(rooms) and any(map(gt, amounts, rests[rooms[found][1]])):
            found += 1
        if found < len(rooms):
            room, number = rooms.pop(found)
        else:
            room, number = budget_tokens, len(groups)
            groups.append([])
            rests.append(list(limits))
        groups[number].append(place)
        rests[number] = list(map(sub, rests[number], amounts))
        insort(rooms, (room - lengths[place], number))
    for group in groups[:1]:  # the others are longest first
        group.sort(key=lambda place: (-lengths[place], place))
    return groups


def line_up_windows(
    windows: Windows, layout: Layout, budget_tokens: int, limits: tuple[int, ...] = ()
) -> tuple[Windows, Integers]:
    """Returns the windows by position, and where groups of neighbours begin and end.

    Twin of `odb_ref.core.batching.grouping.compute_runs`; the bounds are as `compute_group_bounds` has them.
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
    """Returns how many groups each row has."""
    counts: Integers = (bounds[:, 1:] > bounds[:, :-1]).sum(axis=1)
    return counts


def count_groups_to_emit(windows: Windows, bounds: Integers, layout: Layout, budget_tokens: int) -> Integers:
    """Returns how many of its groups each rank would emit. Twin of `odb_ref.core.batching.alignment.count_groups_to_emit`."""
    groups = Runs(bounds[:, :-1], bounds[:, 1:])
    is_rest = (groups.sizes > 0) & (2 * groups.compute_tokens(windows, layout) < min(budget_tokens, HUGE))
    count = count_groups(bounds)
    return count - ((count > 1) & is_rest.any(axis=1))


def find_due(windows: Windows, bounds: Integers, due_before: Integers) -> Booleans:
    """Returns which groups are due, of shape (ranks, most groups). Twin of `odb_ref.core.batching.alignment.is_due`."""
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
    """Returns the offers of some ranks, reduced.

    Twin of what `odb_ref.core.rounds.post_when_ready` posts where nothing fails.
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
    """Returns the samples that fill the windows. Twin of `odb_ref.core.rounds.compute_wanted_samples`."""
    return np.where(is_ended, 0, np.maximum(0, min(config.compute_window_samples(round_), HUGE) - carried))


def compute_shared_wants(
    config: Config, round_: int, windows: Windows, carried_tokens: Integers, drawn: int
) -> Integers:
    """Returns what ranks want of a common order, of which all have ``drawn`` so many.

    Twin of `odb_ref.core.rounds.ask_for_samples`.
    """
    held = -(-windows.counts * carried_tokens // np.maximum(1, windows.tokens))
    is_ended = drawn == config.shared_samples
    return np.where(is_ended, 0, np.maximum(0, min(config.compute_shared_window(round_, drawn), HUGE) - held))


@dataclass(frozen=True, slots=True)
class Runs:
    """The steps of some ranks, of shape (ranks, steps), as runs of their windows; an idle one begins where it ends."""

    begins: Integers
    ends: Integers

    @property
    def sizes(self) -> Integers:
        """Samples of each step."""
        return self.ends - self.begins

    def compute_tokens(self, windows: Windows, layout: Layout) -> Integers:
        """Returns the tokens of each step's batch. Twin of `odb_ref.core.batching.layouts.Layout.compute_tokens`."""
        if layout is Layout.PACKED:
            return self.compute_sums(windows.sums)
        return self.sizes * self.compute_longest(windows)

    def compute_costs(self, windows: Windows, layout: Layout, cost: Cost) -> Integers:
        """Returns the cost of each step's batch. Twin of `odb_ref.core.batching.layouts.Layout.compute_cost`."""
        if cost == TOKENS:
            return self.compute_tokens(windows, layout)
        if layout is Layout.PACKED:
            is_held = np.arange(windows.lengths.shape[1]) < windows.counts[:, None]
            return self.compute_sums(accumulate_rows(price(np.where(is_held, windows.lengths, 0), cost)))
        return self.sizes * price(self.compute_longest(windows), cost)

    def compute_sums(self, sums: Integers) -> Integers:
        """Returns the sum over each step of what ``sums`` accumulates."""
        return np.take_along_axis(sums, self.ends, axis=1) - np.take_along_axis(sums, self.begins, axis=1)

    def compute_longest(self, windows: Windows) -> Integers:
        """Returns the longest sample of each step, 0 where it is idle."""
        if windows.is_sorted:
            longest = np.take_along_axis(windows.lengths, np.maximum(0, self.ends - 1), axis=1)
        else:
            firsts = np.arange(len(self.begins))[:, None] * windows.lengths.shape[1]
            ends = np.stack([self.begins + firsts, self.ends + firsts], axis=2).reshape(-1)
            longest = np.maximum.reduceat(np.append(windows.lengths, 0), ends)[::2].reshape(self.begins.shape)
        return np.where(self.ends > self.begins, longest, 0)


def price(lengths: Integers, cost: Cost) -> Integers:
    """Returns the cost of each length, 0 where that is 0: the function is asked once for each different one."""
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
    """Returns exactly ``target`` steps for each rank; what lies in none of them is carried.

    Twin of `odb_ref.core.batching.alignment.align`.
    """
    groups = Runs(bounds[:, :-1], bounds[:, 1:])
    count = count_groups(bounds)
    is_by_position = step_order is StepOrder.SAMPLER
    # What leaves first has the least rank; where there is no group, the greatest.
    ranks = groups.begins if is_by_position else -groups.compute_costs(windows, layout, cost)
    fills = ranks if is_by_position else -groups.compute_tokens(windows, layout)
    ranks, fills = (np.where(groups.sizes > 0, values, HUGE) for values in (ranks, fills))
    # A sort of many columns at once keeps the order of what is equal, as the core's sorts do.
    chosen = np.lexsort((fills, ~due), axis=-1)[:, :target]
    chosen_ranks = np.take_along_axis(ranks, chosen, axis=1)
    order = np.argsort(chosen_ranks, axis=1, kind="stable")
    chosen_ranks = np.take_along_axis(chosen_ranks, order, axis=1)
    chosen = np.take_along_axis(chosen, order, axis=1)
    shape = (len(bounds), target)
    runs = Runs(np.zeros(shape, dtype=np.int64), np.zeros(shape, dtype=np.int64))
    runs.begins[:, : chosen.shape[1]] = np.take_along_axis(groups.begins, chosen, axis=1)
    runs.ends[:, : chosen.shape[1]] = np.take_along_axis(groups.ends, chosen, axis=1)
    # Where nothing is carried, groups stand in the order of a heap: it shows where groups are split, or equally full.
    is_tied = ((chosen_ranks[:, 1:] == chosen_ranks[:, :-1]) & (chosen_ranks[:, 1:] < HUGE)).any(axis=1)
    is_split = (count < target) & (count < windows.counts)
    for row in np.flatnonzero((count <= target) & (is_tied | is_split)).tolist():
        ends, lengths = bounds[row, : count[row] + 1].tolist(), windows.lengths[row].tolist()
        split = split_runs(ends, lengths, target, layout, step_order, cost=cost, sizes=sizes)
        runs.begins[row, : len(split)] = [begin for begin, _ in split]
        runs.ends[row, : len(split)] = [end for _, end in split]
    return runs


def arrange_runs(runs: Runs, seed: int, round_: int) -> Runs:
    """Returns the steps in the order in which they leave when they are shuffled.

    Twin of `odb_ref.core.batching.order.StepOrder.arrange`.
    """
    order = np.array(permute(runs.begins.shape[1], seed, round_))
    begins, ends = runs.begins[:, order], runs.ends[:, order]
    is_idle = begins == ends
    if is_idle.any():
        last = np.argsort(is_idle, axis=1, kind="stable")
        begins, ends = np.take_along_axis(begins, last, axis=1), np.take_along_axis(ends, last, axis=1)
    return Runs(begins, ends)


def split_runs(
    bounds: list[int],
    lengths: list[int],
    target: int,
    layout: Layout = Layout.PADDED,
    step_order: StepOrder = StepOrder.FULLEST,
    *,
    cost: Cost = TOKENS,
    sizes: Sizes = Sizes.ANY,
) -> list[tuple[int, int]]:
    """Returns the groups of a window, split until there are ``target`` or only singles, lined up. Spec: R4.2.

    But in sampler order a group lies in the window the other way round: its first half is the end of its run.
    """

    is_packed, is_by_position = layout is Layout.PACKED, step_order is StepOrder.SAMPLER

    def compute_cost(begin: int, end: int) -> int:
        if is_packed:
            return sum(map(cost.of_tokens, lengths[begin:end]))
        return (end - begin) * cost.of_tokens(max(lengths[begin:end]))

    def compute_key(begin: int, end: int) -> int:
        return -compute_cost(begin, end) if end - begin > 1 else 0

    def count_first(begin: int, end: int) -> int:
        if not is_packed:
            return sizes.find_middle(end - begin)
        half = compute_cost(begin, end) - compute_cost(begin, end) // 2
        first = lengths[begin : end - 1] if is_by_position else lengths[begin + 1 : end][::-1]
        return min(end - begin - 1, 1 + sum(held < half for held in accumulate(map(cost.of_tokens, first))))

    heap = [(compute_key(begin, end), order, begin, end) for order, (begin, end) in enumerate(pairwise(bounds))]
    heapq.heapify(heap)
    order = len(heap)
    while heap and len(heap) < target and heap[0][0]:
        _, _, begin, end = heapq.heappop(heap)
        size = count_first(begin, end)
        middle = begin + size if is_by_position else end - size
        first, rest = ((begin, middle), (middle, end)) if is_by_position else ((middle, end), (begin, middle))
        heapq.heappush(heap, (compute_key(*first), order, *first))
        heapq.heappush(heap, (compute_key(*rest), order + 1, *rest))
        order += 2
    runs = [(begin, end) for _, _, begin, end in heap]
    return sorted(runs) if is_by_position else sorted(runs, key=lambda run: compute_cost(*run), reverse=True)
