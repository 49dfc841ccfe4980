"""What works with a plain DataLoader works here too, or an error says what to pass."""

from __future__ import annotations

import sqlite3
import threading
from collections import OrderedDict, UserDict, UserList
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch
from torch.utils.data import Dataset, get_worker_info

from odb_ref.torch.reading.collator import pin
from tests.torch.data import Numbers, count_idle, make_loader, make_sample, read_numbers, take, take_apart
from tests.torch.ranks import check_errors, get_values, run_each, run_ranks
from tests.torch.states import check_fails

COUNT = 20


class Pinned:
    """Something that can be pinned."""

    def __init__(self, is_pinned: bool = False) -> None:
        self.is_pinned = is_pinned

    def pin_memory(self) -> Pinned:
        return Pinned(True)


class Pair(NamedTuple):
    """A batch with names."""

    inputs: Any
    extra: Any


class Batch(UserDict[str, Any]):
    """A mapping with more than its items, such as a BatchEncoding."""

    encodings = "kept"


def test_containers_of_every_kind_are_pinned_and_stay_what_they_are() -> None:
    batch = Batch(a=Pinned(), b=[Pinned(), "text", 3], c=(Pinned(), None), d=Pair(Pinned(), b"bytes"))
    batch.encodings = "own"
    batch["e"] = OrderedDict(x=MappingProxyType({"y": Pinned()}))
    batch["f"] = UserList([Pinned()])
    batch["g"] = range(3)
    found: Any = pin(batch)
    assert type(found) is Batch and found.encodings == "own"
    assert type(found["d"]) is Pair and found["d"].extra == b"bytes"
    assert type(found["e"]) is OrderedDict and type(found["f"]) is UserList
    assert type(found["c"]) is tuple and found["b"][1:] == ["text", 3] and list(found["g"]) == [0, 1, 2]
    parts = [found["a"], found["b"][0], found["c"][0], found["d"].inputs, found["e"]["x"]["y"], found["f"][0]]
    assert all(part.is_pinned for part in parts)
    assert not batch["a"].is_pinned and not batch["b"][0].is_pinned


@pytest.mark.skipif(torch.accelerator.is_available(), reason="there is an accelerator to pin for")
@pytest.mark.parametrize("num_workers", [0, 1])
def test_without_an_accelerator_nothing_is_pinned_and_that_is_said(num_workers: int) -> None:
    with pytest.warns(UserWarning, match="no accelerator to pin memory for"):
        loader = make_loader(Numbers(0, COUNT), pin_memory=True, num_workers=num_workers)
    assert sorted(take(loader)) == list(range(COUNT))


class Rows(Dataset[Any]):
    """Rows of a table, read over a connection made here. SQLite lets no other thread use it."""

    def __init__(self, path: Path) -> None:
        self.table = sqlite3.connect(path)

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> Any:
        ((number,),) = self.table.execute("select number from samples where number = ?", (index,))
        return make_sample(number)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_connection_that_belongs_to_one_thread_can_be_read_from(tmp_path: Path, num_workers: int) -> None:
    path = tmp_path / "samples.db"
    with sqlite3.connect(path) as table:
        table.execute("create table samples (number integer)")
        table.executemany("insert into samples values (?)", [(number,) for number in range(COUNT)])
    context = "fork" if num_workers else None
    with make_loader(Rows(path), num_workers=num_workers, multiprocessing_context=context) as loader:
        for _ in range(2):
            assert sorted(read_numbers(loader)) == list(range(COUNT))


class Locked(Numbers):
    """Samples that can be neither copied nor pickled."""

    def __getitem__(self, index: int) -> Any:
        return super().__getitem__(index) | {"lock": threading.Lock()}


def test_samples_that_cannot_be_copied_are_read_again_for_idle_steps() -> None:
    sizes = [COUNT, 3]
    values = get_values(run_ranks(2, lambda rank: take(make_loader(Locked(100 * rank, sizes[rank]), shard="given"))))
    assert sorted(values[0] + values[1]) == [*range(COUNT), 100, 101, 102]


def test_samples_that_cannot_be_sent_are_an_error_that_says_so() -> None:
    said = r"a sample cannot be sent .*cannot pickle '_thread.lock'.*use num_workers=0"
    check_fails(make_loader(Locked(0, COUNT), num_workers=1), said)


def test_a_function_that_cannot_be_sent_to_a_process_is_an_error_that_says_what_to_do() -> None:
    said = r"cannot be sent to another process: Can't .*lambda.*or pass multiprocessing_context='fork'"
    options = {"num_workers": 1, "multiprocessing_context": "spawn", "collate_fn": lambda samples: samples}
    check_fails(make_loader(**options), said)


class OpenedLate(Numbers):
    """Opens something for each worker separately."""

    def __getitem__(self, index: int) -> Any:
        assert get_worker_info() is not None, "no file is open"
        return super().__getitem__(index)


def read_late(rank: int, kind: str, options: dict[str, Any]) -> int:
    by_name: Any = {f"sample {number}": make_sample(number) for number in range(COUNT)}
    data, keys = (by_name, list(by_name)) if kind == "keyed" else (OpenedLate(0, COUNT), range(COUNT))
    loader = make_loader(data, sampler=[] if rank else keys, num_workers=int(kind == "late"), **options)
    return take(loader, count_idle)


def test_where_the_first_sample_cannot_be_read_an_idle_rank_says_what_to_pass() -> None:
    given = {"idle_sample": make_sample(3)}
    found = run_each(2, read_late, [(kind, options) for options in ({}, given) for kind in ("keyed", "late")])
    for unsaid, said in zip(found[:2], found[2:], strict=True):
        texts = "pass Protocol(idle_sample=) or on_idle='none'", "cannot read the data set's first sample"
        check_errors(unsaid, *texts, rank=1)
        assert get_values(said)[1] > 0


def read_idle(rank: int, num_workers: int) -> int:
    options = {"collate_fn": take_apart, "idle_sample": make_sample(3), "num_workers": num_workers}
    return take(make_loader(Numbers(0, 0 if rank else COUNT), shard="given", **options), count_idle)


def test_an_idle_sample_is_as_it_was_in_every_idle_step() -> None:
    for results in run_each(2, read_idle, [(0,), (1,)]):
        assert get_values(results)[1] > 1
