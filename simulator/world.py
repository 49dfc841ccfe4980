"""Many ranks in one process: SimPy plays readers, collators, exchange and trainers, and `odb_ref.core` decides.

How a run goes
--------------
Each rank has a `Machine`. Its effects become SimPy processes: a read or a collation takes as long as the cost model says
and ends in the event that answers it; posts meet in the `Exchange`; delivered steps lie in the rank's bounded queue.
Trainers take one step after the other, and each step ends in a collective of all ranks.

Because of that collective all trainers are in the same step, so one SimPy process drives them all: it lets every rank
that has its step take it, wakes for those whose step comes later, and sleeps until the slowest is done. A queue that a
take makes room in, an offer that follows, a release: all happen at the time they would with a process for each rank, with
one event for a step in place of three for each rank and step. That is what makes 16,384 ranks affordable.

Nothing here decides anything about the protocol, and nothing depends on the clock of the machine it runs on: the same
workload, configuration and costs give the same trace, byte for byte (REPLAY).
"""

from __future__ import annotations

import gc
import random
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain
from typing import assert_never

import simpy

from odb_ref.core.config import Config
from odb_ref.core.effects import (
    Collate,
    Deliver,
    Effect,
    Finish,
    Outcome,
    OutcomeKind,
    PostCounts,
    PostOffer,
    PostReport,
    Read,
)
from odb_ref.core.errors import InvariantError
from odb_ref.core.events import Collated, Event, LocalFailed, SamplesRead
from odb_ref.core.machine import Machine
from odb_ref.core.resume import Resumed, RoundStart
from odb_ref.core.types import Step, compute_padded_tokens
from simulator.conditions import STEADY, Conditions, Fault, FaultKind
from simulator.costs import Costs
from simulator.exchange import Answer, Exchange, Process
from simulator.metrics import Recorder
from simulator.timeline import Timeline
from simulator.trainers import Trainers
from simulator.workload import Workload

TimedObserver = Callable[[int, Event | Resumed | None, Sequence[Effect], float], None]
"""Rank, event, effects, simulated seconds; `odb_ref.core.trace.TraceWriter.record` fits."""


class World:
    """One simulated epoch. Build it, `run` it once, read the ``recorder``."""

    def __init__(
        self,
        config: Config,
        workload: Workload,
        costs: Costs,
        *,
        conditions: Conditions = STEADY,
        seed: int = 0,
        starts: Sequence[RoundStart] = (),
        observer: TimedObserver | None = None,
        timeline: Timeline | None = None,
        on_progress: Callable[[int], None] | None = None,
    ) -> None:
        self.env = simpy.Environment(initial_time=0.0)
        self.workload = workload
        self.costs = costs
        self.conditions = conditions
        self.timeline = timeline
        self.starts = starts
        """Where each rank goes on with a saved epoch; empty for one from its beginning."""
        self._random = random.Random(seed)
        self.exchange = Exchange(
            self.env,
            costs.network,
            workload.ranks,
            answer=self._answer,
            stretch=self.stretch if conditions.jitter else None,
        )
        self.recorder = Recorder(
            ranks=workload.ranks, samples_total=workload.samples_total, budget_tokens=config.budget_tokens
        )
        self.trainers = Trainers(self, on_progress)
        self._fault_s: float | None = None
        self._finished_s = 0.0
        observe = None
        if observer is not None:
            timed = observer

            def observe(rank: int, event: Event | Resumed | None, effects: tuple[Effect, ...]) -> None:
                timed(rank, event, effects, self.env.now)

        self.ranks = [Rank(self, Machine(replace(config, rank=rank), observe)) for rank in range(workload.ranks)]

    def run(self) -> Outcome:
        """How the epoch ended, on every rank.

        Raises: InvariantError when it does not end (FREE), or the ranks end it differently (ALIGN).
        """
        with _paused_garbage_collection():
            for rank in self.ranks:
                rank.begin()
            self.env.process(self.trainers.train())
            self.env.run()
        self.recorder.rounds = self.exchange.count_rounds
        self.recorder.exchange_s = self.exchange.seconds
        survivors = [rank for rank in self.ranks if not rank.is_gone]
        if not survivors:
            return Outcome(OutcomeKind.LOST, 0, "no rank is left")
        outcomes = {rank.outcome for rank in survivors}
        if None in outcomes:
            stuck = next(rank for rank in survivors if rank.outcome is None)
            state = stuck.machine.state
            raise InvariantError(
                "FREE", f"nothing can happen and rank {stuck.number} is in phase {state.phase}, round {state.round}"
            )
        if len(outcomes) > 1:
            raise InvariantError("ALIGN", f"the ranks ended differently: {sorted(map(str, outcomes))}")
        (outcome,) = (outcome for outcome in outcomes if outcome is not None)
        return outcome

    @property
    def abort_s(self) -> float | None:
        """Seconds from the first fault to the moment the last surviving rank's loader has ended; None without a fault.

        0 when all loaders had ended before it.
        """
        return None if self._fault_s is None else max(0.0, self._finished_s - self._fault_s)

    def stretch(self, seconds: float) -> float:
        """``seconds`` times the jitter of this occasion."""
        jitter = self.conditions.jitter
        return seconds * self._random.lognormvariate(0, jitter) if jitter else seconds

    def note_fault(self) -> None:
        """A fault acts now."""
        self._fault_s = self.env.now if self._fault_s is None else self._fault_s

    def note_finish(self) -> None:
        """A rank's loader has ended."""
        self._finished_s = self.env.now

    def _answer(self, rank: int, answer: Answer) -> None:
        self.ranks[rank].answer(answer)


class Rank:
    """One rank: performs what its machine asks for, and turns what comes of it into events."""

    __slots__ = (
        "_collate_fault",
        "_posted_s",
        "_read_fault",
        "_read_samples",
        "_slowness",
        "_world",
        "is_gone",
        "machine",
        "number",
        "outcome",
        "queue",
    )

    def __init__(self, world: World, machine: Machine) -> None:
        self._world = world
        self._read_samples = 0
        self._posted_s = 0.0
        self.machine = machine
        self.number = machine.config.rank
        self._slowness = dict(world.conditions.slow_loaders).get(self.number, 1.0)
        self._read_fault = world.conditions.find_fault(FaultKind.READ, self.number)
        self._collate_fault = world.conditions.find_fault(FaultKind.COLLATE, self.number)
        self.queue: deque[Step] = deque()
        """Delivered steps that the trainer has not taken."""
        self.outcome: Outcome | None = None
        self.is_gone = False
        """True when the process is no more: it hears and says nothing."""

    def begin(self) -> None:
        """Starts the epoch, or goes on with it."""
        if not self._world.starts:
            self._perform(self.machine.begin())
            return
        start, workload = self._world.starts[self.number], self._world.workload
        self._read_samples = start.read_samples
        carried = [workload.read_samples(self.number, position, 1) for position in start.carried]
        self._perform(self.machine.begin(start, tuple(chain.from_iterable(carried))))

    def handle(self, event: Event) -> None:
        """Tells the machine and does what it asks for."""
        if not self.is_gone:
            self._perform(self.machine.handle(event))

    def answer(self, answer: Answer) -> None:
        """A collective of the loaders has ended."""
        if self._world.timeline is not None:
            self._world.timeline.add(self.number, "exchange", "exchange", self._posted_s, self._world.env.now)
        self.handle(answer)

    def _perform(self, effects: tuple[Effect, ...]) -> None:
        world = self._world
        for effect in effects:
            match effect:
                case Deliver():
                    self.queue.append(effect.step)
                    world.trainers.notice(self.number)
                case Read():
                    world.env.process(self._read(effect.count))
                case Collate():
                    world.env.process(self._collate(effect))
                case PostOffer() | PostCounts() | PostReport():
                    self._posted_s = world.env.now
                    world.exchange.post(self.number, effect)
                case Finish():
                    self.outcome = effect.outcome
                    world.note_finish()
                    world.trainers.notice(self.number)
                case _:
                    assert_never(effect)

    def _read(self, count: int) -> Process:
        world, start_s = self._world, self._world.env.now
        span = world.workload.compute_span(self.number, self._read_samples, count)
        samples, tokens = span.stop - span.start, int(world.workload.tokens[span].sum())
        seconds = world.costs.loader.compute_read_s(samples, tokens) * self._slowness
        yield world.env.timeout(world.stretch(seconds))
        if world.timeline is not None:
            world.timeline.add(self.number, "reader", "fill", start_s, world.env.now)
        if self._read_fault is not None and self._read_samples + samples > self._read_fault:
            self._fail(Fault(FaultKind.READ, self.number, self._read_fault))
            return
        read = world.workload.read_samples(self.number, self._read_samples, count)
        self._read_samples += len(read)
        is_ended = self._read_samples == world.workload.compute_shard_size(self.number)
        self.handle(SamplesRead(read, is_ended))

    def _collate(self, effect: Collate) -> Process:
        world, start_s = self._world, self._world.env.now
        padded = sum([compute_padded_tokens(step.group) for step in effect.steps])
        seconds = world.costs.loader.compute_collate_s(len(effect.steps), padded) * self._slowness
        yield world.env.timeout(world.stretch(seconds))
        if world.timeline is not None:
            world.timeline.add(self.number, "collator", "collate", start_s, world.env.now)
        if self._collate_fault is not None and effect.round >= self._collate_fault:
            self._fail(Fault(FaultKind.COLLATE, self.number, self._collate_fault))
        else:
            self.handle(Collated(effect.round))

    def _fail(self, fault: Fault) -> None:
        self._world.note_fault()
        self.handle(LocalFailed(fault.cause))


@contextmanager
def _paused_garbage_collection() -> Iterator[None]:
    # Millions of samples live at once and none is part of a cycle: searching them for one takes longer than the run.
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
