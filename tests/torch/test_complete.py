"""No sample is lost silently. An answer that a data set or a function must not give is an error on every rank."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import cycle
from typing import Any

import pytest
from torch.utils.data import Dataset, IterDataPipe, Sampler

from odb_ref.torch import UsageError
from tests.torch.data import Numbers, Stream, catch_texts, count_samples, make_loader, make_sample, read_numbers
from tests.torch.ranks import get_values, run_each
from tests.torch.states import check_fails, check_refused

COUNT = 40


class AtOnce(Numbers):
    """Reads several samples at once, and returns ``surplus`` samples too many or too few in one of the calls."""

    def __init__(self, surplus: int) -> None:
        super().__init__(0, COUNT)
        self.surplus = surplus

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        samples = [self[index] for index in indices]
        if 20 in indices and self.surplus:
            return (samples + samples)[: len(samples) + self.surplus]
        return samples


class StoppingAtOnce(AtOnce):
    """Stops where it should return several samples."""

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        return [next(iter([])) for _ in indices]


class StoppingStream(Stream):
    """Stops before it begins."""

    def __iter__(self) -> Iterator[Any]:
        raise StopIteration


def stop(_: object) -> Any:
    raise StopIteration


def miss(_: object) -> Any:
    """Raises an error of a class made at run time, as boto3's are. It cannot be pickled."""
    raise type("NoSuchKey", (Exception,), {})("no such key")


def fail_to_measure(fail: Callable[[object], Any]) -> Callable[[dict[str, Any]], int]:
    """Returns a measure that fails for one sample. It can be sent to another process."""
    return partial(measure_or_fail, fail)


def measure_or_fail(fail: Callable[[object], Any], sample: dict[str, Any]) -> Any:
    return fail(sample) if sample["number"] == 20 else len(sample["input_ids"])


CASES: list[tuple[Dataset[Any], dict[str, Any], str]] = [
    (Numbers(0, COUNT, bad=20, fault="StopIteration"), {}, "StopIteration for the sample 20"),
    (AtOnce(-1), {}, "returned 15 samples for 16 keys"),
    (AtOnce(1), {}, "returned 17 samples for 16 keys"),
    (AtOnce(-16), {}, "returned 0 samples for 16 keys"),
    (StoppingAtOnce(0), {}, "__getitems__ of the data set raised StopIteration"),
    (StoppingStream(0, COUNT), {}, "__iter__ of the data set raised StopIteration"),
    (Numbers(0, COUNT), {"length_fn": fail_to_measure(stop)}, "the measure of a sample raised StopIteration"),
    (Stream(0, COUNT), {"length_fn": fail_to_measure(stop)}, "the measure of a sample raised StopIteration"),
    (Numbers(0, COUNT), {"collate_fn": stop}, "StopIteration"),
    (Numbers(0, COUNT, bad=20, fault=miss), {}, "NoSuchKey"),
    (Stream(0, COUNT, bad=20, fault=miss), {}, "NoSuchKey: no such key"),
    (Numbers(0, COUNT), {"length_fn": fail_to_measure(miss)}, "NoSuchKey: no such key"),
]


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize(
    ("data", "options", "cause"), CASES, ids=[f"{type(case[0]).__name__} {case[2]}" for case in CASES]
)
def test_what_ends_a_plain_loader_early_is_an_error(
    data: Dataset[Any], options: dict[str, Any], cause: str, num_workers: int
) -> None:
    """Spec: R11.4. Checks: COVER."""
    check_fails(make_loader(data, num_workers=num_workers, **options), f"rank 0 failed.*{cause}")


@pytest.mark.parametrize(("init_fn", "cause"), [(stop, "StopIteration"), (miss, "NoSuchKey: no such key")])
def test_a_worker_init_fn_that_stops_is_an_error(init_fn: Any, cause: str) -> None:
    """Spec: R11.4. Checks: COVER."""
    check_fails(make_loader(num_workers=1, worker_init_fn=init_fn), f"worker_init_fn raised {cause}")


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_sample_that_stops_is_set_aside_like_any_bad_one(num_workers: int) -> None:
    """Spec: R11.1. Checks: COVER."""
    for data in (Numbers(0, COUNT, bad=20, fault="StopIteration"), AtOnce(-1)):
        with make_loader(data, on_bad_sample="quarantine", num_workers=num_workers) as loader:
            with warnings.catch_warnings(action="ignore"):
                numbers = read_numbers(loader)
            lost = [*data.bad]
            assert [item.index for item in loader.quarantined] == lost
            assert sorted([*numbers, *lost]) == list(range(COUNT))


class OneShot(Sampler[int]):
    """Lists samples in its first epoch only."""

    def __init__(self) -> None:
        self.keys = list(range(COUNT))

    def __iter__(self) -> Iterator[int]:
        while self.keys:
            yield self.keys.pop()

    def __len__(self) -> int:
        return COUNT


class Endless(Sampler[int]):
    """Samples with replacement, and states how long an epoch should be."""

    def __iter__(self) -> Iterator[int]:
        return cycle(range(COUNT))

    def __len__(self) -> int:
        return COUNT


def test_a_sampler_that_lists_other_than_it_says_is_an_error() -> None:
    """Checks: COVER."""
    check_refused(make_loader(sampler=Endless()), "has a length of 40, but listed more")
    with make_loader(sampler=OneShot()) as loader:
        assert sorted(read_numbers(loader)) == list(range(COUNT))
        with pytest.raises(UsageError, match="has a length of 40, but listed 0"):
            iter(loader)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_sample_that_cannot_be_measured_is_named(num_workers: int) -> None:
    samples = [make_sample(number) for number in range(COUNT)]
    samples[13]["input_ids"] = samples[13]["labels"] = []
    check_fails(make_loader(samples, num_workers=num_workers), r"the length of a sample is 0.* \(the sample is 13\)")


class SameForAll(Stream):
    """A stream that does not ask which worker it is in."""

    def __iter__(self) -> Iterator[Any]:
        return map(make_sample, range(self.start, self.start + self.count))


class Pipe(IterDataPipe[Any]):
    def __init__(self, rank: int) -> None:
        self.samples = list(map(make_sample, range(rank * COUNT, rank * COUNT + COUNT)))

    def __iter__(self) -> Iterator[Any]:
        return iter(self.samples)


def read_pipe(rank: int, num_workers: int) -> list[int]:
    with make_loader(Pipe(rank), num_workers=num_workers) as loader:
        return sorted(read_numbers(loader) + read_numbers(loader))


def test_a_data_pipe_on_several_ranks_is_read_here_or_refused() -> None:
    """With workers, a DataLoader made a process group in another process each epoch, and late ranks joined none."""
    here, elsewhere = run_each(2, read_pipe, [(0,), (1,)])
    assert get_values(here) == [sorted(2 * [*range(rank * COUNT, rank * COUNT + COUNT)]) for rank in range(2)]
    assert all("an IterDataPipe on several ranks needs num_workers=0" in result.text for result in elsewhere)


@pytest.mark.parametrize(("num_workers", "is_told"), [(1, False), (2, True)])
def test_workers_that_all_yield_the_same_are_warned_of(num_workers: int, is_told: bool) -> None:
    """Checks: ONCE."""
    with make_loader(SameForAll(0, COUNT), num_workers=num_workers) as loader:
        with catch_texts() as caught:
            numbers = read_numbers(loader)
        assert sorted(numbers) == sorted(num_workers * list(range(COUNT)))
        assert ["the workers begin with the same samples" in text for text in caught] == is_told * [True]
    with make_loader(Stream(0, COUNT), num_workers=num_workers) as loader, warnings.catch_warnings(action="error"):
        list(loader)


def read_part(rank: int, kind: type[Numbers] | type[Stream], is_divided: bool) -> list[str]:
    """Returns the warnings of a rank that reads its half of 400 samples, or the same 200 as the other one."""
    own = {"sampler": range(200)} if kind is Numbers else {}
    data = kind(200 * rank if is_divided else 0, 200)
    with make_loader(data, **own) as loader, catch_texts() as caught:
        assert count_samples(loader) == count_samples(loader) == 200
    return caught


def test_ranks_that_all_yield_the_same_are_warned_of() -> None:
    """Checks: ONCE. A stream, or without updates a sampler, that is not divided."""
    cases = [(kind, is_divided) for is_divided in (False, True) for kind in (Stream, Numbers)]
    found = [get_values(results) for results in run_each(2, read_part, cases)]
    for said in itertools.chain(*found[:2]):
        assert len(said) == 1
        assert "all ranks begin with the same samples" in said[0]
    assert found[2:] == [[[], []]] * 2
