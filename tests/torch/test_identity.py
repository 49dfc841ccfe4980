"""Ranks in different loaders are told so, and a loader of an old process group reports what it is."""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.utils.data import Dataset, IterableDataset, Subset, TensorDataset

from odb_ref.torch import JobError, ODBDataLoader, UsageError
from odb_ref.torch.exchange.identity import is_same, list_facts
from tests.helpers.options import nested
from tests.torch.data import Numbers, collate, make_sample
from tests.torch.ranks import Result, check_errors, get_values, run_each, run_ranks

TIMEOUT_S = 6.0
SETTINGS: dict[str, Any] = {"token_budget": 60, "window": 8, "collate_fn": collate, "timeout_s": TIMEOUT_S}


def make(start: int = 0, count: int = 24, **options: Any) -> Any:
    return ODBDataLoader(Numbers(start, count), **nested(**(SETTINGS | options)))


def make_first(**options: Any) -> Any:
    return ODBDataLoader(Numbers(0, 24), **nested(**(SETTINGS | options)))


def make_second(**options: Any) -> Any:
    return ODBDataLoader(Numbers(100, 24), **nested(**(SETTINGS | options)))


def read(loader: Any) -> list[int]:
    return [number for batch, info in loader.steps() if not info.is_idle for number in batch["numbers"]]


def find_line(function: Callable[..., Any]) -> str:
    return f"test_identity.py:{function.__code__.co_firstlineno + 1}"


def check_named(results: list[Result], *texts: str) -> None:
    """Checks that every rank raised in time, with each of the texts in its message."""
    check_errors(results, "iterate over different loaders", *texts)
    assert max(result.seconds for result in results) < TIMEOUT_S, results


# Ranks in different loaders ----------------------------------------------------------------------------------------------


def cross(rank: int, is_crossing: bool) -> None:
    first = make_first(timeout_s=2)
    read(first)
    if is_crossing:
        read(first if rank == 0 else make_second(timeout_s=2))


def test_ranks_that_have_been_in_different_loaders_are_told_how_to_meet_again() -> None:
    crossed, later = run_each(2, cross, [(True,), (False,)])
    assert all(result.error == "JobError" for result in crossed)
    check_errors(later, "after ranks were in different loaders, make a new process group")


def begin_own(rank: int) -> None:
    loaders = [make_first(), make_second()]
    read(loaders[rank])


def begin_own_of_one_line(rank: int) -> None:
    """Otherwise step 0 would hold samples of both."""
    loaders = [make(start) for start in (0, 100)]
    read(loaders[rank])


def make_with_other_length(rank: int) -> None:
    read(make(0, 24 + rank))


def cross_groups(rank: int) -> None:
    groups = [dist.new_group([0, 1]), dist.new_group([0, 1])]
    loaders = [make(process_group=group) for group in groups]
    read(loaders[rank])


def cross_after_an_epoch(rank: int) -> None:
    """Each rank waits for the other in a loader that the other has not begun, which nothing else would ever end.

    Rank 0 notices, and closes the loader in which the other waits before the other has learned of it in the first.
    """
    loaders = [make_first(), make_second(timeout_s=10 * TIMEOUT_S)]
    for loader in loaders:
        read(loader)
    try:
        read(loaders[rank])
    finally:
        for loader in loaders:
            loader.close()


class Other(Numbers):
    pass


def read_other_type(rank: int, shard: str = "auto") -> list[int]:
    kind = [Numbers, Other][rank]
    return read(ODBDataLoader(kind(12 * rank, 12), **nested(shard=shard, **SETTINGS)))


class Elsewhere(Numbers):
    """Ranks declare that they read one data set, but hold different data."""

    def __init__(self, rank: int) -> None:
        super().__init__(0, 24)
        self.folder = f"/scratch/{rank}"


def read_local(rank: int, kind: Any = Elsewhere, name: str | None = None) -> list[int]:
    return read(ODBDataLoader(kind(rank), **nested(name=name, **SETTINGS)))


CROSSED: list[tuple[Callable[[int], Any], tuple[str, ...]]] = [
    # This case must be the first, because it begins loaders that the others declare to be the first of their lines.
    (cross_after_an_epoch, (find_line(make_first), find_line(make_second))),
    (begin_own, (find_line(make_first), find_line(make_second))),
    (begin_own_of_one_line, ("Numbers of 24 samples", "their data sets differ in start")),
    (make_with_other_length, ("Numbers of 24 samples", "Numbers of 25 samples")),
    (cross_groups, ("group 1", "group 2")),
    (read_other_type, ("Numbers of", "Other of", "type()")),
    (read_local, ("differ in folder", "pass Protocol(name=...)")),
]


def test_ranks_that_begin_different_loaders_name_both() -> None:
    """Spec: R18, R18.1, R18.2."""
    found = run_each(2, lambda rank, function: function(rank), [(function,) for function, _ in CROSSED])
    for (_, texts), results in zip(CROSSED, found, strict=True):
        check_named(results, *texts)


def test_a_rank_that_begins_a_new_loader_while_others_go_on_with_an_old_one_is_told() -> None:
    """A new one of the same line is another too."""

    def cross(rank: int, make_new: Callable[[], Any]) -> None:
        first = make_first()
        read(first)
        read(first if rank == 0 else make_new())

    check_named(run_ranks(3, cross, make_second), find_line(make_first), find_line(make_second))
    check_named(run_ranks(2, cross, make_first), find_line(make_first), "number 2 of these")


def test_ranks_that_begin_loaders_of_other_ranks_say_where_the_missing_one_waits() -> None:
    def overlap(rank: int) -> None:
        pair = dist.new_group([0, 1])
        read(make_first(process_group=pair, is_apart=True, timeout_s=2) if rank == 0 else make_second(timeout_s=2))

    results = run_ranks(3, overlap)
    check_errors(results, find_line(make_second))
    where = rf"rank 0 has not \(it (waits in|has given up) .*{find_line(make_first)}"
    assert re.search(where, results[1].text), results[1]


# Loaders of one line -----------------------------------------------------------------------------------------------------


class Halves(IterableDataset[Any]):
    """Each rank reads its half, which it determines itself."""

    def __init__(self, start: int) -> None:
        self.start = start

    def __iter__(self) -> Iterator[Any]:
        return map(make_sample, range(self.start + dist.get_rank(), self.start + 24, 2))


class Hidden(Numbers):
    """It holds nothing that can be compared."""

    def __init__(self, start: int) -> None:
        super().__init__(start, 24)
        self._held, self.start = object(), None  # type: ignore[assignment]
        self._start = start

    def __getitem__(self, index: int) -> Any:
        return make_sample(self._start + index)


def make_data(kind: str, start: int, rank: int) -> tuple[Any, dict[str, Any]]:
    match kind:
        case "common":
            return Numbers(start, 24), {}
        case "hidden":
            return Hidden(start), {}
        case "stream":
            return Halves(start), {}
        case "sampler":
            return Numbers(start, 24), {"sampler": range(rank, 24, 2)}
        case _:
            return Numbers(start + 12 * rank, 12), {"shard": "given"}


def make_of_one_line(kind: str, start: int, rank: int, name: str | None) -> Any:
    data, options = make_data(kind, start, rank)
    return ODBDataLoader(data, **nested(name=name, **(SETTINGS | options)))


NAMES = {0: "train", 100: "evaluate"}


def begin_in_another_order(rank: int, kind: str, are_named: bool, is_same: bool) -> list[int]:
    """Makes both loaders, on each rank in a different order, as in a loop over a set of names."""
    order = [0, 100] if rank == 0 else [100, 0]
    loaders = {start: make_of_one_line(kind, start, rank, NAMES[start] if are_named else None) for start in order}
    return read(loaders[0 if is_same else order[0]])


def test_loaders_of_one_line_meet_whatever_order_they_are_made_in() -> None:
    """Spec: R18.1."""
    unnamed, named = ("common", "stream", "sampler"), ("common", "stream", "sampler", "given", "hidden")
    cases = [*((kind, False, True) for kind in unnamed), *((kind, True, True) for kind in named)]
    for case, results in zip(cases, run_each(2, begin_in_another_order, cases), strict=True):
        first, second = get_values(results)
        assert sorted(first + second) == list(range(24)), case


TOLD: list[tuple[str, bool, str]] = [
    ("common", False, "their data sets differ in start"),
    ("stream", False, "their data sets differ in start"),
    ("sampler", False, "their data sets differ in start"),
    ("given", False, r"their data sets differ in start. If they are one loader, pass Protocol\(name=...\)"),
    *((kind, True, "the loader 'train' .*the loader 'evaluate'") for kind in ("common", "stream", "given", "hidden")),
]


def test_ranks_that_begin_loaders_of_one_line_in_another_order_are_told() -> None:
    """They were silently cross-wired before, because lines, types and lengths were equal."""
    cases = [(kind, are_named, False) for kind, are_named, _ in TOLD]
    for (_, _, message), results in zip(TOLD, run_each(2, begin_in_another_order, cases), strict=True):
        check_named(results)
        for result in results:
            backwards = ".*".join(message.split(".*")[::-1])
            assert re.search(message, result.text) or re.search(backwards, result.text), result


def test_two_loaders_that_nothing_tells_apart_need_names_of_their_own() -> None:
    def give_one_name_to_two(rank: int) -> None:
        loaders = [make_of_one_line("common", start, rank, "train") for start in (0, 100)]
        read(loaders[0])

    nameless = run_each(2, begin_in_another_order, [("hidden", False, is_same) for is_same in (True, False)])
    (of_one_name,) = run_each(2, give_one_name_to_two, [()])
    message = r"two loaders .* other ranks cannot tell .* Give each its own Protocol\(name="
    for found, said in ((nameless[0], message), (nameless[1], message), (of_one_name, "two loaders called 'train'")):
        for result in found:
            assert result.error == "UsageError", result
            assert re.search(said, result.text), result


class Kept(Numbers):
    def __init__(self) -> None:
        super().__init__(0, 24)
        self.kept = {"of one line": {1, 2}}


def begin_one_after_another(rank: int, kind: str) -> list[list[int]]:
    """Begins loaders one after another. None waits while another begins, or both would read the same."""
    found = [read(make_of_one_line(kind, start, rank, None)) for start in (0, 100)]
    if kind == "common":
        pair = [ODBDataLoader(Kept(), **nested(**SETTINGS)) for _ in range(2)]
        found += map(read, pair[:: 1 if rank else -1])
        if rank == 0:
            make_of_one_line(kind, 0, rank, None)  # for its length, for example
        found.append(read(make_of_one_line(kind, 0, rank, None)))
    return found


def test_loaders_of_one_line_need_no_names_one_after_another() -> None:
    kinds = [("stream",), ("sampler",), ("given",), ("hidden",), ("common",)]
    for (kind,), results in zip(kinds, run_each(2, begin_one_after_another, kinds), strict=True):
        starts = [0, 100, 0, 0, 0] if kind == "common" else [0, 100]
        for start, *parts in zip(starts, *get_values(results), strict=True):
            assert sorted(number for part in parts for number in part) == list(range(start, start + 24)), kind


class Local(Numbers):
    """What it holds differs between ranks, but its samples do not."""

    def __init__(self, rank: int) -> None:
        super().__init__(0, 24)
        self.rank, self.device, self.seed, self.pid = rank, f"cuda:{rank}", rank, os.getpid()
        self.handle = None if rank else object()  # opened when first used, and only rank 0 has looked at a sample
        self.cache = dict.fromkeys(range(rank))
        self._read = rank


def test_what_differs_between_ranks_of_one_data_set_can_be_said() -> None:
    """If each rank gets its own data set, one may read the rest with code of its own."""
    cases = [(read_other_type, "given"), (read_local, Elsewhere, "train"), (read_local, Local)]
    for results in run_each(2, lambda rank, read_own, *args: read_own(rank, *args), cases):
        first, second = get_values(results)
        assert sorted(first + second) == list(range(24))


def test_facts_tell_data_sets_apart_and_nothing_of_them() -> None:
    texts = [{"text": f"secret {number}"} for number in range(100)]
    same: list[Any] = [texts, list(texts)]
    other: list[Any] = [texts[::-1], [{"text": "other"}, *texts[1:]], texts[:-1]]
    held = [list_facts(Held(data)) for data in (*same, *other)]
    assert held[0] == held[1]
    assert all(found != held[0] for found in held[2:])
    assert "secret" not in str(held) + str(list_facts(texts))
    assert list_facts(texts) != list_facts(texts[::-1])
    tensors = [torch.arange(9.0), torch.arange(9.0) + 1, torch.arange(9), torch.arange(8.0), torch.tensor(3)]
    assert len({str(list_facts(TensorDataset(*[tensor] * tensor.ndim))) for tensor in tensors[:4]}) == 4
    assert list_facts(Subset(Numbers(0, 9), [1, 2])) != list_facts(Subset(Numbers(9, 9), [1, 2]))
    own: Any = Held(None)
    own.rows = own  # a cycle does not hang the comparison
    assert list_facts(own) == list_facts(own)
    assert list_facts(Held([object()])) == list_facts(Held([object()]))
    assert list_facts(Held(None)) != list_facts(Held(7))


class Held(Dataset[Any]):
    def __init__(self, rows: Any) -> None:
        self.rows = rows


class Slotted:
    __slots__ = ("value",)

    def __init__(self, value: object) -> None:
        self.value = value


class Labelled(list[int]):
    def __init__(self, label: str) -> None:
        super().__init__([1, 2])
        self.label = label


class Tagged(str):
    def __new__(cls, tag: str) -> Tagged:
        made = super().__new__(cls, "one text")
        made.tag = tag  # type: ignore[attr-defined]
        return made


def add(number: int) -> Any:
    return lambda value: value + number


def replace_middle(number: int) -> list[int]:
    return [*range(500), number, *range(501, 1000)]


KINDS: list[tuple[Any, Any, Any]] = [  # what is held, what is given, and two values that differ
    (lambda given: {1, given}, 2, 3),
    (lambda given: {"kept": Slotted(given)}, "a", "b"),
    (replace_middle, 500, -1),
    (lambda given: torch.full((1000,), given), 2.0, 3.0),
    (lambda given: np.arange(1000) + given, 0, 1),
    (np.float32, 2, 3),
    (Labelled, "a", "b"),
    (Tagged, "a", "b"),
    (lambda given: Subset(Held([given]), [0]), 2, 3),
]


@pytest.mark.parametrize(("make", "one", "other"), KINDS)
def test_data_sets_of_one_process_are_the_same_where_all_that_they_hold_is(make: Any, one: Any, other: Any) -> None:
    assert is_same(Held(make(one)), Held(make(one)))
    assert not is_same(Held(make(one)), Held(make(other)))


def test_what_cannot_be_compared_to_the_last_is_not_the_same() -> None:
    circle: Any = Held(None)
    circle.rows = circle
    other: Any = Held(None)
    other.rows = other
    held = [Held(add(1)), Held(add(2)), Held(threading.Lock()), Held(threading.Lock()), circle, other]
    assert not any(is_same(*pair) for pair in itertools.combinations(held, 2))


# Ranks in the same loaders -----------------------------------------------------------------------------------------------


def test_interleaved_nested_and_new_loaders_go_on_to_work() -> None:
    def interleave(rank: int) -> list[list[int]]:
        """Returns what new loaders read one after another. Loaders beside each other read the same."""
        alone = read(make_first()), read(make_second())
        first, second = make_first(), make_second()
        steps = zip(first.steps(), second.steps(), strict=True)
        pairs = [(one["numbers"], other["numbers"]) for (one, _), (other, _) in steps]
        assert tuple(list(itertools.chain(*numbers)) for numbers in zip(*pairs, strict=True)) == alone
        outer = []
        for batch, _ in make_first().steps():
            outer += batch["numbers"]
            inner = make_second()
            assert read(inner) == alone[1]
            inner.close()
        assert outer == alone[0]
        swapped = [make_second(), make_first()] if rank else [make_first(), make_second()][::-1]
        assert tuple(map(read, swapped)) == alone[::-1]
        return [alone[0], *(read(make(epoch)) for epoch in range(1, 3))]

    values = get_values(run_ranks(2, interleave))
    for epoch, shards in enumerate(zip(*values, strict=True)):
        assert sorted(number for shard in shards for number in shard) == list(range(epoch, epoch + 24))


# Generations -------------------------------------------------------------------------------------------------------------


def join(rank: int, store: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    dist.barrier()  # a rank with nothing more to do may end before the other has connected


def test_a_process_group_that_is_made_anew_is_a_new_generation(tmp_path: Path) -> None:
    """Spec: R18.3."""

    def begin_anew(rank: int) -> Any:
        found = []
        old = make_first()
        for generation in range(3):
            found.append(read(make()))
            read(make_second())
            if generation == 0:
                read(old)
            dist.barrier()
            dist.destroy_process_group()
            join(rank, tmp_path / f"store-{generation}")
        with pytest.raises(UsageError, match=rf"{find_line(make_first)} is stale"):
            next(iter(old))
        return found

    values = get_values(run_ranks(2, begin_anew))
    for shards in zip(*values, strict=True):
        assert sorted(number for shard in shards for number in shard) == list(range(24))


def test_a_process_that_replaces_another_meets_the_survivors(tmp_path: Path) -> None:
    """The survivors had two loaders of that line before it came, which has had none yet."""

    def come_later(pipe: Any) -> None:
        join(1, tmp_path / "store")
        pipe.send(read(make_second()))
        dist.barrier()
        dist.destroy_process_group()

    def lose_rank_1(rank: int) -> list[int]:
        for _ in range(2):
            read(make_second())
        dist.barrier()
        dist.destroy_process_group()
        if rank == 1:
            return []
        join(0, tmp_path / "store")
        found = read(make_second())
        dist.barrier()
        return found

    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    late = context.Process(target=come_later, args=(theirs,))
    late.start()
    results = run_ranks(2, lose_rank_1)
    assert ours.poll(20), results
    assert sorted(results[0].value + ours.recv()) == list(range(100, 124)), results
    late.join(20)


def test_a_loader_keeps_to_the_process_group_that_it_began_under(tmp_path: Path) -> None:
    """A loader made before there is a group reads within it. One that has given a batch, or had another group, does not.

    One that had given a batch without a group used to read all samples on every rank. One of an earlier group used to
    wait for ranks that were gone.
    """

    def make_before(rank: int) -> list[int]:
        for how in ("peek", "again", ""):
            dist.destroy_process_group()
            loader = make()
            if how == "peek":
                next(iter(loader))
            join(rank, tmp_path / f"store-{how}")
            if how == "again":
                read(loader)
                dist.barrier()
                dist.destroy_process_group()
                join(rank, tmp_path / "store-2")
            with pytest.raises(UsageError, match="is stale") if how else contextlib.nullcontext():
                found = read(loader)
            dist.barrier()
        return found

    first, second = get_values(run_ranks(2, make_before))
    assert sorted(first + second) == list(range(24))


def begin_anew_over_one_store(rank: int, folder: Path) -> Any:
    """All generations have one store. Torch's own groups get new keys in it each time, the loader's exchange does not."""
    shared = dist.FileStore(str(folder / "shared"), 2)
    dist.ProcessGroup.get_group_store = lambda group: shared
    found: list[Any] = []
    for generation in range(3):
        dist.destroy_process_group()
        join(rank, folder / f"store-{generation}")
        if generation == 1 and rank == 1:
            dist.barrier()  # the other has given up, and left its messages
        try:
            found.append(sorted(read(make(timeout_s=1 if generation == 1 else TIMEOUT_S))))
        except JobError as error:
            found.append(str(error))
        if generation != 1 or rank == 0:
            dist.barrier()
    return found


def test_generations_may_have_one_store(tmp_path: Path) -> None:
    """Before, what a failed generation left made every later one fail, with the cause of the first."""
    first, second = (result.value for result in run_ranks(2, begin_anew_over_one_store, tmp_path))
    for generation in (0, 2):
        assert sorted(first[generation] + second[generation]) == list(range(24))
    assert "rank 1 has not" in first[1]
    assert "not every rank has started" in second[1]


def test_what_a_killed_process_has_said_is_not_taken_for_its_successors(tmp_path: Path) -> None:
    """It does not count for a successor, whatever loader that is in."""

    def die_while_waiting(rank: int) -> list[int]:
        shared = dist.FileStore(str(tmp_path / "shared"), 2)
        dist.ProcessGroup.get_group_store = lambda group: shared
        if (child := os.fork()) == 0:
            if rank == 0:
                make_second(timeout_s=30).__iter__()
            os._exit(0)
        while rank == 0 and not shared.check(["odb_ref/begun/0"]):
            time.sleep(0.01)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        dist.barrier()  # a successor that begins while the other's child lives may meet it
        return read(make_first())

    first, second = get_values(run_ranks(2, die_while_waiting))
    assert sorted(first + second) == list(range(24))


# Where a loader is made --------------------------------------------------------------------------------------------------


def test_a_loader_knows_the_line_that_made_it() -> None:
    loader = make_first()
    assert loader._origin.made_at == find_line(make_first)
    typed = ODBDataLoader[list[int]](Numbers(0, 3), **nested(**SETTINGS))
    assert typed._origin.made_at.startswith("test_identity.py:")
