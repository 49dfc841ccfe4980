"""How full the batches are, beside other ways and the limit: ``python -m tests.bench --only quality``.

It covers every shipped trace, on 8 and 64 ranks (``--full``: also 512), in windows of 256 and 1,024: epochs of eight windows
per rank in every way to batch, then epochs of 1 to 50 windows beside the peer. Efficiency is real tokens divided by ranks times
critical tokens, and its physical limit is 1. Nothing is timed, so the figures are the same on every machine.
"""

from __future__ import annotations

import math
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from typing import Final

import numpy as np
from odb_sim.engine.metrics import StepRow, Summary
from odb_sim.inputs.lengths import Integers, Lengths, list_bundled_names, load_lengths
from odb_sim.inputs.workload import Sharding, Workload, build_workload
from odb_sim.studies.runs import Result, Run
from odb_sim.studies.runs import run as simulate

from odb_ref.core.batching.layouts import Layout
from odb_ref.core.config import choose_ramp
from tests.bench.report import print_table, say

BUDGET_TOKENS: Final = 12_288
RANKS: Final = (8, 64)
MANY_RANKS: Final = 512
WINDOWS: Final = (256, 1024)
LONG: Final = 8
"""The windows per rank in an epoch that is judged as a long one."""
EPOCHS: Final = (1, 2, 3, 5, 8, 20, 50)
"""The windows per rank in the epochs that are compared with the peer's."""
LEAST_PACKED: Final = {256: 0.97, 1024: 0.99}
"""Goals for the efficiency of packed rows of shared shards, by window."""
MOST_PADDED: Final = 0.6
MOST_PADDED_MEAN: Final = 0.5
"""Goals for the excess of padded batches over the peer's, in a cell and as the geometric mean of all."""


@dataclass(frozen=True, slots=True)
class Way:
    """A way to form batches."""

    name: str
    policy: str = "odb"
    layout: Layout = Layout.PADDED
    sharding: Sharding = Sharding.EVEN


PADDED: Final = Way("padded")
PACKED_SHARED: Final = Way("packed, shared", layout=Layout.PACKED, sharding=Sharding.SHARED)
PEER: Final = Way("peer", "peer")
WAYS: Final = (
    PADDED,
    Way("padded, shared", sharding=Sharding.SHARED),
    Way("packed", layout=Layout.PACKED),
    PACKED_SHARED,
    PEER,
    Way("fixed", "standard"),
    Way("oracle, padded", "gmt"),
    Way("oracle, packed", "packing"),
)


@dataclass(frozen=True, slots=True, order=True)
class Cell:
    """An epoch: a trace, a number of ranks, and the windows of samples per rank."""

    trace: str
    ranks: int
    window: int
    windows: int

    def __str__(self) -> str:
        return f"{self.trace}, {self.ranks} x {self.window}"


Found = dict[Cell, dict[str, Summary]]


@dataclass(frozen=True, slots=True)
class Miss:
    """A missed goal in words, and the epoch that misses it, if it is a single one."""

    text: str
    cell: Cell | None = None
    way: Way = PADDED


def run(options: Namespace) -> bool:
    """Measures every cell of long epochs in every way, and the shorter and longer ones in our way and the peer's. Prints the
    tables, and the missed goals. Returns True if none is missed.
    """
    found: Found = {}
    ranks = (*RANKS, MANY_RANKS) if options.full else RANKS
    for trace in list_bundled_names():
        lengths = load_lengths(trace)
        for count, window, windows in product(ranks, WINDOWS, EPOCHS):
            if count == MANY_RANKS and windows != LONG:
                continue
            cell = Cell(trace, count, window, windows)
            say(str(cell))
            ways = WAYS if windows == LONG else (PADDED, PEER)
            found[cell] = {way.name: _simulate(cell, lengths, way).summary for way in ways}
    return print_quality(found)


def _build(cell: Cell, lengths: Lengths, way: Way) -> Workload:
    samples = cell.ranks * cell.window * cell.windows
    return build_workload(lengths, ranks=cell.ranks, samples=samples, sharding=way.sharding)


def _simulate(cell: Cell, lengths: Lengths, way: Way) -> Result:
    return simulate(
        Run(
            workload=_build(cell, lengths, way),
            policy=way.policy,
            budget_tokens=BUDGET_TOKENS,
            window_samples=cell.window,
            layout=way.layout,
            sharding=way.sharding,
        )
    )


def print_quality(found: Found) -> bool:
    long = {cell: ways for cell, ways in found.items() if cell.windows == LONG}
    print_table(
        f"Efficiency of epochs of {LONG} windows, budget {BUDGET_TOKENS:,} (trace, ranks x window); 1 is the limit",
        ["cell", *(way.name for way in WAYS)],
        [[str(cell), *(f"{ways[way.name].efficiency:.3f}" for way in WAYS)] for cell, ways in long.items()],
    )
    print_table(
        "Excess of padded batches by the peer's, epochs of 1 to 50 windows (below 1: ours is better)",
        ["cell", *(f"{windows} windows" for windows in EPOCHS)],
        [
            [str(cell), *(_format_ratio(found, cell, windows) for windows in EPOCHS)]
            for cell in long
            if cell.ranks != MANY_RANKS
        ],
    )
    missed = list(_list_missed(found))
    print("\n" + ("every goal is met" if not missed else f"{len(missed)} goals missed:"))
    for miss in missed:
        print(f"  {miss.text}")
    if missed:
        _print_losses([(miss.cell, miss.way) for miss in missed if miss.cell is not None])
    return not missed


def _print_losses(epochs: Sequence[tuple[Cell, Way]]) -> None:
    """Prints what the epochs that miss a goal lose and where, and what no rule could save."""
    rows = []
    for cell, way in dict.fromkeys(epochs):
        lengths = load_lengths(cell.trace)
        tokens = _build(cell, lengths, way).tokens
        steps = _simulate(cell, lengths, way).rows
        ramp = choose_ramp(cell.window, cell.window * cell.windows)
        losses = compute_losses(steps, ranks=cell.ranks, ramp_rounds=ramp)
        fewest = count_fewest_steps(tokens, ranks=cell.ranks, budget_tokens=BUDGET_TOKENS)
        full = compute_full_efficiency(tokens, ranks=cell.ranks, budget_tokens=BUDGET_TOKENS)
        shares = [f"{100 * share:.1f}" for share in asdict(losses).values()]
        rows.append([f"{cell}, {cell.windows} windows, {way.name}", *shares, len(steps), fewest, f"{full:.3f}"])
    print_table(
        "Where they lose, in % of ranks x critical tokens; the fewest steps there can be, and the efficiency of full ones",
        ["cell", "ramp", "middle", "ending", "padding", "waiting", "steps", "fewest", "if full"],
        rows,
    )


def _format_ratio(found: Found, cell: Cell, windows: int) -> str:
    return f"{_compute_ratio(found[Cell(cell.trace, cell.ranks, cell.window, windows)]):.2f}"


def _compute_ratio(ways: Mapping[str, Summary]) -> float:
    """Returns the excess of padded batches divided by the peer's, which is never 0."""
    return ways[PADDED.name].excess / ways[PEER.name].excess


def _list_missed(found: Found) -> list[Miss]:
    missed = []
    ratios = []
    for cell, ways in found.items():
        ratio = _compute_ratio(ways)
        if ratio > 1:
            text = f"{cell}, {cell.windows} windows: behind the peer, {ratio:.2f} of its excess"
            missed.append(Miss(text, cell))
        if cell.windows < LONG:
            continue
        ratios.append(ratio)
        if ratio > MOST_PADDED:
            text = f"{cell}, {cell.windows} windows: {ratio:.2f} of the peer's excess, the goal is {MOST_PADDED}"
            missed.append(Miss(text, cell))
        if cell.windows > LONG:
            continue
        efficiency = ways[PACKED_SHARED.name].efficiency
        if efficiency < LEAST_PACKED[cell.window]:
            text = f"{cell}: packed and shared {efficiency:.4f}, the goal is {LEAST_PACKED[cell.window]}"
            missed.append(Miss(text, cell, PACKED_SHARED))
    mean = math.exp(math.fsum(map(math.log, ratios)) / len(ratios))
    print(f"\nPadded batches by the peer's excess, geometric mean of long epochs: {mean:.3f}")
    if mean > MOST_PADDED_MEAN:
        missed.append(Miss(f"the geometric mean of those ratios is {mean:.3f}, the goal is {MOST_PADDED_MEAN}"))
    return missed


# Where batches that are not full lose efficiency -----------------------------------------------------------------------------
#
# Efficiency has no bound below 1 that would excuse a rule. It counts what steps waste, not how many steps there are, and small
# batches waste little. Single samples, with the longest of every rank together, waste hardly anything. So the tables also show
# the fewest steps that an epoch needs, and its efficiency if all of them were full.


@dataclass(frozen=True, slots=True, kw_only=True)
class Losses:
    """Lost shares of ranks times critical tokens. Both ``ramp + middle + ending`` and ``padding + waiting`` add up to 1
    with the efficiency.
    """

    ramp: float
    """Lost in the rounds with small windows."""
    middle: float
    """Lost in the rounds with whole windows."""
    ending: float
    """Lost in the last round, which emits everything left."""
    padding: float
    """Lost inside batches."""
    waiting: float
    """Lost by ranks that wait for one with a larger batch."""


def compute_losses(rows: Sequence[StepRow], *, ranks: int, ramp_rounds: int) -> Losses:
    """Returns the losses of an epoch of at least one step."""
    whole = ranks * sum(row.critical_tokens for row in rows)
    last = rows[-1].round
    ending = [row for row in rows if row.round == last]
    ramp = [row for row in rows if row.round < min(ramp_rounds, last)]
    middle = [row for row in rows if ramp_rounds <= row.round < last]
    ramp_lost, middle_lost, ending_lost = (
        sum(ranks * row.critical_tokens - row.real_tokens for row in part) / whole for part in (ramp, middle, ending)
    )
    return Losses(
        ramp=ramp_lost,
        middle=middle_lost,
        ending=ending_lost,
        padding=sum(row.padded_tokens - row.real_tokens for row in rows) / whole,
        waiting=sum(ranks * row.critical_tokens - row.padded_tokens for row in rows) / whole,
    )


def count_fewest_steps(tokens: Integers, *, ranks: int, budget_tokens: int) -> int:
    """Returns a lower bound on the steps of an epoch of these samples, for any way of forming batches, in either layout.

    A sample over the budget is a batch by itself, no other batch exceeds the budget, and no step has more batches than
    there are ranks.
    """
    is_over = tokens > budget_tokens
    batches = int(np.count_nonzero(is_over)) - (-int(tokens[~is_over].sum()) // budget_tokens)
    return -(-batches // ranks)


def compute_full_efficiency(tokens: Integers, *, ranks: int, budget_tokens: int) -> float:
    """Returns the efficiency of the fewest steps if each, including the last, takes as long as a full batch.

    It is meaningless if a sample exceeds the budget.
    """
    steps = count_fewest_steps(tokens, ranks=ranks, budget_tokens=budget_tokens)
    return int(tokens.sum()) / (ranks * budget_tokens * steps)
