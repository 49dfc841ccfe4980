"""The training processes of all ranks, driven by one SimPy process: see the top of `world` for why that is exact."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import simpy

from odb_ref.core.batching.layouts import Layout
from odb_ref.core.errors import InvariantError
from odb_ref.core.events import ConsumerStopped, PeerLost, StepTaken, Urged
from odb_sim.engine.batches import Batches
from odb_sim.engine.exchange import Process
from odb_sim.engine.rank import Rank
from odb_sim.engine.stage import Stage
from odb_sim.inputs.conditions import Fault, FaultKind

_TAKEN: Final = StepTaken()


@dataclass(frozen=True, slots=True)
class _Computing:
    """A step's seconds, summed over ranks; and when each of them, and the slowest, is ready for the collective."""

    wait_s: float
    compute_s: float
    ready_s: list[float]
    slowest_s: float


class Trainers:
    """The training processes of all ranks, in step: each takes a batch, computes, and waits for all in a collective."""

    __slots__ = (
        "_departed",
        "_leaving",
        "_on_progress",
        "_queued_steps",
        "_ranks",
        "_round",
        "_slowness",
        "_stage",
        "_taken_s",
        "_takers",
        "_taking_slowness",
        "_waiting",
        "_wakened",
        "_waking",
    )

    def __init__(self, stage: Stage, ranks: Sequence[Rank], on_progress: Callable[[int], None] | None) -> None:
        self._stage = stage
        self._ranks = ranks
        self._on_progress = on_progress
        self._slowness = dict(stage.conditions.slow_ranks)
        self._leaving = [fault for fault in stage.conditions.faults if fault.kind in (FaultKind.STOP, FaultKind.KILL)]
        self._departed: set[int] = set()
        """Ranks whose trainer is gone: no step can end any more."""
        self._waiting: set[int] = set()
        """Ranks that want their next step and do not have it."""
        self._wakened: list[int] = []
        self._waking: simpy.Event | None = None
        self._queued_steps = 0
        self._round = 0
        """That of the step taken last."""
        self._takers: list[int] = []
        """The ranks that have taken the step, in turn."""
        self._taken_s: list[float] = []
        """When each of them has."""
        self._taking_slowness: list[float] = []
        """How many times as long as others each of their processors takes for it."""

    @property
    def _layout(self) -> Layout:
        return self._ranks[0].machine.config.layout

    def notice(self, rank: int) -> None:
        """A step was delivered to ``rank``, or its epoch is over."""
        if rank in self._waiting:
            self._wakened.append(rank)
            if self._waking is not None and not self._waking.triggered:
                self._waking.succeed()

    def train(self) -> Process:
        """Yields the SimPy process of all trainers; ends when no rank has a step left.

        Raises: InvariantError when ranks differ in the step they take (ALIGN).
        """
        env, sync_s = self._stage.env, self._stage.costs.collective.compute_s(len(self._ranks))
        first = self._stage.starts[0].planned_steps if self._stage.starts else 0
        while True:
            start_s, number = env.now, first + len(self._stage.recorder.rows)
            self._depart(number)
            self._waiting = set(range(len(self._ranks))) - self._departed
            self._wakened = sorted(self._waiting)
            self._queued_steps = 0
            self._takers, self._taken_s, self._taking_slowness = [], [], []
            leavers = yield from self._take_all(number)
            if not self._takers:
                return
            batches = self._stage.shelf.take(number)
            computing = self._compute(batches, start_s)
            if self._departed:
                return  # whoever has taken the step waits in its collective for one that has left
            if leavers:
                taker = self._takers[0]
                raise InvariantError("ALIGN", f"step {number}: rank {taker} takes it, rank {leavers[0]} has left")
            yield env.timeout(computing.slowest_s + sync_s - env.now)
            self._end_step(batches, computing, start_s)

    def _take_all(self, number: int) -> Generator[simpy.Event, object, list[int]]:
        """Has every rank take its step when it has it; returns the ranks whose epoch is over instead."""
        leavers: list[int] = []
        while self._waiting:
            wakened, self._wakened = self._wakened, []
            for rank in wakened:
                if rank not in self._waiting or self._take(rank, number):
                    continue
                if self._ranks[rank].outcome is not None:
                    self._waiting.discard(rank)
                    leavers.append(rank)
            if self._waiting and not self._wakened:
                self._waking = self._stage.env.event()
                yield self._waking
        return leavers

    def _depart(self, number: int) -> None:
        """Those leave who leave before step ``number``; the others learn of it."""
        stage = self._stage
        for fault in self._leaving:
            if fault.at != number:
                continue
            stage.note_fault(fault)
            self._departed.add(fault.rank)
            if fault.kind is FaultKind.KILL:
                self._ranks[fault.rank].is_gone = True
            else:
                self._ranks[fault.rank].handle(ConsumerStopped())
            stage.env.process(self._spread(fault))

    def _spread(self, fault: Fault) -> Process:
        """Spreads the news of a stop within a message; of a rank that is gone, when the deadline has passed.

        By then their own trainers, held in a collective that cannot end, have given up too.
        """
        stage = self._stage
        others = [rank for rank in self._ranks if rank.number != fault.rank]
        if fault.kind is FaultKind.STOP:
            yield stage.env.timeout(stage.costs.network.alpha_s)
            for rank in others:
                rank.handle(Urged())
        yield stage.env.timeout(stage.conditions.deadline_s)
        for rank in others:
            if rank.outcome is None and not rank.is_gone:
                if fault.kind is FaultKind.KILL:
                    rank.handle(PeerLost(fault.rank, fault.cause))
                rank.handle(ConsumerStopped())

    def _take(self, rank: int, number: int) -> bool:
        """``rank`` takes its step now; False when it is not there."""
        stage, taker = self._stage, self._ranks[rank]
        queue = taker.queue
        if not queue:
            return False
        self._queued_steps += len(queue)
        step = queue.popleft()
        if step.number != number:
            raise InvariantError("ALIGN", f"rank {rank} takes step {step.number}, the others step {number}")
        self._waiting.discard(rank)
        self._takers.append(rank)
        self._taken_s.append(stage.env.now)
        self._taking_slowness.append(stage.stretch(self._slowness.get(rank, 1.0)))
        self._round = step.round
        taker.handle(_TAKEN)
        return True

    def _compute(self, batches: Batches, start_s: float) -> _Computing:
        """Returns how long the ranks that have taken the step compute it."""
        taken_s = np.array(self._taken_s)
        costs_s = self._stage.costs.compute_layout_s(self._layout, batches.padded, batches.longest, batches.pairs)
        compute_s = costs_s[self._takers] * np.array(self._taking_slowness)
        ready_s = taken_s + compute_s
        if (timeline := self._stage.timeline) is not None:
            for rank, begin_s, end_s in zip(self._takers, self._taken_s, ready_s.tolist(), strict=True):
                timeline.add(rank, "trainer", "wait for data", start_s, begin_s)
                timeline.add(rank, "trainer", "compute" if batches.samples[rank] else "idle", begin_s, end_s)
        return _Computing(
            wait_s=float((taken_s - start_s).sum()),
            compute_s=float(compute_s.sum()),
            ready_s=ready_s.tolist(),
            slowest_s=float(ready_s.max(initial=start_s)),
        )

    def _end_step(self, batches: Batches, computing: _Computing, start_s: float) -> None:
        stage, slowest_s, end_s = self._stage, computing.slowest_s, self._stage.env.now
        takers = self._takers
        stage.recorder.end_step(
            batches,
            round_=self._round,
            start_s=start_s,
            end_s=end_s,
            queued_steps=self._queued_steps,
            data_wait_s=computing.wait_s,
            compute_s=computing.compute_s,
            sync_wait_s=max(0.0, len(takers) * (slowest_s - start_s) - computing.wait_s - computing.compute_s),
            collective_s=len(takers) * (end_s - slowest_s),
        )
        if stage.timeline is not None:
            for rank, ready_s in zip(takers, computing.ready_s, strict=True):
                stage.timeline.add(rank, "trainer", "wait for ranks", ready_s, slowest_s)
                stage.timeline.add(rank, "trainer", "collective", slowest_s, end_s)
        if self._on_progress is not None:
            self._on_progress(stage.recorder.samples_emitted)
