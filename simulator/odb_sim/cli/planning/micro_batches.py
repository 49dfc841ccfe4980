"""``odb-ref micro-batches``: micro-batches of known lengths, how long ranks wait in them, and how much could be saved."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from typing import Final

from odb_ref.core.batching.cost import get_cost
from odb_ref.core.batching.layouts import Layout
from odb_ref.core.errors import UsageError
from odb_ref.plan.terms import SAY_ALONE, Options, Oversize, Within
from odb_sim.cli.options import LENGTHS_HELP, add_choice, add_number, add_text
from odb_sim.inputs.cost_files import load_costs
from odb_sim.inputs.costs import Costs
from odb_sim.inputs.files import check_files, write_json
from odb_sim.inputs.lengths import load_lengths
from odb_sim.reports.terminal import print_table, show_progress
from odb_sim.studies.micro_batches import WaysToDivide, divide

_HEADER: Final = ["way", "micro-batches", "least", "fill", "wait", "step s", "wait s"]
HELP: Final = "divide samples of known lengths, as in reinforcement learning, and say what ranks wait"
DESCRIPTION: Final = (
    "Divides the samples of an optimizer step, whose lengths are known, into micro-batches under a budget, "
    "the same number on every rank (odb_ref.plan): where they stay on the ranks that have them, and dealt out to all. Says "
    "how long ranks wait for one another, how much of that dealing saves, and how much nothing but other data would."
)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the command."""
    parser.add_argument(
        "lengths", metavar="LENGTHS", help=LENGTHS_HELP + "; in order, equal parts of a step to each rank"
    )
    parser.add_argument("--ranks", type=int, required=True, metavar="N", help="data-parallel ranks")
    parser.add_argument("--budget", type=int, required=True, metavar="B", help="the most tokens of a micro-batch")
    add_number(parser, "--step-samples", "M", "samples of an optimizer step (all of the file)")
    add_text(parser, "--groups", "COLUMN", "a column of whole numbers: samples of one number belong together")
    add_choice(parser, "--within", Within, f"with --groups, where those of a group meet ({Within.RANK})")
    text = "what the tokens of a micro-batch are. packed: their sum; padded: rows times the longest"
    add_choice(parser, "--layout", Layout, text, Layout.PACKED)
    add_number(parser, "--multiple-of", "K", "a rank has a multiple of K micro-batches", 1)
    add_number(parser, "--pad-to", "K", "each length is rounded up to a multiple of K", 1)
    text = "what becomes of a sample, or a group in one micro-batch, beyond the budget"
    add_choice(parser, "--oversize", Oversize, text, Oversize.REFUSE)
    text = "what is balanced. tokens; attention/Q: tokens + tokens**2 // Q of each sample (what the cost model says)"
    parser.add_argument("--cost", metavar="COST", help=text)
    parser.add_argument("--cost-model", metavar="FILE", help="what things cost, as odb-ref calibrate and plan write it")
    parser.add_argument("--json", metavar="FILE", help="write all figures")


def run_command(options: argparse.Namespace) -> int:
    """Returns exit status 0; bad input raises UsageError."""
    check_files(options.json, reads=[options.lengths, options.cost_model])
    lengths = load_lengths(options.lengths, () if options.groups is None else (options.groups,))
    costs = Costs() if options.cost_model is None else load_costs(options.cost_model)
    step = len(lengths) if options.step_samples is None else options.step_samples
    if not 1 <= step <= len(lengths):
        raise UsageError(f"--step-samples {step:,}: there are {len(lengths):,} samples")
    if options.within is not None and options.groups is None:
        raise UsageError(f"--within {options.within}: say with --groups which samples belong together")
    terms: Options = {
        "budget": options.budget,
        "layout": options.layout,
        "within": options.within or Within.RANK,
        "multiple_of": options.multiple_of,
        "pad_to": options.pad_to,
        "oversize": options.oversize,
    }
    balance = costs.balance if options.cost is None else get_cost(options.cost)
    groups = None if lengths.resources is None or options.groups is None else lengths.resources[:, 0]
    try:
        with show_progress(f"{lengths.name}, {options.ranks:,} ranks", len(lengths)) as on_done:
            outcome = divide(
                lengths,
                ranks=options.ranks,
                costs=costs,
                options=terms,
                balance=balance,
                step_samples=step,
                groups=groups,
                on_done=on_done,
            )
    except UsageError as error:
        raise UsageError(str(error).replace(SAY_ALONE, ", or say --oversize alone")) from error
    if options.json is not None:
        figures = {name: value for name, value in asdict(outcome).items() if name not in ("stay", "dealt")}
        ways = [asdict(outcome.stay), asdict(outcome.dealt)]
        write_json(options.json, {**figures, "saved_s": outcome.saved_s, "left_s": outcome.left_s, "ways": ways})
    _print_outcome(outcome, lengths.name, options, len(lengths))
    return 0


def _print_outcome(outcome: WaysToDivide, name: str, options: argparse.Namespace, total: int) -> None:
    rows = [
        [
            way.way,
            f"{way.micro_batches:,.1f}",
            f"{way.least:,.1f}",
            f"{way.fill:.3f}",
            f"{way.wait:.3f}",
            f"{way.step_s:,.3f}",
            f"{way.wait_s:,.3f}",
        ]
        for way in (outcome.stay, outcome.dealt)
    ]
    unused = total - outcome.samples
    print_table(
        f"{name}: {outcome.steps:,} optimizer steps of {outcome.samples // outcome.steps:,} samples, {options.ranks:,} ranks, "
        f"{options.layout}, budget {options.budget:,}, balanced by {outcome.balanced_by}; a step's mean"
        + (f"; {unused:,} samples left over" if unused else ""),
        _HEADER,
        rows,
    )
    stay, dealt, saved_s = outcome.stay, outcome.dealt, outcome.saved_s
    together = f" (samples of one {options.groups} in one {options.within or Within.RANK})" if options.groups else ""
    splitting = f", which splits {outcome.split_groups:,.1f} groups over ranks" if outcome.split_groups else ""
    left_s = round(outcome.left_s, 9) + 0.0  # no -0.000
    print(
        f"Where the samples stay{splitting}, a step takes {stay.step_s:,.3f} s, of which the mean rank waits "
        f"{stay.wait_s:,.3f} s ({stay.wait_s / stay.step_s:.1%}) for others. Dealing them out{together} "
        f"{'saves' if saved_s >= 0 else 'takes'} {abs(saved_s):,.3f} s {'' if saved_s >= 0 else 'more '}"
        f"({abs(saved_s) / stay.step_s:.1%}). No plan{' that keeps groups together' if splitting else ''} takes less than "
        f"{outcome.bound_s:,.3f} s: a perfect one, if there is one, would save {left_s:,.3f} s more "
        f"({left_s / dealt.step_s:.1%})."
    )
