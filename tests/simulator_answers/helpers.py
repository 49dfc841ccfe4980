"""Recorded runs for tests: the simulator's traces, whose costs are known."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from odb_sim.engine.updates import EVERY_STEP, GlobalBatch
from odb_sim.inputs.conditions import STEADY, Conditions
from odb_sim.inputs.costs import Costs
from odb_sim.inputs.lengths import Lengths
from odb_sim.inputs.workload import Sharding, build_workload
from odb_sim.studies.runs import Run, run

from odb_ref.core.batching.budgets import BudgetSchedule
from odb_ref.core.types import Mode
from odb_ref.trace.writing import TraceWriter


def make_lengths(samples: int = 400, seed: int = 3) -> Lengths:
    tokens = np.clip(np.random.default_rng(seed).lognormal(5, 0.7, samples), 8, 1500).astype(np.int64)
    return Lengths("made", tokens, tokens // 2)


def record(
    path: Path,
    *,
    policy: str = "odb",
    mode: Mode = Mode.JOIN,
    quota_samples: int | None = None,
    sharding: Sharding = Sharding.UNEVEN,
    ranks: int = 3,
    samples: int = 400,
    costs: Costs | None = None,
    conditions: Conditions = STEADY,
    budget_schedule: BudgetSchedule | None = None,
    ramp_rounds: int | None = None,
    global_batch: GlobalBatch = EVERY_STEP,
) -> Path:
    what = Run(
        workload=build_workload(make_lengths(samples), ranks=ranks, sharding=sharding),
        policy=policy,
        budget_tokens=2048,
        window_samples=32,
        mode=mode,
        quota_samples=quota_samples,
        sharding=sharding,
        costs=costs or Costs(),
        conditions=conditions,
        budget_schedule=budget_schedule,
        ramp_rounds=ramp_rounds,
        global_batch=global_batch,
    )
    with TraceWriter(path, what.build_config(), driver="simulator") as writer:
        run(what, observer=writer.record)
    return path
