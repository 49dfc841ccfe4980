"""Tempting properties that do not hold, each with its counterexample, run on the core. Ids are those of spec/properties.md."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import replace
from fractions import Fraction

import pytest

from odb_ref.core.batching.alignment import align
from odb_ref.core.batching.grouping import compute_groups
from odb_ref.core.batching.layouts import Layout
from odb_ref.core.batching.order import StepOrder
from odb_ref.core.batching.rules import PaperRule
from odb_ref.core.effects import OutcomeKind
from odb_ref.core.events import Agreed, LocalFailed, PeerLost, SamplesRead
from odb_ref.core.machine import Machine
from odb_ref.core.state import Phase
from odb_ref.core.types import Mode, compute_padded_tokens
from tests.helpers.world import World, make_config, make_shard, make_shards, run


def _steps(world: World) -> int:
    (count,) = {len(node.taken) for node in world.nodes}
    return count


def test_step_counts_are_not_minimal() -> None:
    """NP1. Checks: FEWEST. What fits one step may lie in two windows."""
    lengths = [8, 1, 8, 1, 8, 1, 8, 1]
    world = run([lengths], make_config(window_samples=2))
    assert _steps(world) == 6
    assert len(compute_groups(make_shard(lengths), 8)) == 5


@pytest.mark.parametrize("seed", range(5))
def test_a_lone_stop_after_the_last_agreement_reaches_nobody(seed: int) -> None:
    """NP2. Checks: STOP. Rank 0 leaves after its first step, when everything else is released. Rank 1 enters step 1 alone."""
    world = World(make_config(depth_steps=4), make_shards([[8] * 3, [8] * 3]), seed=seed)
    while choices := [choice for choice in world.compute_choices() if choice[0] != "take"]:
        world.do(*choices[0])
    assert all(node.finish is not None and node.finish.outcome.kind is OutcomeKind.COMPLETE for node in world.nodes)
    world.stops[0] = 1
    world.run()
    assert [len(node.taken) for node in world.nodes] == [1, 2]
    assert world.nodes[0].is_stopped


def test_a_lone_stop_does_not_recall_a_trainer_from_a_collective() -> None:
    """NP3. Checks: STOP. The stop is agreed on, with limit 1, while rank 1 has already taken step 1."""
    found = False
    for seed in range(50):
        world = run([[8] * 12, [8] * 12], make_config(), seed=seed, stops={0: 1})
        finish = world.nodes[1].finish
        if finish.outcome.kind is OutcomeKind.STOPPED and len(world.nodes[1].taken) > finish.step_limit:
            found = True
    assert found


def test_a_sampler_that_repeats_an_id_emits_it_twice() -> None:
    """NP4. Checks: ONCE. ONCE speaks of positions."""
    shard = tuple(replace(sample, id=7) for sample in make_shard([3, 3]))
    world = World(make_config(), [shard]).run()
    assert [sample.id for sample in world.nodes[0].trained] == [7, 7]


def test_steps_do_not_hold_a_fixed_number_of_samples() -> None:
    """NP5. Checks: BUDGET."""
    world = run([[1] * 8 + [8] * 2], make_config(window_samples=10))
    assert sorted(len(group) for group in world.get_groups(0)) == [1, 1, 8]


def test_samples_are_not_emitted_in_sampler_order() -> None:
    """NP6. Checks: REPLAY."""
    world = run([[1, 8, 2, 8]], make_config())
    positions = [sample.position for sample in world.nodes[0].trained]
    assert positions != sorted(positions)


def test_alignment_may_use_more_groups_than_the_fewest() -> None:
    """NP7. Checks: FEWEST. FEWEST is about R2. Splitting for another rank comes later."""
    groups = compute_groups(make_shard([1, 1, 1, 1]), 8)
    assert len(groups) == 1
    emitted, _ = align(groups, 3, 0)
    assert sum(map(bool, emitted)) == 3


def test_age_ends_with_a_quota_round_that_a_poor_rank_cuts_short() -> None:
    """NP8. Checks: AGE. Three groups of rank 0 are due, but the target is lowered to the single sample of rank 1."""
    shards = make_shards([[8] * 12, [8, 8]])
    world = World(make_config(mode=Mode.QUOTA, max_age_rounds=1, window_samples=4), shards).run()
    long = World(make_config(max_age_rounds=1, window_samples=4), shards).run()
    assert world.is_over
    held = world.nodes[0].machine.state
    assert held.window
    assert held.window[0].position < held.marks[0]
    assert sum(map(len, long.get_groups(0))) == 12


def test_a_quota_may_be_overshot() -> None:
    """NP9. Checks: QUOTA. A round cannot be cut to less than a step."""
    world = run([[1] * 4, [1] * 4], make_config(mode=Mode.QUOTA, quota_samples=3))
    assert sum(step.global_counts.samples for step in world.nodes[0].taken) == 8


def test_a_quota_may_be_missed() -> None:
    """NP10. Checks: QUOTA. The epoch ends when a rank has run dry."""
    world = run([[8] * 6, [8]], make_config(mode=Mode.QUOTA, quota_samples=10))
    assert sum(step.global_counts.samples for step in world.nodes[0].taken) == 2


def test_a_single_sample_may_exceed_the_budget() -> None:
    """NP11. Checks: BUDGET."""
    (group,) = run([[9]], make_config()).get_groups(0)
    assert compute_padded_tokens(group) == 9


def test_a_rank_may_idle_while_another_holds_many_samples() -> None:
    """NP12. Checks: ALIGN. Samples do not move between ranks."""
    world = run([[8] * 4, [8]], make_config())
    assert sum(step.is_idle for step in world.nodes[1].taken) == 3
    assert [step.is_idle for step in world.nodes[1].taken] == [False, True, True, True]


def test_idle_steps_are_not_shared_fairly() -> None:
    """NP13. Checks: ALIGN. An unequal shard shows in full, because nothing of it moves to another rank."""
    world = run([[8] * 6, [8] * 3, []], make_config(window_samples=3, rule=PaperRule()))
    assert [sum(step.is_idle for step in node.taken) for node in world.nodes] == [0, 3, 6]


def test_batches_depend_on_world_window_and_rule_but_not_on_depth() -> None:
    """NP14. Checks: REPLAY."""
    shards = [[3, 8, 1, 8, 2, 8, 8, 1, 1, 6], [2, 2, 1, 3, 5, 1, 1, 2, 2, 2]]
    base = [run(shards, make_config()).get_groups(rank) for rank in range(2)]
    assert [run(shards, make_config(depth_steps=7)).get_groups(rank) for rank in range(2)] == base
    assert [run(shards, make_config(window_samples=3)).get_groups(rank) for rank in range(2)] != base
    assert [run(shards, make_config(rule=PaperRule())).get_groups(rank) for rank in range(2)] != base
    assert run(shards[:1], make_config()).get_groups(0) != base[0]


def test_the_mean_of_rank_means_is_not_the_global_mean() -> None:
    """NP15. Checks: WEIGHT. So the scale of R4.5 is needed."""
    world = run([[2, 2, 2, 2], [8]], make_config())
    left, right = (node.taken[0] for node in world.nodes)
    supervised = [sum(sample.supervised for sample in step.group) for step in (left, right)]
    losses = [Fraction(10), Fraction(21)]  # summed over supervised tokens, on each rank
    mean_of_means = sum(loss / count for loss, count in zip(losses, supervised, strict=True)) / 2
    total = left.global_counts.supervised
    scaled = sum(loss / n * Fraction(2 * n, total) for loss, n in zip(losses, supervised, strict=True)) / 2
    assert mean_of_means != sum(losses) / total
    assert scaled == sum(losses) / total


def test_only_one_of_several_failures_is_named() -> None:
    """NP16. Checks: ABORT."""
    machines = World(make_config(), make_shards([[8]] * 3))
    for rank in (1, 2):
        machines.fail(rank, f"disk {rank}")
    machines.run()
    assert {(finish.outcome.rank, finish.outcome.cause) for finish in machines.get_finishes()} == {(1, "disk 1")}


def test_a_failure_does_not_stop_trainers_at_once() -> None:
    """NP17. Checks: ABORT. Steps that every rank has ready are still handed out."""
    world = run([[8] * 8] * 2, make_config(depth_steps=1), fails={1: ("collate", 1)})
    assert _steps(world) == 4
    assert {finish.outcome.kind for finish in world.get_finishes()} == {OutcomeKind.FAILED}


def test_ranks_may_tell_different_stories_of_a_loss() -> None:
    """NP18. Checks: ABORT."""
    world = World(make_config(), make_shards([[8], [8], [8]]))
    world.send(0, PeerLost(2, "connection reset"))
    world.send(1, PeerLost(None, "deadline"))
    assert [finish.outcome.rank for finish in world.get_finishes()] == [2, None]


def test_an_error_of_one_rank_is_not_told_before_its_offer() -> None:
    """NP19. Checks: ABORT. "In the same round" means the next round to be agreed on: a posted offer is not recalled."""
    config = make_config(window_samples=1)
    machine = Machine(config)
    machine.begin()
    (post,) = machine.handle(SamplesRead(make_shard([8])))
    assert machine.handle(LocalFailed("late")) == ()
    machine.handle(Agreed(post.offer))  # type: ignore[union-attr]
    assert machine.state.phase is Phase.COUNT


def test_with_limits_a_window_may_make_more_groups_than_needed() -> None:
    """NP21. Checks: FEWEST. One further resource is enough."""
    samples = make_shard([1] * 4, costs=[(2,), (3,), (2,), (1,)])
    groups = compute_groups(samples, 4, (4,))
    assert [[sample.costs[0] for sample in group] for group in groups] == [[2], [3], [1, 2]]
    two = (samples[0], samples[2]), (samples[1], samples[3])
    assert all(compute_padded_tokens(group) <= 4 and sum(sample.costs[0] for sample in group) <= 4 for group in two)


def test_a_packed_window_may_make_more_groups_than_needed() -> None:
    """NP22. Checks: FEWEST."""
    samples = make_shard([4, 3, 3, 2, 2, 2])
    groups = Layout.PACKED.compute_groups(samples, 8, ())
    assert [[sample.length for sample in group] for group in groups] == [[4, 3], [3, 2, 2], [2]]
    two = (samples[0], samples[3], samples[4]), (samples[1], samples[2], samples[5])
    assert all(sum(sample.length for sample in group) <= 8 for group in two)


def test_in_sampler_order_a_window_may_make_more_groups_than_needed() -> None:
    """NP23. Checks: FEWEST."""
    samples = make_shard([1, 4, 1, 4])
    groups = StepOrder.SAMPLER.compute_groups(samples, Layout.PADDED, 4)
    assert [[sample.length for sample in group] for group in groups] == [[1], [4], [1], [4]]
    assert len(compute_groups(samples, 4)) == 3


def lower_on_the_way(world: World) -> World:
    """Runs a world whose rank 0 accepts less after it has taken step 3."""
    while len(world.nodes[0].taken) < 4:
        assert world.step()
    world.accept(0, 4)
    return world.run()


def test_when_a_lowered_budget_holds_is_timing() -> None:
    """NP24. Checks: REPLAY. Both runs lower it after step 3 was taken. All ranks of a run follow at the same step."""
    found = []
    for seed in range(6):
        world = lower_on_the_way(World(make_config(window_samples=8), make_shards([[2] * 60, [2] * 60]), seed=seed))
        first = [next(step.number for step in node.taken if len(step.group) == 2) for node in world.nodes]
        assert first[0] == first[1]
        found.append(first[0])
    assert len(set(found)) > 1


def test_what_was_grouped_before_keeps_its_budget() -> None:
    """NP25. Checks: BUDGET."""
    world = lower_on_the_way(World(make_config(depth_steps=1), make_shards([[2] * 40])))
    assert [len(step.group) for step in world.nodes[0].taken[4:]].count(4) > 0


def test_an_empty_epoch_still_takes_a_round() -> None:
    """NP20. Checks: TERM. There are no samples and no steps, but one agreement: no rank knows this of the others."""
    world = run([[], []], make_config())
    assert world.is_over
    assert [sum(isinstance(event, Agreed) for event, _ in node.events) for node in world.nodes] == [1, 1]


def test_age_ends_with_windows_that_are_bounded_in_bytes_and_a_quota() -> None:
    """NP26. Checks: AGE. Each window of rank 1 holds one long sample, so rank 0 emits one of its four in each round."""
    config = make_config(mode=Mode.QUOTA, budget_tokens=1, max_age_rounds=1, window_samples=4)
    shards = make_shards([[1] * 12, [4] * 6])
    rounds = {
        sample.position: step.round
        for step in World(config, shards, window_bytes=4).run().nodes[0].taken
        for sample in step.group
    }
    assert rounds[2] == 2  # held in round 0, and not planned in round 1
    assert max(rounds.values()) > 2
    assert World(replace(config, mode=Mode.JOIN), shards, window_bytes=4).run().nodes[0].taken[2].round == 1


def test_age_ends_with_shared_shards_and_a_quota() -> None:
    """NP26. Checks: AGE. A rank that carries a long sample draws fewer than it carries, and then holds few."""
    lengths = [1, 4, 1, 1, 1, 1, 4, 1, 4, 4, *[1] * 9]
    config = make_config(
        mode=Mode.QUOTA, quota_samples=19, shared_samples=19, budget_tokens=7, max_age_rounds=1, window_samples=3
    )
    rank = World(config, [(), ()], order=make_shard(lengths)).run().nodes[1]
    read, marks = 0, []
    for event, _ in rank.events:
        read += len(event.samples) if isinstance(event, SamplesRead) else 0
        marks += [read] if isinstance(event, Agreed) else []
    held = [(bisect_right(marks, sample.position), step.round) for step in rank.taken for sample in step.group]
    assert (1, 3) in held  # held in round 1, and planned in round 3, which is not the last
    assert max(round_ for _, round_ in held) > 3
