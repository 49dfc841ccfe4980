"""Resuming a saved epoch: differences are named, and what is left or dropped is reported. Spec: R10.4, R10.5."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from odb_ref.core.errors import UsageError
from odb_ref.torch import JobError, ODBDataLoader
from odb_ref.torch.plan.state import compute_digest
from tests.torch import data
from tests.torch.data import Numbers, count_samples, list_numbers, read, take
from tests.torch.ranks import get_values, run_ranks
from tests.torch.states import check_refused

COUNT = 40


def make_loader(dataset: Any = None, **options: Any) -> ODBDataLoader:
    window = {} if options.get("update_samples") else {"window": 6}  # an update is a window
    return data.make_loader(dataset, **window | options)


def save(limit: int | None = 5, **options: Any) -> Any:
    return data.save(make_loader(**options), limit)[1]


def refuse(state: Any, message: str, **options: Any) -> None:
    check_refused(make_loader(state=state, **options), message)


def measure(sample: Any) -> int:
    return len(sample["input_ids"])


def count_one(sample: Any) -> list[int]:
    return [1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"token_budget": 50}, "token_budget: saved 60, now 50"),
        ({"window": 9, "ramp_rounds": 0}, "ramp_rounds: saved 3, now 0; window: saved 6, now 9"),
        ({"layout": "packed"}, "layout: saved None, now 'packed'"),
        ({"order": "sampler"}, "order: saved 'shuffled', now 'sampler'"),
        ({"cost": "attention/8"}, "cost: saved None, now 'attention/8'"),
        ({"sizes": "powers"}, "sizes: saved None, now 'powers'"),
        ({"max_patches": 5}, r"limits: saved None, now \[5\]"),
        ({"cost_fn": count_one, "limits": [2]}, r"cost_fn: saved 'none', now 'given'; limits: saved None, now \[2\]"),
        ({"window_bytes": 5000}, "window_bytes: saved None, now 5000"),
        ({"mode": "quota", "quota": 9}, "mode: saved 'join', now 'quota'; quota: saved None, now 9"),
        ({"policy": "paper"}, "policy: saved 'odb', now 'paper'"),
        ({"max_age_rounds": 1}, "max_age_rounds: saved 4, now 1"),
        ({"length_fn": measure}, "length_fn: saved 'default', now 'given'"),
        ({"supervised_fn": measure}, "supervised_fn: saved 'default', now 'given'"),
        ({"causal_shift": False}, "causal_shift: saved True, now False"),
        ({"shuffle": True}, "order of samples has changed .*shuffle: saved False, now True"),
        ({"seed": 4}, "order of samples has changed .*seed: saved 0, now 4"),
        ({"shard": "shared"}, "order of samples has changed .*shard: saved 'given', now 'shared'"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_each_setting_that_differs_is_named(options: dict[str, Any], message: str) -> None:
    state = save(shard="given")
    refuse(state, message, **({"shard": "given"} | options))


@pytest.mark.parametrize("options", [{"causal_shift": False}, {"supervised_fn": measure}, {"token_budget": 50}])
def test_one_order_of_all_ranks_goes_on_with_other_settings(options: dict[str, Any]) -> None:
    before, state = data.save(make_loader(shuffle=True), 5)
    after = take(make_loader(shuffle=True, state=state, **options))
    assert sorted(list_numbers(before) + after) == list(range(COUNT))


@pytest.mark.parametrize(("steps", "options"), [(5, {}), (8, {"token_budget": 50}), (18, {"token_budget": 50})])
def test_an_update_that_goes_on_or_has_ended_raises_no_warning(steps: int, options: dict[str, Any]) -> None:
    """The last update of an epoch has fewer steps: 18 are all."""
    taken, state = data.save(make_loader(shuffle=True, accumulation_steps=4), steps)
    assert (len(list_numbers(taken)) == COUNT) == (steps == 18)
    take(make_loader(shuffle=True, accumulation_steps=4, state=[state], **options))


def test_an_update_that_does_not_go_on_with_other_settings_is_warned_of() -> None:
    """Gradients saved with it have weights of another update."""
    state = save(shuffle=True, accumulation_steps=3)
    with make_loader(shuffle=True, accumulation_steps=3, token_budget=50, state=[state]) as loader:
        with pytest.warns(RuntimeWarning, match="after 2 of the 3 steps of an update. .* Do not restore gradients"):
            assert next(loader.steps())[1].update_samples > 0
        state = loader.state_dict()
        loader.load_state_dict([state])
        loader.set_epoch(4)
        with pytest.warns(RuntimeWarning, match="the loaded state is dropped") as warned:
            next(loader.steps())
        assert len(warned) == 1  # gradients of an epoch that does not go on are nobody's


def test_a_data_set_of_another_size_is_named() -> None:
    state = save(shuffle=True)
    smaller = Numbers(0, COUNT - 1)
    refuse(state, "samples of the data set: saved 40, now 39", dataset=smaller, shuffle=True)


def test_a_data_set_that_grows_inside_an_epoch_does_not_go_on_as_the_larger_one() -> None:
    """Checks: RESUME. The epoch keeps the order of the smaller one."""
    samples = [{"number": number, "input_ids": torch.zeros(7, dtype=torch.int64)} for number in range(COUNT)]
    options = {"collate_fn": get_numbers, "shuffle": True}
    with make_loader(samples, **options) as loader:
        _, info = next(loader.steps())
        samples.append(samples[0] | {"number": COUNT})
        state = loader.state_dict()
    refuse(state, "samples of the data set: saved 40, now 41", dataset=samples, **options)
    rest = take(make_loader(samples[:COUNT], state=state, **options), count_samples)
    assert rest == COUNT - info.local_samples


def get_numbers(samples: list[dict[str, Any]]) -> list[int]:
    return [sample["number"] for sample in samples]


@pytest.mark.parametrize("shard", ["auto", "shared"])
@pytest.mark.parametrize("steps", [3, 4])
def test_updates_do_not_change_inside_an_epoch(steps: int, shard: str) -> None:
    """Checks: ONCE. A state saved at the end of an update counts in updates."""
    options: dict[str, Any] = {"shuffle": True, "shard": shard}
    with make_loader(update_samples=8, **options) as loader:
        taken = loader.steps()
        while (info := next(taken)[1]).step < steps or info.is_update_end != (steps == 4):
            pass
        inside = loader.state_dict()
        list(taken)
        between = loader.state_dict()
    for changed in ({}, {"update_samples": 16}):
        with make_loader(state=inside, **options, **changed) as loader:
            with pytest.raises(UsageError, match=r"update_samples cannot change within an epoch.*between epochs"):
                iter(loader)
            loader.load_state_dict(between)
            assert loader.epoch == 1
            assert count_samples(loader) == COUNT


def test_between_two_epochs_a_state_fits_other_settings_but_not_another_order() -> None:
    state = save(None, shard="given")
    assert len(take(make_loader(shard="given", token_budget=50, state=state), read)) > 1
    message = r"seed: saved 0, now 3\); to begin epoch 1 with the new order, call set_epoch\(1\)"
    refuse(state, message, shard="given", seed=3)


@pytest.mark.parametrize("update_samples", [None, 8])
def test_states_of_different_steps_are_named_as_such(update_samples: int | None) -> None:
    make = partial(make_loader, shuffle=True, update_samples=update_samples)

    def save_at_other_steps(rank: int) -> Any:
        with make() as loader:
            states = [loader.state_dict() for _, info in loader.steps() if info.is_update_end]
        with make(state=states[1 + rank]) as loader, pytest.raises(JobError, match="load states that") as caught:
            read(loader)
        return states[1 + rank], str(caught.value)

    (first, told), (second, told_other) = get_values(run_ranks(2, save_at_other_steps))
    assert told_other == told
    with (
        make_loader() as loader,
        pytest.raises(UsageError, match=r"rank 0 was saved after \d+ steps, rank 1 after \d+"),
    ):
        loader.load_state_dict([second, first])


def test_other_settings_and_another_number_of_ranks_need_all_states() -> None:
    first, second = get_values(run_ranks(2, lambda rank: save()))
    message = r"ranks: saved 2, now 1; token_budget: saved 60, now 50.*states of all ranks"
    refuse(first, message, token_budget=50)
    assert take(make_loader(token_budget=50, state=[first, second]))


# Keys ----------------------------------------------------------------------------------------------------------------


def as_numpy(numbers: Sequence[int]) -> list[Any]:
    return list(np.asarray(numbers))


def as_tensors(numbers: Sequence[int]) -> list[Any]:
    return list(torch.tensor(numbers))


def as_arrays(numbers: Sequence[int]) -> list[Any]:
    return [np.array([number, 1]) for number in numbers]


def as_dicts(numbers: Sequence[int]) -> list[Any]:
    return [{"row": np.int32(number), "file": np.str_("a")} for number in numbers]


class Named(Numbers):
    """Its keys are anything that holds a number."""

    def __getitem__(self, index: Any) -> Any:
        while not isinstance(index, int):
            index = index["row"] if isinstance(index, dict) else index.tolist()
            index = index[0] if isinstance(index, list) else index
        return super().__getitem__(index)


@pytest.mark.parametrize("make", [list, as_numpy, as_tensors, as_arrays, as_dicts])
def test_keys_of_any_library_in_another_order_are_noticed(make: Any) -> None:
    """Checks: ONCE, COVER."""
    named = Named(0, COUNT)
    numbers = list(range(COUNT))
    state = save(dataset=named, sampler=make(numbers))
    refuse(state, "has changed since the state was saved", dataset=named, sampler=make(numbers[::-1]))
    assert take(make_loader(named, sampler=make(numbers), state=state))


def test_numbers_are_the_same_keys_in_every_library() -> None:
    numbers = [3, 1, 2**40]
    found = {compute_digest(keys) for keys in (numbers, as_numpy(numbers), as_tensors(numbers))}
    assert len(found) == 1
    assert compute_digest([3.0, 1]) != compute_digest([3, 1])
    assert compute_digest([np.float64(3), True]) == compute_digest([3.0, np.bool_(True)])
    assert compute_digest([(np.int64(1), None)]) == compute_digest([(1, None)]) != compute_digest([(1, "None")])
    assert compute_digest([2**70, 1]) != compute_digest([1, 2**70])


# Moments -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_workers", [0, 1])
def test_loading_a_state_leaves_the_epoch_under_way(num_workers: int) -> None:
    with make_loader(shuffle=True, num_workers=num_workers) as loader:
        whole = read(loader)
        loader.set_epoch(0)
        steps = loader.steps()
        for _ in range(4):
            next(steps)
        state = loader.state_dict()
        next(steps)
        loader.load_state_dict(state)
        said = "load_state_dict was called, so the next iteration over its loader continues"
        with pytest.raises(UsageError, match=said):
            next(steps)
        assert loader.state_dict() == state
        assert read(loader) == whole[4:]


def test_ranks_that_load_together_go_on_together() -> None:
    get_values(run_ranks(3, lambda rank: test_loading_a_state_leaves_the_epoch_under_way(0)))


def test_a_loaded_state_that_is_dropped_is_spoken_of() -> None:
    with make_loader() as loader:
        read(loader)
        read(loader, 4)
        state = loader.state_dict()
        assert state["epoch"] == 1
    begun = state
    for steps in (4, 0):
        with make_loader(state=begun) as loader:
            loader.set_epoch(0)
            with pytest.warns(RuntimeWarning, match=rf"chosen epoch 0.*dropped.*epoch 1 after {steps} steps"):
                read(loader)
            begun = loader.state_dict()
    with make_loader(state=begun) as loader, warnings.catch_warnings(action="error"):
        loader.set_epoch(2)  # nothing of it was taken
        read(loader, 1)
        loader.load_state_dict(state)
        loader.set_epoch(0)
        loader.set_epoch(1)
        read(loader)
        loader.load_state_dict(state)
        loader.load_state_dict(loader.state_dict())
        read(loader)


def test_a_state_outlives_the_process_group() -> None:
    def save_after_the_group(rank: int) -> None:
        loader = make_loader(shard="given")
        before = make_loader(shard="given")
        read(loader, 5)
        state = loader.state_dict()
        dist.destroy_process_group()
        assert loader.state_dict() == state
        loader.close()
        with pytest.raises(UsageError, match="is stale"):
            before.state_dict()
        assert loader.state_dict() == state

    get_values(run_ranks(2, save_after_the_group))
