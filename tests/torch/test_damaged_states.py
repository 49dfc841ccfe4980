"""R10.5: a saved state that was damaged is refused, and the refusal names the field."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest

from odb_ref.core.errors import UsageError
from odb_ref.torch import JobState
from tests.torch import data
from tests.torch.data import Numbers, read
from tests.torch.ranks import get_values, run_ranks

make_loader = partial(data.make_loader, Numbers(0, 60), window=9, shuffle=True)
VALUES: list[Any] = [None, True, False, -1, 0, 1, 2**40, 2**70, 1.0, float("nan"), "", "0", [], [0], [[]], {}, {"a": 1}]
VALUES += [b"", (0,), object(), {1, 2}, 10**5000]


def save_with(world_size: int, options: dict[str, Any], base: list[Any]) -> list[Any]:
    return get_values(run_ranks(world_size, lambda rank: data.save(make_loader(state=base, **options), 4)[1]))


def walk(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yields the paths of everything in a state."""
    if path:
        yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield from walk(item, (*path, key))


def damage(state: Any, path: tuple[Any, ...]) -> Iterator[Any]:
    """Yields the state with another value at the path, without it, and with one more beside it."""

    def change(act: Any) -> Any:
        damaged = copy.deepcopy(state)
        holder = damaged
        for key in path[:-1]:
            holder = holder[key]
        act(holder, path[-1])
        return damaged

    old = state
    for key in path:
        old = old[key]
    others: list[Any] = []
    if type(old) is int:
        others = [old + 1, old - 1, -old]
    elif isinstance(old, str):
        others = [old + "x", old[1:], old[::-1]]
    for value in [*VALUES, *others]:
        if (type(value) is not type(old) or value != old) and not (value == (0,) and old == [0]):  # else undamaged
            yield change(lambda holder, key, value=value: holder.__setitem__(key, value))
    yield change(lambda holder, key: holder.__delitem__(key))
    if isinstance(old, list) and len(old) > 1 and old != old[::-1]:
        yield change(lambda holder, key: holder[key].reverse())
    if isinstance(old, list):
        yield change(lambda holder, key: holder[key].append(0))
    if isinstance(old, dict):
        yield change(lambda holder, key: holder[key].update(more=0))


@pytest.fixture(scope="module")
def states() -> list[Any]:
    """Returns states of one rank, of shared shards, of an epoch that other ranks continue, and of one with updates."""
    first = save_with(2, {}, [])
    return [
        save_with(1, {}, [])[0],
        save_with(1, {"shard": "shared", "accumulation_steps": 3}, [])[0],
        save_with(3, {}, first)[1],
        save_with(1, {"update_samples": 7}, save_with(2, {"update_samples": 7}, []))[0],
    ]


def test_a_damaged_state_is_refused_and_the_field_is_named(states: list[Any]) -> None:
    count = 0
    with make_loader() as loader:
        for state in states:
            for path in walk(state):
                for damaged in damage(state, path):
                    with pytest.raises(UsageError, match=r"^load_state_dict: ") as caught:
                        loader.load_state_dict(damaged)
                    named = path[1] if path[0] == "checksums" and len(path) > 1 else path[0]
                    assert str(named) in str(caught.value) or path[0] == "checksums", (path, caught.value)
                    count += 1
            for name in ("more", "plce"):
                with pytest.raises(UsageError, match=name):
                    loader.load_state_dict(state | {name: 0})
        assert count > 2000
        assert len(read(loader, 2)) == 2  # and nothing of it has remained
        loader.load_state_dict(states[0])
        assert read(loader)


@pytest.mark.parametrize(
    "given", [None, 3, "state", b"state", [], [None], [[]], {}, {"version": None}, [{"version": 5}]]
)
def test_what_is_no_state_is_refused(given: Any) -> None:
    with make_loader() as loader, pytest.raises(UsageError, match="load_state_dict"):
        loader.load_state_dict(given)


def test_states_of_all_ranks_are_of_one_moment() -> None:
    first, second, third = save_with(3, {}, [])
    other = save_with(3, {"seed": 5}, [])
    with make_loader() as loader:
        for states in ([first, second], [first, first, third], [first, second, other[2]]):
            loader.load_state_dict(states)
            with pytest.raises(UsageError, match="load_state_dict"):
                iter(loader)
        loader.load_state_dict([first, third, second])
        assert read(loader)


def test_a_damaged_job_state_is_refused() -> None:
    with make_loader() as loader:
        read(loader, 4)
        job = JobState(loader)
        text = str(job.state_dict()["odb_ranks"])
        refused = 0
        for place in range(0, len(text), 7):
            for new in ("", "0", '"'):
                damaged = text[:place] + new + text[place + 1 :]
                try:
                    if json.loads(damaged) == json.loads(text):
                        continue
                except json.JSONDecodeError:
                    pass
                with pytest.raises(UsageError, match="load_state_dict"):
                    job.load_state_dict({"odb_ranks": damaged})
                refused += 1
        assert refused > 100
        job.load_state_dict({"odb_ranks": text})


def test_a_state_survives_json_and_other_types_of_sequence() -> None:
    with make_loader() as loader:
        read(loader, 4)
        state = loader.state_dict()
        for same in (
            json.loads(json.dumps(state, indent=1)),
            dict(reversed(state.items())),
            state | {"bad": tuple(state["bad"])},
        ):
            loader.load_state_dict(same)
