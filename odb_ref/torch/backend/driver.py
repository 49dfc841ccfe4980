"""Drives one machine for one epoch: turns what pipeline, exchange and consumer do into events, and performs the effects.

It lives where the samples are read; exchange and consumer are on the trainer's side, perhaps in another process (`Listener`).
Whichever thread brings an event handles it (`Inbox`), so effects are performed in order, all of them in `Driver._perform`::

    Read, Collate                        the pipeline does
    PostOffer, PostCounts, PostReport    Update.post: the exchange posts it
    Deliver                              Update.summary: as many steps may be taken
    Finish                               stops the pipeline; Update.is_finished: the exchange has done with the epoch
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import assert_never

from odb_ref.core.batching.budgets import Acceptance, BudgetSchedule
from odb_ref.core.config import Config
from odb_ref.core.effects import Collate, Deliver, Effect, Finish, Post, PostCounts, PostOffer, PostReport, Read
from odb_ref.core.errors import UsageError
from odb_ref.core.events import BudgetAccepted, Counted, Event, LocalFailed, SamplesRead, StepTaken
from odb_ref.core.machine import Machine
from odb_ref.core.resume import Resumed, compute_round_start
from odb_ref.core.summary import StateSummary, compute_summary, make_stand_in
from odb_ref.core.types import Group, Sample, Step
from odb_ref.torch.backend.inbox import Inbox
from odb_ref.torch.backend.messages import Listener, Update
from odb_ref.torch.backend.notes import RoundNote, make_round_note
from odb_ref.torch.plan.order import make_plan
from odb_ref.torch.plan.start import EpochStart
from odb_ref.torch.reading.collator import BatchOrder
from odb_ref.torch.reading.description import describe
from odb_ref.torch.reading.pipeline import ReadPipeline
from odb_ref.torch.reading.quarantine import QuarantineError
from odb_ref.torch.reading.reports import ReadItem
from odb_ref.trace.format import TraceWriter


@dataclass(frozen=True, slots=True)
class _Begin:
    """The epoch begins, with what was carried into its first round, or as one that has failed before it could."""

    carried: tuple[Sample, ...] = ()
    failure: str = ""


@dataclass(frozen=True, slots=True)
class _Entry:
    """What waits to be handled."""

    event: Event | _Begin
    at_s: float | None = None
    is_answered: bool = False
    """True for an event of the trainer's side, which counts the answers."""


class Driver:
    """One epoch of one rank: either `begin` or `fail` is its first call."""

    def __init__(
        self, config: Config, start: EpochStart, listener: Listener, schedule: BudgetSchedule | None = None
    ) -> None:
        self._config = config
        self._acceptance = start.make_acceptance(config.budget_tokens, schedule)
        self._start = start
        self._listener = listener
        self._quarantine = start.make_quarantine()
        self._machine = Machine(config, self._record)
        self._pipeline: ReadPipeline | None = None
        self._trace: TraceWriter | None = None
        self._lock = threading.Lock()
        self._inbox = Inbox(self._handle, self._break)
        self._has_failed = False
        self._is_finished = False
        self._at_s: float | None = None
        self._round_start = start.get_round_start(config)
        self._summary: StateSummary | None = None

    def begin(self, pipeline: ReadPipeline) -> None:
        """Starts the epoch: reads what was carried into its first round, or begins at once.

        Raises: OSError when the trace cannot be written.
        """
        start, checkpoint = self._start, self._start.checkpoint
        if start.trace is not None:
            self._trace = TraceWriter(start.trace, self._config, driver="torch", epoch=start.epoch)
        self._pipeline = pipeline
        pipeline.begin(make_plan(start, self._quarantine), self, start.read_ahead)
        if checkpoint is not None and checkpoint.start.carried:
            pipeline.read(len(checkpoint.start.carried))
        else:
            self._inbox.open(_Entry(_Begin()))

    def fail(self, cause: str, summary: StateSummary | None) -> None:
        """Begins as a rank that has failed, in the place of a driver that is lost, at the summary of its state; or of one that
        could not begin. Reads and collates nothing.

        Spec: R7.2, R7.6. Preserves: ABORT.
        """
        if summary is not None:
            self._machine.state = make_stand_in(summary)
            self._inbox.open()
        self._fail(cause)

    # What the pipeline reports -----------------------------------------------------------------------------------------

    def on_read(self, items: list[ReadItem], *, is_ended: bool, is_full: bool) -> None:
        """Hears that samples have been read."""
        samples = tuple(self._make_sample(*item) for item in items)
        is_empty = is_ended and not items and not self._machine.state.read_samples and not self._start.progress.base
        if is_empty and (fault := self._quarantine.find_emptiness()):
            self.on_error(fault, QuarantineError(fault))
        elif self._inbox.is_open and not items and self._is_window_empty():
            fault = f"each sample of a window is bad; the last, {self._quarantine.describe_last()}"
            self.on_error(fault, QuarantineError(fault))
        elif self._inbox.is_open:
            self._inbox.add(_Entry(SamplesRead(samples, is_ended, is_full)))
        else:
            self._inbox.open(_Entry(_Begin(samples)))

    def _is_window_empty(self) -> bool:
        """Returns True when nothing is held while the ranks still draw: the epoch cannot go on so. Spec: R14.5."""
        state = self._machine.state
        return self._start.is_shared and not state.window and not state.is_ended

    def _make_sample(self, place: int, length: int, supervised: int, costs: tuple[int, ...]) -> Sample:
        position = self._quarantine.get_position(place)
        return Sample(self._start.get_id(place), position, length, supervised, costs)

    def on_doubt(self, text: str) -> None:
        """Hears that the user is to be warned."""
        self._listener.on_doubt(text)

    def on_bad(self, place: int, cause: str) -> None:
        """Hears that a sample is set aside."""
        fault = self._quarantine.find_contradiction(place, cause)
        if not fault:
            with self._lock:
                fault = self._quarantine.add(place, cause)
            self._listener.on_bad(place, cause)
        if fault:
            self.on_error(fault, QuarantineError(fault))

    def on_batch(self, number: int, batch: object) -> None:
        """Hears that the batch of a step is made."""
        self._listener.on_batch(number, batch)

    def on_collated(self, round_: int) -> None:
        """The batches of a round are made; the trainer's side says when they are ready there."""
        self._listener.on_collated(round_)

    def on_error(self, cause: str, error: BaseException) -> None:
        """Hears that reading or collating has failed."""
        if not self._has_failed:
            self._listener.on_error(error)
            self._fail(cause)

    # Events ----------------------------------------------------------------------------------------------------------

    def submit(self, event: Event, at_s: float | None = None) -> None:
        """Handles an event of the trainer's side, after those that came before it. ``at_s`` is when it happened, if not now."""
        self._inbox.add(_Entry(event, at_s, is_answered=True))

    def _fail(self, cause: str) -> None:
        self._has_failed = True
        if not self._inbox.open(_Entry(_Begin(failure=cause))):
            self._inbox.add(_Entry(LocalFailed(cause)), is_first=True)

    def _break(self, error: Exception) -> None:
        """A defect of ours, of a rule, or a peer's message: this rank cannot go on, and no other must wait for it."""
        self._stop_pipeline()
        self._listener.on_broken(error)

    def _handle(self, entry: _Entry) -> None:
        self._at_s = entry.at_s
        match entry.event:
            case _Begin() as begin:
                self._handle_begin(begin)
            case SamplesRead() if self._has_failed:
                pass  # the epoch ends without them; one that failed before it began would not know their positions
            case event if self._is_finished and not isinstance(event, StepTaken):
                self._perform((), None, is_answer=entry.is_answered)
            case BudgetAccepted(tokens):
                self._accept(self._acceptance.tell(tokens))
                self._perform((), None, is_answer=entry.is_answered)
            case event:
                effects = self._machine.handle(event)
                planned = None
                if isinstance(event, Counted):
                    self._ask_schedule()
                    planned = self._make_round_note(effects)
                self._perform(effects, planned, is_answer=entry.is_answered)

    def _ask_schedule(self) -> None:
        """Has the budget schedule say what this rank accepts from now on; one that raises has failed. Spec: R15.4."""
        state = self._machine.state
        try:
            acceptance = self._acceptance.ask(state.planned_steps, state.agreed_tokens)
        except Exception as error:
            self.on_error(f"its budget schedule: {describe(error)}", error)
        else:
            self._accept(acceptance)

    def _accept(self, acceptance: Acceptance) -> None:
        """Tells the machine what this rank accepts, where that is something else than before. Spec: R15.4."""
        self._acceptance = acceptance
        if acceptance.offered_tokens != self._machine.state.accepted_tokens:
            self._machine.handle(BudgetAccepted(acceptance.tokens))

    def _handle_begin(self, begin: _Begin) -> None:
        if begin.failure:
            # Which round it begins with does not matter: a failure ends the epoch whatever round the others are in.
            self._machine.begin()
            self._handle(_Entry(LocalFailed(begin.failure)))
            return
        checkpoint = self._start.checkpoint
        try:
            round_start = self._start.make_first() if checkpoint is None else checkpoint.start
            effects = self._machine.begin(round_start, begin.carried)
            self._accept(self._acceptance.begin(self._machine.state.accepted_tokens))
        except UsageError as error:  # the samples carried are not what they were
            self.on_error(describe(error), error)
        else:
            self._perform(effects, None)

    def _make_round_note(self, effects: Sequence[Effect]) -> RoundNote:
        steps = next(effect.steps for effect in effects if isinstance(effect, Collate))
        begun, self._round_start = self._round_start, compute_round_start(self._machine.state)
        with self._lock:
            known_places = self._quarantine.get_known(self._round_start.read_samples, begun.is_ended)
            # With a shard of its own the positions say it.
            carried = self._round_start.carried if self._start.is_shared else ()
            places = tuple(map(self._quarantine.get_place, carried))
        config = self._config
        return make_round_note(
            steps,
            self._round_start,
            budget_tokens=min(config.budget_tokens, begun.agreed_tokens),
            layout=config.layout,
            resources=len(config.limits),
            known_places=known_places,
            carried_places=places,
        )

    # Effects ---------------------------------------------------------------------------------------------------------

    def _perform(self, effects: Sequence[Effect], planned: RoundNote | None, *, is_answer: bool = False) -> None:
        """Performs the effects; tells the trainer's side its part, if there is anything to tell."""
        post: Post | None = None
        was_finished = self._is_finished
        for effect in effects:
            match effect:
                case Read(count, first):
                    if first is not None:
                        self._draw(range(first, first + count))
                    elif self._pipeline is not None:
                        self._pipeline.read(count, self._get_places(self._machine.state.window))
                case Collate(round_, steps):
                    if self._pipeline is not None:
                        self._pipeline.collate(round_, tuple(map(self._make_order, steps)))
                case PostOffer() | PostCounts() | PostReport():
                    post = effect
                case Deliver():
                    pass  # the summary says how many are delivered
                case Finish():
                    self._is_finished = True
                    self._stop_pipeline()
                case _:
                    assert_never(effect)
        before, self._summary = self._summary, compute_summary(self._machine.state)
        is_finished = self._is_finished and not was_finished
        if is_answer or post is not None or planned is not None or self._summary != before:
            self._listener.on_update(Update(self._summary, post, planned, is_answer, is_finished))

    def _draw(self, places: range) -> None:
        """Reads what lies at ``places`` of the common order, but for what was set aside before. Spec: R14.4, R14.6."""
        bad = frozenset(self._start.progress.bad)
        with self._lock:
            self._quarantine.places.draw(places)
        if self._pipeline is not None:
            items = [(place, self._start.get_key(place)) for place in places if place not in bad]
            self._pipeline.draw(items, is_last=self._machine.state.is_ended)

    def _make_order(self, step: Step) -> BatchOrder:
        return BatchOrder(step.number, self._get_places(step.group), step.number >= self._start.progress.steps)

    def _get_places(self, samples: Group) -> tuple[int, ...]:
        with self._lock:
            return tuple(self._quarantine.get_place(sample.position) for sample in samples)

    def _record(self, rank: int, event: Event | Resumed | None, effects: tuple[Effect, ...]) -> None:
        time_s = time.monotonic() if self._at_s is None else self._at_s
        with self._lock:
            if self._trace is not None:
                self._trace.record(rank, event, effects, time_s - self._start.started_s)

    def _stop_pipeline(self) -> None:
        if self._pipeline is not None:
            self._pipeline.stop()

    def close_trace(self) -> None:
        """Ends the trace."""
        with self._lock:
            trace, self._trace = self._trace, None
        if trace is not None:
            trace.close()
