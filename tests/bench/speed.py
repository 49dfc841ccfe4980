"""The loaders beside each other: throughput, time to the first step, and the quality of batches.

All comes from one job: an epoch over the same shards without a model, so that only the loader costs time.
Loaders take turns inside each repetition, and a ratio compares two jobs of the same repetition.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Final

from odb_ref.core.batching.grouping import compute_groups
from odb_ref.core.types import Sample
from tests.bench.cases import has_peer
from tests.bench.data import compute_shards
from tests.bench.launch import Rank, launch
from tests.bench.report import Spread, compute_ratios, print_table, say

TRACE: Final = "mm_mix_real"
BUDGET_TOKENS: Final = 8192
WINDOW_SAMPLES: Final = 256
WORKERS: Final = 2
SAMPLES_PER_RANK: Final = 2000
LIMIT_S: Final = 120.0
KINDS: Final = ("ours", "plain", "peer") if has_peer() else ("ours", "plain")
"""The loaders that can be measured here, in the order of their turns."""


def run(options: Namespace) -> bool:
    """Prints all tables. Returns True if none of our runs failed."""
    samples, trace = options.samples, options.trace
    found = []
    for ranks in (1, 2):
        found.append(measure(ranks, KINDS, options.times, samples, WINDOW_SAMPLES, trace))
        print_speed(found[-1], samples, trace)
    optimum = compute_optimum(2, samples, trace)
    print_quality(found[-1], optimum, WINDOW_SAMPLES, trace)
    if options.full:
        found.append(measure(2, [kind for kind in KINDS if kind != "plain"], 1, samples, 1024, trace))
        print_quality(found[-1], optimum, 1024, trace)
    return not any(runs["ours"].troubles for runs in found)


@dataclass(slots=True)
class Runs:
    """The results of one loader's repetitions."""

    kind: str
    ranks: int
    samples_per_s: list[float] = field(default_factory=list)
    first_s: list[float] = field(default_factory=list)
    later_per_s: list[float] = field(default_factory=list)
    """Samples per second after the first step, which long epochs approach, however short the measured one is."""
    steps: list[int] = field(default_factory=list)
    critical_tokens: list[int] = field(default_factory=list)
    efficiency: list[float] = field(default_factory=list)
    troubles: list[str] = field(default_factory=list)

    def add(self, results: Sequence[Rank]) -> None:
        found = [rank.found for rank in results]
        errors = [f"rank {number}: {item['error']}" for number, item in enumerate(found) if item["error"]]
        if errors:
            self.troubles.append(errors[0])
            return
        samples = sum(len(item["numbers"]) for item in found)
        self.samples_per_s.append(samples / max(item["seconds"] for item in found))
        self.first_s.append(max(item["first_s"] for item in found))
        later = sum(sum(item["groups"][1:]) for item in found)
        self.later_per_s.append(later / max(item["seconds"] - item["first_s"] for item in found))
        self.steps.append(max(item["steps"] for item in found))
        critical = sum(map(max, zip_longest(*(item["padded"] for item in found), fillvalue=0)))
        self.critical_tokens.append(critical)
        self.efficiency.append(sum(sum(item["real"]) for item in found) / (self.ranks * critical))


def measure(
    ranks: int, kinds: Sequence[str], repetitions: int, samples: int, window: int, trace: str
) -> dict[str, Runs]:
    """Runs all loaders in turn, ``repetitions`` times. A plain DataLoader's batches hold the samples of our previous ones."""
    runs = {kind: Runs(kind, ranks) for kind in kinds}
    spec = {
        "trace": trace, "shards": [samples] * ranks, "budget": BUDGET_TOKENS, "window": window, "workers": WORKERS,
        "batch": 15,
    }  # fmt: skip
    for repetition in range(repetitions):
        for kind in kinds:
            say(f"{ranks} ranks, window {window}, {kind}, {repetition + 1} of {repetitions}")
            runs[kind].add(launch("epoch", spec | {"kind": kind}, ranks=ranks, limit_s=LIMIT_S))
            if kind == "ours" and runs[kind].steps:
                spec["batch"] = round(samples / runs[kind].steps[-1])
    return runs


def compute_optimum(ranks: int, samples: int, trace: str) -> int:
    """Returns the fewest steps if all lengths were known beforehand: the most groups that any shard needs."""
    return max(
        len(compute_groups([Sample(i, i, length, length) for i, length in enumerate(shard)], BUDGET_TOKENS))
        for shard in compute_shards(trace, [samples] * ranks)
    )


def print_speed(runs: dict[str, Runs], samples: int, trace: str) -> None:
    """Prints ratios of samples per second and of the first step, for epochs of ``samples`` per rank."""
    ours = runs["ours"]
    rows = []
    for kind, name in (("plain", "plain DataLoader"), ("peer", "peer")):
        if kind not in runs:
            continue
        other = runs[kind]
        trouble = f"{len(other.troubles)} failed: {other.troubles[0][:80]}" if other.troubles else ""
        rows.append([f"ours / {name}", *_compare(runs, kind, "samples_per_s", "first_s", "later_per_s"), trouble])
    print_table(
        f"Loader, {ours.ranks} rank(s) of {samples:,} samples of {trace}, {WORKERS} workers each, {len(ours.steps)} "
        "repetitions: median (least to greatest)",
        ["", "samples/s", "time to first step", "samples/s after it", ""],
        rows,
    )
    for trouble in ours.troubles:
        print(f"  ours: {trouble}")


def _compare(runs: dict[str, Runs], kind: str, *names: str) -> list[Spread | None]:
    return [compute_ratios(getattr(runs["ours"], name), getattr(runs[kind], name)) for name in names]


def print_quality(runs: dict[str, Runs], optimum: int, window: int, trace: str) -> None:
    """Prints steps, critical tokens and efficiency."""
    names = ("steps", "critical_tokens", "efficiency")
    rows: list[list[object]] = [
        [kind, *(Spread.of(getattr(found, name)) for name in names)]
        for kind, found in runs.items()
        if found.steps and kind != "plain"
    ]
    if len(rows) == 2:
        rows.append(["ours / peer", *_compare(runs, "peer", *names)])
    rows.append(["all lengths known", optimum, "", ""])
    print_table(
        f"Batches, {runs['ours'].ranks} ranks, {trace}, budget {BUDGET_TOKENS}, window {window} "
        f"(the peer's: prefetch_factor {window // WORKERS} x {WORKERS} workers)",
        ["", "steps", "critical tokens", "efficiency"],
        rows,
    )
