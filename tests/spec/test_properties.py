"""Every property of spec/properties.md in random small systems under random schedules, with the real core."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from itertools import accumulate

from hypothesis import given
from hypothesis import strategies as st

from odb_ref.core.batching.rules import RULES
from odb_ref.core.config import Config
from odb_ref.core.effects import OutcomeKind, PostOffer
from odb_ref.core.events import Agreed, Collated, Counted, Event, SamplesRead, StepTaken, Urged
from odb_ref.core.types import Mode, compute_padded_tokens
from tests.helpers.world import Node, World, make_config, make_shards, run

SHARDS = st.lists(st.lists(st.integers(1, 10), max_size=9), min_size=1, max_size=4)
SEEDS = st.integers(0, 10_000)


@st.composite
def configs(draw: st.DrawFn, mode: Mode = Mode.JOIN) -> Config:
    """Draws small configurations of one mode."""
    return make_config(
        mode=mode,
        budget_tokens=draw(st.integers(1, 20)),
        window_samples=draw(st.integers(1, 6)),
        depth_steps=draw(st.integers(1, 3)),
        max_age_rounds=draw(st.integers(1, 3)),
        ramp_rounds=draw(st.integers(0, 2)),
        rule=RULES[draw(st.sampled_from(sorted(RULES)))],
        quota_samples=draw(st.none() | st.integers(1, 30)) if mode is Mode.QUOTA else None,
    )


@given(SHARDS, configs(), SEEDS)
def test_join_mode_emits_everything_once_in_aligned_steps(shards: list[list[int]], config: Config, seed: int) -> None:
    """Spec: R1.3, R3. Checks: ALIGN, COVER, ONCE, FREE, BUDGET."""
    world = World(config, make_shards(shards), seed=seed).run()
    assert world.is_over
    assert {finish.outcome.kind for finish in world.get_finishes()} == {OutcomeKind.COMPLETE}
    assert [step.number for step in world.nodes[0].taken] == list(range(len(world.nodes[0].taken)))
    assert len({tuple((step.number, step.round, step.global_counts) for step in n.taken) for n in world.nodes}) == 1
    for node in world.nodes:
        assert sorted(sample.position for sample in node.trained) == list(range(len(node.shard)))
        for step in node.taken:
            assert len(step.group) <= 1 or compute_padded_tokens(step.group) <= config.budget_tokens


@given(SHARDS, configs(Mode.QUOTA), SEEDS)
def test_quota_mode_ends_at_the_same_step_everywhere(shards: list[list[int]], config: Config, seed: int) -> None:
    """Spec: R4.6. Checks: QUOTA, ONCE, ALIGN, FREE."""
    world = World(config, make_shards(shards), seed=seed).run()
    assert world.is_over
    assert len({len(node.taken) for node in world.nodes}) == 1
    emitted = [0, *accumulate(step.global_counts.samples for step in world.nodes[0].taken)]
    quota = emitted[-1] + 1 if config.quota_samples is None else config.quota_samples
    assert all(samples < quota for samples in emitted[:-1])
    for node in world.nodes:
        assert len({sample.position for sample in node.trained}) == len(node.trained)
        assert not any(step.is_idle for step in node.taken)
    if emitted[-1] < quota:
        assert any(len(node.trained) == len(node.shard) for node in world.nodes)


@given(SHARDS, configs(), SEEDS)
def test_the_bounds_on_rounds_and_transitions_hold(shards: list[list[int]], config: Config, seed: int) -> None:
    """Checks: TERM."""
    world = World(config, make_shards(shards), seed=seed).run()
    total, longest = sum(map(len, shards)), max(map(len, shards))
    for node in world.nodes:

        def count(kind: type[Event], node: Node = node) -> int:
            return sum(isinstance(event, kind) for event, _ in node.events)

        rounds = count(Agreed)
        assert rounds <= longest + 1
        assert len(node.taken) == count(StepTaken) <= total
        assert count(Counted) == count(Collated) == rounds - 1
        assert count(SamplesRead) <= len(node.shard) + 1
        assert len(node.events) <= len(node.shard) + 3 * rounds + total
        assert all(step.global_counts.samples for step in node.taken)


@given(SHARDS, configs(), SEEDS, st.data())
def test_a_failure_ends_all_in_one_round_with_one_cause(
    shards: list[list[int]], config: Config, seed: int, data: st.DataObject
) -> None:
    """Checks: ABORT, FREE."""
    rank = data.draw(st.integers(0, len(shards) - 1))
    fails = {rank: (data.draw(st.sampled_from(["read", "collate"])), data.draw(st.integers(0, 3)))}
    world = World(config, make_shards(shards), seed=seed, fails=fails).run()
    assert world.is_over
    (finish,) = set(world.get_finishes())
    assert finish.outcome.kind in (OutcomeKind.COMPLETE, OutcomeKind.FAILED)
    assert finish.outcome.rank == (rank if finish.outcome.kind is OutcomeKind.FAILED else None)
    assert len({sum(isinstance(effect, PostOffer) for effect in node.posted) for node in world.nodes}) == 1
    assert {len(node.taken) for node in world.nodes} == {finish.step_limit}


@given(SHARDS, configs(), SEEDS, st.integers(0, 12))
def test_consumers_that_stop_together_end_together(
    shards: list[list[int]], config: Config, seed: int, count: int
) -> None:
    """Checks: STOP, FREE, RELEASE."""
    world = World(config, make_shards(shards), seed=seed, stops=dict.fromkeys(range(len(shards)), count)).run()
    assert world.is_over
    (taken,) = {len(node.taken) for node in world.nodes}
    assert taken <= count
    assert taken == count or {f.outcome.kind for f in world.get_finishes()} == {OutcomeKind.COMPLETE}


@given(SHARDS, configs(), SEEDS)
def test_timing_and_depth_change_nothing(shards: list[list[int]], config: Config, seed: int) -> None:
    """Checks: REPLAY."""
    one = World(config, make_shards(shards), seed=seed).run()
    other = World(replace(config, depth_steps=5), make_shards(shards), seed=seed + 1).run()
    assert [node.taken for node in one.nodes] == [node.taken for node in other.nodes]


@given(SHARDS, configs(), SEEDS, st.integers(1, 4))
def test_scaled_losses_average_to_the_global_mean(
    shards: list[list[int]], config: Config, seed: int, update: int
) -> None:
    """Checks: WEIGHT. With a different loss for each sample, over updates, in exact fractions."""
    world = World(config, make_shards(shards), seed=seed).run()
    ranks = len(world.nodes)
    steps = len(world.nodes[0].taken)
    for first in range(0, steps, update):
        block = range(first, min(first + update, steps))
        total = sum(world.nodes[0].taken[i].global_counts.supervised for i in block)
        loss = Fraction(0)
        average = Fraction(0)
        for node in world.nodes:
            for i in block:
                samples = node.taken[i].group
                summed = sum(Fraction(sample.id + 1) * sample.supervised for sample in samples)
                local = sum(sample.supervised for sample in samples)
                loss += summed
                if local:
                    average += (summed / local) * Fraction(ranks * local, total) / ranks
        assert not total or average == loss / total


@given(SHARDS, configs(), SEEDS, st.data())
def test_an_urge_for_nothing_changes_no_batch(
    shards: list[list[int]], config: Config, seed: int, data: st.DataObject
) -> None:
    """Spec: R5.9. Checks: REPLAY, FREE."""
    plain = World(config, make_shards(shards), seed=seed).run()
    world = World(config, make_shards(shards), seed=seed)
    when = data.draw(st.lists(st.integers(0, 40), min_size=len(shards), max_size=len(shards)))
    moment = 0
    while world.step():
        for rank, urge in enumerate(when):
            if urge == moment:
                world.send(rank, Urged())
        moment += 1
    assert world.is_over
    assert [node.taken for node in world.nodes] == [node.taken for node in plain.nodes]


def test_the_mode_says_when_an_epoch_ends() -> None:
    """Spec: R1.5. Checks: COVER, QUOTA."""
    shards = [[8, 8, 8], [8]]
    join = run(shards, make_config())
    assert [len(node.taken) for node in join.nodes] == [3, 3]
    quota = run(shards, make_config(mode=Mode.QUOTA))
    assert [len(node.taken) for node in quota.nodes] == [1, 1]
    assert not any(step.is_idle for node in quota.nodes for step in node.taken)
