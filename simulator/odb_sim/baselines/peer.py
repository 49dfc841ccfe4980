"""The released peer, `online-dynamic-batching` 0.1.2, as a described baseline: no line of it is here.

Described from its public documentation and from watching it run (`tests/simulator/test_peer.py` compares the two batch by
batch). A round goes so:

1. A rank waits for new samples: a twentieth of its buffer more in each round, then the whole buffer. They join what the
   last round left over.
2. Sorted from the longest; the first group is a single sample, and each further one has as many samples as the budget
   holds of the length that the group before it ended with. The last may be unfilled.
3. All ranks take as many steps as the rank with the most groups has, but no more than any rank that still reads has new
   samples: every sample that arrives pays for one step at most.
4. A rank with fewer groups splits single samples off its longest group that has two; one with more keeps those with the
   most samples and leaves the rest over.
5. The steps of a round are shuffled, alike on all ranks.

Why it is not a target rule of ours: what tells it apart is not how many steps a round has, for which `paper` stands, but
how groups are formed and split, and that a step must be paid for. What is left over when a rank has no new sample is lost.

This is its best case. On uneven shards the real one may hang or end with an error once a rank has run dry
(``python -m tests.bench --peer-cases``); here the others go on, as they do where it does not, and the dry rank idles.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from odb_sim.baselines.plans import RankBatches
from odb_sim.inputs.workload import Workload

_RAMP_SHARE: Final = 0.05

Batch = list[int]
"""Samples of a batch, as indices into the workload."""


def plan_peer(workload: Workload, budget_tokens: int, window_samples: int, seed: int) -> list[RankBatches]:
    """Returns the batches that the peer makes of each shard, with a buffer of ``window_samples`` samples."""
    random = np.random.default_rng(seed)
    lengths = workload.tokens.tolist()
    firsts, ends = workload.offsets[:-1].tolist(), workload.offsets[1:].tolist()
    left_over: list[Batch] = [[] for _ in firsts]
    emitted: list[list[Batch]] = [[] for _ in firsts]
    wanted = 0.0
    while any(first < end for first, end in zip(firsts, ends, strict=True)):
        take = min(window_samples, max(1, int(wanted)))
        # Added up, not multiplied: with a buffer of 64 the eleventh window is seen to hold 31 samples, not 32.
        wanted = min(float(window_samples), wanted + window_samples * _RAMP_SHARE)
        arrived = [min(take, end - first) for first, end in zip(firsts, ends, strict=True)]
        pools = [
            [*rest, *range(first, first + new)] for rest, first, new in zip(left_over, firsts, arrived, strict=True)
        ]
        firsts = [first + new for first, new in zip(firsts, arrived, strict=True)]
        groups = [form_groups(pool, lengths, budget_tokens) for pool in pools]
        target = min(max(map(len, groups)), *filter(None, arrived))
        order = random.permutation(target).tolist()
        for rank, new in enumerate(arrived):
            if not new:
                left_over[rank] = pools[rank]
                continue
            steps, left_over[rank] = align(groups[rank], target)
            emitted[rank] += [steps[place] for place in order]
    return [_build_plan(batches) for batches in emitted]


def form_groups(pool: Sequence[int], lengths: Sequence[int], budget_tokens: int) -> list[Batch]:
    """Returns the samples as groups from the longest on; none of two or more exceeds the budget."""
    groups: list[Batch] = []
    group: Batch = []
    size = 1
    # Of equal lengths the later comes first.
    for sample in reversed(sorted(pool, key=lambda sample: lengths[sample])):
        group.append(sample)
        if len(group) >= size:
            groups.append(group)
            group = []
            size = max(1, budget_tokens // lengths[sample])
    return [*groups, group] if group else groups


def align(groups: list[Batch], target: int) -> tuple[list[Batch], Batch]:
    """Returns exactly ``target`` groups, and the samples left over. There are at least as many samples as steps."""
    groups = [list(group) for group in groups]
    place = 0
    while len(groups) < target:
        if len(groups[place]) > 1:
            groups.insert(place, [groups[place].pop(0)])
        place += 1
    kept = set(sorted(range(len(groups)), key=lambda index: len(groups[index]))[len(groups) - target :])
    left_over = [sample for index, group in enumerate(groups) if index not in kept for sample in group]
    return [group for index, group in enumerate(groups) if index in kept], left_over


def _build_plan(batches: list[Batch]) -> RankBatches:
    sizes = [len(batch) for batch in batches]
    order = np.array([sample for batch in batches for sample in batch], dtype=np.int64)
    return RankBatches(order, np.cumsum([0, *sizes[:-1]], dtype=np.int64)[: len(batches)])
