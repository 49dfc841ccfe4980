"""Which samples a rank reads, and in which order."""

from __future__ import annotations

from collections.abc import Iterator, Sized
from dataclasses import dataclass

import torch
from torch.utils.data import Sampler


@dataclass(slots=True)
class ShardSampler(Sampler[int]):
    """One rank's share of a data set: every world_size-th index of a shared permutation, from ``rank`` on.

    Nothing is padded and nothing dropped, so shards differ by at most one sample; join mode needs no more. The order is a
    function of seed and epoch.
    """

    dataset: Sized
    rank: int
    world_size: int
    is_shuffled: bool
    seed: int
    epoch: int = 0

    def set_epoch(self, epoch: int) -> None:
        """Chooses the permutation."""
        self.epoch = epoch

    def compute_order(self) -> list[int]:
        """Returns the order of all ranks together: position p of rank r is item ``r + p * world_size``."""
        count = len(self.dataset)
        if not self.is_shuffled:
            return list(range(count))
        generator = torch.Generator()
        generator.manual_seed((self.seed + 1_000_003 * self.epoch) % 2**63)
        return torch.randperm(count, generator=generator).tolist()

    def __iter__(self) -> Iterator[int]:
        return iter(self.compute_order()[self.rank :: self.world_size])

    def __len__(self) -> int:
        return len(range(self.rank, len(self.dataset), self.world_size))
