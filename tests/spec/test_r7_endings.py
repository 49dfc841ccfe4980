"""R7: how an epoch ends."""

from __future__ import annotations

import pytest

from odb_ref.core.effects import OutcomeKind
from tests.helpers.world import Node, World, make_config, run

SHARDS = [[3, 4, 1, 9, 2, 8, 8], [2], [], [5] * 9]


def _is_in_a_collective_that_nobody_completes(node: Node, world: World) -> bool:
    return len(node.taken) > min(len(other.taken) for other in world.nodes)


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("stops", [{0: 1}, {1: 0}, {3: 2}, {0: 3, 2: 1}])
@pytest.mark.parametrize("depth", [1, 2])
def test_a_lone_stop_is_told_to_all(stops: dict[int, int], depth: int, seed: int) -> None:
    """Spec: R7.4. Checks: STOP, FREE."""
    world = run(SHARDS, make_config(depth_steps=depth), seed=seed, stops=stops)
    for node in world.nodes:
        if node.finish is None:  # the stop came after the last agreement, see the non-property NP2
            outcome = node.machine.state.outcome
            assert outcome.kind is OutcomeKind.COMPLETE
            assert _is_in_a_collective_that_nobody_completes(node, world)
        elif node.finish.outcome.kind is OutcomeKind.STOPPED:
            assert node.finish.outcome.rank in stops
            assert node.finish.step_limit <= min(stops.values()) or node.finish.outcome.rank not in stops
            assert len(node.taken) <= min(stops.values()) + 1
