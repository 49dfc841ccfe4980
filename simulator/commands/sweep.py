"""``odb-ref sweep``: a grid of simulations, in parallel, in one table."""

from __future__ import annotations

import argparse
import csv
import json
import os
from pathlib import Path

from odb_ref.core.errors import UsageError
from simulator.answers_report import HEADER, build_row, check_plots, write_sweep_report
from simulator.clusters import ADDRESSES, open_executor
from simulator.conditions import Conditions
from simulator.cost_files import load_costs
from simulator.costs import Costs
from simulator.lengths import load_lengths
from simulator.options import check_writable
from simulator.runs import POLICIES
from simulator.sweep import Answer, Grid, build_points, run_grid
from simulator.terminal import print_table, show_progress
from simulator.workload import Sharding


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds ``sweep``."""
    parser = subparsers.add_parser(
        "sweep",
        help="simulate a grid of settings",
        description="Simulates every combination of the given values on the same samples, in parallel.",
    )
    parser.add_argument("--ranks", required=True, metavar="N[,N...]", help="data-parallel ranks")
    parser.add_argument("--token-budget", required=True, metavar="B[,B...]", help="padded tokens of a batch")
    parser.add_argument("--window", default="256", metavar="K[,K...]", help="samples a rank groups at a time (256)")
    parser.add_argument("--depth", default="8", metavar="D[,D...]", help="steps between loader and trainer (8)")
    parser.add_argument("--policy", default="odb", metavar="P[,P...]", help=f"of {', '.join(POLICIES)} (odb)")
    add_data_options(parser)
    parser.add_argument("--json", metavar="FILE", help="write all figures: a list with an object for each point")
    parser.add_argument("--csv", metavar="FILE", help="write a row for each point")
    parser.add_argument("--html", metavar="FILE", help="write a page with plots")
    parser.set_defaults(run=run_command)


def add_data_options(parser: argparse.ArgumentParser) -> None:
    """Adds what `sweep` and `tune` share."""
    parser.add_argument("lengths", metavar="LENGTHS", help="a bundled trace, or a CSV, CSV.gz or .npy file of lengths")
    parser.add_argument(
        "--samples", type=int, metavar="M", help="draw M lengths with replacement (else: each row once)"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="of the draw and the shuffle (0)")
    parser.add_argument(
        "--shards", choices=[str(sharding) for sharding in Sharding], default=str(Sharding.EVEN), help="(even)"
    )
    parser.add_argument(
        "--jitter",
        type=float,
        default=0.0,
        metavar="S",
        help="spread of every duration: the standard deviation of its ln (0)",
    )
    parser.add_argument("--cost-model", metavar="FILE", help="JSON, as odb-ref calibrate writes it")
    parser.add_argument(
        "--workers",
        type=int,
        default=os.cpu_count() or 1,
        metavar="W",
        help="simulations at a time, each a process (one for each processor)",
    )
    parser.add_argument(
        "--executor",
        metavar="ADDRESS",
        help=f"in place of --workers, a cluster whose workers have this package: {ADDRESSES}",
    )


def load_cost_option(path: str | None) -> Costs:
    """The cost model of ``--cost-model``, or the default.

    Raises: UsageError when the file is no cost model.
    """
    return Costs() if path is None else load_costs(path)


def run_command(options: argparse.Namespace) -> int:
    """Exit status 0; bad input raises UsageError."""
    policies = _parse_words("--policy", options.policy)
    grid = Grid(
        lengths=load_lengths(options.lengths),
        points=build_points(
            policies=policies,
            ranks=parse_numbers("--ranks", options.ranks),
            budgets=parse_numbers("--token-budget", options.token_budget),
            windows=parse_numbers("--window", options.window),
            depths=parse_numbers("--depth", options.depth),
        ),
        samples=options.samples,
        seed=options.seed,
        sharding=Sharding(options.shards),
        costs=load_cost_option(options.cost_model),
        conditions=Conditions(jitter=options.jitter),
    )
    check_writable(options.json, options.csv, options.html)
    check_plots(options.html)
    with (
        show_progress(f"{grid.lengths.name}, {len(grid.points)} simulations", len(grid.points)) as on_done,
        open_executor(options.executor, min(options.workers, len(grid.points))) as executor,
    ):
        answers = run_grid(grid, executor, on_done)
    title = f"{grid.lengths.name}, {answers[0].summary.samples_total:,} samples, {options.shards} shards"
    if options.json is not None:
        figures = [answer.to_json() for answer in answers]
        Path(options.json).write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    if options.csv is not None:
        _write_csv(Path(options.csv), answers)
    if options.html is not None:
        write_sweep_report(Path(options.html), title, answers)
    print_table(title, HEADER, [build_row(answer) for answer in answers])
    return 0


def _write_csv(path: Path, answers: list[Answer]) -> None:
    with path.open("w", encoding="utf-8", newline="") as file:
        rows = [answer.to_json() for answer in answers]
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def _parse_words(option: str, text: str) -> list[str]:
    words = [word.strip() for word in text.split(",")]
    if not all(words) or len(set(words)) < len(words):
        raise UsageError(f"{option}: {text!r} has an empty value, or one twice")
    return words


def parse_numbers(option: str, text: str) -> list[int]:
    """The numbers of a list such as ``8,64``.

    Raises: UsageError when one is no whole number, or comes twice.
    """
    numbers = []
    for word in _parse_words(option, text):
        try:
            numbers.append(int(word))
        except ValueError:
            raise UsageError(f"{option}: {word!r} is not a whole number") from None
    return numbers
