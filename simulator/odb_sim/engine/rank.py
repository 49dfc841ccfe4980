"""One rank of a simulated epoch: its machine, and the time that its effects take."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from itertools import chain
from typing import assert_never

from odb_ref.core.batching.budgets import Acceptance
from odb_ref.core.effects import (
    Collate,
    Deliver,
    Effect,
    Finish,
    Outcome,
    Post,
    PostCounts,
    PostOffer,
    PostReport,
    Read,
)
from odb_ref.core.events import BudgetAccepted, Collated, Counted, Event, LocalFailed, SamplesRead
from odb_ref.core.exchange import Answer
from odb_ref.core.machine import Machine
from odb_ref.core.resume import RoundStart
from odb_ref.core.types import Step
from odb_sim.engine.batches import count_batches
from odb_sim.engine.exchange import Process
from odb_sim.engine.loading import OrderReader, WindowReader
from odb_sim.engine.stage import EpochStage
from odb_sim.inputs.conditions import Fault, FaultKind


class Rank:
    """One rank: performs the effects of its machine, and answers them with events.

    ``post`` takes part in an exchange for a rank. ``notice`` tells the trainers that a rank has another step, or has ended.
    """

    def __init__(
        self, stage: EpochStage, machine: Machine, *, post: Callable[[int, Post], None], notice: Callable[[int], None]
    ) -> None:
        self._stage = stage
        self._post = post
        self._acceptance = Acceptance(budget_tokens=machine.config.budget_tokens, schedule=stage.epoch.budget_schedule)
        self._notice = notice
        self._read_samples = self._reads = 0
        self._full_reads = stage.epoch.full_reads[machine.config.rank] if stage.epoch.full_reads else {}
        self._posted_s = 0.0
        self.machine = machine
        self.number = machine.config.rank
        self._slowness = dict(stage.conditions.slow_loaders).get(self.number, 1.0)
        self._receiving = 0
        """The samples being read while the next batches are collated."""
        first = stage.epoch.starts[self.number].read_samples if stage.epoch.starts else 0
        loader, tokens = stage.costs.loader, stage.workload.tokens
        shard = stage.workload.compute_span(self.number, first, stage.workload.samples_total)
        self._is_drawing = machine.config.shared_samples is not None
        self._reader = (
            OrderReader(loader, tokens)
            if self._is_drawing
            else WindowReader(loader, tokens[shard], machine.config.window_samples)
        )
        self._read_fault = stage.conditions.find_fault(FaultKind.READ, self.number)
        self._collate_fault = stage.conditions.find_fault(FaultKind.COLLATE, self.number)
        self.queue: deque[Step] = deque()
        """Delivered steps that the trainer has not taken."""
        self.outcome: Outcome | None = None
        self.is_gone = False
        """True once the process is gone, after which it handles no event."""

    def begin(self) -> None:
        """Starts the epoch, or resumes it."""
        if not self._stage.epoch.starts:
            agreed_tokens, accepted_tokens = self._acceptance.compute_first()
            first = RoundStart(agreed_tokens=agreed_tokens, accepted_tokens=accepted_tokens)
            self._perform(self.machine.begin(None if first == RoundStart() else first))
            return
        start, workload = self._stage.epoch.starts[self.number], self._stage.workload
        self._acceptance = self._acceptance.begin(start.accepted_tokens)
        self._read_samples = start.read_samples
        carried = [workload.read_samples(self.number, position, 1) for position in start.carried]
        self._perform(self.machine.begin(start, tuple(chain.from_iterable(carried))))

    def handle(self, event: Event) -> None:
        """Passes an event to the machine, and performs the effects."""
        if self.is_gone:
            return
        effects = self.machine.handle(event)
        if isinstance(event, Counted):
            state = self.machine.state
            self._acceptance = self._acceptance.ask(state.planned_steps, state.agreed_tokens)
            if self._acceptance.offered_tokens != state.accepted_tokens:
                self.machine.handle(BudgetAccepted(self._acceptance.tokens))
        if effects:
            self._perform(effects)

    def answer(self, answer: Answer) -> None:
        """Passes on the answer of a collective of the loaders that has ended, unless the rank ended before the answer came."""
        if self.outcome is not None:
            return
        if self._stage.timeline is not None:
            self._stage.timeline.add(self.number, "exchange", "exchange", self._posted_s, self._stage.env.now)
        self.handle(answer)

    def _perform(self, effects: tuple[Effect, ...]) -> None:
        stage = self._stage
        for effect in effects:
            match effect:
                case Deliver():
                    self.queue.append(effect.step)
                    self._notice(self.number)
                case Read():
                    full = self._full_reads.get(self._reads)
                    self._reads += 1
                    span = self._find_places(effect, effect.count if full is None else full)
                    self._receiving = span.stop - span.start
                    stage.env.process(self._read(effect, span, is_full=full is not None))
                case Collate():
                    stage.env.process(self._collate(effect))
                case PostOffer() | PostCounts() | PostReport():
                    if isinstance(effect, PostOffer):
                        self._receiving = 0
                    self._posted_s = stage.env.now
                    self._post(self.number, effect)
                case Finish():
                    self.outcome = effect.outcome
                    stage.note_finish()
                    self._notice(self.number)
                case _:
                    assert_never(effect)

    def _find_places(self, effect: Read, count: int) -> slice[int, int, None]:
        """Returns the places in the workload of the samples to read."""
        if effect.first is not None and self._is_drawing:
            return slice(effect.first, effect.first + effect.count)
        return self._stage.workload.compute_span(self.number, self._read_samples, count)

    def _read(self, effect: Read, span: slice[int, int, None], *, is_full: bool) -> Process:
        stage, start_s = self._stage, self._stage.env.now
        samples = span.stop - span.start
        answer_s = self._reader.read(samples, start_s, stage.stretch(self._slowness), span.start)
        yield stage.env.timeout(answer_s - start_s)
        if stage.timeline is not None:
            stage.timeline.add(self.number, "reader", "fill", start_s, stage.env.now)
        if self._read_fault is not None and self._read_samples + samples > self._read_fault:
            self._fail(Fault(FaultKind.READ, self.number, self._read_fault))
            return
        read = stage.workload.read_places(span, self._read_samples)
        self._read_samples += len(read)
        is_whole = self._read_samples == stage.workload.compute_shard_size(self.number)
        self.handle(SamplesRead(read, self._is_drawing or (is_whole and not is_full), is_full))

    def _collate(self, effect: Collate) -> Process:
        stage, start_s = self._stage, self._stage.env.now
        batches = count_batches([step.group for step in effect.steps], self.machine.config.layout)
        tokens = int(batches.padded.sum())
        seconds = stage.costs.loader.compute_collate_s(len(effect.steps), tokens, self._receiving) * self._slowness
        yield stage.env.timeout(stage.stretch(seconds))
        if stage.timeline is not None:
            stage.timeline.add(self.number, "collator", "collate", start_s, stage.env.now)
        if self._collate_fault is not None and effect.round >= self._collate_fault:
            self._fail(Fault(FaultKind.COLLATE, self.number, self._collate_fault))
        else:
            stage.shelf.put(self.number, effect.steps, batches)
            self.handle(Collated(effect.round))

    def _fail(self, fault: Fault) -> None:
        self._stage.note_fault(fault)
        self.handle(LocalFailed(fault.cause))
