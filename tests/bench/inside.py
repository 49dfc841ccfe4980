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
CURVE: Final = (16, 64, 256, 1024, 4096, 16384)
SAMPLES_PER_RANK: Final = 64
LEAST_S: Final = 1.0


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


def measure_curve() -> dict[int, float]:
    """Microseconds a sample by ranks, with the same number of samples on each rank."""
    curve = {}
    for ranks in CURVE:
        say(f"simulator, {ranks} ranks")
        samples = ranks * SAMPLES_PER_RANK
        times = [simulate(ranks, samples, 16)]
        while sum(times) < LEAST_S:
            times.append(simulate(ranks, samples, 16))
        curve[ranks] = min(times) / samples * 1e6
    return curve


def print_inside(explorer: Spread, simulator: Spread, curve: dict[int, float]) -> dict[str, Any]:
    """Prints them, and returns them as JSON."""
    print_table(
        "Explorer and simulator, on this machine and at its present load (absolute figures)",
        ["", "median (least to greatest)"],
        [["explorer, states/s, one process", str(explorer)], ["simulator, samples/s, 64 ranks", str(simulator)]],
    )
    if curve:
        lowest = curve[CURVE[0]]
        print_table(
            f"Simulator: cost of a sample by ranks, {SAMPLES_PER_RANK} samples each (16 ranks = 1)",
            ["ranks", "cost of a sample"],
            [[f"{ranks:,}", f"{cost / lowest:.2f}"] for ranks, cost in curve.items()],
        )
    return {
        "explorer_states_per_s": explorer.to_json(),
        "simulator_samples_per_s": simulator.to_json(),
        "simulator_us_per_sample": {str(ranks): cost for ranks, cost in curve.items()},
    }
