"""How fast the explorer and the simulator are. Absolute figures: of this machine, at this load."""

from __future__ import annotations

import time
from typing import Any, Final

from odb_sim.explore.search import explore
from odb_sim.explore.suites import FULL
from odb_sim.inputs.lengths import load_lengths
from odb_sim.inputs.workload import build_workload
from odb_sim.studies.runs import Run, run

from tests.bench.report import Spread, print_table
from tests.bench.speed import say

EXPLORED: Final = "three ranks, a million states"
STATES: Final = 60_000


def measure_explorer(repetitions: int) -> Spread:
    """States a second of the start of a large exploration."""
    say("explorer")
    return Spread.of(explore(FULL[EXPLORED], max_states=STATES).states_per_s for _ in range(repetitions))


def simulate(ranks: int, samples: int, window: int) -> float:
    """Seconds that simulating an epoch takes."""
    workload = build_workload(load_lengths("mm_mix_real"), ranks=ranks, samples=samples)
    what = Run(workload=workload, policy="odb", budget_tokens=8192, window_samples=window)
    began = time.perf_counter()
    summary = run(what).summary
    seconds = time.perf_counter() - began
    if summary.samples_emitted != samples:
        raise RuntimeError(f"{summary.samples_emitted} of {samples} samples emitted")
    return seconds


def measure_simulator(repetitions: int) -> Spread:
    """Samples a second, 64 ranks, window 256."""
    say("simulator")
    return Spread.of(40_000 / simulate(64, 40_000, 256) for _ in range(repetitions))


def print_inside(explorer: Spread, simulator: Spread) -> dict[str, Any]:
    """Prints them, and returns them as JSON."""
    print_table(
        "Explorer and simulator, on this machine and at its present load (absolute figures)",
        ["", "median (least to greatest)"],
        [["explorer, states/s, one process", str(explorer)], ["simulator, samples/s, 64 ranks", str(simulator)]],
    )
    return {
        "explorer_states_per_s": explorer.to_json(),
        "simulator_samples_per_s": simulator.to_json(),
    }
