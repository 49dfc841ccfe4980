"""The training processes of all ranks, driven by one SimPy process: see the top of `world` for why that is exact."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import Final

import simpy

from odb_ref.core.errors import InvariantError
from odb_ref.core.events import ConsumerStopped, PeerLost, StepTaken, Urged
from odb_sim.engine.exchange import Process
from odb_sim.engine.rank import Rank
from odb_sim.engine.stage import Stage
from odb_sim.inputs.conditions import Fault, FaultKind

_TAKEN: Final = StepTaken()


class Trainers:
    """The training processes of all ranks, in step: each takes a batch, computes, and waits for all in a collective."""

    __slots__ = (
        "_departed",
        "_leaving",
        "_on_progress",
        "_ranks",
        "_round",
        "_slowness",
        "_stage",
        "_waiting",
        "_wakened",
        "_waking",
        "compute_s",
        "data_wait_s",
        "queued_steps",
        "takes",
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
        self._round = 0
        self.compute_s = 0.0
        self.data_wait_s = 0.0
        self.queued_steps = 0
        self.takes: list[tuple[float, int]] = []
        """When each rank of the step will have computed it, and the rank."""

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
            self.compute_s = self.data_wait_s = 0.0
            self.queued_steps = 0
            self.takes.clear()
            leavers = yield from self._take_all(number, start_s)
            if self._departed:
                return  # whoever has taken the step waits in its collective for one that has left
            if leavers and self.takes:
                taker = self.takes[0][1]
                raise InvariantError("ALIGN", f"step {number}: rank {taker} takes it, rank {leavers[0]} has left")
            if leavers:
                return
            slowest_s, _ = max(self.takes)
            yield env.timeout(slowest_s + sync_s - env.now)
            self._end_step(start_s, slowest_s)

    def _take_all(self, number: int, start_s: float) -> Generator[simpy.Event, object, list[int]]:
        """Has every rank take its step when it has it; returns the ranks whose epoch is over instead."""
        leavers: list[int] = []
        while self._waiting:
            wakened, self._wakened = self._wakened, []
            for rank in wakened:
                if rank not in self._waiting or self._take(rank, number, start_s):
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
            stage.note_fault()
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

    def _take(self, rank: int, number: int, start_s: float) -> bool:
        """``rank`` takes its step now; False when it is not there."""
        stage, taker = self._stage, self._ranks[rank]
        queue = taker.queue
        if not queue:
            return False
        self.queued_steps += len(queue)
        step = queue.popleft()
        if step.number != number:
            raise InvariantError("ALIGN", f"rank {rank} takes step {step.number}, the others step {number}")
        self._waiting.discard(rank)
        now = stage.env.now
        compute_s = stage.stretch(stage.costs.compute_group_s(step.group) * self._slowness.get(rank, 1.0))
        self.compute_s += compute_s
        self.data_wait_s += now - start_s
        self.takes.append((now + compute_s, rank))
        if stage.timeline is not None:
            stage.timeline.add(rank, "trainer", "wait for data", start_s, now)
            stage.timeline.add(rank, "trainer", "idle" if step.is_idle else "compute", now, now + compute_s)
        if not self._departed:
            stage.recorder.take(rank, step.group)
        taker.handle(_TAKEN)
        self._round = step.round
        return True

    def _end_step(self, start_s: float, slowest_s: float) -> None:
        stage, end_s = self._stage, self._stage.env.now
        ranks = len(self.takes)
        stage.recorder.end_step(
            round_=self._round,
            start_s=start_s,
            end_s=end_s,
            queued_steps=self.queued_steps,
            data_wait_s=self.data_wait_s,
            compute_s=self.compute_s,
            sync_wait_s=ranks * (slowest_s - start_s) - self.data_wait_s - self.compute_s,
            collective_s=ranks * (end_s - slowest_s),
        )
        if stage.timeline is not None:
            for ready_s, rank in self.takes:
                stage.timeline.add(rank, "trainer", "wait for ranks", ready_s, slowest_s)
                stage.timeline.add(rank, "trainer", "collective", slowest_s, end_s)
        if self._on_progress is not None:
            self._on_progress(stage.recorder.samples_emitted)
