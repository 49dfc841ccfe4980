"""``odb-ref simulate``: one run, its figures, and on request its trace."""

from __future__ import annotations

import argparse
import csv
import json
from dataclasses import replace
from pathlib import Path

from odb_ref.core.errors import UsageError
from odb_ref.core.trace import TraceWriter
from simulator.answers_report import check_plots
from simulator.commands.replay import replay_traces
from simulator.conditions import parse_fault
from simulator.lengths import load_lengths
from simulator.metrics import StepRow, Summary, list_step_columns, list_step_values
from simulator.options import LENGTHS_HELP, add_run_options, build_run, check_writable
from simulator.run_report import choose_ranks, write_run_report
from simulator.runs import POLICIES, Result, Run, run
from simulator.terminal import print_table, show_progress
from simulator.timeline import Timeline


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds ``simulate``."""
    parser = subparsers.add_parser(
        "simulate",
        help="simulate one run on a length trace",
        description="Simulates one epoch: the real protocol core on every rank, or a baseline, on a trace of lengths.",
    )
    parser.add_argument("lengths", nargs="?", metavar="LENGTHS", help=LENGTHS_HELP)
    add_run_options(parser)
    parser.add_argument(
        "--limit",
        action="append",
        default=[],
        metavar="COLUMN=MAX",
        help="the most a batch of two or more may use, in sum, of what a column of LENGTHS holds: image_tokens=4096, say "
        "(repeatable)",
    )
    parser.add_argument(
        "--replay",
        nargs="+",
        metavar="TRACE",
        help="in place of LENGTHS: simulate recorded runs again and compare every decision; give all files of a job",
    )
    parser.add_argument(
        "--policy", choices=POLICIES, default="odb", help="a target rule of the protocol, or a baseline (odb)"
    )
    parser.add_argument(
        "--fault",
        action="append",
        default=[],
        metavar="KIND:RANK:AT",
        help="read:RANK:SAMPLE or collate:RANK:ROUND raises, stop:RANK:STEPS leaves early, kill:RANK:STEPS dies (repeatable)",
    )
    parser.add_argument(
        "--deadline", type=float, default=60.0, metavar="S", help="seconds ranks wait for a dead one (60)"
    )
    parser.add_argument("--json", metavar="FILE", help="write all figures")
    parser.add_argument("--trace", metavar="FILE", help="write the protocol trace (NDJSON; .gz compresses)")
    parser.add_argument("--steps-csv", metavar="FILE", help="write a row for each step")
    parser.add_argument(
        "--perfetto",
        metavar="FILE",
        help="write a timeline for ui.perfetto.dev; a name in .json: also for chrome://tracing",
    )
    parser.add_argument("--html", metavar="FILE", help="write a page with plots")
    parser.set_defaults(run=run_command)


def run_command(options: argparse.Namespace) -> int:
    """Exit status 0, or 1 when a replayed decision differs; bad input raises UsageError."""
    given = {"LENGTHS": options.lengths, "--ranks": options.ranks, "--token-budget": options.token_budget}
    if options.replay is not None:
        if options.lengths is not None:
            raise UsageError("--replay takes its samples from the trace: leave out LENGTHS")
        return replay_traces(options.replay, cost_model=options.cost_model, json_path=options.json)
    if missing := [name for name, value in given.items() if value is None]:
        raise UsageError(f"needs {', '.join(missing)} (or --replay TRACE)")
    limits = _parse_limits(options.limit)
    what = build_run(options, options.policy, load_lengths(options.lengths, tuple(limits)))
    what = replace(what, limits=tuple(limits.values()))
    faults = tuple(map(parse_fault, options.fault))
    what = replace(what, conditions=replace(what.conditions, faults=faults, deadline_s=options.deadline))
    if options.trace is not None and not what.is_protocol:
        raise UsageError(f"--trace: policy {what.policy} does not run the protocol, so there is no trace")
    check_writable(options.json, options.trace, options.steps_csv, options.perfetto, options.html)
    check_plots(options.html)
    timeline = _make_timeline(options, what)
    result = _simulate(what, options.trace, timeline)
    if options.json is not None:
        Path(options.json).write_text(json.dumps(result.summary.to_json(), indent=2) + "\n", encoding="utf-8")
    if options.steps_csv is not None:
        _write_steps(Path(options.steps_csv), result.rows)
    if timeline is not None and options.perfetto is not None:
        timeline.write(options.perfetto)
    if timeline is not None and options.html is not None:
        write_run_report(Path(options.html), result, timeline)
    _print_summary(result.summary)
    return 0


def _make_timeline(options: argparse.Namespace, what: Run) -> Timeline | None:
    """What collects spans: of all ranks for a timeline file, of a few for a page."""
    if options.perfetto is not None:
        return Timeline()
    return None if options.html is None else Timeline(choose_ranks(what.workload.ranks))


def _parse_limits(texts: list[str]) -> dict[str, int]:
    limits: dict[str, int] = {}
    for text in texts:
        column, _, value = text.partition("=")
        if not column or not value.isdecimal():
            raise UsageError(f"--limit {text}: expected COLUMN=MAX, such as image_tokens=4096")
        if column in limits:
            raise UsageError(f"--limit {text}: a limit of {limits[column]} has been given")
        limits[column] = int(value)
    return limits


def _simulate(what: Run, trace: str | None, timeline: Timeline | None) -> Result:
    with show_progress(
        f"{what.workload.name}, {what.workload.ranks} ranks", what.workload.samples_total
    ) as on_progress:
        if trace is None:
            return run(what, timeline=timeline, on_progress=on_progress)
        with TraceWriter(trace, what.build_config(), driver="simulator") as writer:
            return run(what, observer=writer.record, timeline=timeline, on_progress=on_progress)


def _write_steps(path: Path, rows: list[StepRow]) -> None:
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(list_step_columns())
        for row in rows:
            writer.writerow([f"{value:.6f}" if isinstance(value, float) else value for value in list_step_values(row)])


def format_value(value: str | int | float | None) -> str:
    """A figure for a table."""
    if isinstance(value, float):
        return f"{value:,.4f}"
    if isinstance(value, int):
        return f"{value:,}"
    return "-" if value is None else value


def _print_summary(summary: Summary) -> None:
    title = f"{summary.policy} on {summary.lengths}, {summary.ranks:,} ranks"
    rows = [[key, format_value(value)] for key, value in summary.to_json().items()]
    print_table(title, ["figure", "value"], rows)
