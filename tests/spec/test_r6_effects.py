"""R6: effects, their order and their answers, over many schedules."""

from __future__ import annotations

from collections import Counter

import pytest

from odb_ref.core.effects import Collate, Deliver, PostCounts, PostOffer, PostReport, Read
from odb_ref.core.events import Agreed, Collated, Counted, Reported
from tests.helpers.world import Node, World, make_config, run

SHARDS = [[3, 4, 1, 9, 2, 8, 8], [2], [], [5] * 7]


def _effects(node: Node) -> list[object]:
    return [effect for _, effects in node.events for effect in effects]


@pytest.fixture(params=range(12), name="world")
def _world(request: pytest.FixtureRequest) -> World:
    return run(SHARDS, make_config(depth_steps=1 + request.param % 3), seed=request.param)


def test_effects_and_answers_alternate(world: World) -> None:
    """Spec: R6."""
    answers = {PostOffer: Agreed, PostCounts: Counted, PostReport: Reported, Collate: Collated}
    for node in world.nodes:
        counts = Counter(type(effect) for effect in _effects(node))
        events = Counter(type(event) for event, _ in node.events)
        assert all(counts[effect] == events[event] for effect, event in answers.items())


def test_at_most_one_read_is_open(world: World) -> None:
    """Spec: R6.1."""
    for node in world.nodes:
        open_samples = node.machine.config.compute_window_samples(0)
        for event, effects in node.events:
            samples = getattr(event, "samples", ())
            open_samples = 0 if getattr(event, "is_ended", False) else open_samples - len(samples)
            for effect in effects:
                if isinstance(effect, Read):
                    assert open_samples == 0
                    assert effect.count > 0
                    open_samples = effect.count


def test_one_offer_a_round(world: World) -> None:
    """Spec: R6.2. Checks: TERM."""
    for node in world.nodes:
        rounds = [effect.offer.round_min for effect in _effects(node) if isinstance(effect, PostOffer)]
        assert rounds == list(range(len(rounds)))


def test_all_ranks_post_counts_of_the_same_size(world: World) -> None:
    """Spec: R6.3. Checks: ALIGN."""
    sizes = [[len(e.counts) for e in _effects(node) if isinstance(e, PostCounts)] for node in world.nodes]
    assert all(size == sizes[0] for size in sizes)
    assert sum(sizes[0]) == len(world.nodes[0].taken)


def test_reports_are_posted_on_failure_only(world: World) -> None:
    """Spec: R6.4. Checks: ABORT."""
    assert not any(isinstance(effect, PostReport) for node in world.nodes for effect in _effects(node))
    failed = run(SHARDS, make_config(), fails={1: ("read", 0)})
    assert [sum(isinstance(e, PostReport) for e in _effects(node)) for node in failed.nodes] == [1, 1, 1, 1]


def test_each_step_is_collated_once_before_it_is_delivered(world: World) -> None:
    """Spec: R6.5, R6.6. Checks: RELEASE, ONCE."""
    for node in world.nodes:
        collated: list[int] = []
        ready: set[int] = set()
        for event, effects in node.events:
            if isinstance(event, Collated):
                ready.update(collated)
            for effect in effects:
                if isinstance(effect, Collate):
                    collated += [step.number for step in effect.steps]
                elif isinstance(effect, Deliver):
                    assert effect.step.number in ready
        assert collated == list(range(len(node.taken)))


def test_the_queue_never_holds_more_than_its_depth() -> None:
    """Spec: R6.6. Checks: FREE."""
    for depth in (1, 2, 3):
        world = World(make_config(depth_steps=depth), [node.shard for node in run(SHARDS, make_config()).nodes])
        fullest = 0
        while world.step():
            fullest = max(fullest, *(len(node.queue) for node in world.nodes))
        assert fullest == depth
