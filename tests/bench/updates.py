"""The cost of updates with a fixed number of samples: ``python -m tests.bench --only updates``.

The first table shows how evenly updates are dealt, for every shipped trace. It divides the time of an update that ranks share
without knowing lengths, by rank or by load, by the time of an update dealt with all lengths known, the longest sample first to
the lightest rank. A rank's time is its tokens, plus a twentieth of the budget for each step. Nothing is timed, so the figures
are the same on every machine.

The second table shows the steps and samples per second of loaders on two ranks, in free mode and with updates, in turn: from a
source that is always ready, and from workers that take long for each sample.
"""

from __future__ import annotations

import heapq
import random
import time
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, Final

import torch.distributed as dist
from odb_sim.inputs.lengths import list_bundled_names, load_lengths

from odb_ref.core.batching.alignment import align
from odb_ref.core.batching.layouts import Layout
from odb_ref.core.batching.order import StepOrder
from odb_ref.core.batching.updates import PADDING_SHARE, compute_portion, count_portions
from odb_ref.core.types import make_sample
from tests.bench.data import Texts, collate, compute_shards
from tests.bench.launch import launch
from tests.bench.report import Spread, compute_ratios, print_table, say
from tests.helpers.options import nested

Spec = dict[str, Any]
Lengths = list[int]

# How evenly an update is dealt ---------------------------------------------------------------------------------------------

SIZES: Final = ((8, 32), (8, 128), (64, 64), (64, 128))
"""Ranks, and samples of an update per rank."""
UPDATES: Final = 512
"""The scale of the number of updates, which is divided by the ranks."""
ROWS: Final = 4
"""The number of longest samples that the budget holds."""
MOST: Final = {128: 1.05, 0: 1.10}
"""Goals for the time of a dealt update over that of known lengths, by the smallest number of samples per rank."""
LONG: Final = 1 / 3
"""Above this share of a rank's mean load, a sample that is drawn late is more than the rest can even out."""


@dataclass(frozen=True, slots=True)
class Dealing:
    """Updates of a trace, in multiples of the time with known lengths."""

    trace: str
    ranks: int
    samples: int
    """The samples of an update, per rank."""
    layout: str
    own: float
    dealt: float
    worst: float
    """The worst of the dealt updates."""
    longest: float
    """The longest sample, divided by the mean load of a rank."""

    @property
    def verdict(self) -> str:
        """Empty if the goal is met."""
        goal = next(most for least, most in MOST.items() if self.samples >= least)
        if self.dealt <= goal:
            return ""
        return "a long sample" if self.longest > LONG else "MISSED"


def measure_dealing() -> list[Dealing]:
    """Measures every trace, size and layout."""
    found = []
    for trace in list_bundled_names():
        lengths = list(map(int, load_lengths(trace).tokens))
        for ranks, samples in SIZES:
            say(f"{trace}, {ranks} ranks, {samples} samples each")
            choose = random.Random(f"{trace} {ranks} {samples}")
            updates = [choose.choices(lengths, k=ranks * samples) for _ in range(max(2, UPDATES // ranks // 8))]
            found += [_compare(trace, ranks, samples, updates, layout, ROWS * max(lengths)) for layout in Layout]
    return found


def _compare(trace: str, ranks: int, samples: int, updates: list[Lengths], layout: Layout, budget: int) -> Dealing:
    ways = (deal_by_length, deal_by_rank, deal_by_load)
    known, own, dealt = ([compute_time(way(update, ranks), layout, budget) for update in updates] for way in ways)
    return Dealing(
        trace,
        ranks,
        samples,
        layout.value,
        own=sum(own) / sum(known),
        dealt=sum(dealt) / sum(known),
        worst=max(mine / best for mine, best in zip(dealt, known, strict=True)),
        longest=max(max(update) * ranks / sum(update) for update in updates),
    )


def deal_by_rank(update: Lengths, ranks: int) -> list[Lengths]:
    """Deals every ``ranks``-th sample to the same rank."""
    return [update[rank::ranks] for rank in range(ranks)]


def deal_by_load(update: Lengths, ranks: int) -> list[Lengths]:
    """Deals in portions, as R16.4 does."""
    dealt: list[Lengths] = [[] for _ in range(ranks)]
    drawn, portions = 0, count_portions(len(update), ranks)
    for portion in range(portions):
        loads = list(map(sum, dealt))
        is_last = portion == portions - 1
        draws = [
            compute_portion(rank, loads, drawn, begin=0, end=len(update), is_last=is_last) for rank in range(ranks)
        ]
        for rank, draw in enumerate(draws):
            dealt[rank] += update[draw.first : draw.first + draw.count]
        drawn = draws[0].end
    return dealt


def deal_by_length(update: Lengths, ranks: int) -> list[Lengths]:
    """Deals the longest first, each to the lightest rank."""
    dealt: list[Lengths] = [[] for _ in range(ranks)]
    heap = [(0, rank) for rank in range(ranks)]
    for length in sorted(update, reverse=True):
        load, rank = heap[0]
        dealt[rank].append(length)
        heapq.heapreplace(heap, (load + length, rank))
    return dealt


def compute_time(dealt: Sequence[Lengths], layout: Layout, budget: int) -> float:
    """Returns the time of the slowest rank, in tokens."""
    return add_up(form_steps(dealt, layout, budget), budget)


def add_up(tokens: Sequence[Lengths], budget: int, cost: float = 0.05, *, is_waiting: bool = False) -> float:
    """Returns the time, in tokens, of ranks that compute ``tokens`` in each step."""
    spent = sum(map(max, zip(*tokens, strict=True))) if is_waiting else max(map(sum, tokens))
    return spent + len(tokens[0]) * budget * cost


def form_steps(dealt: Sequence[Lengths], layout: Layout, budget: int, share: int = PADDING_SHARE) -> list[Lengths]:
    """Returns the tokens of each step of each rank."""
    formed = []
    for own in dealt:
        samples = [make_sample(place, place, length, length, ()) for place, length in enumerate(own)]
        formed.append(StepOrder.FULLEST.compute_groups(samples, layout, budget, most_padding=budget // share))
    steps = max(map(len, formed))
    aligned = (align(groups, steps, 0, layout, StepOrder.FULLEST)[0] for groups in formed)
    return [list(map(layout.compute_tokens, groups)) for groups in aligned]


STEP_COSTS: Final = {0.05: False, 0.3: True}
"""The cost of an empty step, as a share of a full one, and whether ranks wait for each other in every step, as with FSDP."""
SHARES: Final = (16, 8, 4, 2)


def measure_shares() -> dict[str, list[float]]:
    """Returns the speed-ups over fixed batches at the same updates (16 samples on each of 8 ranks), by cost and share."""
    found: dict[str, list[float]] = {}
    for trace in list_bundled_names():
        lengths = list(map(int, load_lengths(trace).tokens))
        budget, choose = ROWS * max(lengths), random.Random(f"{trace}816")
        updates = [choose.choices(lengths, k=128) for _ in range(16)]
        fixed = [
            [[max(own[i : i + ROWS]) * ROWS for i in range(0, 16, ROWS)] for own in deal_by_rank(update, 8)]
            for update in updates
        ]
        for (cost, is_waiting), share in product(STEP_COSTS.items(), SHARES):
            ours = (form_steps(deal_by_load(update, 8), Layout.PADDED, budget, share) for update in updates)
            mine, theirs = (
                sum(add_up(steps, budget, cost, is_waiting=is_waiting) for steps in each) for each in (ours, fixed)
            )
            found.setdefault(trace, []).append(theirs / mine)
    return found


def print_dealing(found: Sequence[Dealing]) -> bool:
    """Prints the table. Returns True if every goal is met, except with samples too long to be evened out."""
    rows = [
        [
            item.trace,
            f"{item.ranks} x {item.samples}",
            item.layout,
            *(f"{value:.3f}" for value in (item.own, item.dealt, item.worst)),
            f"{item.longest:.2f}",
            item.verdict,
        ]
        for item in found
    ]
    goals = ", ".join(f"at most {most} from {least} samples a rank on" for least, most in MOST.items())
    header = ["trace", "ranks", "layout", "own share", "dealt", "worst", "longest by load", ""]
    print_table(f"Updates over those of known lengths; dealt: {goals}", header, rows)
    return all(item.verdict != "MISSED" for item in found)


# What loaders do in a second -----------------------------------------------------------------------------------------------

TRACE: Final = "gsm8k"
BUDGET_TOKENS: Final = 4096
UPDATE_SAMPLES: Final = 1024
WAYS: Final[dict[str, Spec]] = {
    "free": {},
    "free, shared": {"shard": "shared"},
    "updates": {"update_samples": UPDATE_SAMPLES},
    "updates, dealt": {"update_samples": UPDATE_SAMPLES, "shard": "shared"},
}
SOURCES: Final = {"ready": (12_000, 0.0), "4 ms a sample": (4_096, 0.004)}
"""The samples of an epoch, and the seconds for each of them."""
LEAST_STEPS: Final = 0.9
"""The goal for steps per second relative to free mode, from a source that is ready."""


def race(spec: Spec, rank: int, ranks: int) -> Spec:
    """Runs epochs of each way in turn, and returns seconds, steps, and seconds to the first step."""
    from odb_ref.torch import ODBDataLoader

    data = Texts(compute_shards(TRACE, [spec["samples"]])[0], 0, read_s=spec["delay_s"])
    found: Spec = {name: [] for name in WAYS}
    for _ in range(spec["repetitions"]):
        for name, way in WAYS.items():
            options = {"token_budget": BUDGET_TOKENS, "num_workers": 2, "collate_fn": collate, "shuffle": True, **way}
            with ODBDataLoader(data, **nested(**options)) as loader:
                dist.barrier()
                began, first, steps = time.monotonic(), 0.0, 0
                for _, info in loader.steps():
                    first = first or time.monotonic() - began
                    steps = info.step + 1
                found[name].append((time.monotonic() - began, steps, first))
    return found


def measure_race(repetitions: int) -> dict[str, Any]:
    """Returns by source and way what `race` measured on the first rank.

    Raises: RuntimeError when a rank failed.
    """
    figures = {}
    for source, (samples, delay_s) in SOURCES.items():
        say(f"loaders, {source}")
        spec = {"samples": samples, "delay_s": delay_s, "repetitions": repetitions}
        ranks = launch("race", spec, ranks=2, limit_s=300)
        if ranks[0].data is None:
            raise RuntimeError(f"race, {source}: {ranks[0].error}")
        figures[source] = {"samples": samples, **ranks[0].data}
    return figures


def print_race(figures: dict[str, Any]) -> bool:
    """Prints the table. Returns True if updates reach the steps per second of the goal."""
    rows, is_good = [], True
    for source, found in figures.items():
        for name in WAYS:
            free = found["free, shared" if "dealt" in name else "free"] if "updates" in name else found[name]
            mine = found[name]
            paces = [[steps / seconds for seconds, steps, _ in one] for one in (mine, free)]
            steps = compute_ratios(*paces)
            samples = compute_ratios(*([1 / seconds for seconds, _, _ in one] for one in (mine, free)))
            is_slow = source == "ready" and steps is not None and steps.median < LEAST_STEPS
            is_good &= not is_slow
            first = Spread.of(first for _, _, first in mine)
            rate = Spread.of(found["samples"] / seconds for seconds, _, _ in mine)
            rows.append([source, name, rate, samples, Spread.of(paces[0]), steps, first, "MISSED" if is_slow else ""])
    title = f"Two ranks with two workers each, {UPDATE_SAMPLES} samples an update, {TRACE}, {BUDGET_TOKENS} tokens"
    header = ["source", "mode", "samples/s", "by free", "steps/s", "by free", "first step, s", ""]
    print_table(title, header, rows)
    return is_good


def run(options: Namespace) -> bool:
    """Prints all tables. Returns True if the goals are met."""
    rows = [[trace, *(f"{gain:.2f}" for gain in gains)] for trace, gains in measure_shares().items()]
    header = ["trace", *(f"{cost:.0%}, 1/{share}" for cost, share in product(STEP_COSTS, SHARES))]
    print_table("Over fixed batches at the same updates, by the cost of an empty step and padding_share", header, rows)
    return print_dealing(measure_dealing()) & print_race(measure_race(options.times))
