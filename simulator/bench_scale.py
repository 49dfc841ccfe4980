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
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from odb_ref.core.errors import UsageError
from simulator.answers_report import check_plots
from simulator.lengths import load_lengths
from simulator.options import check_writable
from simulator.report import COLOURS, Report, make_figure
from simulator.runs import Run, run
from simulator.terminal import print_table, show_progress
from simulator.workload import build_workload

Figures = dict[str, float]
_TRACE: Final = "azure_llm_2023_conv"
_BUDGET_TOKENS: Final = 12288
_KIBIBYTE: Final = 1024
_HEADER: Final = ["ranks", "samples", "steps", "wall s", "processor s", "us a sample", "peak MiB"]


def measure(ranks: int, samples: int) -> Figures:
    """Wall and processor seconds and peak memory of one simulation in this process, and the steps it took."""
    lengths = load_lengths(_TRACE)
    begin_s = time.process_time()
    workload = build_workload(lengths, ranks=ranks, samples=samples)
    summary = run(Run(workload=workload, policy="odb", budget_tokens=_BUDGET_TOKENS)).summary
    peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _KIBIBYTE
    cpu_time_s = time.process_time() - begin_s
    return {
        "wall_time_s": summary.wall_time_s,
        "cpu_time_s": cpu_time_s,
        "peak_bytes": peak_bytes,
        "steps": summary.steps,
    }


def measure_apart(ranks: int, samples: int) -> Figures:
    """`measure` in a process of its own."""
    command = [sys.executable, "-m", "simulator.bench_scale", "--one", str(ranks), str(samples)]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return {key: float(value) for key, value in json.loads(output).items()}


def main() -> None:
    """Prints the curve."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 32, 128, 512, 2048], metavar="N")
    parser.add_argument("--samples-per-rank", type=int, default=610, metavar="M")
    parser.add_argument("--html", metavar="FILE", help="write a page with the curve")
    parser.add_argument("--one", type=int, nargs=2, metavar=("RANKS", "SAMPLES"), help="one row, as JSON")
    options = parser.parse_args()
    if options.one is not None:
        sys.stdout.write(json.dumps(measure(*options.one)) + "\n")
        return
    try:
        check_writable(options.html)
        check_plots(options.html)
    except UsageError as error:
        parser.error(str(error))
    measured = []
    with show_progress("one process for each row", len(options.ranks)) as on_progress:
        for ranks in options.ranks:
            measured.append((ranks, measure_apart(ranks, ranks * options.samples_per_rank)))
            if on_progress is not None:
                on_progress(len(measured))
    rows = [_build_row(ranks, ranks * options.samples_per_rank, figures) for ranks, figures in measured]
    title = f"{_TRACE}, budget {_BUDGET_TOKENS:,}, window 256, {options.samples_per_rank:,} samples a rank"
    print_table(f"Cost of simulating {title}", _HEADER, rows)
    if options.html is not None:
        _write_page(Path(options.html), title, options.samples_per_rank, measured, rows)


def _build_row(ranks: int, samples: int, figures: Figures) -> list[str]:
    return [
        f"{ranks:,}",
        f"{samples:,}",
        f"{figures['steps']:.0f}",
        f"{figures['wall_time_s']:.1f}",
        f"{figures['cpu_time_s']:.1f}",
        f"{1e6 * figures['cpu_time_s'] / samples:.1f}",
        f"{figures['peak_bytes'] / 2**20:,.0f}",
    ]


def _write_page(
    path: Path, title: str, samples_per_rank: int, measured: Sequence[tuple[int, Figures]], rows: list[list[str]]
) -> None:
    report = Report("What simulating costs", f"{title}; each point is a process of its own.")
    figure, (left, right) = make_figure(11.0, 3.4, columns=2)
    ranks = [ranks for ranks, _ in measured]
    costs = [1e6 * figures["cpu_time_s"] / (number * samples_per_rank) for number, figures in measured]
    left.plot(ranks, costs, "o-", color=COLOURS["odb"])
    left.set_ylim(0, 1.15 * max(costs))
    left.set_title("processor microseconds for each sample", loc="left", fontsize=11)
    right.plot(ranks, [figures["peak_bytes"] / 2**20 for _, figures in measured], "o-", color=COLOURS["paper"])
    right.set_ylim(bottom=0)
    right.set_title("peak memory, MiB", loc="left", fontsize=11)
    for axis in (left, right):
        axis.set_xscale("log", base=2)
        axis.minorticks_off()
        axis.set_xticks(ranks, [f"{number:,}" for number in ranks])
        axis.set_xlabel("ranks")
    report.add_figure(figure, "The cost of a sample should not grow with the ranks; memory grows with the samples.")
    report.add_table(_HEADER, rows)
    report.write(path)


if __name__ == "__main__":
    main()
