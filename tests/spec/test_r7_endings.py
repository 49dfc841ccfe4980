"""R7: how an epoch ends."""

from __future__ import annotations

import json

import pytest

from odb_ref.core.effects import OutcomeKind
from odb_ref.core.events import PeerLost
from odb_ref.core.state import Phase
from tests.helpers.world import Node, World, make_config, make_shards, run

SHARDS = [[3, 4, 1, 9, 2, 8, 8], [2], [], [5] * 9]


def _is_in_a_collective_that_nobody_completes(node: Node, world: World) -> bool:
    return len(node.taken) > min(len(other.taken) for other in world.nodes)


@pytest.mark.parametrize("seed", range(10))
def test_every_rank_ends_for_the_same_reason(seed: int) -> None:
    """Spec: R7, R7.1. Checks: ABORT, FREE."""
    cases: list[dict[str, object]] = [
        {}, {"fails": {0: ("read", 1)}}, {"fails": {1: ("collate", 0)}},
        {"fails": {0: ("collate", 1), 3: ("collate", 1)}}, {"stops": dict.fromkeys(range(4), 2)},
    ]  # fmt: skip
    for case in cases:
        world = run(SHARDS, make_config(), seed=seed, **case)
        assert world.is_over
        assert len({finish.outcome for finish in world.get_finishes()}) == 1


def test_released_steps_are_handed_out_before_the_end() -> None:
    """Spec: R7.1, R5.5."""
    world = run(SHARDS, make_config(depth_steps=1), fails={3: ("collate", 1)})
    (limit,) = {finish.step_limit for finish in world.get_finishes()}
    assert limit > 1
    assert [len(node.taken) for node in world.nodes] == [limit] * 4


@pytest.mark.parametrize("seed", range(10))
def test_a_failure_names_the_lowest_rank_with_a_cause(seed: int) -> None:
    """Spec: R7.2. Checks: ABORT."""
    world = run(SHARDS, make_config(), seed=seed, fails={3: ("collate", 0)})
    for finish in world.get_finishes():
        outcome = finish.outcome
        assert (outcome.kind, outcome.rank, outcome.cause) == (OutcomeKind.FAILED, 3, "uncollatable")
        assert finish.step_limit == 0


def test_ranks_that_are_configured_differently_say_so() -> None:
    """Spec: R7.3. Checks: ABORT."""
    world = World(make_config(), make_shards([[1], [1], [1]]))
    other = World(make_config(budget_tokens=9), make_shards([[1], [1], [1]]))
    world.nodes[1] = other.nodes[1]
    world.run()
    (outcome,) = {finish.outcome for finish in world.get_finishes()}
    assert (outcome.kind, outcome.rank) == (OutcomeKind.MISMATCH, 1)
    assert outcome.cause == "budget_tokens is 9, rank 0 has 8"


def test_a_failure_goes_before_a_mismatch() -> None:
    """Spec: R7.2, R7.3."""
    world = World(make_config(), make_shards([[1], [1]]))
    world.nodes[1] = World(make_config(tag="seed 2"), make_shards([[1], [1]])).nodes[1]
    world.fail(1, "disk")
    world.run()
    (outcome,) = {finish.outcome for finish in world.get_finishes()}
    assert (outcome.kind, outcome.cause) == (OutcomeKind.FAILED, "disk")
    assert "tag" in json.loads(world.nodes[1].machine.config.shared_json)


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("stops", [{0: 1}, {1: 0}, {3: 2}, {0: 3, 2: 1}])
@pytest.mark.parametrize("depth", [1, 2])
def test_a_lone_stop_is_told_to_all(stops: dict[int, int], depth: int, seed: int) -> None:
    """Spec: R7.4. Checks: STOP, FREE."""
    world = run(SHARDS, make_config(depth_steps=depth), seed=seed, stops=stops)
    for node in world.nodes:
        if node.finish is None:  # the stop came after the last agreement: see the non-property NP2
            outcome = node.machine.state.outcome
            assert outcome is not None
            assert outcome.kind is OutcomeKind.COMPLETE
            assert _is_in_a_collective_that_nobody_completes(node, world)
        elif node.finish.outcome.kind is OutcomeKind.STOPPED:
            assert node.finish.outcome.rank in stops
            assert node.finish.step_limit <= min(stops.values()) or node.finish.outcome.rank not in stops
            assert len(node.taken) <= min(stops.values()) + 1


def test_a_stop_of_all_after_the_same_step_blocks_nobody() -> None:
    """Spec: R7.4. Checks: STOP."""
    for count in range(6):
        for seed in range(10):
            world = run(SHARDS, make_config(depth_steps=1), seed=seed, stops=dict.fromkeys(range(4), count))
            assert world.is_over
            assert [len(node.taken) for node in world.nodes] == [count] * 4


def test_a_loss_ends_each_rank_by_itself() -> None:
    """Spec: R7.5. Checks: ABORT."""
    world = World(make_config(), make_shards(SHARDS))
    for _ in range(40):
        world.step()
    for rank, node in enumerate(world.nodes):
        taken = len(node.taken)
        world.send(rank, PeerLost(None, f"deadline seen by {rank}"))
        assert node.machine.state.phase is Phase.DONE
        assert node.finish is not None
        assert (node.finish.outcome.kind, node.finish.step_limit) == (OutcomeKind.LOST, taken)
