"""Steps and rounds as the trainer's side knows them: what they hold, but no sample."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

from odb_ref.core.batching.layouts import Layout
from odb_ref.core.resume import RoundStart
from odb_ref.core.types import Step, StepCounts, compute_counts


@dataclass(frozen=True, slots=True)
class StepNote:
    """A planned step, without its samples."""

    number: int
    round: int
    positions: tuple[int, ...]
    local: StepCounts
    padded_tokens: int
    global_counts: StepCounts
    budget_tokens: int
    """The budget in force in its round. Spec: R15.1."""

    @property
    def is_idle(self) -> bool:
        """True when this rank has nothing to train on in this step."""
        return not self.positions


@dataclass(frozen=True, slots=True)
class RoundNote:
    """A planned round: its steps, and where the next round begins.

    Few objects, however many its steps: taking many apart would hold the interpreter lock of the training process, and then
    have its garbage collector look for more.
    """

    round: int
    numbers: range
    """The numbers of its steps."""
    next_start: RoundStart
    known_places: int
    """So many places of the rank's order have decided its steps: see `Progress.known`."""
    positions: array[int]
    """Of all its samples, step by step."""
    rows: array[int]
    """For each step: where its positions begin, its padded tokens, the counts of this rank, and those of all ranks."""
    budget_tokens: int
    """The budget in force."""
    digest: str
    """Of all that the machine knows of its samples."""
    carried_places: tuple[int, ...] = ()
    """With shared shards: the places of what is carried into the next round."""

    def get(self, number: int) -> StepNote:
        """Returns a step by its number."""
        row = self._get_row(number)
        first, padded_tokens, *counts = row
        local, total = counts[: len(counts) // 2], counts[len(counts) // 2 :]
        held = StepCounts.from_row(local)
        positions = tuple(self.positions[first : first + held.samples])
        counts_of_all = StepCounts.from_row(total)
        return StepNote(number, self.round, positions, held, padded_tokens, counts_of_all, self.budget_tokens)

    def get_counts(self, number: int) -> StepCounts:
        """Returns what a step holds, on all ranks."""
        row = self._get_row(number)
        return StepCounts.from_row(row[1 + len(row) // 2 :])

    def _get_row(self, number: int) -> array[int]:
        width = len(self.rows) // len(self.numbers)
        return self.rows[width * (number - self.numbers.start) :][:width]


def make_round_note(
    steps: Sequence[Step],
    next_start: RoundStart,
    *,
    budget_tokens: int,
    layout: Layout = Layout.PADDED,
    resources: int = 0,
    known_places: int = 0,
    carried_places: tuple[int, ...] = (),
) -> RoundNote:
    """Returns what the trainer's side needs to know of a round; ``resources`` counts the further costs of each sample."""
    first = next_start.planned_steps - len(steps)
    positions, rows = array("q"), array("q")
    for step in steps:
        rows.extend((len(positions), layout.compute_tokens(step.group)))
        rows.extend(compute_counts(step.group, resources).to_row())
        rows.extend(step.global_counts.to_row())
        positions.extend(sample.position for sample in step.group)
    numbers = range(first, first + len(steps))
    return RoundNote(
        round=steps[0].round,
        numbers=numbers,
        next_start=next_start,
        known_places=known_places,
        positions=positions,
        rows=rows,
        budget_tokens=budget_tokens,
        digest=_compute_digest(steps),
        carried_places=carried_places,
    )


def _compute_digest(steps: Sequence[Step]) -> str:
    samples = (
        (sample.position, sample.length, sample.supervised, *sample.costs) for step in steps for sample in step.group
    )
    return hashlib.blake2b(array("q", chain.from_iterable(samples)).tobytes(), digest_size=8).hexdigest()


@dataclass(frozen=True, slots=True)
class Taken:
    """A step as the consumer takes it."""

    step: StepNote
    batch: object
    window: StepCounts
    """Global counts of its accumulation window."""
    emitted_samples: int
    is_last: bool
