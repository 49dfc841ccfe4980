"""Random worlds under random schedules: no deadlock, loss or misalignment, and an end within the bound."""

from __future__ import annotations

import os
import random

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test
from odb_sim.explore.measure import compute_bound
from odb_sim.explore.sampling import make_random_bounds, run_random_schedule

from tests.helpers.effort import few
from tests.properties.worlds import WorldMachine

SETTINGS = settings(
    max_examples=few(200),
    stateful_step_count=60,
    deadline=None,
    print_blob=True,
    suppress_health_check=list(HealthCheck),
)


@pytest.mark.slow
def test_random_worlds_keep_every_property() -> None:
    run_state_machine_as_test(WorldMachine, settings=SETTINGS)


FIRST_SEED = int(os.environ.get("ODB_SEED", "0"))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(FIRST_SEED, FIRST_SEED + 60))
def test_large_random_world_ends_properly(seed: int) -> None:
    draw = random.Random(seed)
    bounds = make_random_bounds(draw)
    result = run_random_schedule(bounds, draw)
    assert result.counterexample is None, f"seed {seed}: {bounds}"
    assert 0 < result.transitions <= compute_bound(bounds)
