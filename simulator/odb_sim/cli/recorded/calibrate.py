"""``odb-ref calibrate``: the cost models that fit recorded runs, with their errors."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Final

from odb_ref.core.errors import UsageError
from odb_sim.cli.check import TRACES_HELP
from odb_sim.cli.options import add_choice, add_number, add_recorded_options
from odb_sim.cli.recorded.replay import print_replays, replay_all
from odb_sim.engine.cautions import say_count
from odb_sim.engine.updates import GlobalBatch
from odb_sim.inputs.cost_files import write_costs
from odb_sim.inputs.costs import PricedTransport
from odb_sim.inputs.files import check_files, write_json
from odb_sim.recorded.calibrate import Calibration, calibrate, is_held_back, widen_error
from odb_sim.recorded.measured import ASSUMED_ERROR, calibrate_table
from odb_sim.recorded.replay import Replay
from odb_sim.recorded.runs import check_no_copies, find_workers, load_runs
from odb_sim.recorded.steps import Meeting
from odb_sim.reports.terminal import print_cautions, print_table

_POOR: Final = 0.5
"""Above this median error a fit gets a caution."""
HELP: Final = "fit the cost model to recorded runs"
DESCRIPTION: Final = (
    "Fits the time of a step, of reading, of collating and of an exchange to one half of recorded runs "
    "whose traces have times. Reports the error on the other half, and the error of simulating each run with the fitted "
    "model. With several runs, every second one is held back as a whole."
)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the command."""
    text = (
        f"{TRACES_HELP}. Or a CSV file of timed steps with seconds, and tokens or rows and longest: two sizes are enough, "
        "but only four, with rows of three lengths, show what attention costs"
    )
    parser.add_argument("traces", nargs="+", metavar="TRACE", help=text)
    add_number(parser, "--ranks", "N", "number of ranks on which a CSV file was timed", 1)
    parser.add_argument("--out", metavar="FILE", help="write the cost model, for --cost-model of other commands")
    parser.add_argument("--json", metavar="FILE", help="write numbers and errors")
    text = "loader workers of a rank; 1: the loader as a whole; 0: the training thread reads and collates"
    add_number(parser, "--workers", "W", f"{text} (default: from the traces, or 1)")
    add_choice(parser, "--transport", PricedTransport, "how the ranks exchanged", PricedTransport.REDUCE)
    parser.add_argument("--table", action="store_true", help="a measured table of step times beside the formula")
    add_recorded_options(parser)
    add_number(parser, "--warm-up", "N", "leave the first N steps of every run out of the fit and the error", 0)


def run_command(options: argparse.Namespace) -> int:
    """Returns exit status 0, or 1 if a recorded run differs from the core's decisions. Bad input raises UsageError."""
    if options.workers is not None and options.workers < 0:
        raise UsageError(f"--workers must be at least 0, got {options.workers}")
    if options.depth is not None and options.depth < 1:
        raise UsageError(f"--depth must be at least 1, got {options.depth}")
    if options.warm_up < 0:
        raise UsageError(f"--warm-up must be at least 0, got {options.warm_up}")
    check_files(options.out, options.json, reads=options.traces)
    if any(path.lower().endswith(".csv") for path in options.traces):
        return _calibrate_table(options)
    runs = load_runs(options.traces, depth_steps=options.depth)
    check_no_copies(options.traces)
    transport = PricedTransport(options.transport)
    workers = find_workers(runs) if options.workers is None else options.workers
    global_batch = GlobalBatch(samples=options.global_batch)
    calibration = calibrate(
        runs,
        workers=workers,
        transport=transport,
        has_table=options.table,
        warm_up_steps=options.warm_up,
        global_batch=global_batch,
    )
    replays = replay_all(runs, calibration.costs, workers, global_batch)
    costs = widen_error(calibration.costs, [error for item in replays for error in _list_errors(item, options.warm_up)])
    if costs != calibration.costs:
        calibration = replace(calibration, costs=costs)
        replays = replay_all(runs, costs, workers, global_batch)  # with wider bands for the times
    _tell(options, calibration, [run.name for run in runs], replays)
    parts = ["held back" if is_held_back(number, len(runs)) else "fitted to" for number in range(len(runs))]
    print_replays(replays, is_priced=True, parts=parts if len(runs) > 1 else ["half fitted to"])
    return 0 if all(item.is_equal for item in replays) else 1


def _calibrate_table(options: argparse.Namespace) -> int:
    """Fits the time of a step to a table of timed steps."""
    if len(options.traces) > 1:
        raise UsageError("a table of timed steps must be given alone, without traces")
    calibration = calibrate_table(options.traces[0], options.ranks)
    _tell(options, calibration, options.traces, [])
    (fit,) = calibration.fits
    if not calibration.costs.gpu.per_token2_s:
        print(
            "Attention's part, which grows with the square of a row's length, is left out: these steps do not show it. That "
            "takes four sizes or more, with rows of three lengths, the longest of your data among them."
        )
    if not fit.spans_held and fit.run_error > ASSUMED_ERROR:
        print(f"Caution: steps of one size differ so much that it is {fit.run_error:.0%} off from that alone.")
    elif not fit.spans_held:
        print(f"With so few sizes the error is not known: {fit.run_error:.0%} is assumed.")
    print("Reading, collating and the exchange keep their defaults: only traces show them.")
    return 0


def _list_errors(item: Replay, warm_up_steps: int) -> list[float]:
    """Returns the error of a whole run without its warm-up, or nothing if its times cannot be compared."""
    pairs = () if item.timing is None else item.timing.seconds[warm_up_steps:]
    return [sum(predicted for _, predicted in pairs) / sum(measured for measured, _ in pairs) - 1] if pairs else []


def _tell(
    options: argparse.Namespace, calibration: Calibration, runs: Sequence[str], replays: Sequence[Replay]
) -> None:
    """Writes and prints the cost model, and its errors."""
    fit = calibration.to_json()
    if options.out is not None:
        write_costs(options.out, calibration.costs, {"runs": runs, **fit})
    if options.json is not None:
        told = [{"is_equal": item.is_equal, **asdict(item)} for item in replays]
        write_json(options.json, {"costs": asdict(calibration.costs), "fit": fit, "replays": told})
    _print_errors(calibration)
    _print_numbers(calibration)


def _print_errors(calibration: Calibration) -> None:
    rows = [
        {
            "component": fit.component,
            "fitted to": f"{fit.spans_fitted:,}",
            "judged": f"{fit.spans_held:,}",
            "median error": f"{fit.median_error:.1%}" if fit.spans_held else "-",
            "90 % within": f"{fit.p90_error:.1%}" if fit.spans_held else "-",
            "error of the sum": f"{fit.total_error:+.1%}" if fit.spans_held else "-",
            "median at the pace around": f"{fit.paced_error:.1%}" if fit.spans_held else "-",
            "equal sizes differ by": "-" if fit.scatter is None else f"{fit.scatter.median:.1%}",
        }
        for fit in calibration.fits
    ]
    left_out = calibration.warm_up_steps
    print_table(
        f"Errors on what was held back: {calibration.held_back}; warm-up left out: {left_out} steps of each run",
        list(rows[0]),
        [list(row.values()) for row in rows],
    )
    for fit in calibration.fits:
        if fit.reason:
            print(f"{fit.component}: not fitted, {fit.reason}")
    if calibration.unused:
        print(f"step: no step of {', '.join(calibration.unused)} was used: ranks waited for data, or the run is short")
    print_cautions(
        [
            f"the {fit.component} times of half the spans held back are off by {fit.median_error:.0%} or more, so the "
            "cost model is of little use for them: record longer runs, on a machine that does nothing else"
            for fit in calibration.fits
            if not fit.reason and fit.median_error > _POOR
        ]
        + [
            "the batches recorded are all of about one size, and do not tell what a step takes beside its tokens: all of its "
            "time is counted for its tokens, so batches of other sizes may take far longer, or less long: record two runs "
            "with each of two token budgets, and name those of one budget one after the other"
            for fit in calibration.fits
            if fit.is_alike
        ]
    )


def _print_numbers(calibration: Calibration) -> None:
    rows = []
    for fit in calibration.fits:
        for item in fit.ranges:
            ends = ["-", "-"] if item.low == item.high else [f"{end:.4g}" for end in (item.low, item.high)]
            rows.append([f"{fit.component}: {item.name}", f"{fit.values[item.name]:.4g}", *ends])
    print_table("Cost model, with the range of nine fits in ten", ["number", "value", "from", "to"], rows)
    for fit in calibration.fits:
        for name in fit.dropped:
            print(f"{fit.component}: {name} cannot be told from 0 and is left out")
    fitted, collective = calibration.costs.fitted, calibration.costs.collective
    said = "gpu.fixed_s holds the collective of that many ranks." if fitted.ranks > 1 else ""
    if calibration.meeting is not Meeting.EVERY_UPDATE:
        said = (
            f"Steps were accumulated: the end of an update takes {collective.fixed_s:.4g} s more (collective.fixed_s)"
        )
        if fitted.ranks > 1:
            said += ", and inside one ranks " + ("meet after every step." if collective.each_step else "do not meet.")
        else:
            said += "."
    longest = f" and rows of up to {fitted.longest:,}" if fitted.longest else ""
    print(
        f"Fitted to {say_count(fitted.ranks, 'rank', 'ranks')}, batches of up to {fitted.padded_tokens:,} padded "
        f"tokens{longest}; beyond them it is extrapolated. {said}".rstrip()
    )
