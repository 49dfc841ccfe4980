"""How the simulator's cost grows with the ranks: ``python -m odb_sim.cli.bench_scale``.

Each row is a process of its own, so that its peak memory is its own. Samples for each rank are the same in every row: the
cost for each sample is what should not grow. Processor time is what a row costs on a machine that does nothing else; wall
time is more where something else runs. Both drivers are measured: rounds, and the events of every rank's machine.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from typing import Final

from odb_sim.inputs.lengths import load_lengths
from odb_sim.inputs.workload import build_workload
from odb_sim.reports.terminal import print_table, show_progress
from odb_sim.studies.runs import Driver, Run, run

Figures = dict[str, float]
_TRACE: Final = "azure_llm_2023_conv"
_BUDGET_TOKENS: Final = 12288
_KIBIBYTE: Final = 1024
_DRIVERS: Final = [Driver.ROUNDS, Driver.EVENTS]
_HEADER: Final = ["driver", "ranks", "samples", "steps", "wall s", "processor s", "us a sample", "peak MiB"]


Point = tuple[Driver, int]
"""What drives, and how many ranks."""


def measure(ranks: int, samples: int, driver: Driver) -> Figures:
    """Returns wall and processor seconds and peak memory of one simulation in this process, and the steps it took."""
    lengths = load_lengths(_TRACE)
    begin_s = time.process_time()
    workload = build_workload(lengths, ranks=ranks, samples=samples)
    summary = run(Run(workload=workload, policy="odb", budget_tokens=_BUDGET_TOKENS, driver=driver)).summary
    import resource

    peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _KIBIBYTE
    cpu_time_s = time.process_time() - begin_s
    return {
        "wall_time_s": summary.wall_time_s,
        "cpu_time_s": cpu_time_s,
        "peak_bytes": peak_bytes,
        "steps": summary.steps,
    }


def measure_apart(ranks: int, samples: int, driver: Driver) -> Figures:
    """`measure` in a process of its own."""
    command = [sys.executable, "-m", "odb_sim.cli.bench_scale", "--one", str(ranks), str(samples), driver]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return {key: float(value) for key, value in json.loads(output).items()}


def main() -> None:
    """Prints the curve."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 32, 128, 512, 2048], metavar="N")
    parser.add_argument("--samples-per-rank", type=int, default=610, metavar="M")
    parser.add_argument("--driver", nargs="+", type=Driver, choices=_DRIVERS, default=_DRIVERS, metavar="rounds|events")
    parser.add_argument("--one", nargs=3, metavar=("RANKS", "SAMPLES", "DRIVER"), help="one row, as JSON")
    options = parser.parse_args()
    if options.one is not None:
        ranks, samples, driver = options.one
        sys.stdout.write(json.dumps(measure(int(ranks), int(samples), Driver(driver))) + "\n")
        return
    points: list[Point] = [(driver, ranks) for driver in options.driver for ranks in options.ranks]
    measured: list[tuple[Point, Figures]] = []
    with show_progress("one process for each row", len(points)) as on_progress:
        for driver, ranks in points:
            figures = measure_apart(ranks, ranks * options.samples_per_rank, driver)
            measured.append(((driver, ranks), figures))
            if on_progress is not None:
                on_progress(len(measured))
    rows = [_build_row(point, options.samples_per_rank, figures) for point, figures in measured]
    title = f"{_TRACE}, budget {_BUDGET_TOKENS:,}, window 256, {options.samples_per_rank:,} samples a rank"
    print_table(f"Cost of simulating {title}", _HEADER, rows)


def _build_row(point: Point, samples_per_rank: int, figures: Figures) -> list[str]:
    driver, ranks = point
    samples = ranks * samples_per_rank
    return [
        driver,
        f"{ranks:,}",
        f"{samples:,}",
        f"{figures['steps']:.0f}",
        f"{figures['wall_time_s']:.2f}",
        f"{figures['cpu_time_s']:.2f}",
        f"{1e6 * figures['cpu_time_s'] / samples:.2f}",
        f"{figures['peak_bytes'] / 2**20:,.0f}",
    ]


if __name__ == "__main__":
    main()
