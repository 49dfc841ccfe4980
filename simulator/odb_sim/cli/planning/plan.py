"""``odb-ref plan``: the days, GPU-hours and money that a training run takes, and how to start it."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Final

import numpy as np

from odb_ref.core.errors import UsageError
from odb_sim.cli.options import (
    LENGTHS_HELP,
    PAGE_HELP,
    add_number,
    add_store_options,
    add_text,
    build_source,
    open_runner,
)
from odb_sim.cli.planning.lengths import (
    add_reading_options,
    build_reading,
    describe_reading,
    make_lengths,
    read_lengths,
)
from odb_sim.inputs.cost_files import load_costs, write_costs
from odb_sim.inputs.costs import Costs
from odb_sim.inputs.files import check_files, write_json
from odb_sim.inputs.jobs import TrainingJob, build_job
from odb_sim.inputs.lengths import Lengths, load_lengths
from odb_sim.inputs.presets import list_names
from odb_sim.inputs.texts import is_text_file
from odb_sim.reports.plan_report import HEADER, build_rows, describe_plan, list_commands, write_plan_report
from odb_sim.reports.terminal import print_cautions, print_table
from odb_sim.studies.plan import RunPlan, Wanted, choose, compute_ranges, make_plan

_USUAL_SIMULATIONS: Final = 120
_NODE_GPUS: Final = 8
HELP: Final = "time, GPU-hours and money of a training run"
DESCRIPTION: Final = (
    "Plans a training run on data of known lengths: which setting to train with, what it costs, how "
    "sure that is, and what fixed batches and packing cost."
)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the command."""
    parser.add_argument("data", metavar="DATA", help=LENGTHS_HELP + "; with --tokenizer, a file of texts")
    parser.add_argument(
        "--model", required=True, metavar="M", help=f"{', '.join(list_names('model'))}, or a config.json"
    )
    parser.add_argument("--gpu", required=True, choices=list_names("gpu"), help="GPU whose figures to use")
    parser.add_argument(
        "--gpus", type=int, required=True, metavar="N", help="number of GPUs, each a data-parallel rank"
    )
    add_number(parser, "--node-gpus", "N", "GPUs of a node", _NODE_GPUS)
    text = "how the model is distributed (fsdp)"
    parser.add_argument("--strategy", choices=list_names("strategy"), default="fsdp", help=text)
    parser.add_argument("--precision", choices=list_names("precision"), default="bf16", help="number format (bf16)")
    text = (
        "recompute activations in the backward pass; auto: if that is faster, with --cost-model only if the longest "
        "sample needs it. Pass yes if the steps were timed that way (auto)"
    )
    parser.add_argument("--recompute", choices=("auto", "yes", "no"), default="auto", help=text)
    add_number(parser, "--global-batch", "N", "samples of an optimizer update (default: those of a step)")
    add_number(parser, "--epochs", "E", "epochs to train (1)", kind=float)
    add_number(parser, "--tokens", "N", "instead of --epochs: tokens to train on")
    add_number(parser, "--price", "USD", "price of a GPU hour (default: a dated price, with a range)", kind=float)
    text = "padded tokens of a batch that fit, if known; without --recompute taken to be measured with the setting they suit"
    add_number(parser, "--memory-tokens", "M", text)
    add_text(
        parser, "--cost-model", "FILE", "measured step times, instead of those computed from the model and the GPU"
    )
    add_number(parser, "--seed", "S", "seed of the shuffle", 0)
    add_reading_options(parser)
    add_store_options(parser)
    add_text(parser, "--write-costs", "FILE", "write the cost model, for --cost-model of other commands")
    parser.add_argument("--json", metavar="FILE", help="write all figures")
    parser.add_argument("--html", metavar="FILE", help=PAGE_HELP)


def run_command(options: argparse.Namespace) -> int:
    """Returns exit status 0; bad input raises UsageError."""
    reads = [options.data, options.cost_model, options.tokenizer, options.template, options.model]
    check_files(options.json, options.html, options.write_costs, reads=reads)
    if options.processes < 1:
        raise UsageError(f"--processes must be at least 1, got {options.processes}")
    if options.epochs is not None and options.tokens is not None:
        raise UsageError("--epochs and --tokens both set how long to train: leave one out")
    jobs = list(_build_jobs(options))
    lengths = _read(options)
    measured = None if options.cost_model is None else load_costs(options.cost_model)
    wanted = [
        Wanted(
            job=job,
            lengths=lengths,
            global_batch=options.global_batch,
            epochs=1.0 if options.epochs is None else options.epochs,
            tokens=options.tokens,
            memory_tokens=options.memory_tokens,
            cost_model=measured,
            seed=options.seed,
        )
        for job in jobs
    ]
    with open_runner(options, f"plan {lengths.name}", _USUAL_SIMULATIONS, is_estimate=True) as runner:
        plan = make_plan(choose(wanted), runner)
    commands = list_commands(plan, options.data, _describe_source(options))
    costs = complete_costs(plan)
    if options.json is not None:
        write_json(options.json, encode(plan, costs, commands))
    if options.write_costs is not None:
        write_costs(options.write_costs, costs)
    if options.html is not None:
        write_plan_report(Path(options.html), plan, commands, build_source(options, [options.data]))
    print(describe_plan(plan))
    print_table("", HEADER, build_rows(plan))
    print(*commands, sep="\n")
    print_cautions(plan.cautions)
    return 0


def _build_jobs(options: argparse.Namespace) -> Iterator[TrainingJob]:
    """Yields the candidate jobs: with activations kept, and recomputed."""
    ways = {"yes": (True,), "no": (False,), "auto": (False, True)}[options.recompute]
    for recomputes in ways:
        yield build_job(
            gpu=options.gpu,
            model=options.model,
            strategy=options.strategy,
            gpus=options.gpus,
            precision=options.precision,
            recomputes=recomputes,
            node_gpus=options.node_gpus,
            price_usd=options.price,
        )


def _read(options: argparse.Namespace) -> Lengths:
    """Returns the lengths. Raises: UsageError when an option for texts is given with a file of lengths."""
    if _has_texts(options):
        return make_lengths(options.data, read_lengths(options))
    lengths, most = load_lengths(options.data), build_reading(options).max_tokens
    for flag in ("tokenizer", "template", "column", "split"):
        if getattr(options, flag):
            raise UsageError(f"--{flag}: has no effect on {options.data}, which holds lengths, not texts")
    if most is None:
        return lengths
    return Lengths(lengths.name, np.minimum(lengths.tokens, most), np.minimum(lengths.supervised_tokens, most))


def _describe_source(options: argparse.Namespace) -> str:
    """Returns what makes lengths.csv, a command or a comment, or an empty text if the data themselves can be simulated."""
    if _has_texts(options):
        return f"odb-ref lengths {shlex.quote(options.data)} {describe_reading(options)} --out lengths.csv"
    if options.max_length is None:
        return ""
    return f"# lengths.csv: {options.data}, each length at most {options.max_length}"


def _has_texts(options: argparse.Namespace) -> bool:
    return options.tokenizer is not None and is_text_file(Path(options.data))


def complete_costs(plan: RunPlan) -> Costs:
    """Returns the cost model of a plan with its ranges and its number of ranks, since others get a caution."""
    costs = plan.wanted.costs
    ranks = costs.fitted.ranks or plan.wanted.job.gpus
    return replace(costs, ranges=compute_ranges(plan.wanted), fitted=replace(costs.fitted, ranks=ranks))


def encode(plan: RunPlan, costs: Costs, commands: list[str]) -> dict[str, object]:
    """Returns all figures of a plan."""
    wanted, job = plan.wanted, plan.wanted.job
    memory = job.compute_memory(job.values)
    ways = []
    for way in plan.ways:
        amounts = {
            "seconds": (plan.compute_seconds(way), plan.band(way)),
            "gpu_hours": (plan.compute_gpu_hours(way), plan.band(way)),
            "usd": (plan.compute_money(way), plan.band_money(way)),
            "speedup": (plan.compute_speedup(way), plan.band_speedup(way)),
        }
        ways.append(
            {"name": way.name, "needs": way.needs, "token_budget": way.what.budget_tokens}
            | {name: value for name, (value, _) in amounts.items()}
            | {
                "bands": {
                    name: {"low": value * band.low, "high": value * band.high, "because": dict(band.shares)}
                    for name, (value, band) in amounts.items()
                }
            }
            | {"summary": way.summary.to_json()}
        )
    return {
        "model": asdict(job.model) | {"parameters": job.model.parameters, "active": job.model.active},
        "strategy": job.strategy.name,
        "gpus": job.gpus,
        "recomputes": job.recomputes,
        "constants": {name: asdict(constant) for name, constant in job.constants.items()},
        "memory": asdict(memory) | {"tokens": memory.tokens, "range": job.compute_token_range()},
        "costs": asdict(costs),
        "samples": wanted.samples,
        "ways": ways,
        "commands": commands,
        "cautions": list(plan.cautions),
    }
