"""Data sets of known content for the adapter's tests."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import random
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset, IterableDataset

from odb_ref.torch import ODBDataLoader
from tests.helpers.options import nested


def make_sample(number: int, longest: int = 30) -> dict[str, Any]:
    """Returns a sample whose content, length and mask are functions of its number."""
    choose = random.Random(number)
    length = choose.randint(2, longest)
    ids = torch.tensor([choose.randint(1, 31) for _ in range(length)])
    labels = ids.clone()
    labels[: choose.randint(0, length - 1)] = -100
    return {"number": number, "input_ids": ids, "labels": labels}


class Numbers(Dataset[Any]):
    """Samples ``start`` to ``start + count``. Those at ``bad``, one index in the data set or several, misbehave.

    ``fault`` describes how, or is a function of the index that misbehaves, or returns the description.
    """

    def __init__(
        self,
        start: int,
        count: int,
        *,
        bad: int | Collection[int] | None = None,
        fault: str | Callable[[int], str | None] = "",
        delay_s: float = 0.0,
    ) -> None:
        self.start, self.count = start, count
        self.bad = (bad,) if isinstance(bad, int) else tuple(bad or ())
        self.fault, self.delay_s = fault, delay_s

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Any:
        if self.delay_s:
            time.sleep(self.delay_s)
        sample = make_sample(self.start + index)
        if index not in self.bad:
            return sample
        match self.fault(index) if callable(self.fault) else self.fault:
            case "raise":
                raise ValueError(f"bad row {index}")
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "slow":
                time.sleep(3)
            case "block":  # as on a network mount that has gone away
                threading.Event().wait()
            case "empty":
                sample["input_ids"] = sample["input_ids"][:0]
            case "no_ids":
                del sample["input_ids"]
            case "labels":
                sample["labels"] = {"boxes": [7]}
            case "long":
                sample["input_ids"] = torch.arange(1, 1001)
                sample["labels"] = torch.arange(1, 1001)
            case fault if fault:
                go_wrong(fault)
        return sample


class AtOnce(Numbers):
    """Samples that can be read several at once. Counts how often they are."""

    calls = 0

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        self.calls += 1
        return [self[index] for index in indices]


class Prompts(Numbers):
    """Samples of which all, the odd ones or none lack supervised tokens."""

    def __init__(self, start: int, count: int, masked: str) -> None:
        super().__init__(start, count)
        self.masked = masked

    def __getitem__(self, index: int) -> Any:
        sample = super().__getitem__(index)
        if self.masked == "all" or (self.masked == "odd" and sample["number"] % 2):
            sample["labels"] = torch.full_like(sample["labels"], -100)
        return sample


class Panic(BaseException):
    """Like pyo3's PanicException, it is not an Exception."""


class Unspeakable(Exception):
    """It can be neither printed nor pickled."""

    def __str__(self) -> str:
        raise Panic("no text")

    def __reduce__(self) -> Any:
        raise SystemExit(4)


def go_wrong(error: str) -> None:
    """Raises the error, or ends the process."""
    match error:
        case "SystemExit":
            sys.exit(3)
        case "exit":
            sys.exit(0)
        case "os._exit":
            os._exit(0)
        case "Panic":
            raise Panic("it panicked")
        case "KeyboardInterrupt":
            raise KeyboardInterrupt
        case "Unspeakable":
            raise Unspeakable
        case "StopIteration":
            raise StopIteration
        case "MemoryError":
            raise MemoryError("no memory")
        case _:
            raise ValueError("bad row")


class Stream(IterableDataset[Any]):
    """The same samples, one after another. Each worker reads its share."""

    def __init__(self, start: int, count: int, **faults: Any) -> None:
        self.start, self.count, self.faults = start, count, faults

    def __iter__(self) -> Iterator[Any]:
        worker = torch.utils.data.get_worker_info()
        first, step = (0, 1) if worker is None else (worker.id, worker.num_workers)
        samples = Numbers(self.start, self.count, **self.faults)
        for index in range(first, self.count, step):
            yield samples[index]


def draw() -> tuple[float, float, float]:
    """Draws a number from each generator that user code may use, as listed in R12."""
    return random.random(), float(np.random.rand()), float(torch.rand(()))


class Augmented(Numbers):
    """Samples that contain what they drew."""

    def __getitem__(self, index: int) -> Any:
        return super().__getitem__(index) | {"drawn": draw()}


class AugmentedStream(Stream):
    """The same samples, one after another."""

    def __iter__(self) -> Iterator[Any]:
        for sample in super().__iter__():
            yield sample | {"drawn": draw()}


def collate(samples: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "numbers": [sample["number"] for sample in samples],
        "input_ids": pad_sequence([sample["input_ids"] for sample in samples], batch_first=True),
        "labels": pad_sequence([sample["labels"] for sample in samples], batch_first=True, padding_value=-100),
    }


def take_apart(samples: list[dict[str, Any]]) -> dict[str, Any]:
    """A collate_fn that modifies its samples, but loses nothing."""
    batch = collate(samples)
    for sample in samples:
        sample.clear()
    return batch


def make_loader(data: Any = None, *, state: Any = None, **options: Any) -> ODBDataLoader:
    """Returns a loader of these samples, or of 40, in small batches unless ``options`` say otherwise.

    It goes on from a ``state``, or from a list of those of all ranks.
    """
    settings: dict[str, Any] = {"token_budget": 60, "window": 8, "collate_fn": collate, "timeout_s": 20}
    loader = ODBDataLoader(Numbers(0, 40) if data is None else data, **nested(**settings | options))
    if state:
        loader.load_state_dict(state)
    return loader


def read(loader: ODBDataLoader, limit: int | None = None) -> list[tuple[int, list[int], float]]:
    """Returns step number, sample numbers and loss scale of each step, for at most ``limit`` steps."""
    found: list[tuple[int, list[int], float]] = []
    if limit == 0:
        return found
    for batch, info in loader.steps():
        found.append((info.step, [] if info.is_idle else batch["numbers"], info.loss_scale))
        if len(found) == limit:
            break
    return found


def read_numbers(loader: ODBDataLoader) -> list[int]:
    """Returns the numbers of an epoch's samples in order, without replays."""
    return list_numbers(read(loader))


def list_numbers(*parts: Iterable[tuple[int, list[int], float]]) -> list[int]:
    """Returns the sample numbers of some steps, as `read` returns them."""
    return [number for steps in parts for _, numbers, _ in steps for number in numbers]


def count_samples(loader: ODBDataLoader) -> int:
    return sum(info.local_samples for _, info in loader.steps())


def count_idle(loader: ODBDataLoader) -> int:
    return sum(info.is_idle for _, info in loader.steps())


def take(loader: ODBDataLoader, read: Callable[..., Any] = read_numbers) -> Any:
    """Returns what is read of an epoch, and closes the loader."""
    with loader:
        return read(loader)


def save(loader: ODBDataLoader, limit: int | None = None, read: Callable[..., Any] = read) -> tuple[Any, Any]:
    """Returns ``limit`` steps, and the state after them as a file keeps it, and closes the loader."""
    with loader:
        return read(loader, limit), json.loads(json.dumps(loader.state_dict()))


@contextlib.contextmanager
def catch_texts() -> Iterator[list[str]]:
    """Yields a list to which all warnings are added at the end."""
    texts: list[str] = []
    with warnings.catch_warnings(record=True, action="always") as caught:
        yield texts
    texts += [str(item.message) for item in caught]


def listen(note: Callable[[str], object] = str) -> list[str]:
    """Returns a list to which everything is added that the library logs in this process from now on. ``note`` is told too."""
    lines: list[str] = []

    def emit(record: logging.LogRecord) -> None:
        lines.append(record.getMessage())
        note(lines[-1])

    handler = logging.Handler()
    handler.emit = emit  # type: ignore[method-assign]
    logging.getLogger("odb_ref").addHandler(handler)
    return lines


def check_goes_on(
    make: Callable[[], ODBDataLoader], limits: Iterable[int] | None, read: Callable[..., list[Any]] = read
) -> list[Any]:
    """Checks that an epoch saved after each of these steps, or after any, continues as without saving. Returns its steps."""
    whole = take(make(), read)
    for limit in range(1, len(whole) + 1) if limits is None else limits:
        before, state = save(make(), limit, read)
        with make() as loader:
            loader.load_state_dict(state)
            assert loader.state_dict() == state
            assert before + read(loader) == whole, limit
    return whole
