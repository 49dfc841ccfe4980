"""The consumer's position in an epoch: the planned rounds, the next step, and the progress to save."""

from __future__ import annotations

import hashlib
from array import array
from collections import deque
from dataclasses import dataclass
from itertools import chain

from odb_ref.core.config import Config
from odb_ref.core.resume import Checkpoint, Ledger, RoundStart, compute_round_start, resume
from odb_ref.core.types import ZERO_COUNTS, Step, StepCounts
from odb_ref.torch.plan.start import EpochStart
from odb_ref.torch.plan.state import EpochProgress
from odb_ref.torch.reading.quarantine import Quarantine


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedRound:
    """The steps of a round, and where the next round begins."""

    steps: tuple[Step, ...]
    next_start: RoundStart
    budget_tokens: int
    """The budget in force. Spec: R15.1."""
    known_places: int
    """The number of places in the rank's order that determine the round's steps: see `EpochProgress.known`."""
    carried_places: tuple[int, ...]
    """With shared shards: the places of the samples carried into the next round."""

    def compute_digest(self) -> str:
        """Returns a digest of everything the machine knows about the round's samples."""
        samples = (
            (sample.position, sample.length, sample.supervised, *sample.costs)
            for step in self.steps
            for sample in step.group
        )
        return hashlib.blake2b(array("q", chain.from_iterable(samples)).tobytes(), digest_size=8).hexdigest()


class Cursor:
    """Follows the steps of one rank. The caller holds a lock around each call."""

    def __init__(self, config: Config, start: EpochStart, accumulation_steps: int) -> None:
        begun = start.checkpoint.start if start.checkpoint else compute_round_start(resume(config, start.first, ())[0])
        self.next_start = begun
        """The start of the round to plan next."""
        self._start = start.progress
        self._has_keys = start.keys is not None
        """False for a stream: only its samples, read again, show that its order is the same."""
        self._accumulation_steps = accumulation_steps
        self._config = config
        self._has_updates = config.update_samples is not None
        """True if an update holds a fixed number of samples. It then consists of all steps of a round. Spec: R16.8."""
        is_inside = bool(start.progress.gone_counts.samples)
        self._resumed_update = self.next_start.round // config.update_rounds if is_inside else None
        """The update that the epoch resumes in the middle, after other ranks had trained on a part of it. Spec: R16.6."""
        self._summed, self._sum = range(0), ZERO_COUNTS
        """The last update whose counts were requested, and these counts."""
        self._ledger = Ledger(self.next_start)
        self._carried = {self.next_start.round: start.progress.places}
        """With shared shards: for each round from the last taken step's on, the places of the samples carried into it."""
        self._rounds: deque[PlannedRound] = deque()
        """The planned rounds, from the one with the last taken step, or with the start of its update."""
        self.first_step = start.progress.steps
        """The first step the consumer is given. Earlier steps were trained on before the state was saved."""
        self.next_step = begun.planned_steps
        """The number of the next step to take or, after a restart, to skip."""
        self.emitted_samples = begun.global_samples
        """Samples of all steps before the next one, on all ranks."""
        self.budget_tokens = config.budget_tokens
        """The budget in force in the step taken last."""

    @property
    def is_skipping(self) -> bool:
        """True if the next step was trained on before the state was saved."""
        return self.next_step < self.first_step

    def is_as_saved(self, planned: PlannedRound) -> bool:
        """Returns False if the next round to plan holds the last step that was trained on before the state was saved, and is
        not the round that held it then. Spec: R10.4.
        """
        if not planned.steps or not planned.steps[0].number < self.first_step <= planned.steps[-1].number + 1:
            return True
        ledger = Ledger(self.next_start)
        for step in planned.steps[: self.first_step - planned.steps[0].number]:
            ledger.note_taken(step.number, [sample.position for sample in step.group])
        return (ledger.compute_checkpoint(), planned.compute_digest()) == (self._start.checkpoint, self._start.digest)

    def plan(self, planned: PlannedRound) -> None:
        """Adds a planned round."""
        if planned.steps:
            self._rounds.append(planned)
        self.next_start = planned.next_start
        self._ledger.note_round(planned.next_start)
        self._carried[planned.next_start.round] = planned.carried_places

    def advance(self) -> Step:
        """Moves past the next step, which must be planned, and returns it."""
        planned = self._find_round(self.next_step)
        step = planned.steps[self.next_step - planned.steps[0].number]
        self.next_step += 1
        self._ledger.note_taken(step.number, [sample.position for sample in step.group])
        kept = self.next_step if self._has_updates else self.list_update(self.next_step).start
        while self._rounds[0].steps[-1].number + 1 < kept:
            self._rounds.popleft()
        self._carried = {round_: places for round_, places in self._carried.items() if round_ >= step.round}
        self.emitted_samples += step.global_counts.samples
        self.budget_tokens = planned.budget_tokens
        return step

    def _find_round(self, number: int) -> PlannedRound:
        return next(
            planned for planned in self._rounds if planned.steps[0].number <= number <= planned.steps[-1].number
        )

    def list_update(self, number: int) -> range:
        """Returns the steps of the update that contains a step. With fixed updates the step must be planned."""
        if self._has_updates:
            steps = self._find_round(number).steps
            return range(steps[0].number, steps[-1].number + 1)
        first = number - number % self._accumulation_steps
        return range(first, first + self._accumulation_steps)

    def compute_update(self, step: Step) -> int:
        """Returns the index of a step's update, counted from 0 in the epoch."""
        if self._has_updates:
            return step.round // self._config.update_rounds
        return step.number // self._accumulation_steps

    def is_update_end(self, number: int) -> bool:
        """Returns True if a planned step ends its update."""
        return self.list_update(number)[-1] == number

    def compute_last_needed(self, number: int) -> int:
        """Returns the step that must be planned, or ruled out by the epoch's end, before step ``number`` may be taken.

        It is at least the next step, because ``number`` may be the last. With accumulation it is also the last step of the
        update, because the counts of all its steps enter the weight. The steps of a fixed update are all planned at once.
        """
        return number + 1 if self._has_updates else max(self.list_update(number)[-1], number + 1)

    def sum_counts(self, update: range) -> StepCounts:
        """Returns the known counts of the steps of ``update``, including steps taken before a restart."""
        if self._has_updates:
            if update != self._summed:  # all its steps have the same sum
                self._summed, self._sum = update, self._sum_update(self._find_round(update.start).steps)
            return self._sum
        total = self._start.update_counts if update.start < self.first_step <= update[-1] else ZERO_COUNTS
        for planned in self._rounds:
            for number in range(max(update.start, planned.steps[0].number, self.first_step), update.stop):
                if number > planned.steps[-1].number:
                    break
                total += planned.steps[number - planned.steps[0].number].global_counts
        return total

    def _sum_update(self, steps: tuple[Step, ...]) -> StepCounts:
        """Returns the counts of an update's steps, plus what other ranks had trained on of it. Spec: R16.6, R16.8."""
        is_resumed = self.compute_update(steps[0]) == self._resumed_update
        return sum((step.global_counts for step in steps), self._start.gone_counts if is_resumed else ZERO_COUNTS)

    def compute_progress(self, quarantine: Quarantine) -> EpochProgress:
        """Returns the progress to save after the last taken step. Spec: R10, R11.3."""
        if self.next_step <= self.first_step and self._start.checkpoint is not None:
            return self._start
        checkpoint = self._ledger.compute_checkpoint()
        # The samples read for the round determined all its steps, including those already taken.
        planned = self._find_round(self.next_step - 1) if checkpoint.taken_steps else None
        if planned is None:
            return EpochProgress(
                checkpoint=checkpoint, base=self._start.base, places=self._carried[checkpoint.start.round]
            )
        update = planned.steps[0].round // self._config.update_rounds
        if self._has_updates and self._has_keys and self.next_step > planned.steps[-1].number:
            start = RoundStart(
                round=(update + 1) * self._config.update_rounds,
                planned_steps=self.next_step,
                global_samples=self.emitted_samples,
                agreed_tokens=planned.next_start.agreed_tokens,
                accepted_tokens=planned.next_start.accepted_tokens,
            )
            return EpochProgress(checkpoint=Checkpoint(start=start))
        is_resumed = update == self._resumed_update
        return EpochProgress(
            checkpoint=checkpoint,
            update_counts=self._compute_taken(checkpoint),
            bad=quarantine.get_bad_places(self._compute_begin(update), planned.known_places),
            known=planned.known_places,
            digest=planned.compute_digest(),
            base=self._start.base,
            places=self._carried[checkpoint.start.round],
            gone=self._start.gone if is_resumed else (),
            gone_counts=self._start.gone_counts if is_resumed else ZERO_COUNTS,
        )

    def _compute_begin(self, update: int) -> int:
        """Returns the first place of an update in the order that the rank reads, or 0 in the free mode."""
        if self._config.shared_samples is not None:
            return update * (self._config.update_samples or 0)
        return self._config.compute_update_place(update)

    def _compute_taken(self, checkpoint: Checkpoint) -> StepCounts:
        """Returns the counts of the steps already taken of the current update."""
        if self._has_updates:
            return self._sum_update(self._find_round(self.next_step - 1).steps[: checkpoint.taken_steps])
        taken = range(self.list_update(self.next_step).start, self.next_step)
        return self.sum_counts(taken) if taken else ZERO_COUNTS
