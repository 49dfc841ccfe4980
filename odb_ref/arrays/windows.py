"""The windows of many ranks at once, as arrays.

A window is a row of integers, one per sample, with the length in the high bits and the position in the low ones. Sorting a row
sorts by length, then position (R2.1), and a padded group is a run of the sorted row. For packed groups the row is put into an
order in which they are runs too. Either way the longest sample of a run comes last.
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
    """Returns True when every length lies in 1..2^31 - 1, as the lengths of a loaded trace do."""
    return bool(lengths.min() >= 1 and lengths.max() < 1 << (_POSITION_BITS - 1))


def encode_samples(lengths: Integers, positions: Integers) -> Integers:
    """Returns a number for each sample that sorts by length, then position. Lengths and positions must be below 2^31."""
    return lengths << _POSITION_BITS | positions


def decode_lengths(samples: Integers) -> Integers:
    """Returns the lengths of encoded samples."""
    return samples >> _POSITION_BITS


def decode_positions(samples: Integers) -> Integers:
    """Returns the positions of encoded samples."""
    return samples & _POSITION_MASK


def compute_ragged(begins: Integers, counts: Integers) -> Integers:
    """Returns, one after another in a flat array, the ``counts[i]`` integers from ``begins[i]`` on, for each i."""
    steps = np.cumsum(counts)
    total = int(steps[-1]) if len(steps) else 0
    flat = np.repeat(begins - steps + counts, counts)
    flat += np.arange(total)
    return flat


@dataclass(frozen=True, slots=True)
class Windows:
    """Windows of some ranks. In row r the first ``counts[r]`` places hold samples.

    ``sums`` holds, for each place of a row, the sum of the lengths before it; ``used`` does the same for the use of each
    further resource. Rows that are not ``is_sorted`` are in order of position.
    """

    samples: Integers
    counts: Integers
    lengths: Integers
    sums: Integers
    used: tuple[Integers, ...] = ()
    is_sorted: bool = True

    @property
    def tokens(self) -> Integers:
        """The tokens in each row, without padding."""
        tokens: Integers = self.sums[np.arange(len(self.counts)), self.counts]
        return tokens

    @property
    def positions(self) -> Integers:
        """The position of each sample."""
        return decode_positions(self.samples)


def sort_windows(*parts: tuple[Integers, Integers]) -> Windows:
    """Returns the sorted windows of ranks that hold all ``parts``. A part is its samples, rank by rank, and their number on
    each rank.
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
    """Returns the sum of each row before each of its places, and of the whole row in one more column."""
    sums = np.zeros((values.shape[0], values.shape[1] + 1), dtype=np.int64)
    np.cumsum(values, axis=1, out=sums[:, 1:])
    return sums
