"""Saving after any step and resuming, with the same number of ranks and with others."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch.utils.data import Sampler

from odb_ref.torch import JobError, ODBDataLoader, UsageError
from tests.torch import data
from tests.torch.data import Numbers, Stream, check_goes_on, list_numbers, make_sample, read, take
from tests.torch.ranks import get_values, run_each, run_ranks
from tests.torch.states import change, check_fails, check_refused

COUNT = 47


def make_loader(dataset: Any = None, **options: Any) -> ODBDataLoader:
    settings: dict[str, Any] = {"window": 10, "shuffle": True, "accumulation_steps": 3}
    return data.make_loader(Numbers(0, COUNT) if dataset is None else dataset, **settings | options)


def save(steps: int, dataset: Any = None, **options: Any) -> Any:
    """Returns the state after some steps."""
    return data.save(make_loader(dataset, **options), steps)[1]


def read_on(loader: ODBDataLoader, limit: int | None = None) -> list[Any]:
    """Returns ``limit`` steps, or the rest of an epoch and the next."""
    return read(loader) + read(loader) if limit is None else read(loader, limit)


def test_the_same_ranks_go_on_identically_to_a_quota_and_in_the_next_epoch() -> None:
    """Saved after any step. tests/torch/test_resume_matrix.py covers whole epochs."""
    make = partial(make_loader, mode="quota", quota=30)

    def save_and_go_on(rank: int) -> None:
        check_goes_on(make, range(len(take(make(), read)) + 1), read_on)

    get_values(run_ranks(2, save_and_go_on, timeout_s=120))


def name_samples(start: int, count: int) -> Any:
    """Returns samples by name, so that no key is 0."""
    return {f"sample {number}": make_sample(start + number) for number in range(count)}


HOLED = {"on_bad_sample": "quarantine", "max_bad_samples": 0.5}
KINDS: dict[str, tuple[Any, Callable[[int], dict[str, Any]]]] = {
    "stream": (Stream, lambda count: {}),
    "holed": (partial(Stream, bad=range(1, 47, 3), fault="empty"), lambda count: HOLED),
    "keyed": (name_samples, lambda count: {"sampler": [f"sample {number}" for number in range(count)]}),
}
"""The data set, and the options for its number of samples."""


def read_all(loader: ODBDataLoader, limit: int | None = None) -> list[tuple[int, list[int], float]]:
    """Returns number, samples and loss scale of each step, also of idle ones."""
    found: list[tuple[int, list[int], float]] = []
    for batch, info in loader.steps():
        found.append((info.step, batch["numbers"], info.loss_scale))
        if len(found) == limit:
            break
    return found


def save_idle(rank: int, kind: str, options: dict[str, Any]) -> list[list[int]]:
    """Checks states from before and after the second rank's samples end. Returns what the rank replayed."""

    start, count = ((2000, 47), (1010, 20))[rank]
    dataset, list_options = KINDS[kind]

    def make() -> ODBDataLoader:
        return data.make_loader(dataset(start, count), shard="given", **options, **list_options(count))

    # A map-style data set replays the first sample instead, because what had been read before is not read again.
    whole = check_goes_on(make, range(2, 13, 5), read if kind == "keyed" else read_all)
    return [numbers for _, numbers, scale in whole if not scale]


@pytest.mark.parametrize("kind", KINDS)
def test_a_rank_whose_samples_have_ended_goes_on_and_replays_what_it_would_have(kind: str) -> None:
    """Checks: RESUME. Not even a stream without a sample left is a rank without a sample."""
    free, updates = {"window": 10, "accumulation_steps": 3}, {"update_samples": 16}
    cases = [(kind, options) for options in (free, updates, free | {"num_workers": 1})]
    for results in run_each(2, save_idle, cases, timeout_s=120):
        _, idle = get_values(results)
        assert len(idle) > 3 and len(set(map(tuple, idle))) == 1


def test_a_state_is_small() -> None:
    state = save(60, dataset=Numbers(0, 4000), window=512, token_budget=500)
    assert len(json.dumps(state)) < 2 * 512 * 6 + 1000


def test_states_that_do_not_fit_are_refused() -> None:
    state = save(2)
    with make_loader() as loader, pytest.raises(UsageError, match="version 3, but this library reads version 5"):
        loader.load_state_dict({"version": 3})
    said = r"not what a loader's .* pass the state itself, or to JobState"
    for wrapped in ({"loader": state}, {"odb_ranks": json.dumps([state])}):
        with make_loader() as loader, pytest.raises(UsageError, match=said):
            loader.load_state_dict(wrapped)
    with make_loader() as loader, pytest.raises(UsageError, match="version 1"):
        loader.load_state_dict(state | {"version": 1})
    check_refused(make_loader(state=change(state, world_size=2)), "states of all ranks are needed")
    with make_loader(seed=5, state=state) as loader:
        for _ in range(2):  # the state is kept, and no epoch begins without it
            with pytest.raises(UsageError, match=r"order of samples has changed .*seed: saved 0, now 5"):
                iter(loader)


def test_a_stream_does_not_go_on_with_another_number_of_workers() -> None:
    """One worker reads what the training thread would. Two yield other samples first."""
    options: dict[str, Any] = {"dataset": Stream(0, 60), "shuffle": False}
    first, state = data.save(make_loader(**options), 2)
    rest = take(make_loader(num_workers=1, state=state, **options))
    assert sorted(list_numbers(first) + rest) == list(range(60))
    check_refused(make_loader(num_workers=2, state=state, **options), "num_workers: saved 1, now 2")


def test_a_loaded_state_does_not_stand_for_another_epoch() -> None:
    state = save(2)
    with make_loader(state=state) as loader:
        loader.set_epoch(3)
        assert (loader.state_dict()["epoch"], loader.state_dict()["checkpoint"]) == (3, None)
        loader.set_epoch(0)
        assert loader.state_dict() == state


def test_a_state_that_one_rank_refuses_ends_the_epoch_on_all() -> None:
    def load_another_rank_s_state(rank: int) -> str:
        state = save(2)
        with make_loader(state=change(state, rank=1)) as loader:
            with pytest.raises((UsageError, JobError)) as caught:
                read(loader)
            loader.load_state_dict(state)
            assert read(loader)  # the exchange continues
            return f"{caught.type.__name__}: {caught.value}"

    results = run_ranks(2, load_another_rank_s_state)
    what = "UsageError: load_state_dict: rank 0 was not given its own state, only that of rank 1"
    assert get_values(results) == [what, f"JobError: rank 0 failed: {what}"]
    assert max(result.seconds for result in results) < 15


def test_other_numbers_of_ranks_do_not_go_beyond_a_quota_that_is_met() -> None:
    def save_at_the_quota(rank: int, base: list[Any]) -> tuple[int, dict[str, Any]]:
        with make_loader(mode="quota", quota=20, accumulation_steps=1, state=base) as loader:
            count, state = 0, loader.state_dict()
            for batch in loader:
                count += len(batch["numbers"])
                state = loader.state_dict()
            return count, state

    counts, states = zip(*get_values(run_ranks(2, save_at_the_quota, [])), strict=True)
    assert sum(counts) >= 20
    assert [count for count, _ in get_values(run_ranks(3, save_at_the_quota, list(states)))] == [0] * 3


class Remembering(Sampler[int]):
    """A sampler that lists a different order each time, unless its state is restored."""

    def __init__(self) -> None:
        self.choose = random.Random(5)

    def __iter__(self) -> Iterator[int]:
        return iter(self.choose.sample(range(COUNT), COUNT))


def test_an_order_that_is_listed_otherwise_is_refused_and_one_listed_alike_goes_on() -> None:
    """Spec: R10.4. Checks: RESUME, ONCE, COVER."""
    sampler = Remembering()
    with make_loader(sampler=sampler, shuffle=False) as loader:
        at_start = loader.state_dict()
        memory = sampler.choose.getstate()
        before = read(loader, 5)
        state = loader.state_dict()
        with pytest.raises(UsageError, match="has changed since the state was saved"):
            loader.load_state_dict(state)
            iter(loader)
        sampler.choose.setstate(memory)
        after = read(loader)
        loader.load_state_dict(at_start)  # nothing was taken, so any order will do
        assert read(loader)
    assert sorted(list_numbers(before, after)) == list(range(COUNT))


def test_a_refusal_of_the_order_says_what_to_do() -> None:
    """Spec: R10.4."""
    state = save(5, sampler=range(COUNT), shuffle=False)
    for keys in (range(COUNT - 1), [str(key) for key in range(COUNT)], [*range(1, COUNT), 0]):
        message = rf"47 keys with digest \w+, now {len(keys)} keys .* restore it first"
        check_refused(make_loader(sampler=keys, shuffle=False, state=state), message)


def make_samples(shift: int = 0, length: int = 0) -> list[dict[str, Any]]:
    """Returns the samples under different keys, or others of one length."""
    if length:
        ids = torch.ones(length, dtype=torch.int64)
        return [{"number": number, "input_ids": ids, "labels": ids.clone()} for number in range(COUNT)]
    return [make_sample((number + shift) % COUNT) for number in range(COUNT)]


@pytest.mark.slow
@pytest.mark.parametrize("num_workers", [0, 1])
def test_samples_that_are_shorter_or_lie_under_other_keys_are_noticed(num_workers: int) -> None:
    """Spec: R10.4. Checks: RESUME. The order of the keys is the same, but what the machine knows of the samples is not. Shorter
    ones are noticed even if the epoch ends before its saved step.
    """
    shifted, whole = (make_samples(), make_samples(shift=1)), {"window": 64, "ramp_rounds": 0}
    cases: list[Any] = [(limit, *shifted, {}) for limit in (1, 4, 9, 15)]
    for limit, before, after, options in (*cases, (20, make_samples(length=30), make_samples(length=5), whole)):
        state = save(limit, dataset=before, **options)
        check_fails(make_loader(after, num_workers=num_workers, state=state, **options), "samples have changed")


class Reshuffled(Stream):
    """A stream in an order of its own each time, as WebDataset's ``shuffle`` without a seed."""

    def __iter__(self) -> Iterator[Any]:
        return iter(random.SystemRandom().sample(list(super().__iter__()), self.count))


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_stream_in_another_order_is_noticed_wherever_it_was_saved(num_workers: int) -> None:
    """Spec: R10.4, R16.6. Checks: RESUME. At an update's end the position says nothing about the order."""
    options = {"shuffle": False, "num_workers": num_workers, "update_samples": 9, "accumulation_steps": 1}
    with make_loader(Stream(0, COUNT), **options) as loader:
        ends = [info.is_update_end for _, info in loader.steps()]
    assert True in ends[:-1] and False in ends
    check_goes_on(
        lambda: make_loader(Stream(0, COUNT), **options), range(0, len(ends) + 1, 1 + 5 * num_workers), read_on
    )
    for limit in (ends.index(False) + 1, ends.index(True) + 1):
        state = save(limit, dataset=Stream(0, COUNT), **options)
        for dataset in (Reshuffled(0, COUNT), Stream(0, limit)):
            check_fails(make_loader(dataset, state=state, **options), "samples have changed")


def test_other_ranks_compare_the_order_of_all() -> None:
    """Spec: R10.4. Checks: RESUME."""

    def save_in_part(rank: int, base: list[Any], keys: str) -> Any:
        states = [change(state, keys=keys or state["keys"]) for state in base]
        return data.save(make_loader(state=states), 3)[1]

    states = get_values(run_ranks(2, save_in_part, [], ""))
    assert len({state["keys"] for state in states}) == 1
    good, bad = run_each(3, save_in_part, [(states, ""), (states, "47:0123456789abcdef")])
    get_values(good)
    for result in bad:
        assert "the order of the samples has changed" in result.text
