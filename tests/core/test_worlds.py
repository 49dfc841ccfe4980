"""Two and three machines with an exchange in memory: how an epoch ends if something goes wrong at any time."""

from __future__ import annotations

from typing import Any

import pytest

from odb_ref.core.effects import OutcomeKind
from odb_ref.core.types import Mode
from tests.helpers.world import Fault, World, make_configs, run_by_arrival

SHARDS = [[(i * i + 5 * rank) % 23 + 1 for i in range(26 - 12 * rank)] for rank in range(3)]


def run(seed: int, *faults: Fault, ranks: int = 3, **settings: Any) -> World:
    return run_by_arrival(SHARDS[:ranks], make_configs(ranks, **settings), seed=seed, faults=faults)


@pytest.mark.parametrize("after", range(0, 46, 3))
@pytest.mark.parametrize("ranks", [2, 3])
def test_a_failure_ends_all_ranks_with_one_outcome(after: int, ranks: int) -> None:
    """Spec: R7, R7.2. Checks: ABORT."""
    world = run(after, Fault("fail", 1, after), ranks=ranks)
    first, *others = world.outcomes
    assert all(other == first for other in others)
    assert (first.kind, first.rank, first.cause) == (OutcomeKind.FAILED, 1, "broken sample")
    limits = {rank.finish.step_limit for rank in world.nodes if rank.finish}
    assert limits == {len(rank.taken) for rank in world.nodes}
    assert len(limits) == 1, "all may train on exactly the same steps"


@pytest.mark.parametrize("after", range(0, 46, 3))
def test_a_lost_rank_ends_the_others_who_name_it(after: int) -> None:
    """Spec: R7.5. Checks: ABORT."""
    world = run(after, Fault("kill", 1, after))
    for number in (0, 2):
        outcome = world.outcomes[number]
        assert (outcome.kind, outcome.rank, outcome.cause) == (OutcomeKind.LOST, 1, "process gone")
    assert world.outcomes[1] is None


@pytest.mark.parametrize(
    ("changes", "cause"),
    [
        ({"budget_tokens": 7}, "budget_tokens is 7, rank 0 has 40"),
        ({"rule": "paper"}, "rule is 'paper', rank 0 has 'odb'"),
        ({"tag": "seed=2"}, "tag is 'seed=2', rank 0 has ''"),
        (
            {"mode": Mode.QUOTA, "max_age_rounds": 2},
            "max_age_rounds is 2, rank 0 has 4; mode is 'quota', rank 0 has 'join'",
        ),
    ],
)
def test_ranks_that_are_configured_differently_never_take_a_step(changes: dict[str, Any], cause: str) -> None:
    """Spec: R7.3. Checks: ABORT."""
    configs = make_configs(3)
    configs[2] = make_configs(3, **changes)[2]
    world = run_by_arrival(SHARDS, configs, seed=0)
    for rank, outcome in zip(world.nodes, world.outcomes, strict=True):
        assert (outcome.kind, outcome.rank, outcome.cause) == (OutcomeKind.MISMATCH, 2, cause)
        assert rank.taken == []
