"""What goes wrong on one rank, and how long until every other knows: ``python -m tests.bench --only failures``.

Three ranks with two workers each, steps of 10 ms; rank 1 is where it happens. The clock runs from the moment of the fault
until the last surviving rank has raised; where a rank never starts, from the moment the others have. Left over is what each
surviving rank has more of, after its loader is closed, than after an epoch in which nothing went wrong, and which processes
and shared-memory files are there when all ranks have ended.
"""

from __future__ import annotations

import gc
import json
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import torch.distributed as dist

from tests.bench.data import BrokenCollate, Texts, collate, compute_shards
from tests.bench.launch import Rank, find_descendants, launch
from tests.bench.report import print_table
from tests.helpers.options import nested

Spec = dict[str, Any]

RANKS: Final = 3
CULPRIT: Final = 1
SHARD: Final = 400
FAULT_AT: Final = 150
"""The sample, or with ``step`` faults the step, at which it happens."""
STEP_S: Final = 0.01
TIMEOUT_S: Final = 5.0
"""The option ``timeout_s`` of the loaders: how long a rank that does not start is waited for."""
LIMIT_S: Final = 60.0
SETTLE_S: Final = 3.0


@dataclass(frozen=True, slots=True)
class Failure:
    """A fault, and what every surviving rank is to raise."""

    name: str
    title: str
    kind: str
    cause: str
    blamed: int | None = CULPRIT
    survivors: tuple[int, ...] = (0, 1, 2)
    limit_s: float = 5.0
    options: Spec = field(default_factory=dict)
    """Options of the loader of rank 1 that the other ranks do not have."""
    own: str = ""
    """What the rank raises where it happens, if it is not what the others raise."""


FAILURES: Final = (
    Failure("getitem", "__getitem__ raises", "getitem", f"ValueError: sample {FAULT_AT} is broken"),
    Failure("worker", "a worker is killed (SIGKILL)", "kill", "exited unexpectedly"),
    Failure("loader", "the loader process is killed (SIGKILL)", "step_loader", "loader process exited unexpectedly"),
    Failure("collate", "collate_fn raises", "collate", "cannot be collated"),
    Failure("no_ids", "a sample has no input_ids", "no_input_ids", "has no input_ids"),
    Failure("empty", "a sample is empty", "empty", "the length of a sample is 0"),
    Failure("long", "a sample is longer than the budget (no failure)", "long", "", blamed=None),
    Failure("length", "length_fn returns -3", "length", "the length of a sample is -3"),
    Failure("budget", "another budget", "config", "budget_tokens is 1000", options={"token_budget": 1000}),
    Failure("mode", "another mode", "config", "mode is 'quota'", options={"mode": "quota"}),
    Failure("seed", "another seed", "config", "seed is 4", options={"seed": 4, "shard": "auto"}),
    Failure("late", f"a rank never starts (timeout_s={TIMEOUT_S:g})", "never", "not every rank has started",
            survivors=(0, 2), limit_s=TIMEOUT_S + 3),
    Failure("killed", "a rank's process is killed (SIGKILL)", "step_kill", "its process is gone", survivors=(0, 2)),
    Failure("leaves", "a rank leaves the loop early", "step_break", "left the loop", own="nothing"),
    Failure("raises", "a rank's own code raises", "step_raise", "left the loop", own="KeyError"),
    Failure("interrupt", "Ctrl-C on one rank", "step_interrupt", "left the loop", own="KeyboardInterrupt"),
    Failure("interrupt_all", "Ctrl-C on all ranks", "all_interrupt", "", blamed=None, own="KeyboardInterrupt"),
)  # fmt: skip


# In a rank ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Marker:
    """Notes when something happened, in whichever process it happens; the clock is the machine's."""

    path: str

    def __call__(self) -> None:
        """Now is the moment, unless it was noted before."""
        try:
            with Path(self.path).open("x") as file:
                file.write(repr(time.monotonic()))
        except FileExistsError:
            return


class FaultyTexts(Texts):
    """Texts, one of which is not as it should be."""

    def __init__(self, lengths: list[int], first: int, kind: str, mark: Marker) -> None:
        known = {"getitem", "kill", "empty", "no_input_ids"}
        super().__init__(lengths, first, fault={"at": FAULT_AT, "kind": kind} if kind in known else None)
        if kind == "long":
            self.lengths[FAULT_AT] = 10_000
        self.mark = mark

    def __getitem__(self, index: int) -> Spec:
        if index == FAULT_AT:
            self.mark()
        return Texts.__getitem__(self, index)


class MarkedCollate(BrokenCollate):
    """Raises for the batch that holds a sample, and notes when."""

    def __init__(self, number: int, mark: Marker) -> None:
        super().__init__(number)
        self.mark = mark

    def __call__(self, samples: list[Spec]) -> Spec:
        if any(sample["number"] == self.number for sample in samples):
            self.mark()
        return super().__call__(samples)


@dataclass(frozen=True, slots=True)
class BadLength:
    """A length function that is wrong about one sample."""

    number: int

    def __call__(self, sample: Spec) -> int:
        return -3 if sample["number"] == self.number else len(sample["input_ids"])


def fail(spec: Spec, rank: int, ranks: int) -> Spec:
    """An epoch in which nothing goes wrong, then one in which something does; what this rank raised, when, and what is left."""
    from odb_ref.torch import ODBDataLoader

    signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background starts with Ctrl-C ignored
    mark = Marker(str(Path(spec["folder"]) / "moment"))
    lengths = compute_shards(spec["trace"], [SHARD] * ranks)[rank]
    first = rank * SHARD
    settings = {"token_budget": spec["budget"], "window": spec["window"], "num_workers": spec["workers"]}
    settings |= {"timeout_s": TIMEOUT_S, "shard": "given", "collate_fn": collate}
    with ODBDataLoader(Texts(lengths[:40], first), **nested(**settings)) as loader:
        for _ in loader:
            pass
    before = settle({})
    kind = spec["kind"] if rank == CULPRIT or spec["kind"].startswith("all_") else ""
    if (
        spec["kind"] == "length"
    ):  # on every rank, for ranks must agree on what counts a sample; only one holds this sample
        settings["length_fn"] = BadLength(CULPRIT * SHARD + FAULT_AT)
    if kind == "collate":
        settings["collate_fn"] = MarkedCollate(first + FAULT_AT, mark)
    if kind == "config":
        settings |= spec["options"]
    dist.barrier()
    if kind == "never":
        time.sleep(TIMEOUT_S + SETTLE_S)
        return {}
    started, error, blamed, steps = time.monotonic(), "", None, 0
    with ODBDataLoader(FaultyTexts(lengths, first, kind, mark), **nested(**settings)) as loader:
        try:
            for _ in loader:
                if steps == spec["at_step"] and not act(kind, mark):
                    break
                time.sleep(STEP_S)
                steps += 1
        except BaseException as raised:
            error, blamed = f"{type(raised).__name__}: {raised}"[:300], getattr(raised, "rank", None)
        ended = time.monotonic()
    closed = time.monotonic()
    del loader
    found = {"started": started, "ended": ended, "closed": closed, "error": error, "blamed": blamed, "steps": steps}
    after = settle(before)
    return found | {"left": {key: after[key] - before[key] for key in before}}


def act(kind: str, mark: Marker) -> bool:
    """What this rank does at the chosen step; False: it leaves the loop."""
    match kind:
        case "step_kill":
            mark()
            os.kill(os.getpid(), signal.SIGKILL)
        case "step_loader":
            mark()
            process = next(child for child in multiprocessing.active_children() if child.name == "odb-loader")
            process.kill()
        case "step_break":
            mark()
            return False
        case "step_raise":
            mark()
            raise KeyError("the trainer's own")
        case "step_interrupt" | "all_interrupt":
            mark()
            os.killpg(os.getpgrp(), signal.SIGINT)  # as a terminal does: workers are told too
    return True


def settle(limit: dict[str, int]) -> dict[str, int]:
    """What this process has, once it is no more than ``limit`` or nothing has changed for a while."""
    deadline = time.monotonic() + SETTLE_S
    while True:
        gc.collect()
        stock = {
            "processes": sum(1 for _ in find_descendants(os.getpid())),
            "threads": threading.active_count(),
            "descriptors": len(os.listdir("/proc/self/fd")),
        }
        is_settled = limit and all(stock[key] <= limit[key] for key in stock)
        if is_settled or time.monotonic() > deadline - (0 if limit else SETTLE_S - 1):
            return stock
        time.sleep(0.05)


# The table ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Finding:
    """What came of a failure."""

    is_right: bool
    raised: str
    seconds: float | None
    """From the fault until the last surviving rank had raised."""
    closed_s: float | None
    """Until the last of them had closed its loader."""
    left: str
    trouble: str = ""


def run_failure(failure: Failure) -> Finding:
    """Makes it happen, in processes started for it."""
    spec = {
        "trace": "mm_mix_real",
        "budget": 2048,
        "window": 32,
        "workers": 2,
        "kind": failure.kind,
        "options": failure.options,
        "at_step": 5,
    }
    ranks = launch("fail", spec, ranks=RANKS, limit_s=LIMIT_S, is_watched=True, kept=("moment",))
    return judge(failure, ranks)


def judge(failure: Failure, ranks: list[Rank]) -> Finding:
    """Right: all survivors raise the one error, which names rank and cause, in time, and leave nothing behind."""
    trouble = [f"rank {number} hangs" for number, rank in enumerate(ranks) if rank.is_hung]
    data = {number: ranks[number].data for number in failure.survivors}
    trouble += [f"rank {number}: {ranks[number].error or 'no result'}" for number, item in data.items() if not item]
    if trouble:
        return Finding(False, "-", None, None, "-", "; ".join(trouble))
    found = {number: item for number, item in data.items() if item}
    moment = ranks[0].kept.get("moment")
    began = json.loads(moment) if moment else max(item["started"] for item in found.values())
    told = {number: item for number, item in found.items() if not (failure.own and number == CULPRIT)}
    errors = {item["error"] for item in told.values()}
    seconds = max(item["ended"] for item in found.values()) - began
    checks: list[tuple[bool, Callable[[], str]]] = [
        (len(errors) == 1 or failure.name == "interrupt_all", lambda: f"different errors: {sorted(errors)}"),
        (all(failure.cause in error for error in errors), lambda: f"without the cause {failure.cause!r}"),
        ({item["blamed"] for item in told.values()} == {failure.blamed} or failure.name == "interrupt_all",
         lambda: f"blamed: {sorted(map(str, (item['blamed'] for item in told.values())))}"),
        (failure.kind != "long" or len({item["steps"] for item in found.values()}) == 1, lambda: "steps differ"),
        (failure.kind == "long" or all(error for error in errors), lambda: "no error"),
        (failure.kind == "long" or seconds <= failure.limit_s, lambda: f"later than {failure.limit_s:g} s"),
        (not failure.own or failure.own in (found[CULPRIT]["error"] or "nothing"), lambda: found[CULPRIT]["error"]),
    ]  # fmt: skip
    trouble += [tell() for is_right, tell in checks if not is_right]
    left, is_clean = _describe_left(list(found.values()), ranks)
    is_long = failure.kind == "long"
    raised = f"nothing: {next(iter(found.values()))['steps']} steps on every rank" if is_long else _show_errors(errors)
    closed_s = max(item["closed"] for item in found.values()) - began
    times = (None, None) if is_long else (seconds, closed_s)
    return Finding(not trouble and is_clean, raised, *times, left, "; ".join(trouble))


def _show_errors(errors: set[str]) -> str:
    return " | ".join(sorted(errors))


def _describe_left(found: list[Spec], ranks: list[Rank]) -> tuple[str, bool]:
    more = {key: max(item["left"][key] for item in found) for key in found[0]["left"]}
    after = {"processes": max(rank.left_processes for rank in ranks), "files": sum(rank.left_files for rank in ranks)}
    parts = [f"{count} {name}" for name, count in more.items() if count > 0]
    parts += [f"{count} {name} at the end" for name, count in after.items() if count > 0]
    return ", ".join(parts) or "nothing", not parts


def run_failures(names: list[str] | None, say: Callable[[str], None]) -> dict[str, Finding]:
    """All failures, or those of these names, one after the other."""
    found = {}
    for failure in FAILURES:
        if not names or failure.name in names:
            say(f"failure: {failure.title}")
            found[failure.name] = run_failure(failure)
    return found


def print_failures(found: dict[str, Finding]) -> None:
    """A row for each."""
    rows = []
    for failure in FAILURES:
        if failure.name in found:
            item = found[failure.name]
            times = ["-" if value is None else f"{value:.2f}" for value in (item.seconds, item.closed_s)]
            raised = item.raised if len(item.raised) <= 110 else item.raised[:107] + "..."
            rows.append([failure.title, *times, item.left, "" if item.is_right else f"WRONG {item.trouble}", raised])
    print_table(
        f"Failures on rank {CULPRIT} of {RANKS}, real processes over gloo, 2 workers each: seconds until the last survivor "
        "knew, and had closed its loader",
        ["", "knew", "closed", "left over", "", "what every surviving rank raised"],
        rows,
    )
