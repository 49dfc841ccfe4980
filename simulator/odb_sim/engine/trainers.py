"""The training processes of all ranks, driven by one SimPy process. The top of `world` explains why that is exact."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import Final

import numpy as np
import simpy

from odb_ref.core.effects import OutcomeKind
from odb_ref.core.errors import InvariantError
from odb_ref.core.events import ConsumerStopped, PeerLost, StepTaken, Urged
from odb_ref.core.types import Step
from odb_sim.engine.batches import Batches
from odb_sim.engine.exchange import Process
from odb_sim.engine.rank import Rank
from odb_sim.engine.stage import EpochStage
from odb_sim.engine.updates import EVERY_STEP, Accumulation, GlobalBatch, compute_mean
from odb_sim.inputs.conditions import Fault, FaultKind
from odb_sim.inputs.costs import Seconds

_TAKEN: Final = StepTaken()


class _Step:
    """A step that some ranks have taken. Its lists have one entry for each of them, in the order they took it."""

    def __init__(
        self, batches: Batches, costs_s: list[float], round_: int, *, ends_update: bool, each_step: bool
    ) -> None:
        self.batches = batches
        self.costs_s = costs_s
        """The seconds each rank takes to compute its batch by the cost model alone."""
        self.round = round_
        self.ends_update = ends_update
        self.is_end = ends_update or each_step
        """True when all ranks meet after it."""
        self.queued_steps = 0
        self.takers: list[int] = []
        self.begun_s: list[float] = []
        """When each taker wanted the step."""
        self.taken_s: list[float] = []
        """When each taker got the step."""
        self.compute_s: list[float] = []
        """How long each taker computes the step."""

    @property
    def ready_s(self) -> Seconds:
        """When each taker has computed the step."""
        ready_s: Seconds = np.array(self.taken_s) + np.array(self.compute_s)
        return ready_s


class Trainers:
    """The training processes of all ranks, one update at a time. Each takes a batch, computes it, and takes the next. After the
    last batch of the update it waits for all others in a collective.
    """

    def __init__(
        self,
        stage: EpochStage,
        ranks: Sequence[Rank],
        on_progress: Callable[[int], None] | None,
        global_batch: GlobalBatch = EVERY_STEP,
    ) -> None:
        count = stage.workload.ranks
        self._stage = stage
        self._ranks = ranks
        self._on_progress = on_progress
        self._accumulation = Accumulation(global_batch)
        self._slowness = dict(stage.conditions.slow_ranks)
        self._leaving = [fault for fault in stage.conditions.faults if fault.kind in (FaultKind.STOP, FaultKind.KILL)]
        self._departed: set[int] = set()
        """The ranks whose trainer has left. If there is one, no update can end."""
        self._next = [stage.epoch.starts[0].planned_steps if stage.epoch.starts else 0] * count
        """The step that each rank takes next."""
        self._free_s = [0.0] * count
        """When each rank is done with its previous step."""
        self._held: set[int] = set()
        """The ranks that have taken the last step of their update or epoch, and now meet the others."""
        self._is_late = False
        """True once the deadline after a departure has passed: who is held, or comes to be, then gives up."""
        self._waiting: set[int] = set()
        """The ranks that want their next step and do not have it."""
        self._busy = 0
        """The number of ranks computing a step that is not the last of its update."""
        self._wakened: list[int] = []
        self._waking: simpy.Event | None = None
        self._open: dict[int, _Step] = {}
        """The steps that some ranks have taken and others have not, by number."""
        self._taken: _Step | None = None
        """The last step that all ranks have taken, until it is recorded."""
        self.updates = 0
        """The number of updates that have ended."""

    def find_obstacle(self) -> Fault | None:
        """Returns the fault because of which some rank's step never ends, or None if every step ends."""
        is_left = bool(self._open) or any(rank.queue for rank in self._ranks)
        return next((fault for fault in self._leaving if is_left and fault in self._stage.acted), None)

    def notice(self, rank: int) -> None:
        """Notices that a step was delivered to ``rank``, or that its epoch is over."""
        if rank in self._waiting:
            self._wake(rank)

    def _wake(self, rank: int) -> None:
        self._wakened.append(rank)
        if self._waking is not None and not self._waking.triggered:
            self._waking.succeed()

    def train(self) -> Process:
        """Runs all trainers as one SimPy process, until no rank has a step left.

        Raises: InvariantError when ranks take different steps (ALIGN).
        """
        env = self._stage.env
        met: _Step | None = None
        """A step inside an update after which all ranks met, until it is known whether it was the last of the epoch."""
        while True:
            self._want(range(len(self._ranks)))
            leavers = yield from self._take_all()
            last, self._taken = self._taken, None
            # A rank waits in the collective for one that has left; or all have left, inside an update that never ends (R7.1).
            is_cut = bool(self._departed) or any(self._is_told(rank) for rank in leavers)
            is_over = last is None and not is_cut
            if met is not None:
                met_s = float(met.ready_s.max())
                self._record(met, met_s, self._compute_end_s(met) if is_over else met_s)
                self.updates += is_over
                met = None
            if leavers and self._open and not self._departed:
                number = min(self._open)
                taker = self._open[number].takers[0]
                raise InvariantError("ALIGN", f"step {number}: rank {taker} takes it, rank {leavers[0]} has left")
            if is_cut and last is not None:
                self._record_inner(last)
            if is_cut or last is None:
                return
            slowest_s = float(last.ready_s.max())
            is_inner = last.is_end and not last.ends_update
            end_s = slowest_s if is_inner else self._compute_end_s(last)
            yield env.timeout(end_s - env.now)
            if (timeline := self._stage.timeline) is not None:
                for rank, ready_s in zip(last.takers, last.ready_s.tolist(), strict=True):
                    timeline.add(rank, "trainer", "wait for ranks", ready_s, slowest_s)
                    timeline.add(rank, "trainer", "collective", slowest_s, env.now)
            self._free_s = [env.now] * len(self._ranks)
            self._held.clear()
            if is_inner:
                met = last
            else:
                self._record(last, slowest_s, env.now)
                self.updates += 1

    def _compute_end_s(self, step: _Step) -> float:
        """Returns when the collective after ``step`` ends."""
        return self._stage.costs.collective.compute_end_s(step.ready_s, np.array(step.compute_s), len(self._ranks))

    def _take_all(self) -> Generator[simpy.Event, object, list[int]]:
        """Lets every rank take each step of an update as it comes. Returns the ranks whose epoch is over instead."""
        leavers: list[int] = []
        while self._waiting or self._busy:
            wakened, self._wakened = self._wakened, []
            for rank in wakened:
                if rank not in self._waiting or self._take(rank):
                    continue
                if self._ranks[rank].outcome is not None:
                    self._waiting.discard(rank)
                    leavers.append(rank)
                    self._hold(rank)
                    self._note_wait(rank, "wait for data", self._stage.env.now)
            if (self._waiting or self._busy) and not self._wakened:
                self._waking = self._stage.env.event()
                yield self._waking
        return leavers

    def _want(self, ranks: Sequence[int]) -> None:
        """Notes that ``ranks`` want their next step. Those that leave before it depart, and the others learn of that."""
        for fault in self._leaving:
            if fault.rank in ranks and fault.at == self._next[fault.rank]:
                self._depart(fault)
        wanting = [rank for rank in ranks if rank not in self._departed]
        self._waiting.update(wanting)
        self._wakened += wanting

    def _depart(self, fault: Fault) -> None:
        stage = self._stage
        stage.note_fault(fault)
        self._departed.add(fault.rank)
        if fault.kind is FaultKind.KILL:
            self._ranks[fault.rank].is_gone = True
        else:
            self._ranks[fault.rank].handle(ConsumerStopped())
        stage.env.process(self._spread(fault))

    def _spread(self, fault: Fault) -> Process:
        """Tells the other ranks of a stop after one message's latency, or of a rank that is gone after the deadline.

        By the deadline the collectives that cannot end give up too. A trainer that is in none goes on, and so does its loader.
        """
        stage = self._stage
        others = [rank for rank in self._ranks if rank.number != fault.rank]
        if fault.kind is FaultKind.STOP:
            yield stage.env.timeout(stage.costs.network.alpha_s)
            for rank in others:
                rank.handle(Urged())
        yield stage.env.timeout(stage.conditions.deadline_s)
        self._is_late = True
        for rank in others:
            if fault.kind is FaultKind.KILL and rank.outcome is None:
                rank.handle(PeerLost(fault.rank, fault.cause))
        for number in sorted(self._held - self._departed):
            stage.env.process(self._give_up(number))

    def _hold(self, rank: int) -> None:
        """Notes that ``rank`` will enter a collective once it has computed its step."""
        self._held.add(rank)
        if self._is_late:
            self._stage.env.process(self._give_up(rank))

    def _give_up(self, number: int) -> Process:
        """Lets the trainer of rank ``number`` leave, as soon as it is in a collective that cannot end."""
        yield self._stage.env.timeout(max(0.0, self._free_s[number] - self._stage.env.now))
        rank = self._ranks[number]
        if rank.outcome is None:
            rank.handle(ConsumerStopped())
        elif rank.outcome.kind is OutcomeKind.COMPLETE and self.find_obstacle() is not None:
            self._stage.note_finish()

    def note_held(self) -> None:
        """Adds to the timeline the trainers that wait to the end in a collective which a departed rank never enters."""
        for rank in sorted({rank for step in self._open.values() for rank in step.takers} - self._departed):
            self._note_wait(rank, "wait for ranks", self._stage.ended_s)

    def _note_wait(self, rank: int, name: str, end_s: float) -> None:
        """Adds to the timeline a wait of ``rank`` that is in vain after a fault."""
        if self._stage.timeline is not None and self._stage.fault_s is not None:
            self._stage.timeline.add(rank, "trainer", name, self._free_s[rank], end_s)

    def _take(self, rank: int) -> bool:
        """Lets ``rank`` take its next step now. Returns False when the step is not there."""
        stage, taker, number, now_s = self._stage, self._ranks[rank], self._next[rank], self._stage.env.now
        queue = taker.queue
        if not queue or (self._departed and self._is_told(rank)):
            return False  # there is no step, or the rank knows that another has left
        queued = len(queue)
        delivered = queue.popleft()
        if delivered.number != number:
            raise InvariantError("ALIGN", f"rank {rank} takes step {delivered.number}, the others step {number}")
        step = self._open.get(number) or self._begin(delivered)
        self._waiting.discard(rank)
        self._next[rank] += 1
        seconds = step.costs_s[rank] * stage.stretch(self._slowness.get(rank, 1.0))
        step.queued_steps += queued
        step.takers.append(rank)
        step.begun_s.append(self._free_s[rank])
        step.taken_s.append(now_s)
        step.compute_s.append(seconds)
        if stage.timeline is not None:
            stage.timeline.add(rank, "trainer", "wait for data", self._free_s[rank], now_s)
            stage.timeline.add(
                rank, "trainer", "compute" if step.batches.samples[rank] else "idle", now_s, now_s + seconds
            )
        self._free_s[rank] = now_s + seconds
        if len(step.takers) == len(self._ranks):
            del self._open[number]
            if self._taken is not None:
                self._record_inner(self._taken)
            self._taken = step
        if step.is_end:
            self._hold(rank)
        else:
            self._busy += 1
            stage.env.process(self._go_on(rank))
        taker.handle(_TAKEN)
        return True

    def _is_told(self, rank: int) -> bool:
        """Returns True if ``rank`` knows that the epoch has not ended in order."""
        outcome = self._ranks[rank].outcome
        return outcome is not None and outcome.kind is not OutcomeKind.COMPLETE

    def _begin(self, delivered: Step) -> _Step:
        """Returns a new step, which a rank is the first to take."""
        batches = self._stage.shelf.take(delivered.number)
        costs_s = self._stage.costs.compute_steps_s(batches.padded, batches.row_pairs)
        (ends_update,) = self._accumulation.find_ends(
            batches.samples.sum(keepdims=True), batches.real.sum(keepdims=True)
        )
        step = self._open[delivered.number] = _Step(
            batches,
            costs_s.tolist(),
            delivered.round,
            ends_update=bool(ends_update),
            each_step=self._stage.costs.collective.each_step,
        )
        return step

    def _go_on(self, rank: int) -> Process:
        """Lets ``rank`` compute a step, and then want the next one of the update."""
        yield self._stage.env.timeout(self._free_s[rank] - self._stage.env.now)
        self._busy -= 1
        self._want([rank])
        self._wake(rank)

    def _record_inner(self, step: _Step) -> None:
        """Records a step inside an update, after which no rank waits for others."""
        done_s = compute_mean(step.ready_s)
        self._record(step, done_s, done_s)

    def _record(self, step: _Step, slowest_s: float, end_s: float) -> None:
        """Records a step that all ranks had computed at ``slowest_s``, and whose collective ended at ``end_s``."""
        stage, takers = self._stage, len(step.takers)
        start_s, compute_s = compute_mean(np.array(step.begun_s)), float(np.sum(step.compute_s))
        data_wait_s = float((np.array(step.taken_s) - np.array(step.begun_s)).sum())
        stage.recorder.end_step(
            step.batches,
            round_=step.round,
            start_s=start_s,
            end_s=end_s,
            queued_steps=step.queued_steps,
            data_wait_s=data_wait_s,
            compute_s=compute_s,
            sync_wait_s=max(0.0, takers * (slowest_s - start_s) - data_wait_s - compute_s),
            collective_s=takers * (end_s - slowest_s),
        )
        if stage.fill is not None:
            batches, ready_s = step.batches, np.zeros(takers)
            ready_s[step.takers] = step.ready_s
            figures = (batches.samples[:, None], batches.real[:, None], batches.padded[:, None])
            stage.fill.add(0, *figures, batches.lengths)
            stage.fill.end(step.round, ready_s[:, None], np.array([step.is_end]))
        if self._on_progress is not None:
            self._on_progress(stage.recorder.samples_emitted)
