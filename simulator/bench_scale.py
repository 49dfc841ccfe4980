"""How the simulator's cost grows with the ranks: ``python -m simulator.bench_scale``.

Each row is a process of its own, so that its peak memory is its own. Samples for each rank are the same in every row: the
cost for each sample is what should stay flat. Processor time is what a row costs on a machine that does nothing else; wall
time is more where something else runs.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from typing import Final

from simulator.lengths import load_lengths
from simulator.runs import Run, run
from simulator.terminal import print_table
from simulator.workload import build_workload

_TRACE: Final = "azure_llm_2023_conv"
_BUDGET_TOKENS: Final = 12288
_KIBIBYTE: Final = 1024


def measure(ranks: int, samples: int) -> dict[str, float]:
    """Wall and processor seconds and peak memory of one simulation in this process, and the steps it took."""
    begin_s = time.process_time()
    workload = build_workload(load_lengths(_TRACE), ranks=ranks, samples=samples)
    summary = run(Run(workload=workload, policy="odb", budget_tokens=_BUDGET_TOKENS)).summary
    peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _KIBIBYTE
    cpu_time_s = time.process_time() - begin_s
    return {
        "wall_time_s": summary.wall_time_s,
        "cpu_time_s": cpu_time_s,
        "peak_bytes": peak_bytes,
        "steps": summary.steps,
    }


def measure_apart(ranks: int, samples: int) -> dict[str, float]:
    """`measure` in a process of its own."""
    command = [sys.executable, "-m", "simulator.bench_scale", "--one", str(ranks), str(samples)]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return {key: float(value) for key, value in json.loads(output).items()}


def main() -> None:
    """Prints the curve."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 32, 128, 512, 2048], metavar="N")
    parser.add_argument("--samples-per-rank", type=int, default=610, metavar="M")
    parser.add_argument("--one", type=int, nargs=2, metavar=("RANKS", "SAMPLES"), help="one row, as JSON")
    options = parser.parse_args()
    if options.one is not None:
        sys.stdout.write(json.dumps(measure(*options.one)) + "\n")
        return
    rows = []
    for ranks in options.ranks:
        samples = ranks * options.samples_per_rank
        figures = measure_apart(ranks, samples)
        rows.append(
            [
                f"{ranks:,}",
                f"{samples:,}",
                f"{figures['steps']:.0f}",
                f"{figures['wall_time_s']:.1f}",
                f"{figures['cpu_time_s']:.1f}",
                f"{1e6 * figures['cpu_time_s'] / samples:.1f}",
                f"{figures['peak_bytes'] / 2**20:,.0f}",
            ]
        )
    title = f"{_TRACE}, budget {_BUDGET_TOKENS:,}, window 256: cost of simulating"
    print_table(title, ["ranks", "samples", "steps", "wall s", "processor s", "us a sample", "peak MiB"], rows)


if __name__ == "__main__":
    main()
