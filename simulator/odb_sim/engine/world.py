"""Many ranks in one process: SimPy plays readers, collators, exchange and trainers, and `odb_ref.core` decides.

How a run goes
--------------
Each rank has a `Machine`. Its effects become SimPy processes: a read or a collation takes as long as the cost model says
and ends in the event that answers it; posts meet in the `SimulatedExchange`; delivered steps lie in the rank's bounded queue.
Trainers take one step after the other, and each step ends in a collective of all ranks.

Because of that collective all trainers are in the same update, so one SimPy process drives them all. It lets every rank that
has its step take it, wakes for those whose step comes later, and sleeps until the slowest is done. A queue that gets room, the
offer that follows, a release: each happens at the time it would with a process for each rank, but with one event for a step
instead of three for each rank and step. This makes thousands of ranks affordable. Without faults and jitter, `rounds` gives
the same figures with no event at all.

This module decides nothing about the protocol, and nothing depends on the real clock: the same workload, configuration and
costs give the same trace, byte for byte (REPLAY).
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from odb_ref.core.config import Config
from odb_ref.core.effects import Effect, Outcome, OutcomeKind
from odb_ref.core.errors import InvariantError
from odb_ref.core.events import Event
from odb_ref.core.machine import Machine
from odb_ref.core.resume import Resumed
from odb_sim.engine.exchange import SimulatedExchange
from odb_sim.engine.fill import Fill
from odb_sim.engine.metrics import Recorder, RunRecord
from odb_sim.engine.rank import Rank
from odb_sim.engine.stage import Epoch, EpochStage
from odb_sim.engine.timeline import Timeline
from odb_sim.engine.trainers import Trainers

TimedObserver = Callable[[int, Event | Resumed | None, Sequence[Effect], float], None]
"""Called with rank, event, effects and simulated seconds; `odb_ref.trace.writing.TraceWriter.record` is one."""


class SimulatedWorld:
    """One simulated epoch. Build it, and `run` it once."""

    def __init__(
        self,
        epoch: Epoch,
        config: Config,
        *,
        observer: TimedObserver | None = None,
        timeline: Timeline | None = None,
        fill: Fill | None = None,
        on_progress: Callable[[int], None] | None = None,
    ) -> None:
        ranks = epoch.workload.ranks
        self.recorder = Recorder(
            ranks=ranks,
            samples_total=epoch.workload.samples_total,
            budget_tokens=config.budget_tokens,
            emitted=[start.read_samples - len(start.carried) for start in epoch.starts],
        )
        self.stage = EpochStage(epoch, recorder=self.recorder, timeline=timeline, fill=fill)
        self.exchange = SimulatedExchange(
            self.stage.env,
            epoch.costs.network,
            ranks,
            answer=lambda rank, answer: self.ranks[rank].answer(answer),
            stretch=self.stage.stretch if epoch.conditions.jitter else None,
        )
        self.ranks: list[Rank] = []
        self.trainers = Trainers(self.stage, self.ranks, on_progress, epoch.global_batch)
        observe = None
        if observer is not None:
            timed = observer

            def observe(rank: int, event: Event | Resumed | None, effects: tuple[Effect, ...]) -> None:
                timed(rank, event, effects, self.stage.env.now)

        configs = [replace(config, rank=i) for i in range(ranks)]
        self.ranks.extend(
            Rank(self.stage, Machine(config, observe), post=self.exchange.post, notice=self._notice)
            for config in configs
        )

    def run(self) -> RunRecord:
        """Returns the record of the epoch, which ends in the same way on every rank.

        Raises: InvariantError when it does not end (FREE), or the ranks end it differently (ALIGN).
        """
        with _paused_garbage_collection():
            for rank in self.ranks:
                rank.begin()
            self.stage.env.process(self.trainers.train())
            self.stage.env.run()
        self.trainers.note_held()
        stage, outcome = self.stage, self._find_outcome()
        return replace(
            self.recorder.end(),
            rounds=self.exchange.count_rounds,
            updates=self.trainers.updates,
            exchange_s=self.exchange.seconds,
            outcome=outcome,
            fault_s=stage.fault_s,
            abort_s=stage.abort_s,
            ended_s=stage.ended_s,
            acted=frozenset(stage.acted),
        )

    def _find_outcome(self) -> Outcome:
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
        known = [outcome for outcome in outcomes if outcome is not None]
        # Loaders that had nothing left to do ended in order, but a fault may still keep their trainers from continuing.
        if (fault := self.trainers.find_obstacle()) is not None:
            known = [fault.outcome if outcome.kind is OutcomeKind.COMPLETE else outcome for outcome in known]
        # A loss is not agreed on (R7.5): a rank may have heard an answer before the deadline that came later to another.
        lost = [outcome for outcome in known if outcome.kind is OutcomeKind.LOST]
        if len(set(known) - set(lost)) > 1:
            raise InvariantError("ALIGN", f"the ranks ended differently: {sorted(map(str, known))}")
        return (lost or known)[0]

    def _notice(self, rank: int) -> None:
        self.trainers.notice(rank)


@contextmanager
def _paused_garbage_collection() -> Iterator[None]:
    # Millions of samples live at once, and none is part of a cycle. Searching them for cycles takes longer than the run.
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
