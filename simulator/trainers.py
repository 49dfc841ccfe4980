"""The training processes of all ranks, driven by one SimPy process: see the top of `world` for why that is exact."""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import TYPE_CHECKING

import simpy

from odb_ref.core.errors import InvariantError
from odb_ref.core.events import ConsumerStopped, PeerLost, StepTaken, Urged
from simulator.conditions import Fault, FaultKind
from simulator.exchange import Process

if TYPE_CHECKING:
    from simulator.world import World


class Trainers:
    """The training processes of all ranks, in step: each takes a batch, computes, and waits for all in a collective."""

    __slots__ = (
        "_departed",
        "_leaving",
        "_on_progress",
        "_round",
        "_slowness",
        "_waiting",
        "_wakened",
        "_waking",
        "_world",
        "compute_s",
        "data_wait_s",
        "queued_steps",
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
        """The SimPy process of all trainers; ends when no rank has a step left.

        Raises: InvariantError when ranks differ in the step they take (ALIGN).
        """
        env, sync_s = self._world.env, self._world.costs.gpu.sync_s
        first = self._world.starts[0].planned_steps if self._world.starts else 0
        while True:
            start_s, number = env.now, first + len(self._world.recorder.rows)
            self._depart(number)
            self._waiting = set(range(len(self._world.ranks))) - self._departed
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
            self._end_step(start_s)

    def _take_all(self, number: int, start_s: float) -> Generator[simpy.Event, object, list[int]]:
        """Every rank takes its step when it has it; the ranks whose epoch is over instead."""
        leavers: list[int] = []
        while self._waiting:
            wakened, self._wakened = self._wakened, []
            for rank in wakened:
                if rank not in self._waiting or self._take(rank, number, start_s):
                    continue
                if self._world.ranks[rank].outcome is not None:
                    self._waiting.discard(rank)
                    leavers.append(rank)
            if self._waiting and not self._wakened:
                self._waking = self._world.env.event()
                yield self._waking
        return leavers

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

    def _take(self, rank: int, number: int, start_s: float) -> bool:
        """``rank`` takes its step now; False when it is not there."""
        world = self._world
        queue = world.ranks[rank].queue
        if not queue:
            return False
        self.queued_steps += len(queue)
        step = queue.popleft()
        if step.number != number:
            raise InvariantError("ALIGN", f"rank {rank} takes step {step.number}, the others step {number}")
        self._waiting.discard(rank)
        now = world.env.now
        compute_s = world.stretch(world.costs.compute_group_s(step.group) * self._slowness.get(rank, 1.0))
        self.compute_s += compute_s
        self.data_wait_s += now - start_s
        self.takes.append((now + compute_s, rank))
        if world.timeline is not None:
            world.timeline.add(rank, "trainer", "wait for data", start_s, now)
            world.timeline.add(rank, "trainer", "idle" if step.is_idle else "compute", now, now + compute_s)
        if not self._departed:
            world.recorder.take(rank, step.group)
        world.ranks[rank].handle(StepTaken())
        self._round = step.round
        return True

    def _end_step(self, start_s: float) -> None:
        world, end_s = self._world, self._world.env.now
        world.recorder.end_step(
            round_=self._round,
            start_s=start_s,
            end_s=end_s,
            queued_steps=self.queued_steps,
            data_wait_s=self.data_wait_s,
            compute_s=self.compute_s,
            sync_wait_s=len(self.takes) * (end_s - start_s) - self.data_wait_s - self.compute_s,
        )
        if world.timeline is not None:
            for ready_s, rank in self.takes:
                world.timeline.add(rank, "trainer", "wait for ranks", ready_s, end_s)
        if self._on_progress is not None:
            self._on_progress(world.recorder.samples_emitted)
