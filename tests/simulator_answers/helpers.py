"""Recorded runs for tests: the simulator's traces, whose costs are known."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from odb_sim.inputs.lengths import Lengths
from odb_sim.inputs.workload import Sharding
from odb_sim.studies.runs import run

from odb_ref.trace.writing import TraceWriter
from tests.helpers.simulated import make_run


def make_lengths(samples: int = 400, seed: int = 3) -> Lengths:
    tokens = np.clip(np.random.default_rng(seed).lognormal(5, 0.7, samples), 8, 1500).astype(np.int64)
    return Lengths("made", tokens, tokens // 2)


def record(
    path: Path,
    *,
    lengths: Lengths | None = None,
    sharding: Sharding = Sharding.UNEVEN,
    ranks: int = 3,
    samples: int = 400,
    **settings: Any,
) -> Path:
    """Writes the trace of a run with these settings."""
    defaults = {"budget_tokens": 2048, "window_samples": 32}
    what = make_run(lengths or make_lengths(samples), ranks, sharding=sharding, **(defaults | settings))
    with TraceWriter(path, what.build_config(), driver="simulator") as writer:
        run(what, observer=writer.record)
    return path
