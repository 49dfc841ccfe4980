"""``odb-ref compare``: the protocol beside every baseline, on the same samples, memory limit and costs."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Final

from odb_ref.core.errors import UsageError
from simulator.metrics import Summary
from simulator.options import add_run_options, build_run, check_writable
from simulator.runs import POLICIES, run
from simulator.terminal import print_table, show_progress

_REFERENCE: Final = "standard"
_HEADER: Final = [
    "policy",
    "speed-up",
    "steps",
    "efficiency",
    "excess",
    "padding",
    "idle",
    "data wait",
    "rank wait",
    "sim s",
]


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds ``compare``."""
    parser = subparsers.add_parser(
        "compare",
        help="simulate every policy on the same samples",
        description="Simulates the protocol and every baseline on the same samples; figures as in simulate, in one table.",
    )
    add_run_options(parser)
    parser.add_argument(
        "--policies",
        metavar="P[,P...]",
        default=",".join(POLICIES),
        help=f"which, in which order ({','.join(POLICIES)})",
    )
    parser.add_argument("--json", metavar="FILE", help="write all figures: a list with an object for each policy")
    parser.set_defaults(run=run_command)


def run_command(options: argparse.Namespace) -> int:
    """Exit status 0; bad input raises UsageError."""
    policies = [policy for policy in options.policies.split(",") if policy]
    if not policies or len(set(policies)) < len(policies):
        raise UsageError(f"--policies: {options.policies!r} names none, or one twice")
    what = build_run(options, policies[0])
    runs = [replace(what, policy=policy) for policy in policies]
    check_writable(options.json)
    summaries = []
    for one in runs:
        with show_progress(one.policy, one.workload.samples_total) as on_progress:
            summaries.append(run(one, on_progress=on_progress).summary)
    if options.json is not None:
        figures = [summary.to_json() for summary in summaries]
        Path(options.json).write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    print_comparison(summaries)
    return 0


def print_comparison(summaries: list[Summary]) -> None:
    """Prints a row for each summary; the speed-up is in samples per second, over `standard` where it is among them."""
    reference = next((summary for summary in summaries if summary.policy == _REFERENCE), summaries[0])
    first = summaries[0]
    title = (
        f"{first.lengths}: {first.samples_total:,} samples, {first.ranks:,} ranks ({first.shards} shards), "
        f"{first.mode} mode, budget {first.token_budget:,}, window {first.window:,}; speed-up over {reference.policy}"
    )
    rows = [
        [
            summary.policy,
            f"{summary.samples_per_s / reference.samples_per_s:.2f}",
            f"{summary.steps:,}",
            f"{summary.efficiency:.3f}",
            f"{summary.excess:.3f}",
            f"{summary.padding_ratio:.3f}",
            f"{summary.idle_steps:,}",
            f"{summary.data_wait_share:.3f}",
            f"{summary.trainer_wait_share:.3f}",
            f"{summary.sim_time_s:,.1f}",
        ]
        for summary in summaries
    ]
    print_table(title, _HEADER, rows)
