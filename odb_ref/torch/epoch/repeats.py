"""Detects that all ranks read the same samples: an undivided stream or sampler would be trained on once per rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from odb_ref.core.types import Step, compute_counts

REPEATED: Final = (
    "all ranks begin with the same samples, as happens with an iterable data set that is not divided among them, or without "
    "update_samples with such a sampler: each sample is then trained on once per rank. Divide it by rank and world size "
    "(Hugging Face: datasets.distributed.split_dataset_by_node)"
)

_ENOUGH: Final = 8
"""Ranks with different samples do not agree by chance in steps with this many different token counts."""


class RepeatWatch:
    """Compares this rank's counts in its first steps with the totals over all ranks."""

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self._tokens: set[int] = set()
        """The different token counts of the steps so far, in all of which the ranks agreed."""
        self.is_watching = world_size > 1

    def note(self, steps: Sequence[Step]) -> bool:
        """Compares a round's steps. Returns True, once, when the ranks have agreed in enough of them."""
        for step in steps if self.is_watching else ():
            counts, all_ranks = compute_counts(step.group), step.global_counts
            own = [self._world_size * count for count in (counts.samples, counts.tokens, counts.supervised)]
            if own != [all_ranks.samples, all_ranks.tokens, all_ranks.supervised]:
                self.is_watching = False
                return False
            self._tokens.add(counts.tokens)
            if len(self._tokens) == _ENOUGH:
                self.is_watching = False
                return True
        return False
