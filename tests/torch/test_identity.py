"""Which loader is which: ranks in different loaders are told so, and a loader of an old process group says what it is."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402

from odb_ref.torch import JobError, ODBDataLoader, UsageError, pop_step_info  # noqa: E402
from odb_ref.torch.exchange import identity  # noqa: E402
from tests.helpers.options import nested  # noqa: E402
from tests.torch.data import Numbers, collate  # noqa: E402
from tests.torch.ranks import Result, run_ranks  # noqa: E402

pytestmark = pytest.mark.torch

TIMEOUT_S = 6.0
SETTINGS: dict[str, Any] = {"token_budget": 60, "window": 8, "collate_fn": collate, "timeout_s": TIMEOUT_S}


def make(start: int = 0, count: int = 24, **options: Any) -> Any:
    return ODBDataLoader(Numbers(start, count), **nested(**(SETTINGS | options)))


def make_first(**options: Any) -> Any:
    return ODBDataLoader(Numbers(0, 24), **nested(**(SETTINGS | options)))


def make_second(**options: Any) -> Any:
    return ODBDataLoader(Numbers(100, 24), **nested(**(SETTINGS | options)))


def read(loader: Any) -> list[int]:
    return [number for batch in loader if not pop_step_info(batch).is_idle for number in batch["numbers"]]


def find_line(function: Callable[..., Any]) -> str:
    return f"test_identity.py:{function.__code__.co_firstlineno + 1}"


def check_named(results: list[Result], *texts: str) -> None:
    """Every rank has raised in time, and each of the texts is in what it says."""
    assert {result.error for result in results} == {"JobError"}, results
    for result in results:
        assert all(text in result.text for text in ("iterate over different loaders", *texts)), result.text
        assert result.seconds < TIMEOUT_S, result


# Ranks in different loaders ----------------------------------------------------------------------------------------------


def begin_own(rank: int) -> Any:
    loaders = [make_first(), make_second()]
    read(loaders[rank])


def test_ranks_that_begin_different_loaders_name_both() -> None:
    """Spec: R18, R18.1."""
    check_named(run_ranks(2, begin_own), find_line(make_first), find_line(make_second))


def begin_own_of_one_line(rank: int) -> Any:
    loaders = [make(start) for start in (0, 100)]
    read(loaders[rank])


def test_loaders_of_one_line_and_equal_data_are_told_apart() -> None:
    """Else step 0 would hold samples of both."""
    check_named(run_ranks(2, begin_own_of_one_line), "number 2 of this line")


def test_data_sets_of_other_lengths_are_told_apart() -> None:
    results = run_ranks(2, make_with_other_length)
    check_named(results, "Numbers of 24 samples", "Numbers of 25 samples")


def make_with_other_length(rank: int) -> Any:
    return read(make(0, 24 + rank))


def cross_after_an_epoch(rank: int) -> Any:
    loaders = [make_first(), make_second()]
    for loader in loaders:
        read(loader)
    began = time.monotonic()
    try:
        read(loaders[rank])
    except JobError as error:
        return str(error), time.monotonic() - began
    return "", 0.0


def test_ranks_that_cross_loaders_of_which_each_has_had_an_epoch_are_told() -> None:
    """Each waits for the other in a loader that the other has not begun: nothing else would ever end that.

    Spec: R18.2.
    """
    results = run_ranks(2, cross_after_an_epoch)
    for result in results:
        text, seconds = result.value
        assert find_line(make_first) in text
        assert find_line(make_second) in text
        assert seconds < TIMEOUT_S


def cross_with_a_new_one(rank: int) -> Any:
    first = make_first()
    read(first)
    read(first if rank == 0 else make_second())


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_rank_that_begins_a_new_loader_while_others_go_on_with_an_old_one_is_told(world_size: int) -> None:
    check_named(run_ranks(world_size, cross_with_a_new_one), find_line(make_first), find_line(make_second))


def cross_groups(rank: int) -> Any:
    groups = [dist.new_group([0, 1]), dist.new_group([0, 1])]
    loaders = [make(process_group=group) for group in groups]
    read(loaders[rank])


def test_two_groups_of_the_same_ranks_are_two() -> None:
    check_named(run_ranks(2, cross_groups), "group 1", "group 2")


def overlap(rank: int) -> Any:
    pair = dist.new_group([0, 1])
    read(make_first(process_group=pair, timeout_s=3) if rank == 0 else make_second(timeout_s=3))


def test_ranks_that_begin_loaders_of_other_ranks_say_where_the_missing_one_waits() -> None:
    results = run_ranks(3, overlap)
    assert {result.error for result in results} == {"JobError"}, results
    assert find_line(make_first) in results[1].text
    for result in results:
        assert find_line(make_second) in result.text


# Ranks in the same loaders -----------------------------------------------------------------------------------------------


def interleave(rank: int) -> Any:
    first, second = make_first(), make_second()
    pairs = list(zip(first.steps(), second.steps(), strict=False))
    nested = []
    outer = make_first()
    for _ in outer:
        inner = make_second()
        nested.append(len(read(inner)))
        inner.close()
    anew = [sorted(read(make(epoch))) for epoch in range(3)]
    swapped = [make_second(), make_first()] if rank else [make_first(), make_second()][::-1]
    return len(pairs), nested, anew, sorted(map(len, map(read, swapped)))


def test_interleaved_nested_and_new_loaders_go_on_to_work() -> None:
    results = run_ranks(2, interleave)
    assert not any(result.error for result in results), results
    anew = zip(*(result.value[2] for result in results), strict=True)
    for epoch, shards in enumerate(anew):
        assert sorted(number for shard in shards for number in shard) == list(range(epoch, epoch + 24))


# Generations -------------------------------------------------------------------------------------------------------------


def begin_anew(rank: int, store: Path) -> Any:
    found = []
    old = make_first()
    for generation in range(3):
        found.append(read(make()))
        read(make_second())
        if generation == 0:
            read(old)
        dist.barrier()
        dist.destroy_process_group()
        dist.init_process_group("gloo", init_method=f"file://{store}-{generation}", rank=rank, world_size=2)
    with pytest.raises(UsageError, match=rf"{find_line(make_first)} is of an old generation"):
        next(iter(old))
    return found


def test_a_process_group_that_is_made_anew_is_a_new_generation(tmp_path: Path) -> None:
    """Spec: R18.3."""
    results = run_ranks(2, begin_anew, tmp_path / "store")
    assert not any(result.error for result in results), results
    for shards in zip(*(result.value for result in results), strict=True):
        assert sorted(number for shard in shards for number in shard) == list(range(24))


def _come_later(pipe: Any, store: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=1, world_size=2)
    pipe.send(read(make_second()))
    dist.barrier()
    dist.destroy_process_group()


def replace_rank_1(rank: int, store: Path) -> Any:
    read(make_second())
    read(make_second())
    dist.barrier()
    dist.destroy_process_group()
    if rank == 1:
        return None
    ours, theirs = multiprocessing.get_context("fork").Pipe(duplex=False)
    late = multiprocessing.get_context("spawn").Process(target=_come_later, args=(theirs, store))
    late.start()
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=2)
    found = read(make_second())
    dist.barrier()
    found += ours.recv()
    late.join(20)
    return sorted(found)


def test_a_process_that_replaces_another_meets_the_survivors(tmp_path: Path) -> None:
    """They have had two loaders of that line before it came."""
    results = run_ranks(2, replace_rank_1, tmp_path / "store")
    assert results[0].value == list(range(100, 124)), results


def test_a_loader_made_before_there_is_a_process_group_may_be_used_under_it(monkeypatch: pytest.MonkeyPatch) -> None:
    loader = make()
    monkeypatch.setattr(identity, "_present", [identity._Generation(None)])
    loader._origin.check()


# Where a loader is made --------------------------------------------------------------------------------------------------


def test_a_loader_knows_the_line_that_made_it() -> None:
    loader = make_first()
    assert loader._origin.made_at == find_line(make_first)
    typed = ODBDataLoader[list[int]](Numbers(0, 3), **nested(**SETTINGS))
    assert typed._origin.made_at.startswith("test_identity.py:")
    assert (loader._origin.ordinal, make_first()._origin.ordinal) == (
        loader._origin.ordinal,
        loader._origin.ordinal + 1,
    )
