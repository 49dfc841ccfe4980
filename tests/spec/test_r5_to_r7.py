"""R5 to R7: what `tests/core/test_transitions.py` does not show, nor the checker, which judges effects in random worlds."""

from __future__ import annotations

from dataclasses import replace

import pytest

from odb_ref.core.effects import OutcomeKind, PostReport
from odb_ref.core.errors import PeerError, UsageError
from odb_ref.core.events import Agreed, SamplesRead
from odb_ref.core.machine import start, transition
from odb_ref.core.offer import NONE
from odb_ref.core.state import Phase
from tests.helpers.world import Node, World, make_config, make_shard, make_shards, run

CONFIG = make_config(window_samples=2)
SHARD = make_shard([8, 7])
SHARDS = [[3, 4, 1, 9, 2, 8, 8], [2], [], [5] * 9]


def test_a_read_ends_where_the_window_is_full() -> None:
    """Spec: R2.3, R5.1."""
    begun, _ = start(CONFIG)
    full, (post,) = transition(CONFIG, begun, SamplesRead(SHARD[:1], is_full=True))
    assert (full.wanted_samples, full.is_ended, post.offer.groups_min) == (0, False, 1)
    state, _ = transition(CONFIG, begun, SamplesRead(SHARD[:1]))
    assert transition(CONFIG, state, SamplesRead((), is_full=True)) == (full, (post,))
    for event in (
        SamplesRead(SHARD[:2], is_full=True),  # nothing is left out
        SamplesRead(SHARD[:1], is_ended=True, is_full=True),
        SamplesRead((), is_full=True),  # nothing is held
    ):
        with pytest.raises(UsageError, match="SamplesRead is full, but"):
            transition(CONFIG, begun, event)


def test_an_agreement_is_judged_in_the_order_of_the_rule() -> None:
    """Spec: R5.3, R7.4. Failure, then mismatch, then a wrong round, then stop, then not ready, then closing."""
    state, (post,) = transition(CONFIG, start(CONFIG)[0], SamplesRead(SHARD))
    own = post.offer
    everything = replace(
        own, failed_rank=0, stop_rank=0, stop_step=0, ready_min=0, samples_max=0, round_min=9, round_max=9
    )
    assert transition(CONFIG, state, Agreed(everything))[0].phase is Phase.REPORT
    unfailed = replace(everything, failed_rank=NONE)
    with pytest.raises(PeerError, match="round_min"):
        transition(CONFIG, state, Agreed(unfailed))
    assert transition(CONFIG, state, Agreed(replace(unfailed, round_min=0)))[0].phase is Phase.REPORT
    in_round = replace(unfailed, round_min=0, round_max=0)
    outcome = transition(CONFIG, state, Agreed(in_round))[0].outcome
    assert outcome.kind is OutcomeKind.STOPPED
    with pytest.raises(PeerError, match="ready_min"):
        transition(CONFIG, state, Agreed(replace(in_round, stop_rank=NONE, stop_step=NONE)))
    closing = transition(CONFIG, state, Agreed(replace(in_round, stop_rank=NONE, stop_step=NONE, ready_min=1)))[0]
    assert closing.outcome.kind is OutcomeKind.COMPLETE


def test_an_urge_frees_a_rank_whose_consumer_waits_for_one_that_left() -> None:
    """Spec: R5.9. Checks: FREE, STOP."""
    shards = [[8] * 6, [8] * 6]
    free = stuck = 0
    for seed in range(40):
        options = {"seed": seed, "stops": {0: 1}}
        config = make_config(depth_steps=1)
        free += run(shards, config, **options).is_over
        stuck += not run(shards, config, **options, is_urging=False).is_over
    assert free == 40
    assert stuck > 0


def test_reports_are_posted_on_failure_only() -> None:
    """Spec: R6.4. Checks: ABORT."""
    for fails, reports in (({}, 0), ({1: ("read", 0)}, 1)):
        world = run(SHARDS, make_config(), fails=fails)
        assert [sum(isinstance(effect, PostReport) for effect in node.posted) for node in world.nodes] == [reports] * 4


def test_the_queue_never_holds_more_than_its_depth() -> None:
    """Spec: R6.6. Checks: FREE."""
    for depth in (1, 2, 3):
        world = World(make_config(depth_steps=depth), make_shards(SHARDS))
        fullest = 0
        while world.step():
            fullest = max(fullest, *(len(node.queue) for node in world.nodes))
        assert fullest == depth


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
