"""Command-line options that several commands share, and the values built from them."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import fields, replace
from enum import StrEnum
from pathlib import Path
from typing import Final

from odb_ref.core.batching.cost import Cost, get_cost
from odb_ref.core.batching.layouts import Layout
from odb_ref.core.config import DEPTH_STEPS, Terms
from odb_ref.core.errors import UsageError
from odb_ref.core.types import Mode
from odb_sim.engine.updates import GlobalBatch
from odb_sim.inputs.conditions import Conditions, parse_factor
from odb_sim.inputs.cost_files import load_costs
from odb_sim.inputs.costs import Costs, PricedTransport
from odb_sim.inputs.lengths import Lengths, load_lengths
from odb_sim.inputs.workload import Sharding
from odb_sim.reports.document import PageSource
from odb_sim.reports.terminal import show_progress
from odb_sim.studies.cells import CellFailure, Point, Runner, Store
from odb_sim.studies.clusters import ADDRESSES, open_executor
from odb_sim.studies.runs import PEER, POLICIES, Driver, Run, has_fixed_batches, is_rule, keeps_shards
from odb_sim.studies.sweep import Study

WINDOW: Final = 256
PAGE_HELP: Final = "write a page: the answer in words, how full each step is on each rank, and the figures"
BANDS_HELP: Final = "state how sure the figures are, even if that takes much longer than the run itself"
LENGTHS_HELP: Final = "a bundled trace, a CSV or CSV.gz file with a column total_tokens, or a .npy file of lengths"


def add_number(
    parser: argparse.ArgumentParser,
    flag: str,
    metavar: str,
    text: str,
    default: float | None = None,
    *,
    kind: Callable[[str], float] = int,
) -> None:
    """Adds an option that takes a number, with its default after the help text."""
    said = text if default is None else f"{text} ({default:g})" if kind is float else f"{text} ({default})"
    parser.add_argument(flag, type=kind, default=default, metavar=metavar, help=said)


def add_choice(
    parser: argparse.ArgumentParser, flag: str, kind: type[StrEnum], text: str, default: StrEnum | None = None
) -> None:
    """Adds an option that takes one value of an enumeration, with its default after the help text."""
    said = text if default is None else f"{text} ({default})"
    value = None if default is None else str(default)
    parser.add_argument(flag, choices=[str(item) for item in kind], default=value, help=said)


def add_text(parser: argparse.ArgumentParser, flag: str, metavar: str, text: str, default: str | None = None) -> None:
    """Adds an option that takes a text, with its default after the help text."""
    said = text if default is None else f"{text} ({default})"
    parser.add_argument(flag, default=default, metavar=metavar, help=said)


def add_repeated(parser: argparse.ArgumentParser, flag: str, metavar: str, text: str) -> None:
    """Adds an option that can be given several times."""
    parser.add_argument(flag, action="append", default=[], metavar=metavar, help=f"{text} (repeatable)")


def add_run_options(
    parser: argparse.ArgumentParser,
    *,
    ranks: int | None = None,
    budget: str = "",
    window_rule: str = str(WINDOW),
) -> None:
    """Adds the options that `build_run` reads, except the lengths and the policy.

    ``ranks`` is the default. ``budget`` and ``window_rule`` describe what happens without one.
    """
    add_number(parser, "--ranks", "N", "data-parallel ranks", ranks)
    said = f" ({budget})" if budget else ""
    add_number(parser, "--token-budget", "B", f"maximum padded tokens of a batch of two or more samples{said}")
    add_number(parser, "--window", "K", f"samples that a rank groups at a time ({window_rule})")
    add_number(parser, "--depth", "D", "steps between loader and trainer", DEPTH_STEPS)
    add_shared_options(parser)
    add_choice(
        parser,
        "--driver",
        Driver,
        "rounds: fast, with arrays; events: every rank's machine, for faults, jitter, traces and timelines; both "
        "give equal figures",
        Driver.AUTO,
    )


def add_shared_options(parser: argparse.ArgumentParser, *, has_quota: bool = True) -> None:
    """Adds the options of every command that simulates, for `build_terms`, `build_costs` and `build_conditions`."""
    add_terms(parser, Terms, leave_out=() if has_quota else ("mode", "quota_samples"))
    add_choice(
        parser,
        "--shards",
        Sharding,
        "even: sizes differ by at most one; uneven: one sample each, the rest as 1 : 4 : 9 : 16 ...; shared: all ranks "
        "draw from one order (baselines: as even, and those that know all lengths also instead of uneven)",
        Sharding.EVEN,
    )
    add_number(parser, "--samples", "M", "draw M lengths with replacement (default: each row once)")
    add_number(
        parser,
        "--global-tokens",
        "T",
        "instead of --global-batch: tokens of an update, without padding, up to which every policy accumulates its steps",
    )
    add_number(parser, "--seed", "S", "seed of the draw and the shuffle", 0)
    add_text(parser, "--cost-model", "FILE", "cost model, as odb-ref calibrate writes it")
    add_number(parser, "--workers", "W", "loader workers of a rank (4)")
    add_number(parser, "--prefetch-factor", "P", "items that a rank's loader fetches ahead for each worker (2)")
    text = "how the exchange is priced: reduce (default) grows with the logarithm of the ranks, gather with the ranks"
    add_choice(parser, "--transport", PricedTransport, text)
    add_number(
        parser, "--jitter", "S", "spread of every duration, as the standard deviation of its logarithm", 0.0, kind=float
    )
    add_repeated(parser, "--slow-rank", "RANK:F", "this rank takes F times as long to compute")
    add_repeated(parser, "--slow-loader", "RANK:F", "this rank takes F times as long to load")
    text = "maximum sum of a column of LENGTHS over a batch of two or more samples, for example image_tokens=4096"
    add_repeated(parser, "--limit", "COLUMN=MAX", text)


def add_recorded_options(parser: argparse.ArgumentParser) -> None:
    """Adds what a trace may not record, by default the most plausible."""
    add_number(parser, "--depth", "D", "steps between loader and trainer (default: the most seen)")
    text = "samples of an update to which the job accumulated its steps (default: as recorded, or those of a step)"
    add_number(parser, "--global-batch", "N", text)


SAVED: Final = Path("odb-counterexample.json")


def add_save(parser: argparse.ArgumentParser, text: str) -> None:
    """Adds the file of a counterexample, by default `SAVED`."""
    parser.add_argument("--save", type=Path, default=SAVED, metavar="FILE", help=f"{text} ({SAVED})")


def add_batch_size(
    parser: argparse.ArgumentParser, default: str = "what the budget holds of the longest sample"
) -> None:
    """Adds the size of fixed batches. The text ``default`` describes the size when the option is not given."""
    add_number(parser, "--batch-size", "N", f"samples of a fixed batch, whatever the budget ({default})")


def add_processes(parser: argparse.ArgumentParser, text: str, *, processes: int | None = None) -> None:
    """Adds the number of concurrent processes, by default one for each processor."""
    said = f"{text} ({processes or 'one for each processor'})"
    default = processes or os.cpu_count() or 1
    parser.add_argument("--processes", type=int, default=default, metavar="N", help=said)


def add_executor_options(parser: argparse.ArgumentParser, *, processes: int | None = None) -> None:
    """Adds where the simulations of a study run, and where their answers are kept."""
    add_processes(parser, "simulations at a time, each a process", processes=processes)
    add_store_options(parser)


def add_store_options(parser: argparse.ArgumentParser) -> None:
    """Adds a cluster to use in place of processes, and the folder that keeps answers."""
    text = f"instead of --processes, a cluster whose workers have this package: {ADDRESSES}"
    parser.add_argument("--executor", metavar="ADDRESS", help=text)
    text = "keep each simulation's figures in FOLDER as it ends; the same command then continues from there"
    parser.add_argument("--out", metavar="FOLDER", help=text)


@contextmanager
def open_runner(options: argparse.Namespace, label: str, total: int, *, is_estimate: bool = False) -> Iterator[Runner]:
    """Yields what runs the simulations of a study, as the options say, and shows the progress."""
    processes = options.processes if is_estimate else min(options.processes, total)
    with (
        show_progress(label, total, is_estimate=is_estimate) as on_done,
        closing(Store(options.out)) as store,
        open_executor(options.executor, processes) as executor,
    ):
        yield Runner(executor, store, on_done)


def add_terms(parser: argparse.ArgumentParser, kind: type[Terms], *, leave_out: Sequence[str] = ()) -> None:
    """Adds an option for each field of `Terms` that has a help text, with its default in ``kind``.

    The option is named like the field without its unit: ``--max-age`` for ``max_age_rounds``.
    """
    defaults = {item.name: item.default for item in fields(kind)}
    for item in fields(Terms):
        default = defaults[item.name]
        if item.name in leave_out or "help" not in item.metadata:
            continue
        name, _, unit = item.name.rpartition("_")
        flag = item.metadata.get("flag", "--" + (name or unit).replace("_", "-"))
        said = default.name if isinstance(default, Cost) else default
        text = item.metadata["help"] + ("" if default is None else f" ({said})")
        if isinstance(default, Cost):
            parser.add_argument(flag, default=said, metavar="COST", help=text)
        elif isinstance(default, StrEnum):
            add_choice(parser, flag, type(default), item.metadata["help"], default)
        else:
            parser.add_argument(flag, dest=item.name, type=int, default=default, metavar=unit[0].upper(), help=text)


def build_run(options: argparse.Namespace, policy: str, lengths: Lengths) -> Run:
    """Returns the run on ``lengths`` that the options describe. Raises: UsageError when they make no sense."""
    point = Point(
        policy=policy,
        ranks=options.ranks,
        budget_tokens=options.token_budget,
        window_samples=WINDOW if options.window is None else options.window,
        depth_steps=DEPTH_STEPS if options.depth is None else options.depth,
    )
    # The driver last: whether it can do the run depends on the terms.
    return replace(build_study(options, lengths).build_run(point), driver=Driver(options.driver or Driver.AUTO))


def build_study(options: argparse.Namespace, lengths: Lengths) -> Study:
    """Returns the study that the options of `add_shared_options`, and the size of fixed batches if any, describe.

    Raises: UsageError when they make no sense.
    """
    return Study(
        lengths=lengths,
        samples=options.samples,
        seed=options.seed,
        sharding=Sharding(options.shards),
        global_batch=GlobalBatch(samples=options.update_samples, tokens=options.global_tokens),
        batch_size=getattr(options, "batch_size", None),
        costs=build_costs(options),
        conditions=build_conditions(options),
        terms=build_terms(options),
    )


def build_terms(options: argparse.Namespace) -> Terms:
    """Returns the settings of the protocol other than policy, budget, window and depth.

    Raises: UsageError when it makes no sense.
    """
    names = [item.name for item in fields(Terms) if getattr(options, item.name, None) is not None]
    given = {name: getattr(options, name) for name in names}
    if "limit" in options:
        given["limits"] = tuple(parse_limits(options.limit).values())
    for item in fields(Terms):
        if item.name in given and isinstance(item.default, StrEnum):
            given[item.name] = type(item.default)(given[item.name])
        if item.name in given and isinstance(item.default, Cost):
            given[item.name] = get_cost(given[item.name])
    if given.get("quota_samples") is not None and given["mode"] is not Mode.QUOTA:
        raise UsageError("--quota needs --mode quota")
    return Terms(**given)


def parse_limits(texts: Sequence[str]) -> dict[str, int]:
    """Returns the limit of each column that ``--limit`` names.

    Raises: UsageError when one is malformed, or given twice.
    """
    limits: dict[str, int] = {}
    for text in texts:
        column, _, value = text.partition("=")
        if not column or not value.isdecimal():
            raise UsageError(f"--limit {text}: expected COLUMN=MAX, for example image_tokens=4096")
        if column in limits:
            raise UsageError(f"--limit {text}: a limit of {limits[column]} was given already")
        limits[column] = int(value)
    return limits


def load_lengths_option(options: argparse.Namespace, name: str) -> Lengths:
    """Returns the lengths of a trace, with the columns that ``--limit`` names.

    Raises: UsageError when it cannot be read, or has no such column.
    """
    return load_lengths(name, tuple(parse_limits(options.limit)))


def build_conditions(options: argparse.Namespace) -> Conditions:
    """Returns the ranks and loaders that are slow, and the jitter. Raises: UsageError when an option makes no sense."""
    return Conditions(
        jitter=options.jitter,
        slow_ranks=tuple(map(parse_factor, options.slow_rank)),
        slow_loaders=tuple(map(parse_factor, options.slow_loader)),
    )


def build_costs(options: argparse.Namespace) -> Costs:
    """Returns the cost models.

    Raises: UsageError when an option makes no sense, or the file of ``--cost-model`` is not a cost model.
    """
    costs = Costs() if options.cost_model is None else load_costs(options.cost_model)
    names = [name for name in ("workers", "prefetch_factor") if getattr(options, name) is not None]
    costs = replace(costs, loader=replace(costs.loader, **{name: getattr(options, name) for name in names}))
    if options.transport is not None:
        costs = replace(costs, network=replace(costs.network, transport=PricedTransport(options.transport)))
    return costs


def build_source(options: argparse.Namespace, data: Sequence[str]) -> PageSource:
    """Returns the content of a page's footer: the command as it was given, and its data."""
    return PageSource(command=getattr(options, "said", f"odb-ref {options.command}"), data=data)


_CHECKED: Final = {
    "--window": "window",
    "--depth": "depth",
    "--max-age": "max_age_rounds",
    "--ramp": "ramp_rounds",
    "--padding-share": "padding_share",
    "--layout": "layout",
    "--order": "order",
    "--cost": "cost",
    "--sizes": "sizes",
    "--deadline": "deadline",
    "--driver": "driver",
    "--transport": "transport",
}
"""The options, and their names in the parsed options, that `check_effects` checks. They are None if they were not given."""


def drop_defaults(parser: argparse.ArgumentParser) -> None:
    """Makes the options that `check_effects` checks None by default, so that it sees which were given."""
    parser.set_defaults(**dict.fromkeys(_CHECKED.values()))


def check_effects(options: argparse.Namespace, policies: Sequence[str]) -> None:
    """Checks that every option that was given has an effect on at least one of ``policies``.

    Raises: UsageError when one has none.
    """
    baseline = "" if any(map(is_rule, policies)) else "without a policy that runs the protocol"
    fixed = "" if options.update_samples is None else "with --global-batch"
    share = "with --layout packed" if options.layout == Layout.PACKED else "" if fixed else "without --global-batch"
    calm = "" if getattr(options, "fault", ()) else "without --fault"
    reasons = {"--window": fixed, "--max-age": fixed, "--ramp": fixed, "--padding-share": share, "--deadline": calm}
    for flag, name in _CHECKED.items():
        value, reason = getattr(options, name), baseline or reasons.get(flag)
        if value is not None and reason and not (flag == "--window" and PEER in policies):
            raise UsageError(f"{flag} {value}: has no effect {reason}")
    shards = Sharding(options.shards)
    if shards is not Sharding.EVEN and not any(keeps_shards(policy, shards) for policy in policies):
        raise UsageError(f"--shards {shards}: has no effect on {', '.join(policies)}, with shards that are always even")


def check_batch_size(size: int | None, policies: Sequence[str]) -> None:
    """Checks that ``--batch-size`` applies to at least one of ``policies``.

    Raises: UsageError when none of them has fixed batches.
    """
    if size is not None and not any(map(has_fixed_batches, policies)):
        fixed = ", ".join(filter(has_fixed_batches, POLICIES))
        raise UsageError(
            f"--batch-size {size}: applies only to fixed batches ({fixed}), and policy {', '.join(policies)} has none"
        )


def complain(failed: Sequence[CellFailure], total: int) -> int:
    """Prints the simulations that failed, out of ``total``, and returns the exit status: 0 if none failed, else 2."""
    if not failed:
        return 0
    print(f"{len(failed)} of {total} simulations failed:", *failed, sep="\n  ", file=sys.stderr)
    return 2
