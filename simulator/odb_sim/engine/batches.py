"""The batches the trainers train on, counted once per rank and round when collated, then per step over all ranks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise

import numpy as np

from odb_ref.core.batching.layouts import Layout
from odb_ref.core.errors import InvariantError
from odb_ref.core.types import Group, Step
from odb_sim.inputs.costs import Seconds
from odb_sim.inputs.lengths import Integers


@dataclass(frozen=True, slots=True)
class Batches:
    """Some batches: figures for each, all 0 if it is idle, and the samples' lengths, ids and positions, batch after batch."""

    samples: Integers
    real: Integers
    padded: Integers
    row_pairs: Seconds
    """The sum of the squared lengths of the rows with padding, which is the cost of attention; packed, of the samples."""
    lengths: Integers
    ids: Integers
    positions: Integers


def count_batches(groups: Sequence[Group], layout: Layout = Layout.PADDED) -> Batches:
    """Returns ``groups`` as batches."""
    counts = np.fromiter(map(len, groups), np.int64, len(groups))
    samples = list(chain.from_iterable(groups))
    lengths = np.fromiter([sample.length for sample in samples], np.int64, len(samples))
    ids = np.fromiter([sample.id for sample in samples], np.int64, len(samples))
    positions = np.fromiter([sample.position for sample in samples], np.int64, len(samples))
    return Batches(counts, *measure_batches(lengths, counts, layout), lengths, ids, positions)


def measure_batches(lengths: Integers, counts: Integers, layout: Layout) -> tuple[Integers, Integers, Seconds]:
    """Returns the tokens of some batches without and with padding, and their row pairs, as `Batches` has them.

    Batch b holds ``counts[b]`` samples, and ``lengths`` has those of all batches, one after the other.
    """
    real, longest, row_pairs = np.zeros_like(counts), np.zeros_like(counts), np.zeros(len(counts))
    filled = np.flatnonzero(counts)
    if len(filled):
        begins = (np.cumsum(counts) - counts)[filled]
        real[filled] = np.add.reduceat(lengths, begins)
        row_pairs[filled] = np.add.reduceat(lengths.astype(np.float64) ** 2, begins)
        # The longest is computed, not assumed to be first, so that a wrong grouping shows.
        longest[filled] = np.maximum.reduceat(lengths, begins)
    if layout is Layout.PACKED:
        return real, real, row_pairs
    padded = counts * longest
    return real, padded, padded.astype(np.float64) * longest


def _line_up(collated: Sequence[Batches]) -> Iterator[Batches]:
    """Yields the batches of all ranks for each step, given those that each rank has collated for all steps."""
    counts = np.stack([batches.samples for batches in collated], axis=1)
    columns = zip(
        counts,
        np.stack([batches.real for batches in collated], axis=1),
        np.stack([batches.padded for batches in collated], axis=1),
        np.stack([batches.row_pairs for batches in collated], axis=1),
        strict=True,
    )
    steps, ranks = counts.shape
    order = np.argsort(np.repeat(np.tile(np.arange(steps), ranks), counts.T.ravel()), kind="stable")
    lengths = np.concatenate([batches.lengths for batches in collated])[order]
    ids = np.concatenate([batches.ids for batches in collated])[order]
    positions = np.concatenate([batches.positions for batches in collated])[order]
    ends = np.concatenate(([0], np.cumsum(counts.sum(axis=1)))).tolist()
    for column, (begin, end) in zip(columns, pairwise(ends), strict=True):
        yield Batches(*column, lengths[begin:end], ids[begin:end], positions[begin:end])


class Shelf:
    """Holds the batches of all ranks from their collation until they are trained on."""

    __slots__ = ("_collated", "_ranks", "_ready")

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._collated: defaultdict[int, dict[int, Batches]] = defaultdict(dict)
        """By round, what some ranks have collated while others have not."""
        self._ready: dict[int, Batches] = {}
        """The batches of all ranks, by step."""

    def put(self, rank: int, steps: Sequence[Step], batches: Batches) -> None:
        """Adds the batches that ``rank`` has collated for ``steps``, which are those of a round."""
        if not steps:
            return
        collated = self._collated[steps[0].round]
        collated[rank] = batches
        if len(collated) == self._ranks:
            del self._collated[steps[0].round]
            lined_up = _line_up([collated[number] for number in range(self._ranks)])
            self._ready.update(zip((step.number for step in steps), lined_up, strict=True))

    def take(self, number: int) -> Batches:
        """Returns the batches of step ``number``, by rank.

        Raises: InvariantError when a rank has not collated the step (RELEASE).
        """
        if number not in self._ready:
            raise InvariantError("RELEASE", f"step {number} is taken, and not collated on every rank")
        return self._ready.pop(number)
