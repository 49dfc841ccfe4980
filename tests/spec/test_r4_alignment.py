"""R4: alignment, age, counts, the quota's cut."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from odb_ref.core.batching.alignment import align, is_due
from odb_ref.core.batching.grouping import compute_groups
from odb_ref.core.events import Agreed, Counted
from odb_ref.core.rounds import is_quota_met
from odb_ref.core.state import Phase
from odb_ref.core.types import ZERO_COUNTS, Mode, StepCounts, compute_counts, compute_padded_tokens
from tests.helpers.world import World, make_config, make_shard, make_shards, run


@given(st.lists(st.integers(1, 12), max_size=9), st.integers(1, 20), st.integers(1, 12), st.integers(0, 9))
def test_alignment_makes_exactly_the_target_and_loses_nothing(
    lengths: list[int], budget: int, target: int, due_before: int
) -> None:
    """Spec: R4, R4.1. Checks: ALIGN, CONSERVE, BUDGET."""
    samples = make_shard(lengths)
    emitted, carried = align(compute_groups(samples, budget), target, due_before)
    assert len(emitted) == target
    assert sorted((*(sample for group in emitted for sample in group), *carried), key=lambda s: s.position) == [
        *samples
    ]
    assert all(len(group) <= 1 or compute_padded_tokens(group) <= budget for group in emitted)
    assert [compute_padded_tokens(group) for group in emitted] == sorted(
        map(compute_padded_tokens, emitted), reverse=True
    )


def test_a_group_is_due_by_any_of_its_samples() -> None:
    """Spec: R4.3."""
    group = make_shard([5] * 8)
    assert [is_due((group[7], group[4]), due_before) for due_before in (4, 5, 8)] == [False, True, True]
    assert not is_due((), 9)


@given(st.lists(st.lists(st.integers(1, 9), max_size=12), min_size=1, max_size=3), st.integers(1, 3))
def test_nothing_is_carried_for_longer_than_the_age_allows(shards: list[list[int]], age: int) -> None:
    """Spec: R4.3. Checks: AGE."""
    world = World(make_config(max_age_rounds=age, window_samples=4), make_shards(shards))
    first_held: list[dict[int, int]] = [{} for _ in shards]
    while (choice := world.schedule.choose(world)) is not None:
        world.do(*choice)
        _, rank = choice
        state = world.nodes[rank].machine.state
        if state.phase is Phase.OFFER:
            for sample in state.window:
                first_held[rank].setdefault(sample.position, state.round)
    for rank, node in enumerate(world.nodes):
        assert all(step.round - first_held[rank][s.position] <= age for step in node.taken for s in step.group)


def test_counts_say_of_each_resource_whether_any_rank_uses_it() -> None:
    """Spec: R4.5. Checks: WEIGHT. An idle step counts zero of each, and zeros add up to zero for any number of ranks."""
    costs = [[(0, 3), (0, 0), (7, 0)], [(0, 5)]]
    world = World(make_config(limits=(9, 9)), make_shards([[8, 8, 8], [5]], costs)).run()
    steps = list(zip(*(node.taken for node in world.nodes), strict=True))
    for left, right in steps:
        assert left.global_counts == right.global_counts
        for place in range(2):
            used = sum(sample.costs[place] for step in (left, right) for sample in step.group)
            assert left.global_counts.costs[place] == used
    assert {left.global_counts.costs for left, _ in steps} == {(0, 8), (0, 0), (7, 0)}
    assert compute_counts((), 2) == StepCounts(0, 0, 0, (0, 0))
    assert ZERO_COUNTS + compute_counts((), 2) == compute_counts((), 2)
    held = StepCounts(2, 9, 4, (1, 5))
    assert held + ZERO_COUNTS == ZERO_COUNTS + held == StepCounts.from_row(held.to_row()) == held


def test_a_rank_that_has_met_the_quota_offers_nothing() -> None:
    """Spec: R4.6, R3.5. Checks: QUOTA, CONSERVE."""
    world = run([[8, 8, 8, 8]], make_config(mode=Mode.QUOTA, quota_samples=2))
    node = world.nodes[0]
    assert [len(group) for group in world.get_groups(0)] == [1, 1]
    (_, last) = [event.agreement for event, _ in node.events if isinstance(event, Agreed)]
    assert (last.samples_min, last.samples_max) == (0, 0)
    assert is_quota_met(node.machine.config, node.machine.state)
    assert len(node.machine.state.window) == 2  # what the cut returned is still held, not lost
    assert sum(isinstance(event, Counted) for event, _ in node.events) == 1
