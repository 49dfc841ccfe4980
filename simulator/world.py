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
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
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
from odb_ref.core.events import Collated, ConsumerStopped, Event, LocalFailed, PeerLost, SamplesRead, StepTaken, Urged
from odb_ref.core.machine import Machine
from odb_ref.core.types import Step, compute_padded_tokens
from simulator.conditions import STEADY, Conditions, Fault, FaultKind
from simulator.costs import Costs
from simulator.exchange import Answer, Exchange
from simulator.metrics import Recorder
from simulator.timeline import Timeline
from simulator.workload import Workload

Process = Generator[simpy.Event, object, None]
TimedObserver = Callable[[int, Event | None, Sequence[Effect], float], None]
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
        observer: TimedObserver | None = None,
        timeline: Timeline | None = None,
        on_progress: Callable[[int], None] | None = None,
    ) -> None:
        self.env = simpy.Environment(initial_time=0.0)
        self.workload = workload
        self.costs = costs
        self.conditions = conditions
        self.timeline = timeline
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

            def observe(rank: int, event: Event | None, effects: tuple[Effect, ...]) -> None:
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
        """Starts the epoch."""
        self._perform(self.machine.begin())

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


class Trainers:
    """The training processes of all ranks, in step: each takes a batch, computes, and waits for all in a collective."""

    __slots__ = (
        "_departed",
        "_leaving",
        "_on_progress",
        "_slowness",
        "_waiting",
        "_wakened",
        "_waking",
        "_world",
        "compute_s",
        "data_wait_s",
        "takes",
    )

    def __init__(self, world: World, on_progress: Callable[[int], None] | None) -> None:
        self._world = world
        self._on_progress = on_progress
        self._slowness = dict(world.conditions.slow_ranks)
        self._leaving = [fault for fault in world.conditions.faults if fault.kind in (FaultKind.STOP, FaultKind.KILL)]
        self._departed: set[int] = set()
        """Ranks whose trainer is gone: no step can end any more."""
        self._waiting: set[int] = set()
        """Ranks that want their next step and do not have it."""
        self._wakened: list[int] = []
        self._waking: simpy.Event | None = None
        self.compute_s = 0.0
        self.data_wait_s = 0.0
        self.takes: list[tuple[float, int]] = []
        """When each rank of the step will have computed it, and the rank."""

    def notice(self, rank: int) -> None:
        """A step was delivered to ``rank``, or its epoch is over."""
        if rank in self._waiting:
            self._wakened.append(rank)
            if self._waking is not None and not self._waking.triggered:
                self._waking.succeed()

    def train(self) -> Process:
        """The SimPy process of all trainers; ends when no rank has a step left."""
        env, ranks, costs = self._world.env, len(self._world.ranks), self._world.costs
        while True:
            start_s, number = env.now, len(self._world.recorder.rows)
            self._depart(number)
            self._waiting = set(range(ranks)) - self._departed
            self._wakened = sorted(self._waiting) if self._departed else list(range(ranks))
            self.compute_s = self.data_wait_s = 0.0
            self.takes.clear()
            leavers: list[int] = []
            round_ = 0
            while self._waiting:
                wakened, self._wakened = self._wakened, []
                for rank in wakened:
                    if rank not in self._waiting:
                        continue
                    step = self._take(rank, number, start_s)
                    if step is not None:
                        round_ = step.round
                    elif self._world.ranks[rank].outcome is not None:
                        self._waiting.discard(rank)
                        leavers.append(rank)
                if self._waiting and not self._wakened:
                    self._waking = env.event()
                    yield self._waking
            if self._departed:
                return  # whoever has taken the step waits in its collective for one that has left
            if leavers and self.takes:
                taker = self.takes[0][1]
                raise InvariantError("ALIGN", f"step {number}: rank {taker} takes it, rank {leavers[0]} has left")
            if leavers:
                return
            slowest_s, _ = max(self.takes)
            end_s = slowest_s + costs.gpu.sync_s
            yield env.timeout(end_s - env.now)
            self._end_step(round_, start_s)

    def _depart(self, number: int) -> None:
        """Those leave who leave before step ``number``; the others learn of it."""
        world = self._world
        for fault in self._leaving:
            if fault.at != number:
                continue
            world.note_fault()
            self._departed.add(fault.rank)
            if fault.kind is FaultKind.KILL:
                world.ranks[fault.rank].is_gone = True
            else:
                world.ranks[fault.rank].handle(ConsumerStopped())
            world.env.process(self._spread(fault))

    def _spread(self, fault: Fault) -> Process:
        """A stop is known to all within a message; of one that is gone they learn when their deadline has passed.

        By then their own trainers, held in a collective that cannot end, have given up too.
        """
        world = self._world
        others = [rank for rank in world.ranks if rank.number != fault.rank]
        if fault.kind is FaultKind.STOP:
            yield world.env.timeout(world.costs.network.alpha_s)
            for rank in others:
                rank.handle(Urged())
        yield world.env.timeout(world.conditions.deadline_s)
        for rank in others:
            if rank.outcome is None and not rank.is_gone:
                if fault.kind is FaultKind.KILL:
                    rank.handle(PeerLost(fault.rank, fault.cause))
                rank.handle(ConsumerStopped())

    def _take(self, rank: int, number: int, start_s: float) -> Step | None:
        """The step that ``rank`` takes now; None when none is there."""
        world = self._world
        queue = world.ranks[rank].queue
        if not queue:
            return None
        step = queue.popleft()
        if step.number != number:
            raise InvariantError("ALIGN", f"rank {rank} takes step {step.number}, the others step {number}")
        self._waiting.discard(rank)
        now = world.env.now
        compute_s = world.stretch(world.costs.gpu.compute_group_s(step.group) * self._slowness.get(rank, 1.0))
        self.compute_s += compute_s
        self.data_wait_s += now - start_s
        self.takes.append((now + compute_s, rank))
        if world.timeline is not None:
            world.timeline.add(rank, "trainer", "wait for data", start_s, now)
            world.timeline.add(rank, "trainer", "idle" if step.is_idle else "compute", now, now + compute_s)
        if not self._departed:
            world.recorder.take(rank, step.group)
        world.ranks[rank].handle(StepTaken())
        return step

    def _end_step(self, round_: int, start_s: float) -> None:
        world, end_s = self._world, self._world.env.now
        world.recorder.end_step(
            round_=round_,
            start_s=start_s,
            end_s=end_s,
            data_wait_s=self.data_wait_s,
            compute_s=self.compute_s,
            sync_wait_s=len(self.takes) * (end_s - start_s) - self.data_wait_s - self.compute_s,
        )
        if world.timeline is not None:
            for ready_s, rank in self.takes:
                world.timeline.add(rank, "trainer", "wait for ranks", ready_s, end_s)
        if self._on_progress is not None:
            self._on_progress(world.recorder.samples_emitted)


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
