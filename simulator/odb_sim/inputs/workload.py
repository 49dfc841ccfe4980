"""The input of a run: the samples each rank reads, in order. It depends on lengths, sharding, seed and world size alone.

Ten million samples fit in memory because they stay numpy arrays; `Sample` objects are made when a rank reads them.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from itertools import repeat
from typing import Final

import numpy as np

from odb_ref.core.errors import UsageError
from odb_ref.core.types import Sample, make_sample
from odb_sim.inputs.lengths import Integers, Lengths

LARGEST_WORKLOAD: Final = 1_000_000_000
"""The most samples of a workload. With more, the arrays alone would take too much memory."""


class Sharding(StrEnum):
    """How the samples are split over ranks. Every rank has at least one."""

    EVEN = "even"
    """Shard sizes differ by at most one."""
    UNEVEN = "uneven"
    """One sample for each rank, and the rest in proportion to (rank + 1) squared: 1 : 4 : 9 : 16 ..."""
    SHARED = "shared"
    """Ranks have no shards but draw from one order as they have room (R14). Baselines cannot do this and split it evenly."""


def compute_shard_sizes(samples: int, ranks: int, sharding: Sharding) -> Integers:
    """Returns the samples of each rank; they sum to ``samples``.

    Uneven shards are as unequal as a job could plausibly have, but bounded: the last rank reads about three times the mean,
    the first nearly nothing. Samples left over by rounding go to the last ranks, one each.

    Raises: UsageError when there are more ranks than samples.
    """
    if ranks < 1:
        raise UsageError(f"ranks must be at least 1, got {ranks}")
    if ranks > samples:
        raise UsageError(f"{ranks} ranks, but only {samples} samples: every rank needs at least one")
    weights = np.arange(1, ranks + 1, dtype=np.int64) ** (2 if sharding is Sharding.UNEVEN else 0)
    spare = samples - ranks
    sizes = 1 + spare * weights // int(weights.sum())
    left = samples - int(sizes.sum())
    if sharding is not Sharding.UNEVEN:
        sizes[:left] += 1
    elif left:
        sizes[-left:] += 1
    return sizes


@dataclass(frozen=True, slots=True)
class Workload:
    """The epoch's samples in reading order. Rank r reads from ``offsets[r]`` to ``offsets[r + 1]``, or what it draws of all.

    ``ids`` names each sample by its row in the source, or by the number of the draw if samples are drawn. Each id is unique, so
    that ONCE and COVER can be counted. ``resources`` holds a row for each sample with its use of each further resource.
    """

    name: str
    ids: Integers
    tokens: Integers
    supervised_tokens: Integers
    resources: Integers
    offsets: Integers

    @property
    def ranks(self) -> int:
        """The number of ranks that share the samples."""
        return len(self.offsets) - 1

    @property
    def samples_total(self) -> int:
        """The samples of all ranks together."""
        return len(self.ids)

    def compute_shard_size(self, rank: int) -> int:
        """Returns how many samples ``rank`` reads."""
        return int(self.offsets[rank + 1] - self.offsets[rank])

    def read_samples(self, rank: int, position: int, count: int) -> tuple[Sample, ...]:
        """Returns ``count`` samples of ``rank`` from ``position`` on, or fewer at the end of the shard."""
        return self.read_places(self.compute_span(rank, position, count), position)

    def read_places(self, span: slice[int, int, None], position: int) -> tuple[Sample, ...]:
        """Returns the samples in ``span`` of the arrays, as those of a rank from ``position`` on."""
        ids, tokens, supervised = self.ids[span], self.tokens[span], self.supervised_tokens[span]
        positions = range(position, position + len(ids))
        costs = map(tuple, self.resources[span].tolist()) if self.resources.size else repeat(())
        return tuple(map(make_sample, ids.tolist(), positions, tokens.tolist(), supervised.tolist(), costs))

    def compute_span(self, rank: int, position: int, count: int) -> slice[int, int, None]:
        """Returns the span of those samples in the arrays."""
        start = int(self.offsets[rank]) + position
        return slice(start, min(start + count, int(self.offsets[rank + 1])))


def build_workload(
    lengths: Lengths,
    *,
    ranks: int,
    sharding: Sharding = Sharding.EVEN,
    samples: int | None = None,
    seed: int = 0,
) -> Workload:
    """Returns the workload of one epoch: the trace shuffled by ``seed``, or ``samples`` lengths drawn from it with
    replacement.

    Raises: UsageError when ``samples`` or ``seed`` is not valid, or there are more ranks than samples.
    """
    if seed < 0:
        raise UsageError(f"seed must not be negative, got {seed}")
    if samples is not None and not 1 <= samples <= LARGEST_WORKLOAD:
        raise UsageError(f"samples must be at least 1 and at most {LARGEST_WORKLOAD:,}, got {samples}")
    total = len(lengths) if samples is None else samples
    sizes = compute_shard_sizes(total, ranks, sharding)
    random = np.random.default_rng(seed)
    if samples is None:
        rows = ids = random.permutation(total)
    else:
        rows, ids = random.integers(0, len(lengths), total), np.arange(total)
    resources = np.empty((len(lengths), 0), dtype=np.int64) if lengths.resources is None else lengths.resources
    return Workload(
        name=lengths.name,
        ids=ids,
        tokens=lengths.tokens[rows],
        supervised_tokens=lengths.supervised_tokens[rows],
        resources=resources[rows],
        offsets=np.concatenate(([0], np.cumsum(sizes))),
    )
