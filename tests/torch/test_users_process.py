"""What a user's own process does beside the loader: reused buffers, signals, forks."""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from odb_ref.torch import ODBDataLoader, UsageError
from odb_ref.torch.reading.collator import Made, OwnMemory
from tests.helpers.capture import capture
from tests.helpers.waiting import is_in_time
from tests.torch import data
from tests.torch.data import Numbers, take
from tests.torch.ranks import get_values, run_each, run_ranks

make_loader = partial(data.make_loader, Numbers(0, 120), window=16)
ARRAY = np.zeros(64, dtype=np.int64)
TENSOR = torch.zeros(64, dtype=torch.int64)
OBJECT: dict[str, Any] = {}
RING = [torch.zeros(64, dtype=torch.int64) for _ in range(3)]
VIEWS = list(torch.zeros(16, 64, dtype=torch.int64))
BY_SIZE: dict[Any, Any] = {}
BYTES = bytearray(512)
TURN = iter(range(10**6))


@dataclasses.dataclass(slots=True)
class Holder:
    numbers: Any
    other: Any = None


def fill(buffer: Any, samples: list[Any]) -> Any:
    for index, sample in enumerate(samples):
        buffer[index] = sample["number"]
    return buffer[: len(samples)]


def into_an_object(samples: list[Any]) -> Any:
    OBJECT["numbers"] = [sample["number"] for sample in samples]
    return OBJECT


def into_one_of_its_size(samples: list[Any]) -> Any:
    key = len(samples), max(len(sample["input_ids"]) for sample in samples)
    return fill(BY_SIZE.setdefault(key, torch.zeros(len(samples), dtype=torch.int64)), samples)


def into_lent_memory(samples: list[Any]) -> Any:
    return Holder(np.frombuffer(BYTES, dtype=np.int64)[: len(fill(np.frombuffer(BYTES, dtype=np.int64), samples))])


def get_numbers(batch: Any) -> list[int]:
    match batch:
        case Holder():
            return get_numbers(batch.numbers)
        case dict():
            return [int(number) for number in batch["numbers"]]
        case list():
            return get_numbers(batch[0])
        case _:
            return [int(number) for number in batch]


REUSES: dict[str, Callable[[list[Any]], Any]] = {
    "a tensor": lambda samples: {"numbers": fill(TENSOR, samples)},
    "an array": lambda samples: torch.from_numpy(fill(ARRAY, samples)),
    "an object": into_an_object,
    "a ring": lambda samples: [fill(RING[next(TURN) % 3], samples)],
    "memory without a name": lambda samples: fill(VIEWS[next(TURN) % len(VIEWS)], samples),
    "one of its size": into_one_of_its_size,
    "a buffer, later": lambda samples: fill(TENSOR if next(TURN) % 100 > 20 else torch.zeros_like(TENSOR), samples),
    "lent memory": into_lent_memory,
}


@pytest.mark.slow
@pytest.mark.parametrize("function", REUSES.values(), ids=[*REUSES])
@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_collate_fn_may_use_its_buffer_again(function: Callable[[list[Any]], Any], num_workers: int) -> None:
    """37 of 120 samples were silently lost before, and 19 repeated."""
    seen, steps = [], []
    options = {"num_workers": num_workers, "multiprocessing_context": "fork" if num_workers else None}
    with make_loader(collate_fn=function, loss_scaling="none", **options) as loader:
        for batch, info in loader.steps():
            seen += get_numbers(batch)
            steps.append((info.step, info.local_samples == len(get_numbers(batch))))
    assert sorted(seen) == list(range(120))
    assert steps == [(step, True) for step in range(len(steps))]


def into_what_cannot_be_copied(samples: list[Any]) -> Any:
    """Returns one object for all batches, which holds a lock."""
    LOCKED.numbers = [sample["number"] for sample in samples]
    return LOCKED


def into_an_alias(samples: list[Any]) -> Any:
    """Nothing shows that this memory belongs to another tensor until it comes a second time."""
    fill(TENSOR, samples)
    return TENSOR.data


LOCKED = Holder(None, threading.Lock())


def test_what_is_used_again_and_cannot_be_kept_is_refused_on_every_rank() -> None:
    """Most of an epoch's samples were lost before, and steps were told what belongs to others."""

    def read_reused(rank: int, function: Callable[[list[Any]], Any]) -> None:
        take(make_loader(collate_fn=function), list)

    locked, alias = run_each(2, read_reused, [(into_what_cannot_be_copied,), (into_an_alias,)])
    for results, message in (
        (locked, r"may reuse and that cannot be copied \(TypeError: .*lock"),
        (alias, "overwrites an earlier batch"),
    ):
        for result in results:
            assert (result.error, bool(re.search(message, result.text))) == ("JobError", True), result


def make_kinds() -> dict[str, Any]:
    tensor = torch.zeros(3)
    return {
        "own": [{"x": torch.zeros(3), "texts": ["a"] * 9}, (np.zeros(4), [[1, 2], [3]]), Holder(torch.zeros(2))],
        "copied": [{"x": TENSOR[:2]}, [torch.zeros(4)[1:]], Holder(ARRAY), torch.from_numpy(np.zeros(3)), [tensor] * 2],
    }


def test_what_nobody_else_holds_is_not_copied() -> None:
    own, made = OwnMemory(), [Made(batch) for batch in make_kinds()["own"]]
    assert all(own.keep(item) is item.batch for item in made)
    for item in [Made(batch) for batch in make_kinds()["copied"]]:
        assert own.keep(item) is not item.batch


def test_what_a_data_set_has_given_is_handed_on_as_it_is() -> None:
    """A DataLoader does so too. Copying took a hundred times as long as reading."""
    data = [{"x": TENSOR[:2], "texts": [["a"]]}, {"x": torch.zeros(4)[1:], "texts": [["b"]]}]
    whole: Any = OwnMemory().keep(Made(list(data)), data)
    assert all(left is right for left, right in zip(whole, data, strict=True))
    rows = [sample["x"] for sample in data]
    parts: Any = OwnMemory().keep(Made({"rows": list(rows), "buffer": TENSOR}), data)
    assert all(left is right for left, right in zip(parts["rows"], rows, strict=True))
    assert parts["buffer"] is not TENSOR


def test_a_copy_takes_what_is_shown_of_a_buffer_alone() -> None:
    made: Any = Made({"x": torch.zeros(10**6)[:2], "y": [torch.zeros(5)]})
    copied: Any = OwnMemory().keep(made)
    assert copied["x"].untyped_storage().nbytes() == 8
    assert copied["y"][0] is made.batch["y"][0]


@pytest.fixture
def signals() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGCHLD)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def find_loader_process() -> int:
    (process,) = (child for child in multiprocessing.active_children() if child.name == "odb-loader")
    assert process.pid is not None
    return process.pid


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"persistent_workers": True}, {"multiprocessing_context": "spawn"}], ids=str)
def test_handlers_of_signals_run_in_the_users_process_only(
    tmp_path: Path, signals: None, options: dict[str, Any]
) -> None:
    """A scheduler's signal to all processes of a job ended the loader process, and with it a job that handles the signal."""

    def note(number: int, frame: object) -> None:
        (tmp_path / f"{os.getpid()}-{number}").touch()

    with make_loader(num_workers=1, **options) as loader:
        if options.get("persistent_workers"):
            list(loader)  # the process exists before the handlers do
        for number in (signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, note)
        batches = iter(loader)
        seen = get_numbers(next(batches))
        for number in (signal.SIGTERM, signal.SIGUSR1):
            os.kill(os.getpid(), number)
            os.kill(find_loader_process(), number)
        for batch in batches:
            seen += get_numbers(batch)
    assert sorted(seen) == list(range(120))
    names = [f"{os.getpid()}-{number:d}" for number in (signal.SIGUSR1, signal.SIGTERM)]
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(names)


def test_a_signal_to_all_processes_that_the_user_handles_ends_none() -> None:
    def signal_all(rank: int) -> tuple[int, int]:
        handled = []
        signal.signal(signal.SIGUSR1, lambda *_: handled.append(os.getpid()))
        with make_loader(num_workers=2) as loader:
            batches = iter(loader)
            seen = len(get_numbers(next(batches)))
            os.killpg(os.getpgrp(), signal.SIGUSR1)
            return seen + sum(len(get_numbers(batch)) for batch in batches), len(handled)

    assert get_values(run_ranks(1, signal_all)) == [(120, 1)]


def test_a_signal_that_the_user_does_not_handle_ends_the_loader_process() -> None:
    with data.make_loader(Numbers(0, 2000), num_workers=1) as loader:
        batches = iter(loader)
        next(batches)
        os.kill(find_loader_process(), signal.SIGUSR1)
        with pytest.raises(Exception, match="the loader process exited unexpectedly"):
            list(batches)


def test_ignored_ends_of_children_keep_no_thread_busy() -> None:
    def read_with_ends_ignored(rank: int) -> bool:
        """Runs in a separate process, in which Python can never learn that its children have ended."""
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)
        assert sorted(take(make_loader(num_workers=1))) == list(range(120))
        return is_in_time(lambda: not any(thread.name == "odb-reap" for thread in threading.enumerate()))

    assert get_values(run_ranks(1, read_with_ends_ignored)) == [True]


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_forked_child_cannot_break_its_parents_job(num_workers: int) -> None:
    with make_loader(num_workers=num_workers) as loader:
        batches = iter(loader)
        seen = get_numbers(next(batches))
        if (child := os.fork()) == 0:
            code = 1
            try:
                for use in (partial(next, batches), partial(iter, loader)):
                    with pytest.raises(UsageError, match="belongs to process"):
                        use()
                loader.close()
                del batches
                code = 0
            finally:
                os._exit(code)
        assert os.waitpid(child, 0)[1] == 0
        for batch in batches:
            seen += get_numbers(batch)
    assert sorted(seen) == list(range(120))


def list_then_fill(samples: list[Any]) -> Any:
    return {"numbers": [sample["number"] for sample in samples], "filled": torch.ones(2)}


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_default_device_of_the_users_is_that_of_user_code_alone(num_workers: int) -> None:
    """Results on "meta" have no values, so neither an order, nor a seed, nor a sample would be known."""
    samples = [{"number": number, "input_ids": [1] * (1 + number % 7)} for number in range(24)]
    options = {"shuffle": True, "generator": torch.Generator(), "num_workers": num_workers}
    context = "fork" if num_workers else None  # other processes do not inherit the device
    with torch.device("meta"):
        loader = ODBDataLoader(
            samples, token_budget=30, collate_fn=list_then_fill, multiprocessing_context=context, **options
        )
        batches = [batch for batch, _ in loader.steps()]
    assert sorted(number for batch in batches for number in batch["numbers"]) == list(range(24))
    assert {batch["filled"].device.type for batch in batches} == {"meta"}


ENDING = """
import time, torch
from odb_ref.torch import ODBDataLoader
from odb_ref.torch.epoch.session import CLEANUP
from tests.torch.data import Numbers, collate

def free() -> None:
    end_s = time.monotonic() + 0.5
    while time.monotonic() < end_s:
        torch.empty(1)
    print("freed")

def fail() -> None:
    raise OSError("in the way")

for _ in (loader := ODBDataLoader(Numbers(0, 9), token_budget=60, collate_fn=collate)):
    pass
CLEANUP.submit(fail)  # which keeps nothing else from being done
CLEANUP.submit(free)
"""


def test_a_process_ends_well_though_tensors_are_still_being_freed() -> None:
    """The thread that tidies up frees what a loader held. Python stops threads when it ends, and one that frees a tensor would
    take the process with it, after all training."""
    command, folder = [sys.executable, "-W", "ignore", "-c", ENDING], Path(__file__).parents[2]
    done = capture(command, cwd=folder)
    assert (done.returncode, done.stdout) == (0, "freed\n"), done.stderr
