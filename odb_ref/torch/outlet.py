"""The trainer's end of a loader: the steps that are ready, the exchange, and where the epoch stands.

It decides nothing. The machine is with the samples (`Driver`), perhaps in another process; its state is known here as an
outline, after each event, and every event of the exchange and the consumer goes to it. Should it be lost, a stand-in goes on
here from the last outline, as a rank that has failed. Spec: R7.6.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final

from odb_ref.core.config import Config
from odb_ref.core.effects import Outcome, OutcomeKind
from odb_ref.core.errors import JobError, OdbError
from odb_ref.core.events import (
    Agreed,
    Collated,
    ConsumerStopped,
    Counted,
    Event,
    LocalFailed,
    PeerLost,
    Reported,
    StepTaken,
)
from odb_ref.core.outline import Outline
from odb_ref.core.resume import Ledger
from odb_ref.core.state import Phase
from odb_ref.core.types import ZERO_COUNTS, StepCounts
from odb_ref.torch.channel import Channel
from odb_ref.torch.driver import Driver
from odb_ref.torch.epoch import Backend, EpochMetrics, EpochStart, RoundNote, StepNote, Taken, Update
from odb_ref.torch.info import StepInfo
from odb_ref.torch.state import Place
from odb_ref.torch.workbench import describe

_CHANGED: Final = "the samples are not what they were when the state was saved: the steps taken would be others"
_CLOSED: Final = "its consumer left, and its loader was closed before all ranks knew"


class Outlet:
    """One epoch of one rank. `take` is what the training process calls; the rest happens by itself."""

    def __init__(
        self, config: Config, backend: Backend, channel: Channel, start: EpochStart, *, accumulation_steps: int = 1
    ) -> None:
        self._config = config
        self._backend = backend
        self._channel = channel
        self._start = start
        self._accumulation_steps = accumulation_steps
        self._handle: Callable[[Event, float | None], None] = backend.submit
        self._condition = threading.Condition(threading.RLock())
        self._closing = threading.Lock()
        self._is_closed = False
        self._has_left = False
        self._is_exhausted = False
        self._outline: Outline | None = None
        self._unanswered: deque[Event] = deque()
        """Events the machine has not answered yet; a stand-in must hear of them."""
        self._rounds: deque[RoundNote] = deque()
        """The planned rounds, from the one that the last taken step or the accumulation window lies in."""
        self._batches: dict[int, object] = {}
        self._broken: Exception | None = None
        self._failure: BaseException | None = None
        self._ledger = Ledger(start.checkpoint.start if start.checkpoint else None)
        self._emitted_samples = start.checkpoint.start.global_samples if start.checkpoint else 0
        self._skip_before = start.place.steps
        self._next_step = start.checkpoint.start.planned_steps if start.checkpoint else 0
        """The number of the next step to be taken or, after a restart, skipped."""
        self.quarantine = start.make_quarantine()
        """What was set aside."""
        self.metrics = EpochMetrics(start.started_s)
        self.info: StepInfo | None = None
        """What belongs to the step that was handed out last."""

    def begin(self) -> None:
        """Starts the epoch."""
        with self._condition:
            end = self._channel.open(self.on_answer)
            try:
                self._backend.begin(self._start, self)
            except Exception as error:  # a data set that cannot be sent to a worker, say
                self.on_lost(describe(error), error)
            if end is not None:
                self._submit(end)

    def refuse(self, error: Exception) -> None:
        """Starts the epoch as one that has failed on this rank before it could begin."""
        with self._condition:
            end = self._channel.open(self.on_answer)
            self.on_lost(describe(error), error)
            if end is not None:
                self._submit(end)

    # What the machine's end reports ----------------------------------------------------------------------------------

    def on_update(self, update: Update) -> None:
        """The machine has handled an event."""
        with self._condition:
            if update.is_answer:
                self._unanswered.popleft()
            is_finished = self.is_finished
            self._outline = update.outline
            if update.planned is not None:
                self._rounds.append(update.planned)
                self._ledger.note_round(update.planned.next_start)
            self._skip()
            if update.post is not None:
                self._channel.post(update.post)
            if self.is_finished and not is_finished:
                self._channel.finish()
            self._condition.notify_all()

    def _skip(self) -> None:
        """Takes the steps that were trained on before the state was saved."""
        while self._next_step < self._skip_before and self._may_take():
            self._note_taken(self._find_round(self._next_step).get(self._next_step))
            self._submit(StepTaken())
            if self._next_step == self._skip_before and self._ledger.compute_checkpoint() != self._start.checkpoint:
                self._failure = self._failure or OdbError(_CHANGED)
                self._submit(LocalFailed(_CHANGED))

    def _find_round(self, number: int) -> RoundNote:
        """The round of a step."""
        return next(planned for planned in self._rounds if number in planned.numbers)

    def _note_taken(self, step: StepNote) -> None:
        self._next_step = step.number + 1
        self._ledger.note_taken(step.number, step.positions)
        while self._rounds[0].numbers.stop < self._get_window(self._next_step).start:
            self._rounds.popleft()
        self._emitted_samples += step.global_counts.samples

    def on_collated(self, round_: int, batches: Sequence[tuple[int, object]]) -> None:
        """The batches of a round are here, and ready to train on."""
        with self._condition:
            if not self._has_left:
                self._batches.update(item for item in batches if item[0] >= self._skip_before)
            self._submit(Collated(round_))

    def on_bad(self, place: int, cause: str) -> None:
        """A sample is set aside."""
        with self._condition:
            self.quarantine.add(place, cause)

    def on_error(self, error: BaseException) -> None:
        """Reading or collating has failed."""
        with self._condition:
            self._failure = self._failure or error

    def on_broken(self, error: Exception) -> None:
        """The machine cannot go on."""
        with self._condition:
            self._broken = error
            self._channel.abort(describe(error))
            self._condition.notify_all()

    def on_lost(self, cause: str, error: BaseException) -> None:
        """The machine is gone: a stand-in hears of that, and then of what it has not answered. Spec: R7.6."""
        with self._condition:
            self._failure = self._failure or error
            unanswered = tuple(self._unanswered)
            stand_in = Driver(self._config, EpochStart(keys=()), self)
            self._handle = stand_in.submit
            stand_in.fail(cause, self._outline)
            for event in unanswered:
                stand_in.submit(event)

    # Events ----------------------------------------------------------------------------------------------------------

    def _submit(self, event: Event, at_s: float | None = None) -> None:
        if self._is_closed and self.is_finished:
            return  # it comes late, and the backend may have begun another epoch
        self._unanswered.append(event)
        self._handle(event, at_s)

    def on_answer(self, event: Event) -> None:
        """The exchange has an answer. Waits until the next post is made, if the answer leads to one."""
        with self._condition:
            self._submit(event)
            if isinstance(event, Agreed | Counted | Reported):
                self._condition.wait_for(
                    lambda: self.is_finished or self._is_closed or all(item is not event for item in self._unanswered)
                )

    # The consumer ----------------------------------------------------------------------------------------------------

    @property
    def is_finished(self) -> bool:
        """True when nothing more happens on this rank by itself."""
        return self._broken is not None or (self._outline is not None and self._outline.phase is Phase.DONE)

    def take(self) -> Taken | None:
        """The next step; None when the epoch is complete. Waits for it.

        Raises: JobError when the epoch has ended early, on this rank or another.
        """
        began_s = time.monotonic()
        with self._condition:
            self._condition.wait_for(lambda: self._is_available() or self._is_over())
            if self._is_available():
                now_s = time.monotonic()
                self.metrics.data_wait_s += now_s - began_s
                if not self.metrics.steps:
                    self.metrics.first_step_s = now_s - self.metrics.started_s
                return self._take(now_s)
        self._conclude()
        return None

    def _is_over(self) -> bool:
        """True when no step comes any more; at the end of an epoch once the machine knows of all that were taken."""
        return self._has_left or self._broken is not None or (self.is_finished and not self._unanswered)

    def _is_available(self) -> bool:
        """True when a step may be handed out: it is delivered, and its window's counts and whether it is the last are known."""
        outline = self._outline
        if outline is None or not self._may_take():
            return False
        last_needed = max(self._get_window(self._next_step)[-1], self._next_step + 1)
        return outline.planned_steps > last_needed or outline.is_ending

    def _may_take(self) -> bool:
        """True when the machine has delivered the next step and lets it be taken."""
        outline = self._outline
        if outline is None or self._has_left or self._broken is not None:
            return False
        # Either may lower the limit (R7.4, R7.5): until the machine has answered, nothing is handed out.
        if any(isinstance(event, Agreed | PeerLost) for event in self._unanswered):
            return False
        return self._next_step < min(outline.delivered_steps, outline.step_limit)

    def _get_window(self, number: int) -> range:
        first = number - number % self._accumulation_steps
        return range(first, first + self._accumulation_steps)

    def _take(self, now_s: float) -> Taken:
        step = self._find_round(self._next_step).get(self._next_step)
        batch = self._batches.pop(step.number, None)
        counts = self._sum_counts(self._get_window(step.number))
        self._note_taken(step)
        self.metrics.count(step)
        self._submit(StepTaken(), now_s)
        return Taken(step, batch, counts, self._emitted_samples, self._is_last(step.number))

    def _is_last(self, number: int) -> bool:
        outline = self._outline
        if outline is None or not outline.is_ending:
            return False
        return number + 1 >= min(outline.planned_steps, outline.step_limit)

    def _sum_counts(self, window: range) -> StepCounts:
        """The counts of the steps of ``window`` that are known, those taken before a restart included."""
        total = self._start.place.window if window.start < self._skip_before <= window[-1] else ZERO_COUNTS
        for planned in self._rounds:
            for number in window:
                if number in planned.numbers and number >= self._skip_before:
                    total += planned.get_counts(number)
        return total

    @property
    def is_exhausted(self) -> bool:
        """True when the epoch is complete and the consumer has been told."""
        return self._is_exhausted

    def _conclude(self) -> None:
        if self._has_left:
            return
        if not self._is_closed:
            self._backend.conclude()
        if self._broken is not None:
            raise self._broken
        outline = self._outline
        if outline is None or outline.outcome is None:
            raise OdbError("the epoch has ended without an outcome")
        if outline.outcome.kind is not OutcomeKind.COMPLETE:
            raise _make_error(outline.outcome) from self._failure
        if outline.planned_steps < self._skip_before:
            raise JobError(_CHANGED, rank=None, cause=_CHANGED)  # on all ranks: they count the same steps
        self._is_exhausted = True

    def leave(self) -> None:
        """The consumer takes no further step. Does not wait."""
        with self._condition:
            if self._has_left:
                return
            self._has_left = True
            self._batches.clear()
            self._submit(ConsumerStopped())
            self._condition.notify_all()

    def wait(self, timeout_s: float) -> bool:
        """True when the epoch has finished on this rank; waits for it."""
        with self._condition:
            return self._condition.wait_for(lambda: self.is_finished, timeout_s)

    def close(self) -> None:
        """Ends the backend's epoch, at the end or after `leave`. A stand-in tells the other ranks if they do not know yet."""
        with self._closing:
            if self._is_closed:
                return
            self._is_closed = True
            self._backend.end()
            with self._condition:
                self._batches.clear()
                if not self.is_finished:
                    self.on_lost(_CLOSED, OdbError(_CLOSED))
                self._condition.notify_all()

    def retire(self, timeout_s: float) -> None:
        """Leaves, waits until all ranks know, or for so long, and closes."""
        self.leave()
        self.wait(timeout_s)
        self.close()

    def compute_place(self) -> Place:
        """Where the epoch stands after the last taken step."""
        with self._condition:
            if self._next_step <= self._skip_before and self._start.checkpoint is not None:
                return self._start.place
            checkpoint = self._ledger.compute_checkpoint()
            window = self._get_window(self._next_step)
            taken = range(window.start, self._next_step)
            # What was read for the round decided its steps, the taken ones included.
            start = self._find_round(self._next_step - 1).next_start if checkpoint.taken_steps else checkpoint.start
            known = self.quarantine.get_known(start.read_samples, checkpoint.start.is_ended)
            return Place(
                checkpoint=checkpoint,
                window=self._sum_counts(taken) if taken else ZERO_COUNTS,
                bad=self.quarantine.get_bad(known),
                known=known,
                base=self._start.place.base,
            )


def _make_error(outcome: Outcome) -> JobError:
    who = "a rank that could not be named" if outcome.rank is None else f"rank {outcome.rank}"
    match outcome.kind:
        case OutcomeKind.STOPPED:
            what = "left the loop before its end"
        case OutcomeKind.FAILED:
            what = "failed"
        case OutcomeKind.MISMATCH:
            what = "is configured differently"
        case _:
            what = "is lost"
    return JobError(f"{who} {what}: {outcome.cause}", rank=outcome.rank, cause=outcome.cause)
