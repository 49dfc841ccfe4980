"""RESUME as a matrix: saved after every step of an epoch by W ranks, resumed by W' ranks, W and W' in 1 to 4.

States are saved inside the loop, as a training job saves them, while later steps are already read, formed and collated. All
states of a W come from one epoch, and all continuations with W' ranks run in one launch, so the matrix takes 4 + 4 launches.
"""

from __future__ import annotations

import json
from functools import partial
from typing import Any

import pytest

from odb_ref.torch import ODBDataLoader
from tests.torch import data
from tests.torch.data import Numbers, list_numbers, take
from tests.torch.ranks import get_values, run_ranks

WORLDS = (1, 2, 3, 4)
COUNT = 47
make_loader = partial(data.make_loader, Numbers(0, COUNT), window=9, depth=3, shuffle=True, accumulation_steps=2)
Row = tuple[int, list[int], float]
"""Step number, sample numbers and loss scale of one step of one rank."""


def read(loader: ODBDataLoader, states: list[Any] | None = None) -> list[Row]:
    """Returns the steps up to the end of the epoch. The state after each is added to ``states``."""
    rows = []
    for batch, info in loader.steps():
        rows.append((info.step, [] if info.is_idle else batch["numbers"], info.loss_scale))
        if states is not None:
            states.append(json.loads(json.dumps(loader.state_dict())))
    return rows


def save_at_every_step(rank: int, options: dict[str, Any]) -> tuple[list[Row], list[Any]]:
    with make_loader(**options) as loader:
        states = [loader.state_dict()]
        return read(loader, states), states


def go_on(rank: int, cells: list[list[Any]], options: dict[str, Any]) -> list[list[Row]]:
    """Returns the steps after the states of each cell, with a new loader for each."""
    found = []
    for states in cells:
        found.append(take(make_loader(state=states, **options), read))
    return found


Saved = list[tuple[list[Row], list[Any]]]
"""By rank."""


def save(world_size: int, options: dict[str, Any]) -> Saved:
    saved = get_values(run_ranks(world_size, save_at_every_step, options, timeout_s=120))
    assert sorted(list_numbers(*(rows for rows, _ in saved))) == list(range(COUNT))
    return saved


def check_continuations(
    saved_by_world: dict[int, Saved], limits: dict[int, list[int]], world_size: int, **options: Any
):
    """Continues with ``world_size`` ranks after the numbers of steps in ``limits``, for each epoch."""
    keys = [(world, limit) for world in saved_by_world for limit in limits[world]]
    cells = [[states[limit] for _, states in saved_by_world[world]] for world, limit in keys]
    values = get_values(run_ranks(world_size, go_on, cells, options, timeout_s=240))
    for index, (world, limit) in enumerate(keys):
        saved = saved_by_world[world]
        after = [value[index] for value in values]
        before = [rows[:limit] for rows, _ in saved]
        assert sorted(list_numbers(*before, *after)) == list(range(COUNT)), (world, limit, world_size)
        assert len({tuple(step for step, _, _ in rows) for rows in after}) == 1, (world, limit, world_size)
        if world == world_size:
            assert after == [rows[limit:] for rows, _ in saved], (world, limit)


@pytest.fixture(scope="module", params=["auto", "shared"])
def shard(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def saved_by_world(shard: str) -> dict[int, Saved]:
    return {world_size: save(world_size, {"shard": shard}) for world_size in WORLDS}


@pytest.mark.slow
@pytest.mark.parametrize("world_size", WORLDS)
def test_any_number_of_ranks_goes_on_after_any_step_of_any_other(
    saved_by_world: dict[int, Saved], shard: str, world_size: int
) -> None:
    """Spec: R10.3, R14.6. Checks: RESUME, ONCE, COVER, REPLAY, ALIGN, DEAL.

    Nothing is lost or repeated, and the same ranks repeat the rest exactly.
    """
    # https://github.com/Lightning-AI/litData/issues/878
    limits = {world: list(range(len(saved[0][1]))) for world, saved in saved_by_world.items()}
    assert all(len(steps) >= 6 for steps in limits.values())
    check_continuations(saved_by_world, limits, world_size, shard=shard)


@pytest.mark.deep
def test_states_saved_with_workers_and_prefetch_in_flight_are_as_good(
    saved_by_world: dict[int, Saved], shard: str
) -> None:
    """Checks: RESUME, REPLAY. States saved with workers and without them are equal, and training resumes from either."""
    options = {"num_workers": 2, "prefetch_factor": 2, "shard": shard}
    saved = save(2, options)
    assert saved == saved_by_world[2]
    limits = {2: [0, 3, len(saved[0][0]) - 1]}
    for world_size in (2, 3):
        check_continuations({2: saved}, limits, world_size, **options)
