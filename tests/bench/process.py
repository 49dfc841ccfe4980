"""The cost of the loader to the training process: ``python -m tests.bench --only process``.

A step is emulated. Half of it is Python that holds the interpreter lock, as when launching kernels, and half waits without
the lock, as for an accelerator. While a thread that never blocks runs Python, it is on a processor, or ready without one
(the kernel counts that), or without the lock, so the rest of the wall time is the wait for the lock. Two controls test the
measure: no other thread, and another thread that runs Python all the time.
"""

from __future__ import annotations

import gc
import threading
import time
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass
from itertools import cycle, islice, product
from pathlib import Path
from typing import Any, Final

import torch.distributed as dist
from torch.utils.data import DataLoader

from odb_ref import Batching
from tests.bench.data import Texts, collate, compute_shards
from tests.bench.launch import launch
from tests.bench.report import Spread, has_failures, print_table, say
from tests.helpers.options import nested

Spec = dict[str, Any]

TRACE: Final = "mm_mix_real"
BUDGET_TOKENS: Final = 8192
WORKERS: Final = 2
STEP_S: Final = 0.05
PYTHON_SHARE: Final = 0.5
SAMPLES_PER_RANK: Final = 1500
STEPS: Final = 120
"""The most steps taken. Large windows need shards that hold more."""
SLOW_SAMPLE_S: Final = 0.004
"""The time to make a sample when the first step is timed, like a short tokenization."""
RAMPS: Final = (0, 3, 4)
LIMIT_S: Final = 120.0


# In a rank ---------------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Clock:
    """How the calling thread spends its wall time, summed over the stretches between `start` and `stop`, in seconds."""

    wall_s: float = 0.0
    cpu_s: float = 0.0
    queued_s: float = 0.0
    """Time ready to run, but without a processor."""
    longest_s: float = 0.0
    """The longest wait for the lock in a stretch."""
    _before_s: float = 0.0

    def start(self) -> None:
        self._before_s = self.wall_s - self.cpu_s - self.queued_s
        self.wall_s -= time.monotonic()
        self.cpu_s -= time.thread_time()
        self.queued_s -= _read_schedstat(Path("/proc/thread-self/schedstat"))[1]

    def stop(self) -> None:
        """Ends the stretch. Reading the file releases the lock for a moment. The wait to get it back counts, as it should."""
        self.queued_s += _read_schedstat(Path("/proc/thread-self/schedstat"))[1]
        self.cpu_s += time.thread_time()
        self.wall_s += time.monotonic()
        self.longest_s = max(self.longest_s, self.wall_s - self.cpu_s - self.queued_s - self._before_s)

    def describe(self) -> Spec:
        """Returns its figures. Who neither runs nor waits for a processor, and never blocks, waits for the lock."""
        blocked_s = max(0.0, self.wall_s - self.cpu_s - self.queued_s)
        return {"lock_wait_s": blocked_s, "longest_s": self.longest_s, "python_s": self.wall_s}


def _read_schedstat(path: Path) -> tuple[float, float]:
    """Returns the seconds on a processor, and the seconds waiting for one."""
    on_cpu, queued, _ = path.read_text().split()
    return int(on_cpu) / 1e9, int(queued) / 1e9


def _spin(turns: int) -> int:
    total = 0
    for turn in range(turns):
        total += turn & 7
    return total


def _calibrate(seconds: float) -> int:
    """Returns the number of turns of `_spin` that take ``seconds`` of processor time."""
    _spin(20_000)
    began = time.thread_time()
    _spin(200_000)
    return round(200_000 * seconds / (time.thread_time() - began))


def _read_threads() -> dict[str, float]:
    """Returns the processor seconds of the loader's threads in this process, by name."""
    found: dict[str, float] = {}
    for thread in threading.enumerate():
        if thread.name.startswith("odb-"):
            try:
                on_cpu, _ = _read_schedstat(Path(f"/proc/self/task/{thread.native_id}/schedstat"))
            except OSError:
                continue
            found[thread.name] = found.get(thread.name, 0.0) + on_cpu
    return found


def _train(turns: int, clock: Clock) -> None:
    clock.start()
    _spin(turns)
    clock.stop()
    time.sleep(STEP_S * (1 - PYTHON_SHARE))
    if dist.is_initialized():
        dist.barrier()  # like a model's collective: here a faster rank waits for a slower one, not for data


def busy(spec: Spec, rank: int, ranks: int) -> Spec:
    """Runs an epoch of emulated steps, and measures from its second step to its last."""
    turns = _calibrate(STEP_S * PYTHON_SHARE)
    if "control" in spec:
        return _control(spec["control"], turns)
    from odb_ref.torch import ODBDataLoader

    samples = max(SAMPLES_PER_RANK, 2 * spec["window"])
    lengths = tuple(islice(cycle(compute_shards(TRACE, [SAMPLES_PER_RANK] * ranks)[rank]), samples))
    clock, asking_cpu_s = Clock(), 0.0
    steps, first_round, round_ = 0, 0, 0
    with ODBDataLoader(
        Texts(lengths, rank * samples),
        token_budget=BUDGET_TOKENS,
        num_workers=spec["workers"],
        collate_fn=collate,
        shard="given",
        batching=Batching(window=spec["window"]),
    ) as loader:
        steps_of_loader = loader.steps()
        first_round = next(steps_of_loader)[1].round
        # Otherwise the next collection would spend a tenth of a second on objects that the imports left.
        gc.collect()
        threads_before, waited_before = _read_threads(), loader.metrics()["odb/data_wait_s"]
        threads = dict(threads_before)
        began = time.monotonic()
        while steps < STEPS:
            asking_cpu_s -= time.thread_time()
            step = next(steps_of_loader, None)
            asking_cpu_s += time.thread_time()
            if step is None:
                break
            round_ = step[1].round
            _train(turns, clock)
            steps += 1
            threads |= _read_threads()
        seconds = time.monotonic() - began
        waited_s = loader.metrics()["odb/data_wait_s"] - waited_before
    return clock.describe() | {
        "seconds": seconds,
        "steps": steps,
        "rounds": round_ - first_round,
        "data_wait_s": waited_s,
        "asking_cpu_s": asking_cpu_s,
        "threads": {name: seconds - threads_before.get(name, 0.0) for name, seconds in threads.items()},
    }


def _control(kind: str, turns: int) -> Spec:
    """Runs the same steps without a loader, with ``kind`` "rival" beside a thread that runs Python all the time."""
    is_over = threading.Event()

    def rival() -> None:
        while not is_over.is_set():
            _spin(10_000)

    if kind == "rival":
        threading.Thread(target=rival, daemon=True).start()
    clock, steps = Clock(), 40
    began = time.monotonic()
    for _ in range(steps):
        _train(turns, clock)
    seconds = time.monotonic() - began
    is_over.set()
    return clock.describe() | {"seconds": seconds, "steps": steps}


def first(spec: Spec, rank: int, ranks: int) -> Spec:
    """Returns the seconds to the first step, or with ``kind`` "fill" until a plain DataLoader has read a window."""
    lengths = compute_shards(TRACE, [SAMPLES_PER_RANK] * ranks)[rank]
    dataset = Texts(lengths, rank * SAMPLES_PER_RANK, read_s=SLOW_SAMPLE_S)
    workers, window = spec["workers"], spec["window"]
    if spec["kind"] == "fill":
        began = time.monotonic()
        read = 0
        for batch in DataLoader(dataset, batch_size=8, num_workers=workers, collate_fn=collate):
            read += len(batch["number"])
            if read >= window:
                break
        return {"first_s": time.monotonic() - began}
    from odb_ref.torch import ODBDataLoader

    options = {"window": window, "num_workers": workers, "collate_fn": collate, "shard": "given"}
    with ODBDataLoader(dataset, token_budget=BUDGET_TOKENS, **nested(**options, **spec["options"])) as loader:
        for _ in loader:
            break
        return {"first_s": loader.metrics()["odb/first_step_s"]}


# The tables --------------------------------------------------------------------------------------------------------------


def _measure(job: str, title: str, spec: Spec, ranks: int = 2) -> list[Spec]:
    say(f"training process, {title}")
    return [rank.found for rank in launch(job, spec, ranks=ranks, limit_s=LIMIT_S)]


def run(_options: Namespace) -> bool:
    """Prints all figures on two ranks: by window and number of workers, the controls, and the first step. Returns False if a
    job failed.
    """
    controls = {
        title: _measure("busy", title, {"control": kind}, ranks=1)
        for title, kind in (("control: no other thread", "alone"), ("control: a thread that runs Python", "rival"))
    }
    found = {
        title: _measure("busy", title, {"window": window, "workers": workers})
        for window, workers in product((256, 1024, 8192), (WORKERS, 0))
        for title in [f"window {window}, {workers} workers"]
    }
    starts: dict[str, Spec] = {
        "a plain DataLoader has read a window of samples": {"kind": "fill"},
        "first step, as it is set": {"kind": "ours", "options": {}},
    } | {f"first step, ramp_rounds={rounds}": {"kind": "ours", "options": {"ramp_rounds": rounds}} for rounds in RAMPS}
    begun = {
        title: _measure("first", title, {"window": 1024, "workers": WORKERS, **spec}) for title, spec in starts.items()
    }
    if has_failures(item for part in (controls, found, begun) for runs in part.values() for item in runs):
        return False
    print_table(
        f"The process that trains, 2 ranks, steps of {STEP_S * 1000:g} ms, half of it Python: shares of the wall time "
        "(mean of ranks)",
        ["", "steps", "waits for the lock", "of its Python time", "longest (ms)", "waits for data"],
        [[title, *_show_shares(runs)] for title, runs in (controls | found).items()],
    )
    print_table(
        "Processor time of the loader in the process that trains: at most what it holds the lock for (us, mean of ranks)",
        ["", "threads, a round", "threads, a step", "next(), a step", f"share of a {STEP_S * 1000:g} ms step"],
        [[title, *_show_costs(runs)] for title, runs in found.items()],
    )
    print_table(
        f"The first step: window 1,024, {SLOW_SAMPLE_S * 1000:g} ms a sample, {WORKERS} workers (s, of 2 ranks)",
        ["", "seconds"],
        [[title, Spread.of(item["first_s"] for item in runs)] for title, runs in begun.items()],
    )
    return True


def _mean(runs: list[Spec], compute: Callable[[Spec], float]) -> float:
    return sum(map(compute, runs)) / len(runs)


def _show_shares(runs: list[Spec]) -> list[object]:
    lock = _mean(runs, lambda item: item["lock_wait_s"] / item["seconds"])
    python = _mean(runs, lambda item: item["lock_wait_s"] / item["python_s"])
    longest_s = _mean(runs, lambda item: item["longest_s"])
    has_loader = "data_wait_s" in runs[0]
    data = f"{_mean(runs, lambda item: item['data_wait_s'] / item['seconds']):.2%}" if has_loader else None
    return [runs[0]["steps"], f"{lock:.2%}", f"{python:.2%}", f"{longest_s * 1e3:.1f}", data]


def _show_costs(runs: list[Spec]) -> list[str]:
    by_round = _mean(runs, lambda item: sum(item["threads"].values()) / max(1, item["rounds"]))
    by_step = _mean(runs, lambda item: sum(item["threads"].values()) / item["steps"])
    asking = _mean(runs, lambda item: item["asking_cpu_s"] / item["steps"])
    return [*(f"{cost_s * 1e6:,.0f}" for cost_s in (by_round, by_step, asking)), f"{(by_step + asking) / STEP_S:.2%}"]
