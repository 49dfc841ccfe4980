"""How the simulator's cost grows with the ranks: ``python -m tests.bench.scale``.

Each row runs in its own process, so that it has its own peak memory. The number of samples for each rank is the same in every
row, so the cost per sample should not grow. Processor time is what a row costs on an otherwise idle machine; on a busy machine
the wall time is longer. Both drivers are measured: rounds, and the events of every rank's machine.
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
import time
from typing import Final

from odb_sim.inputs.lengths import load_lengths
from odb_sim.inputs.workload import build_workload
from odb_sim.studies.runs import Driver, Run, run

from tests.bench.report import print_table
from tests.helpers.capture import capture

TRACE: Final = "azure_llm_2023_conv"
BUDGET_TOKENS: Final = 12288
HEADER: Final = ["driver", "ranks", "samples", "steps", "wall s", "processor s", "us a sample", "peak MiB"]


def measure(ranks: int, samples: int, driver: Driver) -> dict[str, float]:
    """Returns the wall and processor seconds, the peak memory and the steps of one simulation in this process."""
    lengths = load_lengths(TRACE)
    begin_s = time.process_time()
    workload = build_workload(lengths, ranks=ranks, samples=samples)
    summary = run(Run(workload=workload, policy="odb", budget_tokens=BUDGET_TOKENS, driver=driver)).summary
    peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    cpu_time_s = time.process_time() - begin_s
    measured = {"wall_time_s": summary.wall_time_s, "cpu_time_s": cpu_time_s, "peak_bytes": peak_bytes}
    return measured | {"steps": summary.steps}


def measure_apart(ranks: int, samples: int, driver: Driver) -> dict[str, float]:
    """Calls `measure` in a new process."""
    command = [sys.executable, "-m", "tests.bench.scale", "--one", str(ranks), str(samples), driver]
    output = capture(command, check=True).stdout
    return {key: float(value) for key, value in json.loads(output).items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 32, 128, 512, 2048], metavar="N")
    parser.add_argument("--samples-per-rank", type=int, default=610, metavar="M")
    parser.add_argument("--driver", nargs="+", type=Driver, default=[Driver.ROUNDS, Driver.EVENTS])
    parser.add_argument("--one", nargs=3, metavar=("RANKS", "SAMPLES", "DRIVER"), help="one row, as JSON")
    options = parser.parse_args()
    if options.one is not None:
        ranks, samples, driver = options.one
        sys.stdout.write(json.dumps(measure(int(ranks), int(samples), Driver(driver))) + "\n")
        return
    rows = []
    for driver in options.driver:
        for ranks in options.ranks:
            samples = ranks * options.samples_per_rank
            found = measure_apart(ranks, samples, driver)
            seconds = [f"{found['wall_time_s']:.2f}", f"{found['cpu_time_s']:.2f}"]
            costs = [f"{1e6 * found['cpu_time_s'] / samples:.2f}", f"{found['peak_bytes'] / 2**20:,.0f}"]
            rows.append([driver, f"{ranks:,}", f"{samples:,}", f"{found['steps']:.0f}", *seconds, *costs])
    print_table(f"Cost of simulating {TRACE}, budget {BUDGET_TOKENS:,}, window 256", HEADER, rows)


if __name__ == "__main__":
    main()
