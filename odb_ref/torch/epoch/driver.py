"""Drives the machine of one rank for one epoch: events in, effects out. Always runs in the training process.

Events come from four parties, each on its own thread. One lock makes sure that they are handled one after another::

    sample service   SamplesRead, Collated, LocalFailed
    exchange         Agreed, Counted, Reported, Urged, PeerLost
    consumer         StepTaken, ConsumerStopped, BudgetAccepted
    budget schedule  BudgetAccepted, asked once a round (R15.4)

`EpochDriver._perform` carries out the effects::

    Read, Collate                        the sample service reads, collates
    PostOffer, PostCounts, PostReport    the exchange posts
    Deliver                              nothing: the state's queue says what may be taken
    Finish                               service and exchange stop working for this epoch
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, assert_never

from odb_ref.core.batching.budgets import Acceptance, BudgetSchedule
from odb_ref.core.config import Config
from odb_ref.core.effects import Collate, Deliver, Effect, Finish, PostCounts, PostOffer, PostReport, Read
from odb_ref.core.errors import OdbError, UsageError
from odb_ref.core.events import BudgetAccepted, Collated, Counted, Event, LocalFailed, SamplesRead, StepTaken, Urged
from odb_ref.core.machine import Machine
from odb_ref.core.resume import RoundStart, compute_round_start
from odb_ref.core.state import Phase, State
from odb_ref.core.types import Group, Sample, Step, StepCounts, make_sample
from odb_ref.torch.epoch.cursor import Cursor, PlannedRound
from odb_ref.torch.epoch.repeats import REPEATED, RepeatWatch
from odb_ref.torch.epoch.trace import EpochTrace
from odb_ref.torch.exchange.exchange_thread import Exchange
from odb_ref.torch.plan.order import make_plan
from odb_ref.torch.plan.start import Drawing, EpochStart
from odb_ref.torch.plan.state import START, EpochProgress
from odb_ref.torch.reading.collator import pin
from odb_ref.torch.reading.description import describe
from odb_ref.torch.reading.quarantine import QuarantineError
from odb_ref.torch.reading.serialization import unpack
from odb_ref.torch.reading.service import BatchRequest, ReadItem, SampleService

CHANGED: Final = (
    "the samples have changed since the state was saved, so resuming would take different steps. The data set has changed, or "
    "uses a random generator of its own (R12)"
)
_CLOSED: Final = "its consumer left, and its loader was closed before all ranks knew"


@dataclass(frozen=True, slots=True)
class _Begin:
    """The samples carried into the first round have arrived, so the protocol can begin."""

    carried: tuple[Sample, ...]


class EpochDriver:
    """One epoch of one rank. Safe to call from any thread: `condition` is the lock, and is notified after each event."""

    def __init__(
        self,
        config: Config,
        service: SampleService,
        exchange: Exchange,
        start: EpochStart,
        *,
        schedule: BudgetSchedule | None = None,
        accumulation_steps: int = 1,
        is_pinned: bool = False,
    ) -> None:
        self.condition = threading.Condition(threading.RLock())
        self.service = service
        self.exchange = exchange
        self.quarantine = start.make_quarantine()
        """The samples set aside on this rank."""
        self.warnings: deque[str] = deque()
        """Warnings that the user has not seen yet."""
        self.cursor = Cursor(config, start, accumulation_steps)
        self.config = config
        self.start = start
        self._drawing = Drawing(start, config)
        self._acceptance = start.make_acceptance(config.budget_tokens, schedule)
        # If the loader itself divides an order among ranks, they cannot repeat each other.
        self._repeats = RepeatWatch(1 if start.samples else config.world_size)
        self._trace = EpochTrace(start, config)
        self._machine = Machine(config, self._trace.record)
        self._events: deque[Event | _Begin] = deque()
        self._early: list[Event] = []
        """Events that the machine takes once it has begun."""
        self._is_handling = False
        self.has_begun = False
        """True once the machine has begun."""
        self._is_reading = False
        """True once the service has been given this epoch."""
        self.is_closed = False
        self._closing = threading.Lock()
        self._batches: dict[int, object] = {}
        """The batches that are ready, by step number."""
        self._is_pinned = is_pinned
        self._uncollated: set[int] = set()
        """The steps of the round being collated whose batches are not ready yet."""
        self.failure: BaseException | None = None
        """The first failure on this rank. It is the cause of the error that the consumer gets."""
        self.defect: BaseException | None = None
        """Why this machine cannot continue, if so: an error of this library, of a rule, or in a peer's message."""

    # Beginning and end -----------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Starts reading the samples of the first round.

        Raises: exceptions of starting a process or sending a data set that do not derive from Exception.
        """
        start, checkpoint = self.start, self.start.checkpoint
        with self.condition:
            try:
                self._trace.open(self.quarantine)
                plan = make_plan(start, self.quarantine)
                self._is_reading = True
                self.service.begin(plan, self, start.read_ahead)
            except BaseException as error:  # a data set that cannot be sent to a worker, or Ctrl-C in the meantime
                self.on_error(describe(error), error)
                if not isinstance(error, Exception):
                    raise
            else:
                if checkpoint is not None and checkpoint.start.carried:
                    self.service.read(len(checkpoint.start.carried))
                elif not self.failure:
                    self.submit(_Begin(()))

    def close(self) -> None:
        """Ends the service's epoch. If not all ranks know yet that the epoch ends, this rank fails it. Spec: R7.2."""
        with self._closing:
            if self.is_closed:
                return
            with self.condition:
                self.is_closed = True
                was_reading, self._is_reading = self._is_reading, False
                self._batches.clear()
            if was_reading:
                self.service.end()
            with self.condition:
                if not self.is_finished:
                    self.on_error(_CLOSED, OdbError(_CLOSED))
                self.close_trace()
                self.condition.notify_all()

    def close_trace(self) -> None:
        """Completes the trace."""
        with self.condition:
            self._trace.close()

    # What the sample service reports -----------------------------------------------------------------------------------

    def on_read(self, items: Sequence[ReadItem], *, is_ended: bool, is_full: bool) -> None:
        """Handles the samples that were requested."""
        with self.condition:
            if not self._is_reading or self.failure or self.is_finished:
                return  # the epoch ends without these samples
            state = self.state
            # If ranks share an order, other ranks may have its good samples.
            is_own = not self.start.is_shared and self.start.progress == START and not state.read_samples
            if is_own and is_ended and not items and (fault := self.quarantine.find_emptiness()):
                self.on_error(fault, QuarantineError(fault))
                return
            get_id, get_position = self.start.get_id, self.quarantine.places.get_position
            samples = tuple([make_sample(get_id(item[0]), get_position(item[0]), *item[1:]) for item in items])
            if not self.has_begun:
                self.submit(_Begin(samples))
            elif not items and self._is_stuck(state):
                fault = (
                    "all samples of a window are bad, but with shard='shared' a window needs at least one good sample. Pass a "
                    "larger Batching(window=), or ramp_rounds=0 if this is one of the first windows. Last bad sample: "
                    f"{self.quarantine.describe_last()}"
                )
                self.on_error(fault, QuarantineError(fault))
            else:
                self.submit(SamplesRead(samples, is_ended, is_full))

    def _is_stuck(self, state: State) -> bool:
        """Returns True if nothing is held while the ranks still draw, which only an update permits. Spec: R14.5, R16.5."""
        is_free = self.config.update_samples is None
        return self.start.is_shared and is_free and not state.window and not state.is_ended

    def on_bad(self, place: int, cause: str) -> None:
        """Sets a sample aside. Its place follows those of all samples set aside before. Spec: R11."""
        with self.condition:
            if not self._is_reading:
                return
            if fault := self.quarantine.add(place, cause):
                self.on_error(fault, QuarantineError(fault))
            elif self.has_begun and not self.is_finished:
                self._trace.set_aside((place,))

    def on_warning(self, text: str) -> None:
        """Stores a warning for the training thread."""
        with self.condition:
            self.warnings.append(text)

    def on_batch(self, number: int, batch: object) -> None:
        """Stores a step's batch, rebuilt and pinned, until it is taken. The last batch of a round makes the round ready."""
        batch = pin(unpack(batch)) if self._is_pinned else unpack(batch)
        with self.condition:
            if number not in self._uncollated or not self._is_reading:
                return
            if not self.state.is_stopped and number >= self.cursor.first_step:
                self._batches[number] = batch
            self._uncollated.remove(number)
            self._tell_collated()

    def _tell_collated(self) -> None:
        if not self._uncollated:
            self.submit(Collated(self.state.round - 1))

    def on_error(self, cause: str, error: BaseException) -> None:
        """Fails this rank because reading, collating or the process that does either failed. Spec: R7.2. Preserves: ABORT."""
        with self.condition:
            if self.failure is not None or self.is_finished:
                return
            self.failure = error
            if not self.has_begun:
                # It does not matter which round this begins: a failure ends the epoch in whatever round the others are.
                self._perform([effect for effect in self._machine.begin() if isinstance(effect, PostOffer)])
                self.has_begun = True
            self.submit(LocalFailed(cause))

    # Events ----------------------------------------------------------------------------------------------------------

    def submit(self, event: Event | _Begin) -> None:
        """Handles an event, after all earlier ones."""
        with self.condition:
            self._events.append(event)
            if self._is_handling:
                return  # an effect caused this event; the event being handled is finished first
            self._is_handling = True
            try:
                while self.defect is None and (due := self._take_event()) is not None:
                    self._handle(due)
            except BaseException as error:  # an event is half handled: the other ranks must not wait for the rest
                self._break(error)
                if not isinstance(error, Exception):
                    raise
            finally:
                self._is_handling = False
                self.condition.notify_all()

    def _take_event(self) -> Event | _Begin | None:
        """Returns the next event. In a process that is alone an answer is one, once what came before it is handled."""
        return self._events.popleft() if self._events else self.exchange.take_answer()

    def _handle(self, event: Event | _Begin) -> None:
        if isinstance(event, _Begin):
            self._begin(event.carried)
            return
        if self.state.phase is Phase.DONE and not isinstance(event, StepTaken):
            return
        if not self.has_begun and isinstance(event, BudgetAccepted | Urged):
            self._early.append(event)
            return
        if isinstance(event, BudgetAccepted):
            self._accept(self._acceptance.tell(event.tokens))
            return
        effects = self._machine.handle(event)
        if isinstance(event, Counted):
            self._ask_schedule()
            self._note_round(effects)
        self._perform(effects)
        self._skip()

    def _begin(self, carried: tuple[Sample, ...]) -> None:
        try:
            effects = self._machine.begin(self.start.round_start, carried)
        except UsageError as error:  # the carried samples have changed
            self.on_error(describe(error), error)
            return
        self.has_begun = True
        self._trace.set_aside(self.quarantine.get_bad_places())
        self._accept(self._acceptance.begin(self.state.accepted_tokens))
        self._perform(effects)
        self._events.extend(self._early)

    def _break(self, error: BaseException) -> None:
        """Aborts the exchange: this rank cannot continue, and no other rank may wait for it."""
        self.defect = error
        self._events.clear()
        if self._is_reading:
            self.service.stop()
        self.exchange.abort(describe(error))

    def _ask_schedule(self) -> None:
        """Asks the budget schedule which budget this rank accepts next. If it raises, the rank fails. Spec: R15.4."""
        try:
            acceptance = self._acceptance.ask(self.state.planned_steps, self.state.agreed_tokens)
        except Exception as error:
            self.on_error(f"in its budget schedule: {describe(error)}", error)
        else:
            self._accept(acceptance)

    def _accept(self, acceptance: Acceptance) -> None:
        """Tells the machine the budget that this rank accepts, if it has changed. Spec: R15.4."""
        self._acceptance = acceptance
        if acceptance.offered_tokens != self.state.accepted_tokens:
            self._machine.handle(BudgetAccepted(acceptance.tokens))

    def _note_round(self, effects: Sequence[Effect]) -> None:
        begins = compute_round_start(self.state)
        begun = self.cursor.next_start
        steps = next(effect.steps for effect in effects if isinstance(effect, Collate))
        if self._repeats.note(steps):
            self.on_warning(REPEATED)
        # With a shard of its own, a rank can compute the places from the positions.
        carried = begins.carried if self.start.is_shared else ()
        planned = PlannedRound(
            steps=steps,
            next_start=begins,
            budget_tokens=min(self.config.budget_tokens, begun.agreed_tokens),
            known_places=self._compute_known(begun, begins),
            carried_places=tuple(map(self.quarantine.places.get_place, carried)),
        )
        if not self.cursor.is_as_saved(planned):
            self.on_error(CHANGED, OdbError(CHANGED))
        self.cursor.plan(planned)

    def _compute_known(self, begun: RoundStart, begins: RoundStart) -> int:
        """Returns the number of places in the rank's order that determine the steps up to the end of a round. Spec: R11.3."""
        if self.config.update_samples is None or self.start.is_shared:
            return self.quarantine.get_known(begins.read_samples, begun.is_ended)
        return self.config.compute_update_place(begins.round // self.config.update_rounds)

    def _skip(self) -> None:
        """Takes the steps that were already trained on before the state was saved. Spec: R10.2."""
        while self.cursor.is_skipping and self.cursor.next_step < self.taking_limit and not self._events:
            self.cursor.advance()
            self._events.append(StepTaken())

    # Effects ---------------------------------------------------------------------------------------------------------

    def _perform(self, effects: Sequence[Effect]) -> None:
        for effect in effects:
            match effect:
                case Read(count, first):
                    self._read(count, first)
                case Collate(_, steps):
                    self._uncollated = {step.number for step in steps}
                    if self._is_reading:
                        self.service.collate(tuple(map(self._make_request, steps)))
                    self._tell_collated()
                case PostOffer() | PostCounts() | PostReport():
                    self.exchange.post(effect, self.state.failure, self.quarantine.describe_last())
                case Deliver():
                    pass
                case Finish():
                    if self._is_reading:
                        self.service.stop()
                    self.exchange.finish()
                case _:
                    assert_never(effect)

    def _read(self, count: int, first: int | None) -> None:
        """Requests samples: the next ones, those of an update, or with shared shards those drawn. Spec: R14.4, R16.2."""
        if not self.start.is_shared:
            if self._is_reading:
                end = None if first is None else first + count
                self.service.read(count, self._get_places(self.state.window), end)
            return
        places = range(first or 0, (first or 0) + count)
        self.quarantine.places.draw(places)
        if self._is_reading:
            items, asked = self._drawing.list_items(places, self.state.round)
            self.service.draw(items, asked, is_last=self.state.is_ended)

    def _make_request(self, step: Step) -> BatchRequest:
        return BatchRequest(step.number, self._get_places(step.group), step.number >= self.cursor.first_step)

    def _get_places(self, samples: Group) -> tuple[int, ...]:
        get_place = self.quarantine.places.get_place
        return tuple([get_place(sample.position) for sample in samples])

    # State -----------------------------------------------------------------------------------------------------------

    @property
    def state(self) -> State:
        """The machine's state."""
        return self._machine.state

    @property
    def is_finished(self) -> bool:
        """True if nothing more happens on this rank by itself."""
        return self.defect is not None or self.state.phase is Phase.DONE

    @property
    def taking_limit(self) -> int:
        """The consumer may take steps numbered below this."""
        state = self.state
        if self.defect is not None or not self.has_begun:
            return 0
        return min(state.taken_steps + len(state.queue), state.step_limit)

    def take(self) -> tuple[Step, object, StepCounts]:
        """Takes the next step, which must be available. Returns it with its batch and the counts of its update."""
        number = self.cursor.next_step
        counts = self.cursor.sum_counts(self.cursor.list_update(number))
        step = self.cursor.advance()
        batch = self._batches.pop(number, None)
        self.submit(StepTaken())
        return step, batch, counts

    def drop_batches(self) -> None:
        """Drops the batches that are ready, because the consumer has left."""
        self._batches.clear()

    def compute_progress(self) -> EpochProgress:
        """Returns the position of the epoch after the last taken step."""
        with self.condition:
            return self.cursor.compute_progress(self.quarantine)
