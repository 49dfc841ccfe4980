"""What a user passes in works, or is refused by name. Nothing that can be assigned or passed is ignored."""

from __future__ import annotations

import copy
import functools
import itertools
import pickle
import re
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist
from torch.utils.data import BatchSampler, DataLoader, Sampler, SequentialSampler
from torch.utils.data.distributed import DistributedSampler

from odb_ref.core.errors import UsageError
from odb_ref.torch import apply
from odb_ref.torch.settings import RENAMED
from odb_ref.trace.check import check_traces
from tests.torch import data
from tests.torch.data import Numbers, collate, listen, read, read_numbers, take
from tests.torch.ranks import check_errors, get_values, run_each, run_ranks
from tests.torch.states import check_refused

make_loader = functools.partial(data.make_loader, Numbers(0, 20), window=6)


# Numbers -------------------------------------------------------------------------------------------------------------


def cost_in_numpy(tokens: int) -> Any:
    return np.int32(tokens)


class NumpyRule:
    name = "numpy"

    def compute_target(self, agreement: Any) -> Any:
        return np.int64(agreement.groups_max)


@pytest.mark.parametrize(
    "options",
    [
        {"token_budget": np.int64(60), "window": np.int32(6), "depth": np.uint8(2), "ramp_rounds": np.int64(1)},
        {"window_bytes": np.int64(5000), "max_age_rounds": np.int64(2), "accumulation_steps": np.int64(2)},
        {"seed": np.uint64(2**64 - 1), "shuffle": np.bool_(True), "trainer_divides_loss": np.bool_(True)},
        {"num_workers": np.int64(1), "prefetch_factor": np.int64(2), "persistent_workers": np.bool_(False)},
        {"num_workers": 1, "timeout": np.float32(9), "timeout_s": np.int64(9), "log_wait_s": np.float32(9)},
        {"on_bad_sample": "quarantine", "max_bad_samples": np.float32(0.5), "len_bound": np.int64(30)},
        {"on_bad_sample": "quarantine", "max_bad_samples": np.int64(3), "causal_shift": np.bool_(True)},
        {"budget_schedule": lambda step, current: np.int32(50)},
        {"cost": cost_in_numpy},
        {"policy": NumpyRule()},
        {"limits": np.array([3]), "cost_fn": lambda sample: np.array([1])},
        {"window": 2**62 - 1, "token_budget": 2**62 - 1, "depth": 2**62 - 1, "log_wait_s": 1e300},
    ],
    ids="-".join,
)
def test_numbers_of_any_library_and_size_are_taken(options: dict[str, Any]) -> None:
    assert sorted(take(make_loader(**options))) == list(range(20))


def measure_much(sample: Any) -> int:
    return 2**62


def cost_much(sample: Any) -> list[int]:
    return [2**70]


MUCH: list[tuple[dict[str, Any], str]] = [
    ({"length_fn": measure_much}, f"the length of a sample is {2**62}, expected an integer between 1 and {2**42}"),
    (
        {"cost_fn": cost_much, "limits": [5]},
        f"a cost that cost_fn returned is {2**70}, expected an integer between 0 and {2**42}",
    ),
]


def test_measures_beyond_what_can_be_exchanged_are_named() -> None:
    """The exchange, or the process in between, failed before: int too big to convert."""

    def read_much(rank: int, case: int, num_workers: int) -> None:
        take(make_loader(num_workers=num_workers, **MUCH[case][0]))

    cases = [(case, num_workers) for case in range(len(MUCH)) for num_workers in (0, 1)]
    for (case, _), results in zip(cases, run_each(2, read_much, cases), strict=True):
        check_errors(results, MUCH[case][1])


def test_the_longest_of_lengths_is_exchanged() -> None:
    measures = dict.fromkeys(("length_fn", "supervised_fn"), lambda sample: 2**42)
    found = get_values(run_ranks(3, lambda rank: take(make_loader(num_workers=rank, **measures))))
    assert sorted(itertools.chain(*found)) == list(range(20))


def test_a_cost_function_that_overflows_is_named() -> None:
    """NumPy 1 wraps such numbers round, later versions raise."""
    with pytest.raises(UsageError, match=r"cost (must give integers for .* tokens: OverflowError|gives .*-31072)"):
        make_loader(cost=np.int16)


@pytest.mark.parametrize(("samples", "is_right"), [(np.int64(20), True), (0, False), (-3, False), (1.5, False)])
def test_the_samples_of_an_estimate_are_a_number(samples: Any, is_right: bool) -> None:
    with make_loader() as loader:
        if is_right:
            assert loader.estimate_steps(samples) == loader.estimate_steps(20)
        else:
            with pytest.raises(UsageError, match="samples must be"):
                loader.estimate_steps(samples)


# Attributes, copies --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "message"), [("batch_size", "under token_budget .* update_samples"), ("batch_sampler", "no batch_sampler")]
)
def test_what_a_dataloader_has_and_this_has_not_is_missing_with_advice(name: str, message: str) -> None:
    with make_loader() as loader:
        with pytest.raises(AttributeError, match=message):
            getattr(loader, name)
        assert not hasattr(loader, name)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        *((name, "make another loader") for name in ("dataset", "sampler", "collate_fn", "num_workers", "pin_memory")),
        *((name, "make another loader") for name in ("window", "shuffle", "seed", "length_fn", "depth", "trace")),
        ("process_group", "make another loader"),
        ("batch_size", "batches are formed under token_budget"),
        ("batch_sampler", "token_budget"),
        ("drop_last", "make another loader"),
        ("token_budget", "call accept_budget"),
        ("epoch", "call set_epoch"),
        ("in_order", "always in order"),
        ("pin_memory_device", "with pin_memory"),
        ("loss_scaling", r"with loss=Loss\(scaling=...\)"),
        *((name, "make another loader with") for name in RENAMED),
    ],
)
def test_an_argument_cannot_be_assigned_later(name: str, message: str) -> None:
    with make_loader() as loader, pytest.raises(UsageError, match=f"{name} cannot be assigned.*{message}"):
        setattr(loader, name, 3)


def test_an_argument_cannot_be_deleted() -> None:
    with make_loader() as loader:
        with pytest.raises(UsageError, match="collate_fn cannot be deleted"):
            del loader.collate_fn
        assert sorted(read_numbers(loader)) == list(range(20))


def test_notes_of_ones_own_can_be_assigned() -> None:
    with make_loader() as loader:
        loader.note_of_mine = 3  # type: ignore[attr-defined]
        del loader.note_of_mine  # type: ignore[attr-defined]


@pytest.mark.parametrize("attempt", [copy.copy, copy.deepcopy, pickle.dumps])
def test_an_iterator_cannot_be_copied(attempt: Any) -> None:
    """Dropping the copy left the epoch before, so that no further batch came, without an error."""
    with make_loader() as loader:
        for begin in (lambda: iter(loader), loader.steps):
            epoch = begin()
            next(epoch)
            with pytest.raises(UsageError, match="cannot be copied"):
                attempt(epoch)
            assert sum(1 for _ in epoch) > 2


def test_a_loader_is_true_and_cannot_be_copied() -> None:
    with make_loader() as loader:
        assert loader
        for attempt in (copy.copy, copy.deepcopy, pickle.dumps):
            with pytest.raises(UsageError, match="state_dict"):
                attempt(loader)


# Samplers, data loaders ----------------------------------------------------------------------------------------------


def make_sampler() -> DistributedSampler[Any]:
    return DistributedSampler(Numbers(0, 20), num_replicas=1, rank=0)


def list_in(epoch: int) -> list[int]:
    sampler = make_sampler()
    sampler.set_epoch(epoch)
    return list(sampler)


def test_a_sampler_set_to_another_epoch_is_noticed() -> None:
    sampler = make_sampler()
    with make_loader(sampler=sampler, order="sampler") as loader:
        for epoch in range(3):  # as a DataLoader's user does
            sampler.set_epoch(epoch)
            assert read_numbers(loader) == list_in(epoch)
        sampler.set_epoch(7)
        with pytest.raises(UsageError, match=r"set to epoch 7, but the loader reads epoch 3: call set_epoch\(7\)"):
            iter(loader)
        loader.set_epoch(7)
        assert read_numbers(loader) == list_in(7)
        loader.set_epoch(1)  # setting the loader's epoch is enough
        assert read_numbers(loader) == list_in(1)
    assert take(make_loader(sampler=sampler, order="sampler")) == list_in(0)  # the loader left it at another epoch


def test_loaders_of_either_mode_may_share_a_sampler_one_after_another() -> None:
    """The epoch at which one loader left it is not taken for one that the user has set."""
    sampler = make_sampler()
    for options in ({"update_samples": 4}, {"update_samples": 4}, {"order": "sampler"}, {"update_samples": 4}):
        assert sorted(take(make_loader(sampler=sampler, **options))) == sorted(list_in(0))


def test_a_sampler_that_never_ends_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has no length, as some lists of training samples."""

    class Endless(Sampler[int]):
        def __iter__(self) -> Iterator[int]:
            return itertools.cycle(range(20))

    monkeypatch.setattr("odb_ref.torch.plan.sampler.MOST_UNTOLD", 1000)
    check_refused(make_loader(sampler=Endless()), "did not end after 1,000 keys")
    with pytest.raises(UsageError, match="sampler=5: expected a Sampler"):
        make_loader(sampler=5)


class Private(Sampler[int]):
    """Hides its epoch, or shows only what follows from it."""

    def __init__(self, base: int = 0) -> None:
        self._base, self._seed = base, base

    def set_epoch(self, epoch: int) -> None:
        self._seed = self._base + epoch

    def __iter__(self) -> Iterator[int]:
        return iter(np.random.RandomState(self._seed).permutation(20).tolist())


class Wrapped(Sampler[int]):
    def __init__(self) -> None:
        self.inner = Private()

    def set_epoch(self, epoch: int) -> None:
        self.inner.set_epoch(epoch)

    def __iter__(self) -> Iterator[int]:
        return iter(self.inner)


class Unset(Private):
    """A sampler as many users of torch write it, without an epoch until one is set."""

    _epoch: int | None = None

    def set_epoch(self, epoch: int) -> None:
        super().set_epoch(epoch)
        self._epoch = epoch


@pytest.mark.parametrize("make", [Private, lambda: Private(1000), Wrapped, Unset, make_sampler])
def test_an_epoch_that_a_sampler_does_not_show_is_noticed(make: Any) -> None:
    sampler, other = make(), make()
    sampler.set_epoch(5)
    other.set_epoch(5)
    with make_loader(sampler=sampler, order="sampler") as loader:
        with pytest.raises(UsageError, match=r"set to epoch 5, but the loader reads epoch 0: call set_epoch\(5\)"):
            iter(loader)
        loader.set_epoch(5)
        assert read_numbers(loader) == list(other)
        other.set_epoch(6)
        assert read_numbers(loader) == list(other)


@pytest.mark.parametrize("make", [Private, Wrapped, Unset, make_sampler])
def test_a_sampler_set_back_to_the_epoch_before_is_noticed(make: Any) -> None:
    """A caller that wanted the same order in each epoch silently got another one before."""
    sampler = make()
    with make_loader(sampler=sampler, order="sampler") as loader:
        sampler.set_epoch(0)
        first = read_numbers(loader)
        sampler.set_epoch(0)
        with pytest.raises(UsageError, match=r"set to epoch 0, but the loader reads epoch 1: call set_epoch\(0\)"):
            iter(loader)
        loader.set_epoch(0)
        assert read_numbers(loader) == first


def test_an_epoch_that_makes_no_difference_may_be_set() -> None:
    """Frameworks do so for the loader of a validation."""
    sampler = DistributedSampler(Numbers(0, 20), num_replicas=1, rank=0, shuffle=False)
    with make_loader(sampler=sampler, order="sampler") as loader:
        for _ in range(3):
            sampler.set_epoch(0)
            assert read_numbers(loader) == list(range(20))


def test_a_sampler_may_count_its_epochs() -> None:
    """It advances to the next epoch by itself, as Accelerate's does."""

    class Counting(Sampler[int]):
        epoch = 0

        def set_epoch(self, epoch: int) -> None:
            self.epoch = epoch

        def __iter__(self) -> Iterator[int]:
            yield from range(5)
            self.epoch += 1

    with make_loader(sampler=Counting()) as loader:
        for epoch in (0, 1, 1, 0, 5):
            loader.set_epoch(epoch)
            assert len(read_numbers(loader)) == 5


def test_batches_of_the_users_own_are_not_taken_for_an_order() -> None:
    plain: DataLoader[Any] = DataLoader(Numbers(0, 20), batch_sampler=[[0, 1], [2, 3]], collate_fn=collate)
    with pytest.raises(UsageError, match="those of list would be ignored"):
        apply(plain, token_budget=60)
    assert sorted(take(apply(plain, token_budget=60, shuffle=False))) == list(range(20))
    usual = BatchSampler(SequentialSampler(range(20)), 3, drop_last=False)
    usually = DataLoader(Numbers(0, 20), batch_sampler=usual, collate_fn=collate)
    assert sorted(take(apply(usually, token_budget=60))) == list(range(20))


@pytest.mark.parametrize(
    "batching",
    [
        {"batch_size": 3, "drop_last": True},
        # The DataLoader itself reports that it drops nothing of this sampler.
        {"batch_sampler": BatchSampler(SequentialSampler(range(20)), 3, drop_last=True)},
    ],
    ids="-".join,
)
def test_drop_last_is_answered_or_taken_over_by_updates_of_a_fixed_size(batching: dict[str, Any]) -> None:
    plain: DataLoader[Any] = DataLoader(Numbers(0, 20), collate_fn=collate, **batching)
    told = pytest.warns(RuntimeWarning, match="drop_last=True has no effect")
    with told:
        assert sorted(take(apply(plain, token_budget=60))) == list(range(20))
    assert sorted(take(apply(plain, token_budget=60, update_samples=6))) == list(range(18))


def test_what_is_for_workers_is_left_out_without_them() -> None:
    plain: DataLoader[Any] = DataLoader(Numbers(0, 20), num_workers=2, timeout=9, collate_fn=collate)
    assert sorted(take(apply(plain, token_budget=60, num_workers=0))) == list(range(20))


# Several loaders -----------------------------------------------------------------------------------------------------


def test_two_loaders_do_not_write_one_trace(tmp_path: Path) -> None:
    path = tmp_path / "trace.ndjson"
    with make_loader(trace=path) as first:
        read(first)
        with make_loader(trace=path) as second:
            for _ in range(2):
                with pytest.raises(UsageError, match=r"another loader in this process writes to .*trace\.ndjson"):
                    iter(second)
        read(first)  # its own file, in every epoch
        take(make_loader(trace=tmp_path / "other.ndjson"))
    take(make_loader(trace=path))  # the previous loader is closed
    gone = make_loader(trace=path)
    read(gone)
    del gone
    take(make_loader(trace=path))


def test_an_epoch_that_cannot_begin_counts_no_step_twice(tmp_path: Path) -> None:
    folder = tmp_path / "traces"
    folder.mkdir()
    with make_loader(trace=folder / "trace.ndjson") as loader:
        steps = len(read(loader))
        folder.rename(tmp_path / "away")
        with pytest.raises((OSError, UsageError)):
            read(loader)
        assert loader.state_dict()["steps"] == steps
        folder.mkdir()
        more = len(read(loader))
        assert loader.state_dict()["steps"] == steps + more


@pytest.mark.parametrize("groups", [[[0, 2], [1, 3]], [[0], [1]]])
def test_groups_beside_each_other_write_traces_of_their_own(groups: list[list[int]], tmp_path: Path) -> None:
    """Those of one group were lost before, because both groups had ranks 0 and 1."""

    def trace_in_groups(rank: int) -> None:
        group, _ = dist.new_subgroups_by_enumeration(groups)
        take(make_loader(shard="given", process_group=group, is_apart=True, trace=tmp_path / "t.ndjson"))

    results = get_values(run_ranks(sum(map(len, groups)), trace_in_groups))
    assert len(list(tmp_path.iterdir())) == len(results)
    verdict = check_traces([tmp_path])
    assert (verdict.is_ok, len(verdict.jobs)) == (True, 2), verdict


def test_another_loader_does_not_silence_a_reminder() -> None:
    reminder = pytest.warns(RuntimeWarning, match=r"for batch, info in loader.steps\(\)")
    with make_loader(loss_reduction="sum") as train, make_loader() as validation, reminder:
        for _ in train:
            assert len(list(itertools.islice(validation.steps(), 2))) == 2


def test_a_bound_follows_the_data_set() -> None:
    samples = Numbers(0, 20)
    with (
        data.make_loader(samples, window=6, len_bound="samples", token_budget=1) as loader,
        warnings.catch_warnings(action="error"),
    ):
        assert len(loader) == 20
        samples.count = 40
        assert len(loader) == 40
        assert len(read(loader)) == 40


# Ranks ---------------------------------------------------------------------------------------------------------------


def read_in_the_second_half(rank: int, fault: str) -> Any:
    group = dist.new_group([2, 3])
    if rank < 2:
        return None
    samples = Numbers(0, 20, bad=7 if rank == 3 and fault == "raise" else None, fault=fault)
    options = {"window": 7 if rank == 3 and fault == "window" else 6, "shard": "given", "timeout_s": 8}
    with data.make_loader(samples, process_group=group, is_apart=True, **options) as loader:
        return len(read(loader, 1 if rank == 3 and fault == "leave" else None))


NAMED = {
    "raise": r"^rank 3 \(rank 1 of its group\) failed: ValueError: bad row 7",
    "leave": r"^rank 3 \(rank 1 of its group\) left the loop before its end",
    "window": r"^rank 3 .* is configured differently: window_samples is 7, rank 2 \(rank 0 of its group\) has 6",
}


def test_ranks_are_named_by_the_job_and_by_their_group() -> None:
    for message, results in zip(NAMED.values(), run_each(4, read_in_the_second_half, zip(NAMED)), strict=True):
        assert re.search(message, results[2].text), results[2]
        assert results[2].rank == 1


def test_a_rank_that_is_waited_for_is_named_by_the_job() -> None:
    """Two ranks of four were told of ranks 0 and 1 before, which read nothing."""

    def wait_in_the_second_half(rank: int) -> list[str]:
        lines = listen()
        group = dist.new_group([2, 3])
        if rank < 2:
            return []
        with make_loader(shard="given", process_group=group, is_apart=True, timeout_s=4) as loader:
            if rank == 3:
                time.sleep(2.5)
            epoch = iter(loader)
            next(epoch)
            if rank == 3:
                time.sleep(2.5)
            list(epoch)
        return lines

    found = run_ranks(4, wait_in_the_second_half)[2]
    whom = r"rank 2 \(rank 0 of its group\) waits for rank 3 \(rank 1 of its group\), which "
    assert [line for line in found.value if re.search(whom + "has not started its loader", line)], found
    assert [line for line in found.value if re.search(whom + "is waiting for its trainer", line)], found
