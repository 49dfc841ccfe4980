"""Two and three machines with an exchange in memory: how an epoch ends when it goes well, and when it does not."""

from __future__ import annotations

from typing import Any

import pytest

from odb_ref.core.effects import OutcomeKind
from odb_ref.core.types import Mode
from tests.helpers.world import Fault, World, make_configs, run_by_arrival

SHARDS = [[(i * i + 5 * rank) % 23 + 1 for i in range(26 - 12 * rank)] for rank in range(3)]
SEEDS = range(12)


def run(seed: int, *faults: Fault, ranks: int = 3, **settings: Any) -> World:
    return run_by_arrival(SHARDS[:ranks], make_configs(ranks, **settings), seed=seed, faults=faults)


def taken_positions(world: World, rank: int) -> list[int]:
    return sorted(sample.position for step in world.nodes[rank].taken for sample in step.group)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("rule", ["odb", "paper"])
def test_join_mode_covers_unequal_shards_in_step(seed: int, rule: str) -> None:
    world = run(seed, rule=rule, depth_steps=1 + seed % 3)
    assert {outcome.kind for outcome in world.outcomes if outcome} == {OutcomeKind.COMPLETE}
    for rank, shard in enumerate(SHARDS):
        assert taken_positions(world, rank) == list(range(len(shard)))
    steps = [[(step.number, step.round, step.global_counts) for step in rank.taken] for rank in world.nodes]
    assert steps[0] == steps[1] == steps[2]
    assert [number for number, _, _ in steps[0]] == list(range(len(steps[0])))
    for index, (_, _, counts) in enumerate(steps[0]):
        groups = [rank.taken[index].group for rank in world.nodes]
        assert counts.samples == sum(map(len, groups)) > 0
        assert counts.tokens == sum(sample.length for group in groups for sample in group)
        assert counts.supervised == sum(sample.supervised for group in groups for sample in group)


@pytest.mark.parametrize("rule", ["odb", "paper"])
def test_batches_do_not_depend_on_timing_or_depth(rule: str) -> None:
    first, *others = [run(seed, rule=rule, depth_steps=1 + seed % 4) for seed in SEEDS]
    for other in others:
        assert [rank.taken for rank in other.nodes] == [rank.taken for rank in first.nodes]


@pytest.mark.parametrize("quota", [1, 7, 20, 51])
@pytest.mark.parametrize("seed", SEEDS[:4])
def test_quota_mode_ends_at_the_first_step_that_reaches_it_or_when_one_runs_dry(seed: int, quota: int) -> None:
    world = run(seed, mode=Mode.QUOTA, quota_samples=quota)
    counts = [[step.global_counts.samples for step in rank.taken] for rank in world.nodes]
    assert counts[0] == counts[1] == counts[2]
    assert sum(counts[0][:-1]) < quota
    if sum(counts[0]) < quota:
        assert taken_positions(world, 2) == list(range(len(SHARDS[2])))
    assert all(step.group for rank in world.nodes for step in rank.taken)


def test_an_empty_shard_stays_in_step() -> None:
    world = run_by_arrival([[4, 5, 6], []], make_configs(2), seed=0)
    assert taken_positions(world, 0) == [0, 1, 2]
    assert [step.is_idle for step in world.nodes[1].taken] == [True] * len(world.nodes[0].taken)


@pytest.mark.parametrize("shards", [[[]], [[], []], [[], [], []]])
def test_no_input_at_all_is_an_epoch_of_no_steps(shards: list[list[int]]) -> None:
    world = run_by_arrival(shards, make_configs(len(shards)), seed=0)
    assert all(rank.taken == [] for rank in world.nodes)
    assert {outcome.kind for outcome in world.outcomes if outcome} == {OutcomeKind.COMPLETE}


@pytest.mark.parametrize("after", range(0, 46, 3))
@pytest.mark.parametrize("ranks", [2, 3])
def test_a_failure_ends_all_ranks_with_one_outcome(after: int, ranks: int) -> None:
    world = run(after, Fault("fail", 1, after), ranks=ranks)
    first, *others = world.outcomes
    assert first is not None
    assert all(other == first for other in others)
    assert (first.kind, first.rank, first.cause) == (OutcomeKind.FAILED, 1, "broken sample")
    limits = {rank.finish.step_limit for rank in world.nodes if rank.finish}
    assert limits == {len(rank.taken) for rank in world.nodes}
    assert len(limits) == 1, "all may train on exactly the same steps"


def test_two_failures_in_one_round_name_the_lowest_rank() -> None:
    world = run(0, Fault("fail", 2, 1), Fault("fail", 1, 1))
    assert {(outcome.rank, outcome.kind) for outcome in world.outcomes if outcome} == {(1, OutcomeKind.FAILED)}


@pytest.mark.parametrize("after", range(0, 46, 3))
@pytest.mark.parametrize("ranks", [2, 3])
def test_a_consumer_that_leaves_ends_all_ranks_and_is_named(after: int, ranks: int) -> None:
    world = run(after, Fault("stop", 0, after), ranks=ranks)
    taken = len(world.nodes[0].taken)
    for rank in world.nodes:
        assert rank.finish is not None
        assert (rank.finish.outcome.kind, rank.finish.outcome.rank) == (OutcomeKind.STOPPED, 0)
        assert rank.finish.outcome.cause == f"its consumer left after {taken} steps"
        assert rank.finish.step_limit == taken
        # One step more may have been taken before the rank knew: its trainer waits in that step's collective.
        assert taken <= len(rank.taken) <= taken + 1


@pytest.mark.parametrize("after", range(0, 46, 3))
def test_consumers_that_leave_together_end_cleanly(after: int) -> None:
    world = run(after, *(Fault("stop", rank, after) for rank in range(3)))
    assert {outcome.kind for outcome in world.outcomes if outcome} == {OutcomeKind.STOPPED}
    limit = min(len(rank.taken) for rank in world.nodes)
    assert all(rank.finish and limit <= rank.finish.step_limit <= len(rank.taken) for rank in world.nodes)


@pytest.mark.parametrize("after", range(0, 90, 6))
def test_an_urge_for_nothing_changes_no_batch(after: int) -> None:
    calm, urged = run(1), run(1, Fault("urge", 0, after), Fault("urge", 2, after + 9))
    assert [rank.taken for rank in urged.nodes] == [rank.taken for rank in calm.nodes]


@pytest.mark.parametrize("after", range(0, 46, 3))
def test_a_lost_rank_ends_the_others_who_name_it(after: int) -> None:
    world = run(after, Fault("kill", 1, after))
    for number in (0, 2):
        outcome = world.outcomes[number]
        assert outcome is not None
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
    configs = make_configs(3)
    configs[2] = make_configs(3, **changes)[2]
    world = run_by_arrival(SHARDS, configs, seed=0)
    for rank, outcome in zip(world.nodes, world.outcomes, strict=True):
        assert outcome is not None
        assert (outcome.kind, outcome.rank, outcome.cause) == (OutcomeKind.MISMATCH, 2, cause)
        assert rank.taken == []


def test_ranks_may_differ_in_depth() -> None:
    configs = [make_configs(3, depth_steps=1 + rank)[rank] for rank in range(3)]
    world = run_by_arrival(SHARDS, configs, seed=0)
    assert {outcome.kind for outcome in world.outcomes if outcome} == {OutcomeKind.COMPLETE}
