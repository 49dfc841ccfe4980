"""What is simulated of an epoch, whichever way: by rounds, by events, or as a plan of batches."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from odb_ref.core.batching.budgets import BudgetSchedule
from odb_ref.core.config import DEPTH_STEPS, Terms
from odb_ref.core.resume import RoundStart
from odb_sim.engine.updates import EVERY_STEP, GlobalBatch
from odb_sim.inputs.conditions import STEADY, Conditions
from odb_sim.inputs.costs import Costs
from odb_sim.inputs.workload import Sharding, Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class Epoch(Terms):
    """What ranks read and train on, what that costs, and what goes otherwise; beside the terms of the protocol."""

    workload: Workload
    budget_tokens: int
    global_batch: GlobalBatch = EVERY_STEP
    """What an optimizer update holds: steps are accumulated to it."""
    window_samples: int = 256
    depth_steps: int = DEPTH_STEPS
    sharding: Sharding = Sharding.EVEN
    seed: int = 0
    order_seed: int | None = None
    """How steps are shuffled, in a job that is replayed; None: as ``seed`` says."""
    costs: Costs = field(default_factory=Costs)
    conditions: Conditions = STEADY
    starts: tuple[RoundStart, ...] = ()
    """Where each rank resumes a saved epoch; empty for one from its beginning."""
    full_reads: tuple[Mapping[int, int], ...] = ()
    """How many samples a read of each rank finds before the window is full of bytes, by the read's number; empty: no bound."""
    budget_schedule: BudgetSchedule | None = None
    """What every rank accepts as its token budget, by the steps planned. Spec: R15.4."""
