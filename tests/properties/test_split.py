"""Machine and queue in two processes: the same steps as in one, and a lost loader process is a rank that has failed."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from odb_ref.core.batching.rules import RULES
from odb_ref.core.config import Config
from odb_ref.core.errors import UsageError
from odb_ref.core.events import Agreed, PeerLost
from odb_ref.core.state import Phase
from odb_ref.core.types import Mode
from tests.helpers.effort import few
from tests.helpers.world import World, make_config, make_shards
from tests.properties.split import Kill, SplitWorld


@dataclass(frozen=True)
class Case:
    """A world, and what goes wrong in it."""

    config: Config
    lengths: list[list[int]]
    seed: int
    depths: list[int]
    speeds: dict[str, float] = field(default_factory=dict)
    stops: dict[int, int] = field(default_factory=dict)
    fails: dict[int, tuple[str, int]] = field(default_factory=dict)
    kills: dict[int, Kill] = field(default_factory=dict)
    break_after: int | None = None

    def run(self, world_class: type[SplitWorld] = SplitWorld) -> SplitWorld:
        """The world in two processes a rank, at its end."""
        return world_class(
            self._list_configs(),
            make_shards(self.lengths),
            seed=self.seed,
            speeds=self.speeds,
            stops=self.stops,
            fails=self.fails,
            kills=self.kills,
            break_after=self.break_after,
        ).run()

    def run_whole(self) -> World:
        """The same world in one process a rank, with nothing going wrong."""
        return World(self._list_configs(), make_shards(self.lengths), seed=self.seed).run()

    def _list_configs(self) -> list[Config]:
        return [replace(self.config, depth_steps=depth) for _, depth in zip(self.lengths, self.depths, strict=False)]


FIRST_SEED = int(os.environ.get("ODB_SEED", "0"))
KINDS = ("read", "collated", "handle", "update", "arrive", "notice", "take", "urge", "break", "offer", "counts")
SPEEDS = st.dictionaries(st.sampled_from(KINDS), st.sampled_from((0.01, 0.1, 5.0)), min_size=1, max_size=5)


@st.composite
def cases(draw: st.DrawFn, *, has_faults: bool) -> Case:
    shard = st.lists(st.integers(1, 9), max_size=14) | st.lists(st.integers(1, 9), min_size=8, max_size=20)
    lengths = draw(st.lists(shard, min_size=1, max_size=4))
    mode = draw(st.sampled_from(Mode))
    ranks = st.integers(0, len(lengths) - 1)
    config = make_config(
        world_size=len(lengths),
        budget_tokens=draw(st.integers(1, 16)),
        window_samples=draw(st.integers(1, 6)),
        ramp_rounds=draw(st.integers(0, 2)),
        max_age_rounds=draw(st.integers(1, 3)),
        mode=mode,
        quota_samples=draw(st.none() | st.integers(1, 24)) if mode is Mode.QUOTA else None,
        rule=draw(st.sampled_from(sorted(RULES.values(), key=lambda rule: rule.name))),
    )
    case = Case(
        config,
        lengths,
        draw(st.integers(0, 2**32)),
        draw(st.lists(st.integers(1, 4), min_size=4, max_size=4)),
        draw(SPEEDS),
    )
    if not has_faults:
        return case
    kill = st.builds(
        Kill,
        after=st.integers(0, 150),
        phase=st.none() | st.sampled_from([phase for phase in Phase if phase is not Phase.DONE]),
        unsent=st.integers(0, 3),
        is_losing_batches=st.booleans(),
    )
    leavers = draw(st.just(set()) | st.just(set(range(len(lengths)))) | st.sets(ranks, min_size=1, max_size=1))
    return replace(
        case,
        kills=draw(st.dictionaries(ranks, kill, min_size=1, max_size=2)),
        stops=dict.fromkeys(sorted(leavers), draw(st.integers(0, 6))),
        fails=draw(
            st.dictionaries(ranks, st.tuples(st.sampled_from(("read", "collate")), st.integers(0, 4)), max_size=1)
        ),
        break_after=draw(st.none() | st.integers(0, 1000)),
    )


@settings(max_examples=few(200))
@given(cases(has_faults=False))
def test_two_processes_a_rank_take_the_steps_of_one(case: Case) -> None:
    """Spec: R7.6. Checks: REPLAY, RELEASE, COVER, FREE."""
    world, whole = case.run(), case.run_whole()
    world.check_end()
    assert world.get_finishes() == whole.get_finishes()
    for node, other in zip(world.nodes, whole.nodes, strict=True):
        assert node.taken == other.taken


@settings(max_examples=few(300))
@given(cases(has_faults=True))
def test_a_lost_loader_process_is_a_rank_that_has_failed(case: Case) -> None:
    """Spec: R7.6. Checks: ABORT, RELEASE, STOP, FREE, ALIGN, REPLAY."""
    run_and_check(case)


def make_long_case(seed: int) -> Case:
    """Epochs of some rounds, in which every phase is met; the loss comes in any of them."""
    draw = random.Random(seed)
    ranks = draw.randint(1, 4)
    mode = draw.choice(list(Mode))
    config = make_config(
        world_size=ranks,
        budget_tokens=draw.randint(2, 12),
        window_samples=draw.randint(2, 8),
        ramp_rounds=draw.randint(0, 2),
        max_age_rounds=draw.randint(1, 3),
        mode=mode,
        quota_samples=draw.choice((None, draw.randint(10, 40))) if mode is Mode.QUOTA else None,
        rule=RULES[draw.choice(sorted(RULES))],
    )
    leavers = draw.choice((range(0), range(0), range(ranks), [draw.randrange(ranks)]))
    fails = {draw.randrange(ranks): (draw.choice(("read", "collate")), draw.randint(0, 4))}
    phases = (Phase.FILL, Phase.OFFER, Phase.COUNT, Phase.DRAIN, Phase.REPORT if draw.random() < 0.5 else None)
    return Case(
        config,
        [[draw.randint(1, 9) for _ in range(draw.randint(10, 25))] for _ in range(ranks)],
        seed,
        [draw.choice((1, 1, 2, 4)) for _ in range(ranks)],
        {kind: draw.choice((0.01, 0.1, 5.0)) for kind in draw.sample(KINDS, 3)},
        stops=dict.fromkeys(leavers, draw.randint(0, 10)),
        fails=fails if draw.random() < 0.2 else {},
        kills={
            draw.randrange(ranks): Kill(
                draw.randint(0, 300), draw.choice(phases), draw.choice((0, 0, 1, 3)), draw.random() < 0.5
            )
            for _ in range(draw.choice((1, 1, 2)))
        },
        break_after=draw.randint(0, 1000) if draw.random() < 0.15 else None,
    )


def run_and_check(case: Case, world_class: type[SplitWorld] = SplitWorld) -> SplitWorld:
    """The world at its end, which is as it should be."""
    world, whole = case.run(world_class), case.run_whole()
    world.check_end()
    for node, other in zip(world.nodes, whole.nodes, strict=True):
        assert node.taken == other.taken[: len(node.taken)]
    return world


@pytest.mark.parametrize("seed", range(FIRST_SEED, FIRST_SEED + few(300)))
def test_a_loss_at_any_moment_of_a_long_epoch_ends_all_ranks(seed: int) -> None:
    """Spec: R7.6. Checks: ABORT, RELEASE, STOP, FREE, ALIGN, REPLAY."""
    run_and_check(make_long_case(seed))


class HoldingNothing(SplitWorld):
    """Hands out steps while an agreement is not answered."""

    holding = (PeerLost,)


class HoldingNothingOnALoss(SplitWorld):
    """Hands out steps while a lost peer is not answered."""

    holding = (Agreed,)


class ToldLast(SplitWorld):
    """Tells a stand-in of the loss when it has heard the rest."""

    is_failure_told_last = True


def make_late_stop_case(seed: int) -> Case:
    """A consumer leaves, and the word of it is slow to reach another, whose consumer has a step to take."""
    return Case(
        make_config(world_size=2), [[8] * 16] * 2, seed, [4, 4], {"take": 0.05, "handle": 0.1}, stops={0: 3 + seed % 4}
    )


@pytest.mark.parametrize(
    ("world_class", "make_case"),
    [(HoldingNothing, make_late_stop_case), (HoldingNothingOnALoss, make_long_case), (ToldLast, make_long_case)],
)
def test_a_trainers_end_that_breaks_the_rule_is_caught(
    world_class: type[SplitWorld], make_case: Callable[[int], Case]
) -> None:
    """Spec: R7.6."""
    for seed in range(20):
        run_and_check(make_case(seed))
    with pytest.raises((UsageError, AssertionError)):
        for seed in range(600):
            run_and_check(make_case(seed), world_class)
