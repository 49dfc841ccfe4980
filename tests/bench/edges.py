"""A plain DataLoader and ours at extremes of size, speed and number: ``python -m tests.bench --only edges``.

Each line is a ratio to a plain DataLoader that makes the same batches, given as its batch sampler. Both run in turn in one
process, a few times each, with the same functions to read and collate. What differs is the loaders themselves.
"""

from __future__ import annotations

import os
import time
from argparse import Namespace
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any, Final, cast

import torch
from torch.utils.data import DataLoader, Dataset

from odb_ref import Batching
from tests.bench.launch import find_descendants, launch
from tests.bench.report import Spread, compute_ratios, has_failures, print_table, say

Spec = dict[str, Any]
Sample = dict[str, Any]

LIMIT_S: Final = 300.0
EPOCH_S: Final = 0.5
SETTLED_S: Final = 1.0
"""The time after which a loader is judged if it first has to adapt."""
MANY: Final = 10_000_000
KEEP: Final = {"MALLOC_TRIM_THRESHOLD_": str(2**32), "MALLOC_MMAP_THRESHOLD_": str(2**30)}
"""Otherwise a window of large samples returns its memory to the system, and the next window starts from new pages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Edge:
    """A data set, a loader's settings, and a goal."""

    title: str
    samples: int
    goal: float
    """Ours divided by plain, in samples per second, or in the time to the first step if ``unit`` is "first"."""
    unit: str = "rate"
    workers: int = 0
    group: int = 16
    """The number of samples that fit into a batch."""
    window: int = 1024
    updates: int | None = None
    """The number of samples in an update. None is free mode, which reads a whole window before the first step."""
    nbytes: int = 0
    """The bytes of a large tensor in each sample."""
    read_s: float = 0.0
    collate_s: float = 0.0
    repetitions: int = 5
    keeps_memory: bool = False
    """True if the C library should keep freed memory, see `KEEP`."""


def _list_edges() -> dict[str, Edge]:
    edges = {"tiny": Edge(title="tiny samples", samples=20_000, group=64, goal=0.3)}
    short = Edge(title="short epoch", samples=200, goal=2.0, unit="first", read_s=2e-4)
    large = Edge(title="samples of 3 MB", samples=256, goal=0.5, group=8, window=64, nbytes=3 * 2**20)
    half = Edge(title=f"epochs of {EPOCH_S:g} s", samples=1000, goal=0.95, workers=2, read_s=1e-3, repetitions=9)
    modes = {"free mode": None, "updates of 32": 32}
    for workers in (0, 2):
        told = f"{workers} workers" if workers else "no workers"
        for name, updates in modes.items():
            title = f"{short.title}, {name}, {told}"
            edges[f"short {name} {workers}"] = replace(short, title=title, workers=workers, updates=updates)
        for unit, goal in (("rate", 0.7 if workers else 0.5), ("first", 2.0)):
            title = f"{large.title}, {told}"
            edges[f"large {workers} {unit}"] = replace(large, title=title, goal=goal, unit=unit, workers=workers)
    edges["large 0 kept"] = replace(large, title=f"{large.title}, no workers, memory kept", keeps_memory=True)
    slow = Edge(
        title="collate_fn of 15 ms", samples=8000, goal=0.95, unit="settled", group=8, workers=4, collate_s=0.015
    )
    edges["slow collate"] = replace(slow, title=f"{slow.title}, 4 workers, after {SETTLED_S:g} s", repetitions=3)
    for name, updates in modes.items():
        edges[f"half a second {name}"] = replace(half, title=f"{half.title}, {name}, 2 workers", updates=updates)
    return edges


EDGES: Final = _list_edges()


# In a process of its own -------------------------------------------------------------------------------------------------


class Samples(Dataset[Sample]):
    """Samples of four tokens, made beforehand. Each may take time to read, or hold a large tensor, made when it is read."""

    def __init__(self, edge: Edge) -> None:
        self._edge = edge
        self._samples = [{"input_ids": torch.full((4,), number)} for number in range(edge.samples)]

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int) -> Sample:
        sample, edge = self._samples[index], self._edge
        if edge.read_s:
            time.sleep(edge.read_s)
        if edge.nbytes:
            return sample | {"pixels": torch.full((edge.nbytes // 4,), float(index))}
        return sample


@dataclass(frozen=True, slots=True)
class Stack:
    """Collates by stacking each field, and takes its time."""

    seconds: float = 0.0

    def __call__(self, samples: list[Sample]) -> Sample:
        if self.seconds:
            time.sleep(self.seconds)
        return {name: torch.stack([sample[name] for sample in samples]) for name in samples[0]}


def _make_ours(edge: Edge, dataset: Dataset[Sample]) -> Any:
    from odb_ref.torch import ODBDataLoader

    return ODBDataLoader(
        dataset,
        token_budget=4 * edge.group,
        num_workers=edge.workers,
        collate_fn=Stack(edge.collate_s),
        shuffle=True,
        batching=Batching(window=edge.window),
        update_samples=edge.updates,
    )


def _list_batches(edge: Edge) -> list[list[int]]:
    """Returns the samples of each of our batches, in order."""
    quick = replace(edge, workers=0, nbytes=0, read_s=0, collate_s=0)
    with _make_ours(quick, Samples(quick)) as loader:
        return [batch["input_ids"][:, 0].tolist() for batch in loader]


def _take_times(batches: Iterator[Sample], began_s: float) -> list[float]:
    """Returns when each batch came, in seconds since the start."""
    times = []
    for batch in batches:
        float(batch["input_ids"][0, 0])
        times.append(time.monotonic() - began_s)
    return times


def edge(spec: Spec, rank: int, ranks: int) -> Spec:
    """Runs both in turn, and returns the figure of each for each repetition."""
    what = EDGES[spec["edge"]]
    dataset, batches = Samples(what), _list_batches(what)
    plain: DataLoader[Sample] = DataLoader(
        dataset, batch_sampler=cast(Any, batches), num_workers=what.workers, collate_fn=Stack(what.collate_s)
    )
    found: dict[str, list[float]] = {"plain": [], "ours": []}
    with _make_ours(what, dataset) as ours:
        for _ in range(spec["repetitions"] or what.repetitions):
            for kind, loader in (("plain", plain), ("ours", ours)):
                if kind == "ours":
                    ours.set_epoch(0)
                began_s = time.monotonic()
                times = _take_times(iter(loader), began_s)
                if len(times) != len(batches):
                    raise RuntimeError(f"{len(times)} batches of {len(batches)}")
                found[kind].append(_compute_figure(what, times, time.monotonic() - began_s))
    return found


def _compute_figure(edge: Edge, times: Sequence[float], seconds: float) -> float:
    match edge.unit:
        case "first":
            return times[0]
        case "settled":
            settled = [at for at in times if at > SETTLED_S]
            return (len(settled) - 1) / (settled[-1] - settled[0])
        case _:
            return edge.samples / seconds


class Many(Dataset[Sample]):
    """Ten million samples that take no memory."""

    def __len__(self) -> int:
        return MANY

    def __getitem__(self, index: int) -> Sample:
        return {"input_ids": torch.full((4,), index)}


def memory(spec: Spec, rank: int, ranks: int) -> Spec:
    """Returns the peak memory in MB that the process and its children added during the first steps of an epoch, and the time
    to the first step.
    """
    dataset, workers = Many(), spec["workers"]
    if spec["kind"] == "plain":
        loader: Any = DataLoader(dataset, 64, shuffle=True, num_workers=workers, collate_fn=Stack())
    else:
        loader = _make_ours(Edge(title="", samples=MANY, goal=0, group=64, workers=workers), dataset)
    before = _read_memory()
    began_s = time.monotonic()
    batches = iter(loader)
    next(batches)
    first_s = time.monotonic() - began_s
    most = _read_memory()
    for _ in range(20):
        next(batches)
        most = max(most, _read_memory())
    if spec["kind"] != "plain":
        loader.close()
    return {"MB": most - before, "first_s": first_s}


def _read_memory() -> float:
    """Returns the megabytes that this process and its children use, with shared pages divided among their users."""
    total = 0
    for pid in (os.getpid(), *find_descendants(os.getpid())):
        try:
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        except OSError:
            continue
        total += sum(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
    return total / 1024


# The tables --------------------------------------------------------------------------------------------------------------


def run(options: Namespace) -> bool:
    """Prints two tables. Returns False if a job failed. A figure below its goal is not counted, as machines are busy."""
    found: Spec = {}
    for name in options.edge or EDGES:
        say(f"edges: {name}")
        spec, environment = {"edge": name, "repetitions": options.repetitions}, KEEP if EDGES[name].keeps_memory else {}
        (result,) = launch("edge", spec, limit_s=LIMIT_S, environment=environment)
        found[name] = result.found
    memories: dict[tuple[int, str], Spec] = {}
    for workers, kind in () if options.edge else product((0, 2), ("plain", "ours")):
        say(f"edges: memory, {kind}, {workers} workers")
        (result,) = launch("memory", {"kind": kind, "workers": workers}, limit_s=LIMIT_S)
        memories[workers, kind] = result.found
    if has_failures((*found.values(), *memories.values())):
        return False
    rows = []
    for name, item in found.items():
        edge, is_first = EDGES[name], EDGES[name].unit == "first"
        what, goal = ("first step after", "at most") if is_first else ("samples/s", "at least")
        ratio = compute_ratios(item["ours"], item["plain"])
        rows.append([edge.title, what, Spread.of(item["plain"]), ratio, f"{goal} {edge.goal:g}"])
    print_table(
        "At the edges: ours to a plain DataLoader of the same batches",
        ["", "what", "plain (s, 1/s)", "ratio: median (least to greatest)", "goal"],
        rows,
    )
    rows = []
    for workers in sorted({workers for workers, _ in memories}):
        plain, ours = memories[workers, "plain"], memories[workers, "ours"]
        taken = [f"{megabytes:.0f}" for megabytes in (plain["MB"], ours["MB"], ours["MB"] - plain["MB"])]
        rows.append([workers, *taken, "below 200", *(f"{item['first_s']:.2f}" for item in (plain, ours))])
    if rows:
        print_table(
            f"A map-style data set of {MANY:,} samples, shuffled: memory that its epoch takes, children included (MB)",
            ["workers", "plain", "ours", "over plain", "goal", "first step (s), plain", "ours"],
            rows,
        )
    return True
