"""``odb-ref tune``: token budget, window and depth for a data set and a memory."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Final

from odb_ref.core.batching.rules import RULES
from odb_ref.core.errors import UsageError
from odb_sim.cli.sweep import add_data_options, build_study
from odb_sim.inputs.files import check_writable, write_json
from odb_sim.reports.answers_report import (
    TUNE_HEADER,
    TUNE_NOTE,
    build_tune_row,
    check_plots,
    describe_beside,
    write_tune_report,
)
from odb_sim.reports.terminal import print_cautions, print_table, show_progress
from odb_sim.studies.cells import CellAnswer, Store
from odb_sim.studies.clusters import open_executor
from odb_sim.studies.tune import LARGEST_WINDOW, Question, Tuning, compute_host_tokens, tune

HOST_BYTES_PER_TOKEN: Final = 24
"""Ids, labels and attention mask of 8 bytes each."""
_USUAL_SIMULATIONS: Final = 100


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the subcommand."""
    parser = subparsers.add_parser(
        "tune",
        help="find token budget, window and depth",
        description="Finds the cheapest token budget, window, depth and ramp whose epoch is within a tolerance of the fastest, "
        "and shows the trade-off. Windows and depth cost host memory: at most the window, two windows collated and padded, "
        "and the queue's batches, for each rank.",
    )
    parser.add_argument("--ranks", type=int, required=True, metavar="N", help="data-parallel ranks")
    parser.add_argument(
        "--memory-tokens", type=int, required=True, metavar="M", help="padded tokens of a batch that fit on a GPU"
    )
    parser.add_argument("--window-max", type=int, default=LARGEST_WINDOW, metavar="K", help="the largest to try (4096)")
    parser.add_argument(
        "--tolerance", type=float, default=0.01, metavar="T", help="share of the best throughput to give up (0.01)"
    )
    parser.add_argument("--policy", choices=sorted(RULES), default="odb", help="target rule (odb)")
    add_data_options(parser, has_quota=False)
    parser.add_argument(
        "--host-bytes-per-token",
        type=int,
        default=HOST_BYTES_PER_TOKEN,
        metavar="B",
        help="of a sample in host memory: ids, labels and mask are 24; images cost more (24)",
    )
    parser.add_argument("--json", metavar="FILE", help="write the recommendation and everything tried")
    parser.add_argument("--html", metavar="FILE", help="write a page with plots")
    parser.set_defaults(run=run_command)


def run_command(options: argparse.Namespace) -> int:
    """Returns exit status 0; bad input raises UsageError."""
    if options.host_bytes_per_token < 1:
        raise UsageError(f"--host-bytes-per-token must be at least 1, got {options.host_bytes_per_token}")
    question = Question(
        study=build_study(options),
        ranks=options.ranks,
        memory_tokens=options.memory_tokens,
        policy=options.policy,
        window_max=options.window_max,
        tolerance=options.tolerance,
    )
    check_writable(options.json, options.html, reads=[options.lengths, options.cost_model])
    check_plots(options.html)
    with (
        show_progress(f"tune {question.study.lengths.name}", _USUAL_SIMULATIONS, is_estimate=True) as on_done,
        Store(options.out) as store,
        open_executor(options.executor, options.processes) as executor,
    ):
        tuning = tune(question, executor, on_done, store=store)
    title = f"{question.study.lengths.name}, {question.ranks:,} ranks, memory for {question.memory_tokens:,} tokens"
    mebibytes = compute_host_tokens(tuning.recommended) * options.host_bytes_per_token / 2**20
    lead = _describe(tuning, question, mebibytes)
    if options.json is not None:
        write_json(options.json, _encode(tuning, mebibytes))
    if options.html is not None:
        write_tune_report(Path(options.html), title, lead, tuning)
    for name, curve in (
        ("window", tuning.windows),
        ("token budget", tuning.budgets),
        ("depth", tuning.depths),
        ("ramp", tuning.ramps),
    ):
        print_table(f"{title}: by {name}", TUNE_HEADER, [build_tune_row(answer, tuning) for answer in curve])
    print(TUNE_NOTE)
    print(lead)
    for reason in tuning.reasons:
        print(f"- {reason}")
    for line in describe_beside(tuning):
        print(line)
    print_cautions(tuning.cautions)
    return 0


def _describe(tuning: Tuning, question: Question, mebibytes: float) -> str:
    point = tuning.recommended.point
    text = (
        f"Recommended: --token-budget {point.budget_tokens} --window {point.window_samples} --depth {point.depth_steps} "
        f"--ramp {point.ramp_rounds}; {tuning.recommended.rate:,.0f} tokens/s over an epoch of "
        f"{question.epoch_samples:,} samples, at most {mebibytes:,.0f} MiB of host memory a rank. "
        f"{len(tuning.tried)} simulations."
    )
    if tuning.samples_over_memory:
        text += (
            f" {tuning.samples_over_memory:,} samples are longer than the memory ({question.memory_tokens:,} tokens) and "
            "travel alone: cut them, or no setting makes them fit."
        )
    return text


def _encode(tuning: Tuning, mebibytes: float) -> dict[str, object]:
    point = tuning.recommended.point
    return {
        "token_budget": point.budget_tokens,
        "window": point.window_samples,
        "depth": point.depth_steps,
        "ramp": point.ramp_rounds,
        "host_mib": mebibytes,
        "reasons": tuning.reasons,
        "samples_over_memory": tuning.samples_over_memory,
        "cautions": tuning.cautions,
        "recommended": _encode_answer(tuning.recommended),
        "best": _encode_answer(tuning.best),
        "windows": list(map(_encode_answer, tuning.windows)),
        "budgets": list(map(_encode_answer, tuning.budgets)),
        "depths": list(map(_encode_answer, tuning.depths)),
        "ramps": list(map(_encode_answer, tuning.ramps)),
        "beside": [
            {"options": item.options, "needs": item.needs, "gain": item.answer.rate / tuning.recommended.rate - 1}
            for item in tuning.beside
        ],
        "tried": list(map(_encode_answer, tuning.tried)),
    }


def _encode_answer(answer: CellAnswer) -> dict[str, str | int | float | None]:
    return answer.to_json() | {"host_tokens": compute_host_tokens(answer), "ramp": answer.point.ramp_rounds}
