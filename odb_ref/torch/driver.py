"""Drives one machine for one epoch: turns what engine, exchange and consumer do into events, and performs the effects.

There is no loop of its own: whichever thread brings an event handles it, under one lock, and every effect is only a request to
another thread. So taking a step and the end of the epoch cannot cross, and the order of effects is kept.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Final, assert_never

from odb_ref.core.config import Config
from odb_ref.core.effects import (
    Collate,
    Deliver,
    Effect,
    Finish,
    OutcomeKind,
    PostCounts,
    PostOffer,
    PostReport,
    Read,
)
from odb_ref.core.errors import JobError, OdbError
from odb_ref.core.events import Collated, ConsumerStopped, Counted, Event, LocalFailed, SamplesRead, StepTaken
from odb_ref.core.machine import Machine
from odb_ref.core.resume import Ledger, Resumed, compute_round_start
from odb_ref.core.state import Phase
from odb_ref.core.trace import TraceWriter
from odb_ref.core.types import ZERO_COUNTS, Sample, Step, StepCounts
from odb_ref.torch.channel import Channel
from odb_ref.torch.engine import Engine, ReadItem
from odb_ref.torch.epoch import EpochMetrics, EpochStart, Taken
from odb_ref.torch.info import StepInfo
from odb_ref.torch.quarantine import QuarantineError
from odb_ref.torch.state import Place
from odb_ref.torch.workbench import BatchOrder, describe

_CHANGED: Final = "the samples are not what they were when the state was saved: the steps taken would be others"


class Driver:
    """One epoch of one rank. `take` is what the training process calls; the rest happens by itself."""

    def __init__(
        self,
        config: Config,
        engine: Engine,
        channel: Channel,
        start: EpochStart,
        *,
        accumulation_steps: int = 1,
        trace: TraceWriter | None = None,
    ) -> None:
        self._engine = engine
        self._channel = channel
        self._start = start
        self._accumulation_steps = accumulation_steps
        self._trace = trace
        self._machine = Machine(config, self._record)
        self._condition = threading.Condition(threading.RLock())
        self._inbox: deque[Event] = deque()
        self._closing = threading.Lock()
        self._is_closed = False
        self._has_begun = False
        self._is_handling = False
        self._has_left = False
        self._is_exhausted = False
        self._queue: deque[Step] = deque()
        self._batches: dict[int, object] = {}
        self._counts: dict[int, StepCounts] = {}
        self._finish: Finish | None = None
        self._broken: OdbError | None = None
        self._failure: BaseException | None = None
        checkpoint = start.checkpoint
        self._ledger = Ledger(checkpoint.start if checkpoint else None)
        self._emitted_samples = checkpoint.start.global_samples if checkpoint else 0
        self._skip_before = start.place.steps
        self._next_step = self._skip_before
        self.quarantine = start.quarantine
        """What was set aside."""
        self._extents: deque[tuple[int, int]] = deque()
        """For each round not all taken: the steps planned with it, and the samples read for it."""
        self.metrics = EpochMetrics()
        self.info: StepInfo | None = None
        """What belongs to the step that was handed out last."""

    def begin(self) -> None:
        """Starts the epoch."""
        with self._condition:
            self._channel.open(self.submit)
            try:
                self._engine.begin(self._start.plan, self, self._start.read_ahead)
            except Exception as error:  # a data set that cannot be sent to a worker, say
                self.on_error(describe(error), error)
                return
            checkpoint = self._start.checkpoint
            if checkpoint is not None and checkpoint.start.carried:
                self._engine.read(len(checkpoint.start.carried))
            else:
                self._begin_machine(())

    def refuse(self, error: Exception) -> None:
        """Starts the epoch as one that has failed on this rank before it could begin."""
        with self._condition:
            self._channel.open(self.submit)
            self.on_error(describe(error), error)

    def _begin_machine(self, carried: tuple[Sample, ...]) -> None:
        checkpoint = self._start.checkpoint
        with self._condition:
            self._has_begun = True
            self._perform(self._machine.begin(checkpoint.start if checkpoint else None, carried))
            self._handle_inbox()

    # What the engine reports -----------------------------------------------------------------------------------------

    def on_read(self, items: list[ReadItem], is_ended: bool) -> None:
        """Samples have been read."""
        if self._failure is not None:
            return  # the epoch ends without them; one that failed before it began would not know their positions
        get_id, get_position = self._start.get_id, self.quarantine.get_position
        samples = tuple(
            Sample(get_id(place), get_position(place), length, supervised, costs)
            for place, length, supervised, costs in items
        )
        is_empty = is_ended and not items and not self._machine.state.read_samples and not self._start.place.base
        if is_empty and (fault := self.quarantine.find_emptiness()):
            self.on_error(fault, QuarantineError(fault))
        elif self._has_begun:
            self.submit(SamplesRead(samples, is_ended))
        else:
            self._begin_machine(samples)

    def on_bad(self, place: int, cause: str) -> None:
        """A sample is set aside."""
        with self._condition:
            fault = self.quarantine.add(place, cause)
        if fault:
            self.on_error(fault, QuarantineError(fault))

    def on_collated(self, round_: int, batches: Sequence[tuple[int, object]]) -> None:
        """The batches of a round are ready, each with the number of its step."""
        with self._condition:
            if not self._has_left:
                self._batches.update(batches)
            self.submit(Collated(round_))

    def on_error(self, cause: str, error: BaseException) -> None:
        """Reading or collating has failed."""
        with self._condition:
            self._failure = self._failure or error
            if not self._has_begun:
                # Its round does not matter: a failure ends the epoch whatever round the others are in.
                self._has_begun = True
                self._machine.begin()
            self.submit(LocalFailed(cause))

    # Events and effects ----------------------------------------------------------------------------------------------

    def submit(self, event: Event) -> None:
        """Handles an event, after those that came before it."""
        with self._condition:
            self._inbox.append(event)
            self._handle_inbox()

    def _handle_inbox(self) -> None:
        if self._is_handling or not self._has_begun:
            return
        self._is_handling = True
        try:
            while self._inbox and self._broken is None:
                event = self._inbox.popleft()
                if self._finish is not None and not isinstance(event, StepTaken):
                    continue
                effects = self._machine.handle(event)
                if isinstance(event, Counted):
                    self._note_round()
                self._perform(effects)
        except OdbError as error:
            # A defect of ours, of a rule, or a peer's message: this rank cannot go on, and no other must wait for it.
            self._broken = error
            self._channel.abort(describe(error))
            self._engine.stop()
        finally:
            self._is_handling = False
            self._condition.notify_all()

    def _note_round(self) -> None:
        state = self._machine.state
        self._ledger.note_round(state)
        self._extents.append((state.planned_steps, compute_round_start(state).read_samples))

    def _perform(self, effects: Sequence[Effect]) -> None:
        for effect in effects:
            match effect:
                case Read(count):
                    self._engine.read(count)
                case Collate(round_, steps):
                    self._counts.update((step.number, step.global_counts) for step in steps)
                    self._engine.collate(round_, tuple(map(self._make_order, steps)))
                case PostOffer() | PostCounts() | PostReport():
                    self._channel.post(effect)
                case Deliver(step):
                    self._deliver(step)
                case Finish():
                    self._finish = effect
                    self._channel.finish()
                    self._engine.stop()
                case _:
                    assert_never(effect)

    def _make_order(self, step: Step) -> BatchOrder:
        places = tuple(self.quarantine.get_place(sample.position) for sample in step.group)
        return BatchOrder(step.number, places, step.number >= self._skip_before)

    def _deliver(self, step: Step) -> None:
        if step.number >= self._skip_before:
            self._queue.append(step)
            return
        # Trained on before the state was saved.
        self._note_taken(step)
        self._inbox.append(StepTaken())
        if step.number + 1 == self._skip_before and self._ledger.compute_checkpoint() != self._start.checkpoint:
            self.on_error(_CHANGED, OdbError(_CHANGED))

    def _note_taken(self, step: Step) -> None:
        self._batches.pop(step.number, None)
        self._ledger.note_taken(step)
        while self._extents and self._extents[0][0] <= step.number:
            self._extents.popleft()
        self._emitted_samples += step.global_counts.samples

    def _record(self, rank: int, event: Event | Resumed | None, effects: tuple[Effect, ...]) -> None:
        if self._trace is not None:
            self._trace.record(rank, event, effects, time.monotonic() - self.metrics.started_s)

    # The consumer ----------------------------------------------------------------------------------------------------

    @property
    def is_finished(self) -> bool:
        """True when nothing more happens on this rank by itself."""
        return self._finish is not None or self._broken is not None

    def take(self) -> Taken | None:
        """The next step; None when the epoch is complete. Waits for it.

        Raises: JobError when the epoch has ended early, on this rank or another.
        """
        began = time.monotonic()
        with self._condition:
            while not self._is_available():
                if self.is_finished or self._has_left:
                    self._conclude()
                    return None
                self._condition.wait()
            self.metrics.data_wait_s += time.monotonic() - began
            if not self.metrics.steps:
                self.metrics.first_step_s = time.monotonic() - self.metrics.started_s
            return self._take()

    def _is_available(self) -> bool:
        """True when a step may be handed out: it is delivered, and its window's counts and whether it is the last are known."""
        if not self._queue or self._has_left or self._broken is not None:
            return False
        number = self._queue[0].number
        state = self._machine.state
        if number >= state.step_limit:
            return False
        last_needed = max(self._get_window(number)[-1], number + 1)
        return state.planned_steps > last_needed or state.phase in (Phase.DRAIN, Phase.DONE)

    def _get_window(self, number: int) -> range:
        first = number - number % self._accumulation_steps
        return range(first, first + self._accumulation_steps)

    def _take(self) -> Taken:
        step = self._queue.popleft()
        batch = self._batches.get(step.number)
        window = self._get_window(step.number)
        counts = self._sum_counts(window)
        for number in [number for number in self._counts if number < window.start]:
            del self._counts[number]
        self._note_taken(step)
        self._next_step = step.number + 1
        self.metrics.count(step)
        self.submit(StepTaken())
        state = self._machine.state
        is_last = state.phase in (Phase.DRAIN, Phase.DONE) and step.number + 1 >= min(
            state.planned_steps, state.step_limit
        )
        return Taken(step, batch, counts, self._emitted_samples, is_last)

    def _sum_counts(self, window: range) -> StepCounts:
        """The counts of the steps of ``window`` that are known, those taken before a restart included."""
        total = self._start.place.window if window.start < self._skip_before <= window[-1] else ZERO_COUNTS
        for number in window:
            if number >= self._skip_before:
                total += self._counts.get(number, ZERO_COUNTS)
        return total

    @property
    def is_exhausted(self) -> bool:
        """True when the epoch is complete and the consumer has been told."""
        return self._is_exhausted

    def _conclude(self) -> None:
        self._close_trace()
        if self._has_left:
            return
        if self._broken is not None:
            raise self._broken
        if self._finish is not None and self._finish.outcome.kind is not OutcomeKind.COMPLETE:
            raise self._make_error(self._finish) from self._failure
        if self._machine.state.planned_steps < self._skip_before:
            raise JobError(_CHANGED, rank=None, cause=_CHANGED)  # on all ranks: they count the same steps
        self._is_exhausted = True

    def _make_error(self, finish: Finish) -> JobError:
        outcome = finish.outcome
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

    def leave(self) -> None:
        """The consumer takes no further step. Does not wait."""
        with self._condition:
            if self._has_left:
                return
            self._has_left = True
            self._batches.clear()
            self.submit(ConsumerStopped())

    def wait(self, timeout_s: float) -> bool:
        """True when the epoch has finished on this rank; waits for it."""
        with self._condition:
            return self._condition.wait_for(lambda: self.is_finished, timeout_s)

    def close(self) -> None:
        """Ends the engine's epoch and the trace. After `leave` and `wait`, or at the end."""
        with self._closing:
            if not self._is_closed:
                self._is_closed = True
                self._engine.end()
        self._close_trace()

    def retire(self, timeout_s: float) -> None:
        """Leaves, waits until all ranks know, and closes."""
        self.leave()
        self.wait(timeout_s)
        self.close()

    def _close_trace(self) -> None:
        with self._condition:
            trace, self._trace = self._trace, None
        if trace is not None:
            trace.close()

    def compute_place(self) -> Place:
        """Where the epoch stands after the last taken step."""
        with self._condition:
            if self._next_step == self._skip_before and self._start.checkpoint is not None:
                return self._start.place
            checkpoint = self._ledger.compute_checkpoint()
            window = self._get_window(self._next_step)
            taken = range(window.start, self._next_step)
            # What was read for the round decided its steps, the taken ones included.
            extent = self._extents[0][1] if checkpoint.taken_steps else checkpoint.start.read_samples
            known = self.quarantine.get_known(extent, checkpoint.start.is_ended)
            return Place(
                checkpoint=checkpoint,
                window=self._sum_counts(taken) if taken else ZERO_COUNTS,
                bad=self.quarantine.get_bad(known),
                known=known,
                base=self._start.place.base,
            )
