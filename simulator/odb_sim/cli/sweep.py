"""``odb-ref sweep``: a grid of parallel simulations, in one table."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Final

from odb_ref.core.config import DEPTH_STEPS
from odb_ref.core.errors import UsageError
from odb_sim.cli.options import (
    LENGTHS_HELP,
    PAGE_HELP,
    WINDOW,
    add_batch_size,
    add_executor_options,
    add_shared_options,
    build_source,
    build_study,
    check_batch_size,
    check_effects,
    complain,
    drop_defaults,
    load_lengths_option,
    open_runner,
)
from odb_sim.inputs.files import check_files, write_csv, write_json
from odb_sim.reports.answers_report import write_sweep_report
from odb_sim.reports.run_report import describe_band
from odb_sim.reports.tables import SETTINGS, SWEEP, build_row
from odb_sim.reports.terminal import print_cautions, print_table
from odb_sim.studies.cells import CellAnswer, split_failed
from odb_sim.studies.runs import POLICIES, describe_shards
from odb_sim.studies.sweep import (
    build_points,
    describe_setting,
    estimate_answer,
    find_fastest,
    has_worlds,
    list_sweep_cautions,
    run_grid,
)

HELP: Final = "simulate a grid of settings"
DESCRIPTION: Final = "Simulates every combination of the given values on the same samples, in parallel."


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the command."""
    parser.add_argument("--ranks", required=True, metavar="N[,N...]", help="data-parallel ranks")
    parser.add_argument("--token-budget", required=True, metavar="B[,B...]", help="padded tokens of a batch")
    parser.add_argument("--window", metavar="K[,K...]", help=f"samples that a rank groups at a time ({WINDOW})")
    parser.add_argument("--depth", metavar="D[,D...]", help=f"steps between loader and trainer ({DEPTH_STEPS})")
    text = f"any of {', '.join(POLICIES)}, or module:name for a rule of your own (odb)"
    parser.add_argument("--policy", default="odb", metavar="P[,P...]", help=text)
    add_batch_size(parser)
    add_data_options(parser)
    parser.add_argument("--json", metavar="FILE", help="write all figures: a list with an object for each point")
    parser.add_argument("--csv", metavar="FILE", help="write a row for each point")
    parser.add_argument("--html", metavar="FILE", help=PAGE_HELP)
    drop_defaults(parser)


def add_data_options(parser: argparse.ArgumentParser, *, has_quota: bool = True) -> None:
    """Adds the options that `sweep` and `tune` share."""
    parser.add_argument("lengths", metavar="LENGTHS", help=LENGTHS_HELP)
    add_shared_options(parser, has_quota=has_quota)
    add_executor_options(parser)


def run_command(options: argparse.Namespace) -> int:
    """Returns exit status 0; bad input raises UsageError."""
    policies = _parse_words("--policy", options.policy)
    reads = [options.lengths, options.cost_model, *policies]
    check_files(options.json, options.csv, options.html, reads=reads)
    check_batch_size(options.batch_size, policies)
    check_effects(options, policies)
    study = build_study(options, load_lengths_option(options, options.lengths))
    points = build_points(
        policies=policies,
        ranks=parse_numbers("--ranks", options.ranks),
        budgets=parse_numbers("--token-budget", options.token_budget),
        windows=[WINDOW] if options.window is None else parse_numbers("--window", options.window),
        depths=[DEPTH_STEPS] if options.depth is None else parse_numbers("--depth", options.depth),
        update_samples=options.update_samples,
    )
    study.check(points)
    label = f"{study.lengths.name}, {len(points)} simulations"
    with open_runner(options, label, len(points)) as runner:
        answers, failed = split_failed(run_grid(study, points, runner))
    shards = describe_shards(options.shards, [answer.summary for answer in answers])
    title = f"{study.lengths.name}, {answers[0].summary.samples_total:,} samples, {shards}"
    figures = [answer.to_json() for answer in answers]
    if options.json is not None:
        write_json(options.json, figures)
    if options.csv is not None:
        write_csv(options.csv, [list(figures[0]), *(entry.values() for entry in figures)])
    best, _ = find_fastest(answers)
    band = estimate_answer(study, best)
    sure = "" if band is None else describe_band(best.summary, band)
    if options.html is not None:
        source = build_source(options, [options.lengths])
        write_sweep_report(Path(options.html), title, study, answers, source=source, sure=sure)
    _print_answers(title, answers)
    if sure:
        by_rank = " by tokens a second and rank" * has_worlds(answers)
        print(f"The fastest{by_rank} ({describe_setting(best)}): {sure}")
    print_cautions(list_sweep_cautions(study, answers))
    return complain(failed, len(points))


def _print_answers(title: str, answers: list[CellAnswer]) -> None:
    """Prints a table, and moves settings that are the same in every row to its title to save columns."""
    header = list(SWEEP)
    rows = [build_row(SWEEP, answer) for answer in answers]
    same = [column for column in range(len(SETTINGS)) if len({row[column] for row in rows}) == 1]
    if len(same) == len(SETTINGS):
        same.remove(header.index("policy"))
    kept = [column for column in range(len(header)) if column not in same]
    said = "".join(f", {header[column]} {rows[0][column]}" for column in same)
    table = [[row[column] for column in kept] for row in rows]
    print_table(title + said, [header[column] for column in kept], table, keys=len(SETTINGS) - len(same))


def _parse_words(option: str, text: str) -> list[str]:
    words = [word.strip() for word in text.split(",")]
    if not all(words) or len(set(words)) < len(words):
        raise UsageError(f"{option}: {text!r} has an empty value, or the same value twice")
    return words


def parse_numbers(option: str, text: str) -> list[int]:
    """Returns the numbers of a list such as ``8,64``.

    Raises: UsageError when one is not a whole number, or comes twice.
    """
    numbers = []
    for word in _parse_words(option, text):
        try:
            numbers.append(int(word))
        except ValueError:
            raise UsageError(f"{option}: {word!r} is not a whole number") from None
    return numbers
