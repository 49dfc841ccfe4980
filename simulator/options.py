"""Command-line options that several commands share, and what becomes of them."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Final

from odb_ref.core.errors import UsageError
from odb_ref.core.types import Mode
from simulator.conditions import Conditions, parse_factor
from simulator.cost_files import load_costs
from simulator.costs import Costs, Transport
from simulator.lengths import Lengths
from simulator.runs import Run
from simulator.workload import Sharding, build_workload

LENGTHS_HELP: Final = "a bundled trace, or a CSV, CSV.gz or .npy file of lengths"


def add_run_options(
    parser: argparse.ArgumentParser,
    *,
    ranks: int | None = None,
    budget: str = "",
    window: int | None = 256,
    window_rule: str = "",
) -> None:
    """Adds what `build_run` reads, all but the lengths and the policy.

    ``ranks`` and ``window`` are the defaults; ``budget`` and ``window_rule`` say what is done where there is none.
    """
    parser.add_argument(
        "--ranks", type=int, default=ranks, metavar="N", help="data-parallel ranks" + (f" ({ranks})" if ranks else "")
    )
    parser.add_argument(
        "--token-budget",
        type=int,
        metavar="B",
        help="the most padded tokens of a batch of two or more" + (f" ({budget})" if budget else ""),
    )
    parser.add_argument(
        "--window",
        type=int,
        default=window,
        metavar="K",
        help=f"samples a rank groups at a time ({window if window is not None else window_rule})",
    )
    parser.add_argument("--depth", type=int, default=8, metavar="D", help="steps between loader and trainer (8)")
    parser.add_argument("--mode", choices=[str(mode) for mode in Mode], default=str(Mode.JOIN))
    parser.add_argument("--quota", type=int, metavar="Q", help="with --mode quota: samples, over all ranks, to stop at")
    parser.add_argument(
        "--shards",
        choices=[str(sharding) for sharding in Sharding],
        default=str(Sharding.EVEN),
        help="even: sizes differ by one at most; uneven: one each and the rest as 1 : 4 : 9 : 16 ...",
    )
    parser.add_argument(
        "--samples", type=int, metavar="M", help="draw M lengths with replacement (else: each row once)"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="of the draw and the shuffle (0)")
    parser.add_argument("--max-age", type=int, default=4, metavar="R", help="rounds a sample may be carried for (4)")
    parser.add_argument(
        "--ramp", type=int, default=3, metavar="R", help="rounds with a smaller window at the start (3)"
    )
    parser.add_argument("--cost-model", metavar="FILE", help="what things cost, as odb-ref calibrate writes it")
    parser.add_argument("--workers", type=int, metavar="W", help="loader workers of a rank (4)")
    parser.add_argument(
        "--transport",
        choices=[str(transport) for transport in Transport],
        help="how the exchange is priced: reduce (default) grows with the logarithm of the ranks, gather with the ranks",
    )
    parser.add_argument(
        "--jitter",
        type=float,
        default=0.0,
        metavar="S",
        help="spread of every duration, as standard deviation of its ln",
    )
    parser.add_argument(
        "--slow-rank",
        action="append",
        default=[],
        metavar="RANK:F",
        help="this rank computes F times as long (repeatable)",
    )
    parser.add_argument(
        "--slow-loader",
        action="append",
        default=[],
        metavar="RANK:F",
        help="this rank loads F times as long (repeatable)",
    )


def build_run(options: argparse.Namespace, policy: str, lengths: Lengths) -> Run:
    """The run on ``lengths`` that the options describe.

    Raises: UsageError when they make no sense.
    """
    sharding = Sharding(options.shards)
    if options.quota is not None and options.mode != Mode.QUOTA:
        raise UsageError("--quota needs --mode quota")
    workload = build_workload(
        lengths, ranks=options.ranks, sharding=sharding, samples=options.samples, seed=options.seed
    )
    return Run(
        workload=workload,
        policy=policy,
        budget_tokens=options.token_budget,
        window_samples=options.window,
        depth_steps=options.depth,
        mode=Mode(options.mode),
        quota_samples=options.quota,
        max_age_rounds=options.max_age,
        ramp_rounds=options.ramp,
        sharding=sharding,
        seed=options.seed,
        costs=_build_costs(options),
        conditions=Conditions(
            jitter=options.jitter,
            slow_ranks=tuple(map(parse_factor, options.slow_rank)),
            slow_loaders=tuple(map(parse_factor, options.slow_loader)),
        ),
    )


def _build_costs(options: argparse.Namespace) -> Costs:
    costs = Costs() if options.cost_model is None else load_costs(options.cost_model)
    if options.workers is not None:
        costs = replace(costs, loader=replace(costs.loader, workers=options.workers))
    if options.transport is not None:
        costs = replace(costs, network=replace(costs.network, transport=Transport(options.transport)))
    return costs


def check_writable(*paths: str | None) -> None:
    """Nothing when every path can be written: better said before a long run than after it.

    Raises: UsageError naming the path.
    """
    for path in paths:
        if path is None:
            continue
        is_new = not Path(path).exists()
        try:
            with Path(path).open("ab"):
                pass
        except OSError as error:
            raise UsageError(f"{path}: cannot be written: {error.strerror or error}") from error
        if is_new:
            Path(path).unlink()
