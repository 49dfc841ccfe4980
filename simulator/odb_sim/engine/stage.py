"""The settings of a simulated epoch, and what the parts of the simulation share: clock, conditions and record."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field

import simpy

from odb_ref.core.batching.budgets import BudgetSchedule
from odb_ref.core.config import DEPTH_STEPS, Terms
from odb_ref.core.resume import RoundStart
from odb_sim.engine.batches import Shelf
from odb_sim.engine.fill import Fill
from odb_sim.engine.metrics import Recorder
from odb_sim.engine.timeline import Timeline
from odb_sim.engine.updates import EVERY_STEP, GlobalBatch
from odb_sim.inputs.conditions import STEADY, Conditions, Fault
from odb_sim.inputs.costs import Costs
from odb_sim.inputs.workload import Sharding, Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class Epoch(Terms):
    """The workload, its costs and the conditions of an epoch, beside the terms of the protocol."""

    workload: Workload
    budget_tokens: int
    global_batch: GlobalBatch = EVERY_STEP
    """The size of an optimizer update, up to which steps are accumulated."""
    window_samples: int = 256
    depth_steps: int = DEPTH_STEPS
    sharding: Sharding = Sharding.EVEN
    seed: int = 0
    order_seed: int | None = None
    """The seed that shuffles steps in a replayed job. None means ``seed``."""
    costs: Costs = field(default_factory=Costs)
    conditions: Conditions = STEADY
    starts: tuple[RoundStart, ...] = ()
    """Where each rank resumes a saved epoch; empty for an epoch from its beginning."""
    full_reads: tuple[Mapping[int, int], ...] = ()
    """By rank and number of the read, the samples it finds before the window is full in bytes; empty without such a bound."""
    budget_schedule: BudgetSchedule | None = None
    """The schedule of the token budget that every rank accepts. Spec: R15.4."""


class EpochStage:
    """Holds what ranks and trainers share, but neither ranks nor trainers."""

    def __init__(self, epoch: Epoch, *, recorder: Recorder, timeline: Timeline | None, fill: Fill | None) -> None:
        self.env = simpy.Environment(initial_time=0.0)
        self.epoch = epoch
        self.workload = epoch.workload
        self.costs = epoch.costs
        self.conditions = epoch.conditions
        self.recorder = recorder
        self.shelf = Shelf(epoch.workload.ranks)
        self.timeline = timeline
        self.fill = fill
        self._random = random.Random(epoch.seed)
        self.acted: set[Fault] = set()
        """The faults that have happened."""
        self.fault_s: float | None = None
        """When the first fault happened, or None."""
        self._finished_s = 0.0

    def stretch(self, seconds: float) -> float:
        """Returns ``seconds`` times a jitter drawn for this call."""
        jitter = self.conditions.jitter
        return seconds * self._random.lognormvariate(0, jitter) if jitter else seconds

    def note_fault(self, fault: Fault) -> None:
        """Notes that ``fault`` happens now."""
        self.acted.add(fault)
        self.fault_s = self.env.now if self.fault_s is None else self.fault_s

    def note_finish(self) -> None:
        """Notes that a rank's loader has ended, or its trainer has given up."""
        self._finished_s = self.env.now

    @property
    def abort_s(self) -> float | None:
        """The seconds from the first fault until the last surviving rank ended, or None without a fault.

        A rank ends with its loader, or with its trainer if that waits for a rank that is gone. 0 if all ended before the fault.
        """
        return None if self.fault_s is None else max(0.0, self._finished_s - self.fault_s)

    @property
    def ended_s(self) -> float:
        """When the last surviving rank had ended, after a fault; 0 without one."""
        return 0.0 if self.fault_s is None else self._finished_s
