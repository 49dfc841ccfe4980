"""The windows of many ranks at once, as arrays.

A window is a row of integers, a sample each: its length in the high bits, its position in the low ones. Sorting a row sorts
by length, then position (R2.1), and a padded group is a run of the sorted row. For packed groups the row is put in another
order, in which they are runs too. Either way the longest sample of a run is the last.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

Integers = NDArray[np.int64]

_POSITION_BITS: Final = 32
_POSITION_MASK: Final = (1 << _POSITION_BITS) - 1
_FILLER: Final = np.iinfo(np.int64).max
"""Sorts behind every sample."""


def fits_twins(lengths: Integers) -> bool:
    """Returns True when every length lies in 1..2^31 - 1, as those of a loaded trace do."""
    return bool(lengths.min() >= 1 and lengths.max() < 1 << (_POSITION_BITS - 1))


def encode_samples(lengths: Integers, positions: Integers) -> Integers:
    """Returns a number for each sample that sorts by length, then position; lengths and positions lie below 2^31."""
    return lengths << _POSITION_BITS | positions


def decode_lengths(samples: Integers) -> Integers:
    """Returns the lengths that `encode_samples` was given."""
    return samples >> _POSITION_BITS


def decode_positions(samples: Integers) -> Integers:
    """Returns the positions that `encode_samples` was given."""
    return samples & _POSITION_MASK


def compute_ragged(begins: Integers, counts: Integers) -> Integers:
    """``begins[0], begins[0] + 1 ...``, so many as ``counts[0]``; then those of the next, and so on; flat."""
    steps = np.cumsum(counts)
    total = int(steps[-1]) if len(steps) else 0
    flat = np.repeat(begins - steps + counts, counts)
    flat += np.arange(total)
    return flat


@dataclass(frozen=True, slots=True)
class Windows:
    """Windows of some ranks; of row r the first ``counts[r]`` places hold samples.

    ``sums`` holds, before each place of a row, the lengths so far; ``used`` likewise what is used of each further resource.
    Where rows are not ``is_sorted``, they stand by position.
    """

    samples: Integers
    counts: Integers
    lengths: Integers
    sums: Integers
    used: tuple[Integers, ...] = ()
    is_sorted: bool = True

    @property
    def tokens(self) -> Integers:
        """What each row holds, in tokens without padding."""
        tokens: Integers = self.sums[np.arange(len(self.counts)), self.counts]
        return tokens

    @property
    def positions(self) -> Integers:
        """The position of each sample."""
        return decode_positions(self.samples)


def sort_windows(*parts: tuple[Integers, Integers]) -> Windows:
    """Returns the windows of ranks that hold all ``parts``: each the samples of a part, rank by rank, and how many each
    rank has.
    """
    counts = np.sum([part_counts for _, part_counts in parts], axis=0)
    ranks, width = len(counts), max(1, int(counts.max(initial=0)))
    samples = np.full((ranks, width), _FILLER, dtype=np.int64)
    begins = np.arange(ranks) * width
    for held, part_counts in parts:
        samples.reshape(-1)[compute_ragged(begins, part_counts)] = held
        begins = begins + part_counts
    samples.sort(axis=1)
    lengths = decode_lengths(samples)
    return Windows(samples, counts, lengths, accumulate_rows(lengths))


def accumulate_rows(values: Integers) -> Integers:
    """Sums of each row before each of its places, and of all of it: one column more."""
    sums = np.zeros((values.shape[0], values.shape[1] + 1), dtype=np.int64)
    np.cumsum(values, axis=1, out=sums[:, 1:])
    return sums
