"""Where the trainer stands in an epoch: the planned rounds, the next step, and what to save."""

from __future__ import annotations

from collections import deque

from odb_ref.core.config import Config
from odb_ref.core.resume import Ledger
from odb_ref.core.types import ZERO_COUNTS, StepCounts
from odb_ref.torch.backend.notes import RoundNote, StepNote
from odb_ref.torch.plan.start import EpochStart
from odb_ref.torch.plan.state import Progress
from odb_ref.torch.trainer.bad_samples import BadSampleLog


class Position:
    """Follows the steps of one rank. Its owner holds a lock around each call."""

    def __init__(self, config: Config, start: EpochStart, accumulation_steps: int) -> None:
        saved = None if start.checkpoint is None else start.checkpoint.start
        begun = start.get_round_start(config)
        self._start = start.progress
        self._accumulation_steps = accumulation_steps
        self._ledger = Ledger(begun)
        self._carried = {begun.round: start.progress.places}
        """With shared shards: the places of what was carried into a round, from that of the last taken step on."""
        self._rounds: deque[RoundNote] = deque()
        """From the one that the last taken step or the accumulation window lies in."""
        self.first_step = start.progress.steps
        """The first step that the consumer is given: those below were trained on before the state was saved."""
        self.next_step = saved.planned_steps if saved else 0
        """The number of the next step to be taken or, after a restart, skipped."""
        self.emitted_samples = saved.global_samples if saved else 0
        """Samples of the steps up to the next, on all ranks."""

    @property
    def is_skipping(self) -> bool:
        """True while the next step is one that was trained on before the state was saved."""
        return self.next_step < self.first_step

    @property
    def is_as_saved(self) -> bool:
        """True when the steps skipped are those that were taken before the state was saved."""
        digest = self._find_round(self.next_step - 1).digest
        return (self._ledger.compute_checkpoint(), digest) == (self._start.checkpoint, self._start.digest)

    def plan(self, note: RoundNote) -> None:
        """Adds a planned round."""
        self._rounds.append(note)
        self._ledger.note_round(note.next_start)
        self._carried[note.next_start.round] = note.carried_places

    def advance(self) -> StepNote:
        """Moves past the next step, which must be planned, and returns it."""
        step = self._find_round(self.next_step).get(self.next_step)
        self.next_step += 1
        self._ledger.note_taken(step.number, step.positions)
        while self._rounds[0].numbers.stop < self.compute_window(self.next_step).start:
            self._rounds.popleft()
        self._carried = {round_: places for round_, places in self._carried.items() if round_ >= step.round}
        self.emitted_samples += step.global_counts.samples
        return step

    def _find_round(self, number: int) -> RoundNote:
        return next(planned for planned in self._rounds if number in planned.numbers)

    def compute_window(self, number: int) -> range:
        """Returns the steps of the accumulation window that a step lies in."""
        first = number - number % self._accumulation_steps
        return range(first, first + self._accumulation_steps)

    def sum_counts(self, window: range) -> StepCounts:
        """Returns the counts of the steps of ``window`` that are known, those taken before a restart included."""
        total = self._start.window if window.start < self.first_step <= window[-1] else ZERO_COUNTS
        for planned in self._rounds:
            for number in window:
                if number in planned.numbers and number >= self.first_step:
                    total += planned.get_counts(number)
        return total

    def compute_progress(self, bad: BadSampleLog) -> Progress:
        """Returns what to save after the last taken step. Spec: R10, R11.3."""
        if self.next_step <= self.first_step and self._start.checkpoint is not None:
            return self._start
        checkpoint = self._ledger.compute_checkpoint()
        # What was read for the round decided its steps, the taken ones included.
        note = self._find_round(self.next_step - 1) if checkpoint.taken_steps else None
        known = 0 if note is None else note.known_places
        taken = range(self.compute_window(self.next_step).start, self.next_step)
        return Progress(
            checkpoint=checkpoint,
            window=self.sum_counts(taken) if taken else ZERO_COUNTS,
            bad=bad.get_places(known),
            known=known,
            digest="" if note is None else note.digest,
            base=self._start.base,
            places=self._carried[checkpoint.start.round],
        )
