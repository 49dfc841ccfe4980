"""``odb-ref replay``: recorded runs, simulated again and compared decision by decision."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from odb_ref.core.errors import UsageError
from odb_sim.cli.options import PAGE_HELP, add_number, build_source
from odb_sim.inputs.cost_files import load_costs
from odb_sim.inputs.costs import Costs
from odb_sim.inputs.files import check_writable, write_json
from odb_sim.recorded.replay import Replay, describe_inline, replay
from odb_sim.recorded.runs import RecordedRun, load_runs
from odb_sim.reports.document import Source
from odb_sim.reports.recorded_report import (
    REPLAYED,
    TIMES,
    list_replay_rows,
    list_time_rows,
    write_replay_report,
)
from odb_sim.reports.terminal import print_cautions, print_table, show_progress


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the subcommand."""
    parser = subparsers.add_parser(
        "replay",
        help="simulate recorded runs again and compare every decision",
        description="Simulates what the ranks of recorded runs have read, and compares every round's steps, every step's "
        "samples on every rank and every step's counts with the record. Exit status: 0 all equal, 1 one differs, "
        "2 a file cannot be used.",
    )
    parser.add_argument("traces", nargs="+", metavar="TRACE", help="a trace file; give all files of a job together")
    parser.add_argument("--cost-model", metavar="FILE", help="predict times with it, as odb-ref calibrate writes it")
    add_number(parser, "--depth", "D", "steps between loader and trainer (else: the most seen)")
    add_number(parser, "--workers", "W", "loader workers of a rank, of a trace that does not say it (the cost model's)")
    parser.add_argument("--json", metavar="FILE", help="write the comparison")
    parser.add_argument("--html", metavar="FILE", help=PAGE_HELP)
    parser.set_defaults(run=run_command)


def run_command(options: argparse.Namespace) -> int:
    """Returns exit status 0 when every decision is equal, else 1; bad input raises UsageError."""
    return replay_traces(
        options.traces,
        cost_model=options.cost_model,
        depth=options.depth,
        workers=options.workers,
        json_path=options.json,
        page=None if options.html is None else (options.html, build_source(options, options.traces)),
    )


def replay_traces(
    traces: Sequence[str],
    *,
    cost_model: str | None = None,
    depth: int | None = None,
    workers: int | None = None,
    json_path: str | None = None,
    page: tuple[str, Source] | None = None,
) -> int:
    """Replays the runs that ``traces`` hold, prints the comparison, and writes it where ``json_path`` and ``page`` say.

    Exit status 0 when every decision is equal, else 1. Times are shown only for a given cost model: the defaults describe
    no particular machine.

    Raises: UsageError when a file cannot be used.
    """
    if depth is not None and depth < 1:
        raise UsageError(f"--depth must be at least 1, got {depth}")
    if workers is not None and workers < 0:
        raise UsageError(f"--workers must be at least 0, got {workers}")
    check_writable(json_path, None if page is None else page[0], reads=[*traces, cost_model])
    costs = None if cost_model is None else load_costs(cost_model)
    runs = load_runs(traces, depth_steps=depth)
    replays = replay_all(runs, costs, workers)
    if json_path is not None:
        data = [{"is_equal": item.is_equal, **asdict(item)} for item in replays]
        write_json(json_path, {"replays": data})
    if page is not None:
        write_replay_report(Path(page[0]), runs, replays, page[1], is_priced=costs is not None)
    print_replays(replays, is_priced=costs is not None)
    if costs is not None:
        print_cautions([text for run in runs if (text := describe_inline(run, costs, workers))])
    return 0 if all(item.is_equal for item in replays) else 1


def replay_all(runs: list[RecordedRun], costs: Costs | None, workers: int | None = None) -> list[Replay]:
    """Returns the replay of every run, with a progress bar on a terminal; ``workers`` as in `replay`."""
    replays = []
    for number, recorded in enumerate(runs, 1):
        total = sum(len(rank.samples) for rank in recorded.ranks)
        with show_progress(f"replay {number} of {len(runs)}", total) as on_progress:
            replays.append(replay(recorded, costs=costs, workers=workers, on_progress=on_progress))
    return replays


def print_replays(replays: list[Replay], *, is_priced: bool, parts: Sequence[str] = ()) -> None:
    """A line for each difference, then a table. ``parts`` says of each run what part it had in the cost model."""
    for item in replays:
        if item.difference:
            print(f"{item.name}: {item.difference}")
    print_table("Recorded against simulated", REPLAYED, list_replay_rows(replays))
    times = list_time_rows(replays, parts)
    if is_priced and times:
        header = [*TIMES, *(["cost model"] if parts else [])]
        print_table("Times, from the first step taken to the last", header, times)
