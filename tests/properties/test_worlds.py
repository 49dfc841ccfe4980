"""Random worlds under random schedules: no deadlock, loss or misalignment, and an end within the bound."""

from __future__ import annotations

import os
import random

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

from odb_ref.core.rules import RULES
from odb_ref.core.types import Mode
from simulator.explore.bounds import Bounds
from simulator.explore.rank import compute_bound
from simulator.explore.search import make_space
from tests.properties.worlds import WorldMachine

SETTINGS = settings(
    max_examples=200, stateful_step_count=60, deadline=None, print_blob=True, suppress_health_check=list(HealthCheck)
)


def test_random_worlds_keep_every_property() -> None:
    run_state_machine_as_test(WorldMachine, settings=SETTINGS)


def make_random_bounds(draw: random.Random) -> Bounds:
    """A larger world than Hypothesis draws: up to 8 ranks with up to 30 samples each."""
    mode = draw.choice(list(Mode))
    ranks = draw.randint(1, 8)
    return Bounds(
        lengths=tuple(tuple(draw.randint(1, 60) for _ in range(draw.choice((0, 1, 5, 30)))) for _ in range(ranks)),
        budget_tokens=draw.randint(1, 128),
        window_samples=draw.randint(1, 12),
        depth_steps=draw.randint(1, 4),
        mode=mode,
        quota_samples=draw.choice((None, draw.randint(1, 120))) if mode is Mode.QUOTA else None,
        max_age_rounds=draw.randint(1, 5),
        ramp_rounds=draw.randint(0, 3),
        rule=draw.choice(sorted(RULES.values(), key=lambda rule: rule.name)),
        failures=draw.choice((0, 0, 1, 3)),
        stops=draw.choice((0, 0, 1, 3)),
        losses=draw.choice((0, 0, 1, 2)),
        is_single_reads=draw.random() < 0.5,
        is_eager_end=draw.random() < 0.5,
        is_urged_freely=draw.random() < 0.3,
    )


FIRST_SEED = int(os.environ.get("ODB_SEED", "0"))


@pytest.mark.parametrize("seed", range(FIRST_SEED, FIRST_SEED + 60))
def test_large_random_world_ends_properly(seed: int) -> None:
    draw = random.Random(seed)
    bounds = make_random_bounds(draw)
    space, world = make_space(bounds)
    # Ranks of different speed; a fault is as likely as anything else that may happen at a moment, or much rarer.
    speeds = [draw.choice((1.0, 0.1, 0.01)) for _ in range(bounds.ranks)]
    fault_weight = draw.choice((1.0, 0.02))
    transitions = 0
    while codes := space.enabled(world):
        if space.is_over(world, codes):
            space.check_over(world)
        weights = [speeds[code // 10] * (fault_weight if code % 10 >= 6 else 1.0) for code in codes]
        world = space.apply(world, draw.choices(codes, weights)[0])
        space.check(world)
        transitions += 1
    space.check_over(world)
    assert transitions <= compute_bound(bounds)
