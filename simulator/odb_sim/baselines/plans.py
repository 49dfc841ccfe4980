"""The batches of each baseline. None of them uses the protocol core; all keep the token budget.

============  =========================================================================================================
`standard`    fixed batches in sampler order, padded to the longest of the batch. The batch size is the largest with which
              even a batch of the longest samples of the data set fits the token budget, at least 1. An engineer must choose
              it if the lengths of a batch are unknown in advance and no run may fail for lack of memory.
`hfg`         ``group_by_length`` of Hugging Face's Trainer: shuffled, cut into mega-batches of 50 batches, each sorted by
              length, the longest sample of all first; then fixed batches of the same size as `standard`.
`balanced`    cost-rebalanced fixed batches: each step takes the samples that `standard` takes on all ranks together, in
              sampler order, and splits them over the ranks so that the most padded tokens on any rank are fewest.
`gmt`         global max-token oracle, as fairseq's ``--max-tokens``: all lengths are known; sorted by length, cut into the
              fewest batches under the budget, batches shuffled.
`bmt`         bucketed max-token oracle: all lengths are known; samples shuffled into buckets whose bounds grow by 1.1, each
              bucket cut in that order into batches under the budget, batches shuffled.
`packing`     best-fit decreasing packing of 1,000 samples at a time into rows of at most the budget, each sample attending
              to itself only, no padding; rows shuffled.
============  =========================================================================================================

`standard` keeps the shards of the workload. The others know all lengths before the run, so they deal batches to ranks
evenly, whatever the shards: batch i goes to rank i mod W in step i div W, as in fairseq and Accelerate. A rank without a
batch in the last step idles.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

import numpy as np

from odb_ref.core.batching.layouts import Layout
from odb_sim.inputs.lengths import Integers
from odb_sim.inputs.workload import Workload

_MEGA_BATCHES: Final = 50
_BUCKET_GROWTH: Final = 1.1
_PACKED_AT_ONCE: Final = 1000


@dataclass(frozen=True, slots=True)
class RankBatches:
    """The batches of one rank: batch b holds the samples ``order[starts[b]:starts[b + 1]]``, as indices into the workload."""

    order: Integers
    starts: Integers
    layout: Layout = Layout.PADDED


def compute_batch_size(workload: Workload, budget_tokens: int) -> int:
    """Returns the size of a fixed batch: the number of longest samples that fit the budget, between 1 and all samples."""
    return min(max(1, budget_tokens // int(workload.tokens.max())), workload.samples_total)


def plan_standard(workload: Workload, budget_tokens: int, _seed: int) -> list[RankBatches]:
    """Returns fixed batches of each shard, in sampler order."""
    size = compute_batch_size(workload, budget_tokens)
    return [
        RankBatches(np.arange(start, stop), np.arange(0, stop - start, size))
        for start, stop in pairwise(workload.offsets.tolist())
    ]


def plan_hfg(workload: Workload, budget_tokens: int, seed: int) -> list[RankBatches]:
    """Returns fixed batches of samples of similar length."""
    size = compute_batch_size(workload, budget_tokens)
    order = np.random.default_rng(seed).permutation(workload.samples_total)
    mega_samples = size * max(1, min(workload.samples_total // (size * 4), _MEGA_BATCHES))
    for start in range(0, len(order), mega_samples):
        part = order[start : start + mega_samples]
        order[start : start + mega_samples] = part[np.argsort(-workload.tokens[part], kind="stable")]
    # The longest sample comes first, so that a run which will exceed the memory does so at once.
    leaders = order[::mega_samples]
    longest = int(workload.tokens[leaders].argmax()) * mega_samples
    order[[0, longest]] = order[[longest, 0]]
    return _deal(workload, np.split(order, range(size, len(order), size)))


def plan_balanced(workload: Workload, budget_tokens: int, _seed: int) -> list[RankBatches]:
    """Returns fixed steps whose samples are split over the ranks by cost."""
    ranks = workload.ranks
    step_samples = compute_batch_size(workload, budget_tokens) * ranks
    orders: list[list[Integers]] = [[] for _ in range(ranks)]
    for step, start in enumerate(range(0, workload.samples_total, step_samples)):
        samples = np.arange(start, min(start + step_samples, workload.samples_total))
        samples = samples[np.argsort(workload.tokens[samples], kind="stable")]
        starts = _cut_for_ranks(workload.tokens[samples].tolist(), ranks)
        # Dealt in turn, so that the long samples do not all go to the last rank.
        for place, batch in enumerate(np.split(samples, starts[1:])):
            orders[(place + step) % ranks].append(batch)
    return list(map(join_batches, orders))


def _cut_for_ranks(tokens: list[int], ranks: int) -> list[int]:
    """Returns the starts of runs of the sorted ``tokens``, one per rank, whose largest padded size is the least possible."""
    low, high = tokens[-1], tokens[-1] * -(-len(tokens) // ranks)
    while low < high:
        middle = (low + high) // 2
        if len(cut_sorted(tokens, middle)) <= ranks:
            high = middle
        else:
            low = middle + 1
    starts = cut_sorted(tokens, high)
    # One long sample can set the size, so that the rest fits fewer runs than there are ranks. No rank should idle for that.
    while len(starts) < min(ranks, len(tokens)):
        ends = [*starts[1:], len(tokens)]
        _, start, end = max(
            ((end - start) * tokens[end - 1], start, end)
            for start, end in zip(starts, ends, strict=True)
            if end - start > 1
        )
        starts = sorted([*starts, (start + end) // 2])
    return starts


def cut_sorted(tokens: list[int], budget_tokens: int) -> list[int]:
    """Returns the starts of the fewest runs of ``tokens``, sorted from the shortest, that each fit the budget with padding."""
    starts, start = [0], 0
    for index, length in enumerate(tokens):
        if (index - start + 1) * length > budget_tokens and index > start:
            starts.append(index)
            start = index
    return starts


def plan_gmt(workload: Workload, budget_tokens: int, seed: int) -> list[RankBatches]:
    """Returns the fewest batches any sampler could make of the whole data set."""
    order = np.argsort(workload.tokens, kind="stable")
    starts = cut_sorted(workload.tokens[order].tolist(), budget_tokens)
    return _deal(workload, _shuffle(np.split(order, starts[1:]), seed))


def plan_bmt(workload: Workload, budget_tokens: int, seed: int) -> list[RankBatches]:
    """Returns batches of samples from one length bucket each."""
    shuffled = np.random.default_rng(seed).permutation(workload.samples_total)
    buckets = np.floor(np.log(workload.tokens[shuffled]) / np.log(_BUCKET_GROWTH)).astype(np.int64)
    by_bucket = np.argsort(buckets, kind="stable")
    order, buckets = shuffled[by_bucket], buckets[by_bucket]
    starts: list[int] = []
    start = longest = 0
    previous = -1
    for index, (length, bucket) in enumerate(zip(workload.tokens[order].tolist(), buckets.tolist(), strict=True)):
        longest = max(longest, length)
        if bucket != previous or (index - start + 1) * longest > budget_tokens:
            starts.append(index)
            start, longest, previous = index, length, bucket
    return _deal(workload, _shuffle(np.split(order, starts[1:]), seed))


def plan_packing(workload: Workload, budget_tokens: int, seed: int) -> list[RankBatches]:
    """Returns packed rows of whole samples."""
    batches: list[Integers] = []
    for start in range(0, workload.samples_total, _PACKED_AT_ONCE):
        chunk = workload.tokens[start : start + _PACKED_AT_ONCE].tolist()
        batches += [np.array(pack) + start for pack in pack_best_fit(chunk, budget_tokens)]
    return _deal(workload, _shuffle(batches, seed), Layout.PACKED)


def pack_best_fit(tokens: list[int], budget_tokens: int) -> list[list[int]]:
    """Returns packs of indices into ``tokens`` by best-fit decreasing: each sample, longest first, goes where it fits best."""
    packs: list[list[int]] = []
    rooms: list[tuple[int, int]] = []  # room left and pack, sorted
    for index in sorted(range(len(tokens)), key=lambda i: -tokens[i]):
        place = bisect.bisect_left(rooms, (tokens[index], -1))
        if place < len(rooms):
            room, pack = rooms.pop(place)
            packs[pack].append(index)
        else:
            room, pack = budget_tokens, len(packs)
            packs.append([index])
        if room > tokens[index]:
            bisect.insort(rooms, (room - tokens[index], pack))
    return packs


def _shuffle(batches: list[Integers], seed: int) -> list[Integers]:
    """Returns the same batches in a random order."""
    return [batches[i] for i in np.random.default_rng(seed).permutation(len(batches)).tolist()]


def join_batches(batches: Sequence[Integers | list[int]], layout: Layout = Layout.PADDED) -> RankBatches:
    """Returns the batches of a rank, given the samples of each."""
    order = np.concatenate([np.zeros(0, dtype=np.int64), *batches])
    ends = np.cumsum([len(batch) for batch in batches], dtype=np.int64)
    return RankBatches(order, np.insert(ends, 0, 0)[: len(batches)], layout)


def _deal(workload: Workload, batches: list[Integers], layout: Layout = Layout.PADDED) -> list[RankBatches]:
    """Deals batch i to rank i mod W."""
    ranks = workload.ranks
    return [join_batches(batches[rank::ranks], layout) for rank in range(ranks)]


Planner = Callable[[Workload, int, int], list[RankBatches]]
"""Returns the plan of each rank, given workload, token budget and seed."""

PLANNERS: Final[dict[str, Planner]] = {
    "standard": plan_standard,
    "hfg": plan_hfg,
    "balanced": plan_balanced,
    "bmt": plan_bmt,
    "gmt": plan_gmt,
    "packing": plan_packing,
}
FIXED_SIZE: Final = ("standard", "hfg", "balanced")
"""The baselines whose batch size `compute_batch_size` sets."""
