"""``odb-ref replay``: simulates recorded runs again and compares every decision."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Final

from odb_ref.core.errors import UsageError
from odb_sim.cli.check import TRACES_HELP
from odb_sim.cli.options import PAGE_HELP, add_number, add_recorded_options, add_text, build_source
from odb_sim.engine.updates import EVERY_STEP, GlobalBatch
from odb_sim.inputs.cost_files import load_costs
from odb_sim.inputs.costs import Costs
from odb_sim.inputs.files import check_files, write_json
from odb_sim.recorded.replay import Replay, describe_inline, replay
from odb_sim.recorded.runs import RecordedRun, load_runs
from odb_sim.reports.recorded_report import (
    REPLAYED,
    TIMES,
    list_replay_rows,
    list_time_rows,
    write_replay_report,
)
from odb_sim.reports.terminal import print_cautions, print_table, show_progress

HELP: Final = "simulate recorded runs again and compare every decision"
DESCRIPTION: Final = (
    "Simulates what the ranks of recorded runs have read, and compares every round's steps, every step's "
    "samples on every rank and every step's counts with the record. Exit status: 0 all equal, 1 one differs, "
    "2 a file cannot be used."
)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the command."""
    parser.add_argument("traces", nargs="+", metavar="TRACE", help=TRACES_HELP)
    add_text(parser, "--cost-model", "FILE", "predict times with this cost model, as odb-ref calibrate writes it")
    text = "loader workers of a rank, if the trace does not say (default: those of the cost model)"
    add_number(parser, "--workers", "W", text)
    add_recorded_options(parser)
    parser.add_argument("--json", metavar="FILE", help="write the comparison")
    parser.add_argument("--html", metavar="FILE", help=PAGE_HELP)


def run_command(options: argparse.Namespace) -> int:
    """Returns exit status 0 when every decision is equal, else 1. Bad input raises UsageError.

    Times are shown only if a cost model is given, because the default describes no particular machine.
    """
    workers = options.workers
    if options.depth is not None and options.depth < 1:
        raise UsageError(f"--depth must be at least 1, got {options.depth}")
    if workers is not None and workers < 0:
        raise UsageError(f"--workers must be at least 0, got {workers}")
    check_files(options.json, options.html, reads=[*options.traces, options.cost_model])
    costs = None if options.cost_model is None else load_costs(options.cost_model)
    runs = load_runs(options.traces, depth_steps=options.depth)
    replays = replay_all(runs, costs, workers, GlobalBatch(samples=options.global_batch))
    is_priced = costs is not None
    if options.json is not None:
        write_json(options.json, {"replays": [{"is_equal": item.is_equal, **asdict(item)} for item in replays]})
    if options.html is not None:
        source = build_source(options, options.traces)
        write_replay_report(Path(options.html), runs, replays, source, is_priced=is_priced)
    print_replays(replays, is_priced=is_priced)
    if costs is not None:
        print_cautions([text for run in runs if (text := describe_inline(run, costs, workers))])
    return 0 if all(item.is_equal for item in replays) else 1


def replay_all(
    runs: list[RecordedRun],
    costs: Costs | None,
    workers: int | None = None,
    global_batch: GlobalBatch = EVERY_STEP,
) -> list[Replay]:
    """Replays every run, with a progress bar on a terminal. The arguments are those of `replay`."""
    replays = []
    for number, recorded in enumerate(runs, 1):
        total = sum(len(rank.samples) for rank in recorded.ranks)
        with show_progress(f"replay {number} of {len(runs)}", total) as on_progress:
            try:
                found = replay(
                    recorded, costs=costs, workers=workers, global_batch=global_batch, on_progress=on_progress
                )
            except UsageError as error:
                raise UsageError(f"{recorded.name}: {error}") from error
            replays.append(found)
    return replays


def print_replays(replays: list[Replay], *, is_priced: bool, parts: Sequence[str] = ()) -> None:
    """Prints a line for each difference, then a table. ``parts`` names the part that each run had in the cost model."""
    for item in replays:
        if item.difference:
            print(f"{item.name}: {item.difference}")
    print_table("Recorded against simulated", REPLAYED, list_replay_rows(replays))
    times = list_time_rows(replays, parts)
    if is_priced and times:
        header = [*TIMES, *(["cost model"] if parts else [])]
        print_table("Times, from the first step taken to the last", header, times)
