"""``odb-ref simulate``: one run, its figures, and optionally its trace."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import astuple, fields, replace
from pathlib import Path
from typing import Final

from odb_ref.core.errors import UsageError
from odb_sim.cli.options import (
    BANDS_HELP,
    LENGTHS_HELP,
    PAGE_HELP,
    add_batch_size,
    add_number,
    add_repeated,
    add_run_options,
    build_run,
    build_source,
    check_batch_size,
    check_effects,
    drop_defaults,
    load_lengths_option,
)
from odb_sim.engine.cautions import say_amount, summarize_cautions
from odb_sim.engine.fill import Fill
from odb_sim.engine.metrics import StepRow, Summary, describe_update
from odb_sim.engine.timeline import Timeline
from odb_sim.inputs.conditions import STEADY, BudgetTable, parse_budget_schedule, parse_fault
from odb_sim.inputs.files import check_files, naming, write_csv, write_json
from odb_sim.reports.run_report import describe_band, make_timeline, write_run_report
from odb_sim.reports.terminal import print_cautions, print_table, show_progress
from odb_sim.studies.bands import estimate, is_quick
from odb_sim.studies.fitted import describe_fit, fit_batches
from odb_sim.studies.runs import POLICIES, Result, Run, describe_budget, describe_window, run
from odb_sim.studies.settings import list_costly

HELP: Final = "simulate one run on a length trace"
DESCRIPTION: Final = "Simulates one epoch: the real protocol core on every rank, or a baseline, on a trace of lengths."


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the command."""
    parser.add_argument("lengths", nargs="?", metavar="LENGTHS", help=LENGTHS_HELP)
    add_run_options(parser)
    text = f"one of {', '.join(POLICIES)}, or module:name or path.py:name for a target rule of your own (odb)"
    parser.add_argument("--policy", default="odb", metavar="P", help=text)
    text = "token budgets that every rank accepts from a number of planned steps on, for example 0:4096,500:8192"
    parser.add_argument("--budget-schedule", metavar="STEP:TOKENS,...", help=text)
    add_batch_size(parser)
    text = "read:RANK:SAMPLE or collate:RANK:ROUND raises an error, stop:RANK:STEPS leaves early, kill:RANK:STEPS dies"
    add_repeated(parser, "--fault", "KIND:RANK:AT", text)
    add_number(parser, "--deadline", "S", "seconds that ranks wait for a dead one", STEADY.deadline_s, kind=float)
    parser.add_argument("--bands", action="store_true", help=BANDS_HELP)
    parser.add_argument("--json", metavar="FILE", help="write all figures")
    parser.add_argument("--trace", metavar="FILE", help="write the protocol trace (NDJSON; .gz compresses)")
    parser.add_argument("--steps-csv", metavar="FILE", help="write a row for each step")
    parser.add_argument("--perfetto", metavar="FILE", help="write a timeline for ui.perfetto.dev or chrome://tracing")
    parser.add_argument("--html", metavar="FILE", help=PAGE_HELP)
    drop_defaults(parser)


def run_command(options: argparse.Namespace) -> int:
    """Returns exit status 0; bad input raises UsageError."""
    given = {"LENGTHS": options.lengths, "--ranks": options.ranks, "--token-budget": options.token_budget}
    if missing := [name for name, value in given.items() if value is None]:
        raise UsageError(f"needs {', '.join(missing)}")
    writes = (options.json, options.trace, options.steps_csv, options.perfetto, options.html)
    check_files(*writes, reads=[options.lengths, options.cost_model, options.policy])
    check_batch_size(options.batch_size, [options.policy])
    what = build_run(options, options.policy, load_lengths_option(options, options.lengths))
    check_effects(options, [options.policy])
    if options.budget_schedule is not None:
        what = replace(what, budget_schedule=_parse_budget_schedule(options))
    faults = tuple(map(parse_fault, options.fault))
    deadline_s = STEADY.deadline_s if options.deadline is None else options.deadline
    what = replace(what, conditions=replace(what.conditions, faults=faults, deadline_s=deadline_s))
    if options.trace is not None and not what.is_protocol:
        raise UsageError(f"--trace: policy {what.policy} does not run the protocol, so there is no trace")
    timeline = _make_timeline(options, what)
    asked, what = what, fit_batches(what)
    faulty = {fault.rank for fault in what.conditions.faults}
    fill = None if options.html is None else Fill(what.workload.ranks, faulty)
    result = _simulate(what, options.trace, timeline, fill)
    cautions = (*result.cautions, *describe_fit(asked, what), *list_costly(what, result.summary))
    result = replace(result, cautions=cautions)
    band = estimate(what, result.summary) if options.bands or is_quick(what) else None
    if options.json is not None:
        summary = result.summary
        told = band and band.to_json(sim_time_s=summary.sim_time_s) | {
            "tokens_per_s": {"low": summary.tokens_per_s / band.high, "high": summary.tokens_per_s / band.low}
        }
        figures = {**summary.to_json(), "band": told, "cautions": [caution.text for caution in result.cautions]}
        write_json(options.json, figures)
    if options.steps_csv is not None:
        write_csv(options.steps_csv, _list_rows(result.rows))
    if timeline is not None and options.perfetto is not None:
        with naming(options.perfetto):
            timeline.write(options.perfetto)
    if fill is not None:
        source = build_source(options, [options.lengths])
        write_run_report(Path(options.html), asked, result, fill=fill, timeline=timeline, source=source, band=band)
    _print_summary(result.summary)
    if band is not None:
        print(describe_band(result.summary, band))
    print_cautions(summarize_cautions(result.cautions))
    return 0


def _parse_budget_schedule(options: argparse.Namespace) -> BudgetTable:
    """Returns the schedule that the options ask for.

    Raises: UsageError when it is not a schedule, or asks for more than the largest budget there is.
    """
    table = parse_budget_schedule(options.budget_schedule)
    for step, tokens in table.changes:
        if tokens > options.token_budget:
            raise UsageError(
                f"--budget-schedule {step}:{tokens}: must be at most --token-budget {options.token_budget}"
            )
    return table


def _make_timeline(options: argparse.Namespace, what: Run) -> Timeline | None:
    """Returns a collector of spans: of all ranks for a timeline file, or of a few ranks for a page."""
    if options.perfetto is not None:
        return Timeline()
    return None if options.html is None else make_timeline(what)


def _simulate(what: Run, trace: str | None, timeline: Timeline | None, fill: Fill | None) -> Result:
    with show_progress(
        f"{what.workload.name}, {what.workload.ranks} ranks", what.workload.samples_total
    ) as on_progress:
        if trace is None:
            return run(what, timeline=timeline, fill=fill, on_progress=on_progress)
        with naming(trace), what.open_trace(trace) as writer:
            return run(what, observer=writer.record, timeline=timeline, fill=fill, on_progress=on_progress)


def _list_rows(rows: Iterable[StepRow]) -> Iterator[Sequence[str | int]]:
    yield [item.name for item in fields(StepRow)]
    for row in rows:
        yield [f"{value:.6f}" if isinstance(value, float) else value for value in astuple(row)]


_SHOWN: Final = (
    "steps",
    "rounds",
    "efficiency",
    "excess",
    "padding_ratio",
    "length_autocorrelation",
    "displacement_samples",
    "idle_steps",
    "oversize_groups",
    "largest_batch_tokens",
    "compute_share",
    "data_wait_share",
    "trainer_wait_share",
    "collective_share",
)


def _print_summary(summary: Summary) -> None:
    """Prints a headline and the figures that explain it. The JSON has all figures."""
    print(
        f"{summary.policy} on {summary.lengths}, {summary.ranks:,} ranks, {describe_budget(summary)}"
        f"{describe_window(summary)}: {summary.tokens_per_s:,.0f} tokens/s\n"
        f"{summary.samples_emitted:,} of {summary.samples_total:,} samples ({say_amount(summary.samples_per_s)}/s) in "
        f"{say_amount(summary.sim_time_s)} simulated seconds; {_describe_outcome(summary)}\n"
        f"{summary.updates:,} updates of {describe_update(summary)}; driver: {summary.driver}, "
        f"{summary.wall_time_s:,.1f} s here"
    )
    figures = summary.to_json()
    shown = (*_SHOWN, "ending_share") if summary.ending_share else _SHOWN
    print_table("", ["figure", "value"], [[key, _format(figures[key])] for key in shown])
    print(f"All {len(figures)} figures: --json FILE")


def _describe_outcome(summary: Summary) -> str:
    who = "" if summary.outcome_rank is None else f" by rank {summary.outcome_rank}"
    return summary.outcome + who + (f": {summary.outcome_cause}" if summary.outcome_cause else "")


def _format(value: str | int | float | None) -> str:
    return f"{value:,.4f}" if isinstance(value, float) else f"{value:,}"
