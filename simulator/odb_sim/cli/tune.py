"""``odb-ref tune``: token budget, window and depth for a data set and a memory."""

from __future__ import annotations

import argparse
from math import ceil
from pathlib import Path
from typing import Final

from odb_ref.core.batching.rules import RULES
from odb_ref.core.errors import UsageError
from odb_sim.cli.options import (
    PAGE_HELP,
    add_number,
    build_source,
    build_study,
    load_lengths_option,
    open_runner,
)
from odb_sim.cli.sweep import add_data_options
from odb_sim.engine.metrics import describe_update
from odb_sim.inputs.files import check_files, write_json
from odb_sim.reports.answers_report import write_tune_report
from odb_sim.reports.run_report import describe_band
from odb_sim.reports.tables import TUNE_NOTE, build_row, describe_beside, list_tune_columns
from odb_sim.reports.terminal import print_cautions, print_table
from odb_sim.studies.cells import CellAnswer
from odb_sim.studies.search import compute_host_tokens
from odb_sim.studies.sweep import estimate_answer
from odb_sim.studies.tune import LARGEST_WINDOW, NAMES, Question, Tuning, list_choices, tune

HOST_BYTES_PER_TOKEN: Final = 24
"""Token ids, labels and an attention mask, at 8 bytes each."""
_HELD: Final = ("ramp_rounds", "max_age_rounds", "padding_share", "cost")
"""Options that are kept, not tuned, if they are given."""
_USUAL_SIMULATIONS: Final = 600
_USUAL_ALONE: Final = 100
HELP: Final = "find token budget, window and depth"
DESCRIPTION: Final = (
    "Finds the cheapest token budget, window, depth, ramp, age and balance whose epoch is within a "
    "tolerance of the fastest, and shows the trade-off. Windows and depth cost host memory: at most the window, two "
    "windows collated and padded, and the queue's batches, for each rank. --ramp, --max-age, --padding-share and --cost "
    "are kept fixed if they are given."
)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the command."""
    parser.add_argument("--ranks", type=int, required=True, metavar="N", help="data-parallel ranks")
    text = "padded tokens of a batch that fit on a GPU"
    parser.add_argument("--memory-tokens", type=int, required=True, metavar="M", help=text)
    add_number(parser, "--window-max", "K", f"the largest window to try ({LARGEST_WINDOW})")
    add_number(parser, "--tolerance", "T", "share of the best throughput to give up", 0.01, kind=float)
    parser.add_argument("--policy", choices=sorted(RULES), default="odb", help="target rule (odb)")
    add_data_options(parser, has_quota=False)
    text = "bytes per token of a sample in host memory: ids, labels and mask take 24; images more"
    add_number(parser, "--host-bytes-per-token", "B", text, HOST_BYTES_PER_TOKEN)
    text = "only the recommendation, which is faster: not what packed rows, shared shards or another order would gain"
    parser.add_argument("--no-beside", action="store_true", help=text)
    parser.add_argument("--json", metavar="FILE", help="write the recommendation and everything tried")
    parser.add_argument("--html", metavar="FILE", help=PAGE_HELP)
    parser.set_defaults(**dict.fromkeys(_HELD))  # options given are kept


def run_command(options: argparse.Namespace) -> int:
    """Returns exit status 0; bad input raises UsageError."""
    if options.host_bytes_per_token < 1:
        raise UsageError(f"--host-bytes-per-token must be at least 1, got {options.host_bytes_per_token}")
    if options.window_max is not None and options.update_samples is not None:
        raise UsageError(f"--window-max {options.window_max}: has no effect with --global-batch")
    check_files(options.json, options.html, reads=[options.lengths, options.cost_model])
    question = Question(
        study=build_study(options, load_lengths_option(options, options.lengths)),
        ranks=options.ranks,
        memory_tokens=options.memory_tokens,
        policy=options.policy,
        window_max=LARGEST_WINDOW if options.window_max is None else options.window_max,
        tolerance=options.tolerance,
        held=frozenset(name for name in _HELD if getattr(options, name) is not None),
    )
    label = f"tune {question.study.lengths.name}"
    choices = () if options.no_beside else tuple(list_choices(question))
    usual = _USUAL_SIMULATIONS if choices else _USUAL_ALONE
    with open_runner(options, label, usual, is_estimate=True) as runner:
        tuning = tune(question, runner, choices=choices)
    title = f"{question.study.lengths.name}, {question.ranks:,} ranks, memory for {question.memory_tokens:,} tokens"
    mebibytes = compute_host_tokens(tuning.recommended) * options.host_bytes_per_token / 2**20
    lead = _describe(tuning, question, mebibytes)
    band = estimate_answer(question.study, tuning.recommended)
    sure = "" if band is None else describe_band(tuning.recommended.summary, band)
    if options.json is not None:
        write_json(options.json, _encode(tuning, mebibytes))
    if options.html is not None:
        write_tune_report(
            Path(options.html),
            title,
            lead,
            tuning,
            study=question.study,
            source=build_source(options, [options.lengths]),
            sure=sure,
        )
    columns = list_tune_columns(tuning)
    for name, curve in tuning.curves.items():
        if len(curve) > 1:
            rows = [build_row(columns, answer) for answer in curve]
            print_table(f"{title}: by {NAMES[name][0]}", list(columns), rows)
    print(TUNE_NOTE)
    print(lead, sure)
    for reason in tuning.reasons:
        print(f"- {reason}")
    for line in describe_beside(tuning):
        print(line)
    print_cautions(tuning.cautions)
    return 0


def _describe(tuning: Tuning, question: Question, mebibytes: float) -> str:
    text = (
        f"Recommended: {tuning.options}; {tuning.recommended.rate:,.0f} tokens/s over an epoch of "
        f"{question.epoch_samples:,} samples ({describe_update(tuning.recommended.summary)} an update), at most "
        f"{ceil(mebibytes):,} MiB of host memory a rank. {len(tuning.tried)} simulations."
    )
    if tuning.samples_over_memory:
        text += (
            f" {tuning.samples_over_memory:,} samples are longer than the memory ({question.memory_tokens:,} tokens) "
            "and are alone in their batches: cut them, because no setting makes them fit."
        )
    return text


def _encode(tuning: Tuning, mebibytes: float) -> dict[str, object]:
    point = tuning.recommended.point
    return {
        "token_budget": point.budget_tokens,
        "window": point.window_samples,
        "depth": point.depth_steps,
        "ramp": point.ramp_rounds,
        "max_age": point.max_age_rounds,
        "padding_share": point.padding_share,
        "cost": point.cost,
        "options": tuning.options,
        "host_mib": mebibytes,
        "reasons": tuning.reasons,
        "samples_over_memory": tuning.samples_over_memory,
        "cautions": tuning.cautions,
        "recommended": _encode_answer(tuning.recommended),
        "best": _encode_answer(tuning.best),
        "curves": {
            NAMES[name][1].removeprefix("--").replace("-", "_"): list(map(_encode_answer, curve))
            for name, curve in tuning.curves.items()
        },
        "beside": [
            {
                "options": item.options,
                "needs": item.needs,
                "gain": item.answer.rate / tuning.recommended.rate - 1,
                "answer": _encode_answer(item.answer),
            }
            for item in tuning.beside
        ],
        "tried": list(map(_encode_answer, tuning.tried)),
    }


def _encode_answer(answer: CellAnswer) -> dict[str, str | int | float | None]:
    point = answer.point
    own = {"ramp": point.ramp_rounds, "max_age": point.max_age_rounds, "padding_share": point.padding_share}
    return answer.to_json() | own | {"host_tokens": compute_host_tokens(answer)}
