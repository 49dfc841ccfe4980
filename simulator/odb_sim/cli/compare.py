"""``odb-ref compare``: the protocol beside every baseline, on the same samples, memory limit and costs."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Final

from odb_ref.core.errors import UsageError
from odb_sim.cli.options import (
    BANDS_HELP,
    LENGTHS_HELP,
    PAGE_HELP,
    add_batch_size,
    add_executor_options,
    add_run_options,
    build_run,
    build_source,
    check_batch_size,
    check_effects,
    complain,
    drop_defaults,
    load_lengths_option,
    open_runner,
)
from odb_sim.engine.cautions import say_amount, summarize_cautions
from odb_sim.engine.metrics import UPDATE_COLUMNS, Summary, describe_update, list_update_values
from odb_sim.inputs.files import check_files, write_csv, write_json
from odb_sim.inputs.lengths import list_bundled_names
from odb_sim.reports.answers_report import write_compare_report
from odb_sim.reports.terminal import print_cautions, print_table
from odb_sim.studies.comparison import (
    FIXED_BATCH,
    GROUPS_PER_WINDOW,
    LEAST_WINDOW,
    Compared,
    choose_budget,
    choose_window,
    compare,
)
from odb_sim.studies.runs import POLICIES, Run, describe_shards

_RANKS: Final = 8


def _show_band(compared: Compared, summary: Summary) -> str:
    band = compared.find_band(summary)
    return "-" if band is None else band.describe(compared.compute_speedup(summary))


Cell = Callable[[Compared, Summary], str]
_CELLS: Final[dict[str, Cell]] = {
    "policy": lambda _, one: one.policy,
    "speed-up": lambda compared, one: f"{compared.compute_speedup(one):.2f}",
    "90 % band": _show_band,
    UPDATE_COLUMNS[0]: lambda compared, one: list_update_values(compared.find_accumulated(one))[0],
    UPDATE_COLUMNS[1]: lambda compared, one: list_update_values(compared.find_accumulated(one))[1],
    UPDATE_COLUMNS[2]: lambda compared, one: list_update_values(compared.find_accumulated(one))[2],
    "at own batch": lambda compared, one: f"{compared.compute_own_speedup(one):.2f}",
    f"own {UPDATE_COLUMNS[0]}": lambda _, one: list_update_values(one)[0],
    f"own {UPDATE_COLUMNS[1]}": lambda _, one: list_update_values(one)[1],
    "steps": lambda _, one: f"{one.steps:,}",
    "efficiency": lambda _, one: f"{one.efficiency:.3f}",
    "excess": lambda _, one: f"{one.excess:.3f}",
    "padding": lambda _, one: f"{one.padding_ratio:.3f}",
    "idle": lambda _, one: f"{one.idle_steps:,}",
    "data wait": lambda _, one: f"{one.data_wait_share:.3f}",
    "rank wait": lambda _, one: f"{one.trainer_wait_share:.3f}",
    "sim s": lambda _, one: say_amount(one.sim_time_s),
}
"""The columns of the table of one trace, which has a row for each policy."""
_BLOCKS: Final[dict[str, Cell]] = {
    "Speed-up: samples per second over {reference}, both at one global batch": _CELLS["speed-up"],
    "Range of nine in ten such speed-ups": _show_band,
    "What an update then holds: samples, tokens, micro-batches of a rank": lambda compared, one: " / ".join(
        list_update_values(compared.find_accumulated(one))
    ),
    "Speed-up if an update is what each policy makes of it by itself": _CELLS["at own batch"],
    "What an update holds there": lambda _, one: " / ".join(list_update_values(one)),
    "Efficiency: real tokens over ranks x critical tokens": _CELLS["efficiency"],
    "Excess: critical tokens over the real tokens of the fullest rank, - 1": _CELLS["excess"],
    "Steps": _CELLS["steps"],
    "Padding ratio": _CELLS["padding"],
}
"""The tables of several traces, which have a row for each trace and a column for each policy."""
HELP: Final = "simulate every policy on the same samples"
DESCRIPTION: Final = (
    "Simulates the protocol and every baseline on the same samples, under the same memory limit and "
    "costs. One trace gives a row for each policy; several give a row for each trace and a column for each policy."
)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the command."""
    parser.add_argument("lengths", nargs="*", metavar="LENGTHS", help=LENGTHS_HELP + "; several for one table")
    parser.add_argument("--all", action="store_true", help="every bundled trace")
    add_run_options(
        parser,
        ranks=_RANKS,
        budget="--batch-size times the longest sample of the trace",
        window_rule=f"{LEAST_WINDOW}, doubled until it holds {GROUPS_PER_WINDOW} batches of average samples or a shard",
    )
    add_batch_size(
        parser, f"{FIXED_BATCH}; without --token-budget, the most that these batches need is the budget of every policy"
    )
    text = f"policies, in this order; module:name for a target rule of your own ({','.join(POLICIES)})"
    parser.add_argument("--policy", metavar="P[,P...]", default=",".join(POLICIES), help=text)
    add_executor_options(parser, processes=1)
    parser.add_argument("--bands", action="store_true", help=BANDS_HELP)
    parser.add_argument("--json", metavar="FILE", help="write all figures: one object for each trace and policy")
    parser.add_argument("--csv", metavar="FILE", help="write all figures: one row for each trace and policy")
    parser.add_argument("--html", metavar="FILE", help=PAGE_HELP)
    drop_defaults(parser)


def run_command(options: argparse.Namespace) -> int:
    """Returns exit status 0; bad input raises UsageError."""
    policies = [policy for policy in options.policy.split(",") if policy]
    if not policies or len(set(policies)) < len(policies):
        raise UsageError(f"--policy: {options.policy!r} has an empty name, or the same name twice")
    reads = [*options.lengths, options.cost_model, *policies]
    check_files(options.json, options.csv, options.html, reads=reads)
    if options.token_budget is not None:
        check_batch_size(options.batch_size, policies)
    names = _list_names(options)
    runs = [_build_run(options, policies[0], name) for name in names]
    check_effects(options, policies)
    total = 2 * len(policies) * len(runs)
    label = f"{len(policies)} policies on {len(runs)} trace(s)"
    with open_runner(options, label, total) as runner:
        compared, failed = compare(runs, policies, runner, has_bands=options.bands)
    figures = [entry for item in compared for entry in item.to_json()]
    if options.json is not None:
        write_json(options.json, figures)
    if options.csv is not None:
        write_csv(options.csv, [list(figures[0]), *(entry.values() for entry in figures)])
    tables = [_build_table(compared[0])] if len(compared) == 1 else _build_tables(compared)
    if options.html is not None:
        write_compare_report(
            Path(options.html), describe_terms(compared), compared, tables, build_source(options, names)
        )
    if len(compared) > 1:
        print(describe_terms(compared))
    for table in tables:
        print_table(*table)
    for item in compared:
        if len(item.summaries) > 1:
            print(describe_ratio(item))
    if any(what.global_batch.goal is None for what in runs):
        print(
            "That global batch is the largest that one of these policies has by itself; choose another with --global-batch."
        )
    print_cautions(summarize_cautions(caution for item in compared for caution in item.cautions))
    return complain(failed, total)


def _list_names(options: argparse.Namespace) -> list[str]:
    if bool(options.lengths) == options.all:
        raise UsageError("needs LENGTHS or --all, but not both")
    names: list[str] = list_bundled_names() if options.all else options.lengths
    if len(set(names)) < len(names):
        raise UsageError("LENGTHS: the same trace is named twice")
    return names


def _build_run(options: argparse.Namespace, policy: str, name: str) -> Run:
    """Returns the run on the trace ``name``. Budget and window follow rules if they are not given."""
    lengths = load_lengths_option(options, name)
    budget, window = options.token_budget, options.window
    if budget is None:
        budget = choose_budget(lengths, FIXED_BATCH if options.batch_size is None else options.batch_size)
    samples = len(lengths) if options.samples is None else options.samples
    if window is None:
        window = choose_window(lengths, budget, shard_samples=samples // max(1, options.ranks))
    # If the batch size determined the budget, the budget determines the batch size.
    size = None if options.token_budget is None else options.batch_size
    given = argparse.Namespace(**{**vars(options), "token_budget": budget, "window": window, "batch_size": size})
    return build_run(given, policy, lengths)


def describe_terms(compared: list[Compared]) -> str:
    """Returns what all policies of a comparison have in common, in a sentence or two."""
    what = compared[0].what
    return (
        f"{what.workload.ranks:,} ranks ({describe_shards(what.sharding, compared[0].summaries)}), {what.mode} mode. Budget: "
        "maximum padded tokens of a batch, the same for every policy. Fixed batch: samples of a batch of standard, hfg and "
        "balanced, "
        + ("what the budget holds of the longest sample" if what.batch_size is None else "as asked for")
        + ("." if what.update_samples else ". Window: samples that a rank of the protocol groups at a time.")
    )


def describe_sure(compared: Compared) -> str:
    """Returns the uncertainty of the ratio as a suffix, or an empty string if it is unknown."""
    band = compared.find_band(compared.chosen)
    if band is None or not band.shares:
        return ""
    return f", {band.describe(compared.compute_speedup(compared.chosen))} times in nine cases of ten ({band.explain()})"


def describe_ratio(compared: Compared) -> str:
    """Returns the speed-up of the first policy other than the reference, and the size of an update on each side."""
    reference = compared.reference
    first = compared.chosen
    ours, theirs = compared.find_accumulated(first), compared.find_accumulated(reference)
    unit = "samples" if compared.global_batch.tokens is None else "tokens"
    return (
        f"{compared.what.workload.name}, at one global batch of {compared.global_batch.goal:,} {unit}: {first.policy} "
        f"({describe_update(ours)} an update) has {compared.compute_speedup(first):.2f} times the samples per second of "
        f"{reference.policy} ({describe_update(theirs)}){describe_sure(compared)}. With the updates that each makes by "
        f"itself, it has {compared.compute_own_speedup(first):.2f} times: {describe_update(first)}, against "
        f"{describe_update(reference)}."
    )


def _describe_size(compared: Compared) -> str:
    """Returns the size of fixed batches, and a smaller one if the global batch needs it."""
    fitted = {one.batch_size for one in compared.accumulated if one.batch_size} - {compared.batch_size}
    return f"{compared.batch_size:,}" + "".join(f", {size:,} at one global batch" for size in sorted(fitted))


def _find_window(compared: Compared) -> int | None:
    """Returns the window of the first policy that has one. If updates are fixed, only the peer has."""
    return next((summary.window for summary in compared.summaries if summary.window is not None), None)


def _build_table(compared: Compared) -> tuple[str, list[str], list[list[str]]]:
    """Returns a row for each policy."""
    what, window = compared.what, _find_window(compared)
    title = (
        f"{what.workload.name}: {what.workload.samples_total:,} samples, {what.workload.ranks:,} ranks "
        f"({describe_shards(what.sharding, compared.summaries)}), {what.mode} mode, budget {what.budget_tokens:,} "
        f"(fixed batches of {_describe_size(compared)})"
        + ("" if window is None else f", window {window:,}" + " (peer only)" * (what.update_samples is not None))
        + f"; speed-up over {compared.reference.policy}, at one global batch; the next three columns "
        "show what an update then holds; from 'at own batch' on: with the updates that each policy makes by itself"
    )
    rows = [[show(compared, summary) for show in _CELLS.values()] for summary in compared.summaries]
    return title, list(_CELLS), rows


def _build_tables(compared: list[Compared]) -> list[tuple[str, list[str], list[list[str]]]]:
    """Returns a table for each figure, with a row for each trace and a column for each policy.

    The first table shows the settings of each trace.
    """
    policies = [summary.policy for summary in compared[0].summaries]
    terms = [
        [
            item.what.workload.name,
            f"{item.what.workload.samples_total:,}",
            f"{item.what.workload.tokens.mean():,.0f}",
            f"{item.what.workload.tokens.max():,}",
            f"{item.what.budget_tokens:,}",
            _describe_size(item),
            "-" if (window := _find_window(item)) is None else f"{window:,}",
        ]
        for item in compared
    ]
    header = ["trace", "samples", "mean length", "longest", "budget", "fixed batch", "window"]
    tables = [("Traces", header, terms)]
    for title, show in _BLOCKS.items():
        rows = [[item.what.workload.name, *(show(item, one) for one in item.summaries)] for item in compared]
        tables.append((title.format(reference=compared[0].reference.policy), ["trace", *policies], rows))
    return tables
