"""R16: an optimizer update holds the same samples for any number of ranks and any memory."""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Collection, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from odb_ref.core.batching.layouts import Layout
from odb_ref.core.batching.order import StepOrder
from odb_ref.core.batching.rules import PaperRule, compute_checked_target
from odb_ref.core.batching.updates import compute_first_place, count_portions
from odb_ref.core.config import Config
from odb_ref.core.effects import Effect, OutcomeKind, PostCounts, Read
from odb_ref.core.errors import UsageError
from odb_ref.core.events import Agreed, Collated, Counted, SamplesRead
from odb_ref.core.machine import start, transition
from odb_ref.core.resume import RoundStart
from odb_ref.core.rounds import compute_round_target
from odb_ref.core.state import Phase, State
from odb_ref.core.types import Mode
from tests.helpers.world import AnyOrder, ByArrival, Fault, World, make_config, make_shard

LENGTHS = st.lists(st.integers(1, 20), max_size=40)


def make_world(
    lengths: Sequence[int],
    ranks: int,
    update_samples: int,
    *,
    is_shared: bool = False,
    seed: int = 0,
    **options: object,
) -> World:
    """Returns a job whose common order has samples of these lengths. Each rank's own source is every W-th of it."""
    settings = {name: options.pop(name) for name in list(options) if name in Config.__dataclass_fields__}
    order = make_shard(lengths)
    config = make_config(
        budget_tokens=settings.pop("budget_tokens", 24),
        world_size=ranks,
        update_samples=update_samples,
        shared_samples=len(order) if is_shared else None,
        **settings,
    )
    shards = [() if is_shared else order[rank::ranks] for rank in range(ranks)]
    schedule = options.pop("schedule", None) or AnyOrder(seed)
    return World(config, shards, order=order, schedule=schedule, **options)  # type: ignore[arg-type]


def list_updates(world: World) -> dict[int, Counter[int]]:
    """Returns the ids of the samples in each update that was taken, over all ranks."""
    updates: dict[int, Counter[int]] = defaultdict(Counter)
    for node in world.nodes:
        for step in node.taken:
            update = step.round // node.machine.config.update_rounds
            updates[update].update(sample.id for sample in step.group)
    return dict(updates)


def list_expected(samples: int, update_samples: int, bad: Collection[int] = ()) -> dict[int, Counter[int]]:
    expected = {}
    for update, begin in enumerate(range(0, samples, update_samples)):
        good = [place for place in range(begin, min(begin + update_samples, samples)) if place not in bad]
        if good:
            expected[update] = Counter(good)
    return expected


@given(
    LENGTHS,
    st.integers(1, 4),
    st.integers(0, 12),
    st.booleans(),
    st.sampled_from(Layout),
    st.sampled_from(StepOrder),
    st.randoms(use_true_random=False),
)
def test_an_update_holds_its_places(
    lengths: list[int], ranks: int, more: int, is_shared: bool, layout: Layout, order: StepOrder, rng: random.Random
) -> None:
    """Spec: R16, R16.1, R16.2, R16.3, R16.5, R16.8. Checks: UPDATE, COVER, ALIGN, WEIGHT."""
    size, seed = ranks + more, rng.randint(0, 9999)
    bad = {place for place in range(len(lengths)) if rng.random() < rng.choice((0, 0.3, 0.9))}
    settings = {"seed": seed, "layout": layout, "order": order, "bad": bad, "budget_tokens": rng.choice((7, 24, 60))}
    world = make_world(lengths, ranks, size, is_shared=is_shared, **settings).run()  # type: ignore[arg-type]
    assert {finish.outcome.kind for finish in world.get_finishes()} == {OutcomeKind.COMPLETE}, world.outcomes
    assert list_updates(world) == list_expected(len(lengths), size, bad)
    assert len({len(node.taken) for node in world.nodes}) == 1
    for steps in zip(*(node.taken for node in world.nodes), strict=True):
        assert len({(step.number, step.round, step.global_counts) for step in steps}) == 1
        assert steps[0].global_counts.supervised == sum(s.supervised for step in steps for s in step.group)


@given(LENGTHS, st.integers(4, 16), st.booleans(), st.integers(0, 9999), st.integers(1, 30), st.integers(0, 40))
def test_a_budget_that_changes_changes_no_update(
    lengths: list[int], size: int, is_shared: bool, seed: int, tokens: int, after: int
) -> None:
    """Spec: R16.1, R15.3. Checks: UPDATE."""
    faults = [Fault("accept", seed % 2, after, tokens=tokens)]
    world = make_world(lengths, 2, size, is_shared=is_shared, schedule=ByArrival(seed, faults)).run()
    assert list_updates(world) == list_expected(len(lengths), size)


@pytest.mark.parametrize("seed", range(8))
def test_padding_is_bounded_by_the_budget_in_force(seed: int) -> None:
    """Spec: R16.3, R15.1. A lower budget allows less padding too."""
    rng = random.Random(seed)
    faults = [Fault("accept", seed % 2, rng.randint(0, 20), tokens=rng.randint(6, 15))]
    lengths = [rng.randint(1, 10) for _ in range(40)]
    world = make_world(lengths, 2, 16, padding_share=4, schedule=ByArrival(seed, faults))
    while world.step():
        for node in world.nodes:
            config, state = node.machine.config, node.machine.state
            most = config.compute_round_bounds(state.agreed_tokens)[0] // 4
            for group in state.groups if state.phase is Phase.OFFER else ():
                assert config.layout.compute_tokens(group) - sum(sample.length for sample in group) <= most


@given(LENGTHS, st.integers(1, 3), st.integers(0, 9), st.booleans(), st.integers(0, 9999))
def test_an_update_is_released_before_the_next_is_read(
    lengths: list[int], ranks: int, more: int, is_shared: bool, seed: int
) -> None:
    """Spec: R16.3. So the first step of an epoch waits for at most one update, and ranks hold samples of two."""
    size = ranks + more
    world = make_world(lengths, ranks, size, is_shared=is_shared, seed=seed)
    while world.step():
        for node in world.nodes:
            state = node.machine.state
            update = state.round // node.machine.config.update_rounds
            assert all(step.round // node.machine.config.update_rounds == update - 1 for step in state.plan)
            if state.plan:
                assert not state.window, "the steps before are not released, and samples are read"


@given(LENGTHS, st.integers(1, 3), st.integers(0, 9), st.booleans(), st.randoms(use_true_random=False))
def test_an_update_goes_on_where_it_was_saved(
    lengths: list[int], ranks: int, more: int, is_shared: bool, rng: random.Random
) -> None:
    """Spec: R10.2, R14.6, R16.6. Checks: RESUME, UPDATE."""
    size, seed = ranks + more, rng.randint(0, 9999)
    bad = {place for place in range(len(lengths)) if rng.random() < 0.2}
    options = {"is_shared": is_shared, "bad": bad, "seed": seed}
    whole = make_world(lengths, ranks, size, **options).run()  # type: ignore[arg-type]
    stop = rng.randint(0, len(whole.nodes[0].taken))
    saved = make_world(lengths, ranks, size, stops=dict.fromkeys(range(ranks), stop), **options).run()  # type: ignore[arg-type]
    checkpoints = saved.save()
    before = [
        node.shard[: checkpoint.start.read_samples] for node, checkpoint in zip(saved.nodes, checkpoints, strict=True)
    ]
    order = make_shard(lengths)
    shards = before if is_shared else [order[rank::ranks] for rank in range(ranks)]
    config = saved.nodes[0].machine.config
    resumed = World(config, shards, order=order, seed=seed + 1, checkpoints=checkpoints, drawn=before, bad=bad).run()
    for rank, checkpoint in enumerate(checkpoints):
        groups = resumed.get_groups(rank)[checkpoint.taken_steps :]
        assert [[s.id for s in group] for group in groups] == [
            [s.id for s in group] for group in whole.get_groups(rank)[stop:]
        ]


@given(LENGTHS, st.integers(1, 4), st.integers(0, 9), st.booleans(), st.integers(0, 4), st.integers(0, 9999))
def test_the_start_of_an_update_is_two_integers(
    lengths: list[int], ranks: int, more: int, is_shared: bool, update: int, seed: int
) -> None:
    """Spec: R16.6. Checks: RESUME, UPDATE. This includes other numbers of ranks than before."""
    size = ranks + more
    whole = make_world(lengths, ranks + 1 if more else ranks, size, seed=seed).run()
    expected = {number: ids for number, ids in list_updates(whole).items() if number >= update}
    world = make_world(lengths, ranks, size, is_shared=is_shared)
    config = world.nodes[0].machine.config
    begin = RoundStart(round=update * config.update_rounds, planned_steps=7, global_samples=7)
    rest = make_world(lengths, ranks, size, is_shared=is_shared, seed=seed, checkpoints=[Begun(begin)] * ranks).run()
    assert list_updates(rest) == expected
    assert rest.nodes[0].taken[:1] == [] or rest.nodes[0].taken[0].number == 7


class Begun:
    """What `World` needs from a checkpoint."""

    def __init__(self, start: RoundStart) -> None:
        self.start = start


# What a rank reads ---------------------------------------------------------------------------------------------------


@given(st.integers(1, 6), st.integers(0, 20), st.integers(0, 30))
def test_the_shares_of_an_update_are_its_places(ranks: int, more: int, update: int) -> None:
    """Spec: R16.2. Checks: UPDATE."""
    size = ranks + more
    places = []
    for rank in range(ranks):
        first, end = (
            compute_first_place(u, update_samples=size, rank=rank, world_size=ranks) for u in (update, update + 1)
        )
        assert end > first, "each rank has something to read, so that each learns of its end"
        places += [rank + ranks * place for place in range(first, end)]
    assert sorted(places) == list(range(update * size, (update + 1) * size))


def begin_reading(config: Config) -> tuple[State, tuple[Effect, ...]]:
    """Returns the state and effects of a single rank after the first round, in which nothing is read."""
    state, (post,) = start(config)
    assert (post.offer.samples_min, post.offer.groups_max) == (1, 0), "or the epoch would close here"
    state, effects = transition(config, state, Agreed(post.offer))
    state, more = transition(config, state, Counted((), ()))
    return transition(config, state, Collated(0))[0], (*effects, *more)


def test_nothing_is_read_in_the_first_round_of_an_update() -> None:
    """Spec: R16.3, R6.1. Checks: UPDATE."""
    _, effects = begin_reading(make_config(update_samples=4))
    assert [effect for effect in effects if isinstance(effect, Read)] == [Read(4, 0)]


def test_a_short_read_takes_nothing_from_the_next_update() -> None:
    """Spec: R16.2, R16.5. Checks: UPDATE."""
    config = make_config(update_samples=4)
    state, _ = begin_reading(config)
    state, (post,) = transition(config, state, SamplesRead(make_shard([3, 3, 3]), is_full=True))
    assert post.offer.samples_max == 3
    assert config.compute_update_place(1) == 4, "by its place, not by how many were good"


def test_a_rank_whose_part_is_bad_goes_on() -> None:
    """Spec: R16.5. Checks: UPDATE, TERM."""
    config = make_config(update_samples=2)
    state, _ = begin_reading(config)
    state, (post,) = transition(config, state, SamplesRead((), is_full=True))
    assert (post.offer.samples_min, post.offer.groups_max) == (1, 0), "or the epoch would close here"
    state, effects = transition(config, state, Agreed(post.offer))
    assert effects == (PostCounts(()),)
    assert not state.aligned


# Portions ------------------------------------------------------------------------------------------------------------


def test_the_number_of_portions_follows_from_the_samples_of_a_rank() -> None:
    """Spec: R16.4."""
    sizes = (8, 23, 24, 71, 72, 215, 216, 647, 648, 10**6)
    assert [count_portions(size, 8) for size in sizes] == [1, 1, 2, 2, 3, 3, 4, 4, 5, 5]


# What is refused -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "what"),
    [
        ({"world_size": 4, "update_samples": 3}, "less than one sample for each"),
        ({"mode": Mode.QUOTA, "quota_samples": 9, "update_samples": 3}, "count updates"),
        ({"mode": Mode.QUOTA, "shared_samples": 9, "update_samples": 3}, "end together"),
    ],
)
def test_what_would_cut_an_update_is_refused(settings: dict[str, object], what: str) -> None:
    """Spec: R16.1, R16.7."""
    with pytest.raises(UsageError, match=what):
        make_config(**settings)


def test_in_quota_mode_the_first_rank_without_samples_ends_the_epoch() -> None:
    """Spec: R16.7. Streams have unequal lengths. There are whole updates until one stream has nothing left."""
    sources = [make_shard([2] * 9), make_shard([2] * 5, 100)]
    for mode, updates in ((Mode.QUOTA, [4, 4, 3]), (Mode.JOIN, [4, 4, 3, 2, 1])):
        config = make_config(update_samples=4, mode=mode)
        world = World(config, sources, seed=3).run()
        assert [ids.total() for ids in list_updates(world).values()] == updates
        assert {outcome.kind for outcome in world.outcomes if outcome} == {OutcomeKind.COMPLETE}


def test_no_rule_keeps_back_a_group_of_an_update() -> None:
    """Spec: R16.3."""

    class Short(PaperRule):
        def compute_target(self, agreement: object) -> int:
            return 1

    config = make_config(update_samples=4, rule=Short())
    state, _ = begin_reading(config)
    _, (post,) = transition(config, state, SamplesRead(make_shard([8, 8, 8, 8])))
    assert compute_checked_target(Short(), post.offer) == 1
    assert compute_round_target(config, post.offer) == post.offer.groups_max > 1
