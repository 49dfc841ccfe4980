"""The released peer, `online-dynamic-batching` 0.1.2, as a baseline. None of its code is used.

The baseline follows its public documentation and observations of its runs (`tests/simulator/test_peer.py` compares the two
batch by batch). A round works as follows:

1. A rank waits for new samples: in each round a twentieth of its buffer more, up to the whole buffer. They join the samples
   left over by the last round.
2. The samples are sorted from the longest. The first group is a single sample. Each further group has as its size the number
   of samples, of the length with which the previous group ended, that fit the budget. The last may be incomplete.
3. All ranks take the steps of the rank with the most groups, but no more than any rank that still reads has new samples, so
   every new sample pays for at most one step.
4. A rank with fewer groups splits single samples off its longest group of two or more. A rank with more keeps the groups with
   the most samples and leaves the others over.
5. The steps of a round are shuffled, in the same way on all ranks.

It is not one of our target rules because it differs not in the number of steps of a round, for which `paper` stands, but in how
groups are formed and split, and in that a step must be paid for. Samples left over when a rank has no new ones are lost.

This is its best case. On uneven shards the real peer may hang or end with an error once a rank has run dry
(``python -m tests.bench --peer-cases``). In this baseline the others then continue, and the dry rank idles.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from odb_sim.baselines.plans import RankBatches, join_batches
from odb_sim.inputs.workload import Workload

_RAMP_SHARE: Final = 0.05

Batch = list[int]
"""The samples of a batch, as indices into the workload."""


def plan_peer(workload: Workload, budget_tokens: int, window_samples: int, seed: int) -> list[RankBatches]:
    """Returns the batches that the peer forms of each shard, with a buffer of ``window_samples`` samples."""
    random = np.random.default_rng(seed)
    lengths = workload.tokens.tolist()
    firsts, ends = workload.offsets[:-1].tolist(), workload.offsets[1:].tolist()
    left_over: list[Batch] = [[] for _ in firsts]
    emitted: list[list[Batch]] = [[] for _ in firsts]
    wanted = 0.0
    while any(first < end for first, end in zip(firsts, ends, strict=True)):
        take = min(window_samples, max(1, int(wanted)))
        # Added up, not multiplied, because the peer's eleventh window of a buffer of 64 holds 31 samples, not 32.
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
    return list(map(join_batches, emitted))


def form_groups(pool: Sequence[int], lengths: Sequence[int], budget_tokens: int) -> list[Batch]:
    """Returns the samples in groups from the longest on. No group of two or more exceeds the budget."""
    groups: list[Batch] = []
    group: Batch = []
    size = 1
    # Among samples of equal length the later comes first.
    for sample in reversed(sorted(pool, key=lambda sample: lengths[sample])):
        group.append(sample)
        if len(group) >= size:
            groups.append(group)
            group = []
            size = max(1, budget_tokens // lengths[sample])
    return [*groups, group] if group else groups


def align(groups: list[Batch], target: int) -> tuple[list[Batch], Batch]:
    """Returns exactly ``target`` groups, and the samples left over. There must be at least ``target`` samples."""
    groups = [list(group) for group in groups]
    place = 0
    while len(groups) < target:
        if len(groups[place]) > 1:
            groups.insert(place, [groups[place].pop(0)])
        place += 1
    kept = set(sorted(range(len(groups)), key=lambda index: len(groups[index]))[len(groups) - target :])
    left_over = [sample for index, group in enumerate(groups) if index not in kept for sample in group]
    return [group for index, group in enumerate(groups) if index in kept], left_over
