"""R14: all ranks draw from one order."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from odb_ref.core.batching.layouts import Layout
from odb_ref.core.batching.shards import Draw, compute_draw, compute_shares, compute_want
from odb_ref.core.config import Config
from odb_ref.core.effects import Collate, Effect, OutcomeKind, PostCounts, PostOffer, Read
from odb_ref.core.errors import PeerError, UsageError
from odb_ref.core.events import Agreed, Counted, Event, SamplesRead
from odb_ref.core.exchange import combine_posts
from odb_ref.core.machine import Machine, start, transition
from odb_ref.core.offer import Offer
from odb_ref.core.resume import RoundStart, compute_round_start
from odb_ref.core.types import Mode, StepCounts
from tests.helpers.world import ByArrival, Fault, Node, Shard, World, make_config, make_shard

WANTS = st.lists(st.integers(0, 12), min_size=1, max_size=6)


def is_fair(wants: list[int], left: int, shares: Sequence[int]) -> bool:
    """R14.3: all remaining places up to what is wanted. What is then wanted is equal, except that lower ranks have one less."""
    rests = [want - share for want, share in zip(wants, shares, strict=True)]
    most = max(rests)
    served = [rest < most for want, rest in zip(wants, rests, strict=True) if want >= most]
    is_even = all(not share or rest >= most - 1 for share, rest in zip(shares, rests, strict=True))
    is_whole = sum(shares) == min(left, sum(wants)) and min(rests) >= 0 and min(shares) >= 0
    return is_whole and is_even and served == sorted(served, reverse=True)


@given(WANTS, st.integers(0, 80))
def test_shares_are_what_is_wanted_or_all_that_is_left(wants: list[int], left: int) -> None:
    """Spec: R14.3. Checks: DEAL."""
    assert is_fair(wants, left, compute_shares(wants, left))


@given(WANTS, st.integers(0, 50), st.integers(0, 50))
def test_draws_are_neighbours_in_the_order_of_the_ranks(wants: list[int], drawn: int, left: int) -> None:
    """Spec: R14.3. Checks: DEAL."""
    draws = [compute_draw(rank, wants, drawn, drawn + left) for rank in range(len(wants))]
    place = drawn
    for draw in draws:
        assert draw.first == place
        place += draw.count
    assert {draw.end for draw in draws} == {place}


def test_what_is_carried_counts_by_its_tokens() -> None:
    """Spec: R14.2."""
    assert compute_want(8, samples=8, tokens=80, carried_tokens=0) == 8
    assert compute_want(8, samples=8, tokens=80, carried_tokens=30) == 5
    assert compute_want(8, samples=8, tokens=80, carried_tokens=31) == 4
    assert compute_want(4, samples=8, tokens=80, carried_tokens=80) == 0
    assert compute_want(8, samples=8, tokens=2**60, carried_tokens=2**59 + 1) == 3, "exact, not in floats"


@pytest.mark.parametrize(
    ("layout", "left", "size"),
    [(Layout.PACKED, 9, 8), (Layout.PACKED, 7, 7), (Layout.PACKED, 3, 4), (Layout.PADDED, 3, 8)],
)
def test_windows_of_packed_rows_shrink_to_what_is_left_for_each_rank(layout: Layout, left: int, size: int) -> None:
    """Spec: R14.2."""
    assert layout.compute_shared_window(8, left) == size
    assert layout.compute_shared_window(1, left) == 1
    assert layout.compute_shared_window(7, 1) == (4 if layout is Layout.PACKED else 7)


def test_a_rank_wants_no_more_than_what_is_left_for_each() -> None:
    """Spec: R14.2. 8 of 13 places are drawn, so 3 are left for each rank, but there is room for 4."""
    for layout, wanted in ((Layout.PACKED, 3), (Layout.PADDED, 4)):
        _, machine, offer = offer_first([8, 8, 8, 8], 13, layout=layout)
        (counts,) = machine.handle(Agreed(offer))
        assert counts.wanted == wanted


def run_shared(lengths: list[int], ranks: int, *, seed: int = 0, **options: object) -> World:
    """Runs a job over a common order of these lengths."""
    config = make_config(shared_samples=len(lengths), **options)
    return World(config, [()] * ranks, order=make_shard(lengths), schedule=ByArrival(seed)).run()


def list_emitted(world: World) -> list[int]:
    """Returns the names of all samples that consumers took."""
    return [sample.id for node in world.nodes for sample in node.trained]


@pytest.mark.parametrize("seed", range(60))
def test_a_job_emits_each_sample_of_the_order_once(seed: int) -> None:
    """Spec: R14, R14.1, R14.5. Checks: DEAL, COVER, ONCE, ALIGN."""
    draw = random.Random(seed)
    ranks = draw.randint(1, 6)
    lengths = [draw.randint(1, draw.choice((3, 20))) for _ in range(draw.choice((0, 1, ranks, 5, 40, 90)))]
    world = run_shared(
        lengths,
        ranks,
        seed=seed,
        layout=draw.choice(list(Layout)),
        budget_tokens=draw.randint(2, 40),
        window_samples=draw.randint(1, 9),
        ramp_rounds=draw.randint(0, 2),
        max_age_rounds=draw.randint(1, 3),
    )
    assert all(outcome is not None and outcome.kind is OutcomeKind.COMPLETE for outcome in world.outcomes)
    assert sorted(list_emitted(world)) == list(range(len(lengths)))
    assert sorted(place for node in world.nodes for places in node.drawn for place in places) == list(
        range(len(lengths))
    )
    assert len({len(node.taken) for node in world.nodes}) == 1
    # The order ends on all ranks in the same round, that of the last draw of any rank.
    ends = {
        max((event.wants for event, _ in node.events if isinstance(event, Counted)), default=()) for node in world.nodes
    }
    assert len(ends) == 1
    assert {node.machine.state.draw.end for node in world.nodes} == {len(lengths)}
    assert all(node.machine.state.is_ended for node in world.nodes)


def test_a_rank_of_short_samples_draws_more() -> None:
    """Spec: R14.2. Checks: DEAL. NP12 is about own shards."""
    lengths = [1 if place % 2 else 8 for place in range(80)]
    world = run_shared(lengths, 2, window_samples=4, budget_tokens=8)
    idle = [sum(step.is_idle for step in node.taken) for node in world.nodes]
    assert max(idle) <= 1
    tokens = [sum(sample.length for sample in node.trained) for node in world.nodes]
    assert abs(tokens[0] - tokens[1]) <= 24


def begin(total: int = 20, **options: object) -> tuple[Config, Machine]:
    """Returns rank 1 of two ranks' machines, at its beginning."""
    config = make_config(rank=1, world_size=2, shared_samples=total, window_samples=4, **options)
    return config, Machine(config)


def offer_first(lengths: list[int], total: int = 20, **options: object) -> tuple[Config, Machine, Offer]:
    """Returns the same after the offer of its first window."""
    config, machine = begin(total, **options)
    machine.begin()
    (post,) = machine.handle(SamplesRead(make_shard(lengths)))
    return config, machine, post.offer


def test_a_rank_reads_what_it_has_drawn_after_the_counts() -> None:
    """Spec: R14.2, R14.4, R6.1, R6.3, R5.4."""
    _, machine = begin()
    assert machine.begin() == (Read(4, 4),)
    order = make_shard([8, 1, 1, 1])
    assert machine.handle(SamplesRead(order[:2])) == ()
    (offer,) = machine.handle(SamplesRead(order[2:]))
    (counts,) = machine.handle(Agreed(replace(offer.offer, groups_min=1)))
    # The group of 8 tokens is emitted, and one of 3 is carried: 4 samples have 11 tokens, and ceil(12 / 11) are wanted.
    assert counts == PostCounts((StepCounts(1, 8, 7),), 2)
    read, collate = machine.handle(Counted(counts.counts, (3, 2)))
    assert read == Read(2, 11)
    assert isinstance(collate, Collate)
    assert machine.state.draw == Draw(11, 2, 13)
    assert not machine.state.is_ended


def test_what_ranks_want_is_gathered_with_the_counts() -> None:
    """Spec: R14.2, R6.3."""
    one = StepCounts(1, 1, 1)
    assert combine_posts([PostCounts((one,), 3), PostCounts((one,), 0)]) == Counted((StepCounts(2, 2, 2),), (3, 0))
    assert combine_posts([PostCounts((one,)), PostCounts((one,))]) == Counted((StepCounts(2, 2, 2),))


@pytest.mark.parametrize("wants", [(), (4,), (4, 4, 4), (-1, 4)])
def test_a_want_of_each_rank_is_expected(wants: tuple[int, ...]) -> None:
    """Spec: R14.2, R8. The state is unchanged."""
    config, machine, offer = offer_first([8, 1, 1, 1])
    (counts,) = machine.handle(Agreed(offer))
    assert isinstance(counts, PostCounts)
    with pytest.raises(PeerError, match="field wants"):
        transition(config, machine.state, Counted(counts.counts, wants))


def test_nothing_can_be_read_before_it_is_drawn() -> None:
    """Spec: R14.2, R5.1."""
    config, machine, offer = offer_first([8, 1, 1, 1])
    machine.handle(Agreed(offer))
    with pytest.raises(UsageError, match="no Read is open"):
        transition(config, machine.state, SamplesRead(make_shard([1])))


def test_fewer_samples_than_were_drawn_end_the_read_and_not_the_order() -> None:
    """Spec: R14.4, R14.5, R11.1."""
    config, _ = begin()
    state, _ = start(config)
    state, (post,) = transition(config, state, SamplesRead(make_shard([8, 1]), is_ended=True))
    assert (state.read_samples, state.wanted_samples, state.is_ended) == (2, 0, False)
    assert (post.offer.groups_min, post.offer.groups_max) == (1, 2)
    with pytest.raises(UsageError, match="the source has not ended"):
        transition(config, start(config)[0], SamplesRead((), is_ended=True))
    last, _ = begin(8)
    state, (post,) = transition(last, start(last)[0], SamplesRead((), is_ended=True))
    assert post.offer.samples_max == 0
    assert state.is_ended


def test_an_order_of_nothing_ends_at_once() -> None:
    """Spec: R14.5."""
    config, machine = begin(0)
    (post,) = machine.begin()
    assert isinstance(post, PostOffer)
    assert machine.state.is_ended
    assert config.shared_samples == 0


@pytest.mark.parametrize("kind", ["fail", "stop", "kill", "urge"])
@pytest.mark.parametrize("seed", range(12))
def test_what_goes_wrong_ends_all_ranks(kind: str, seed: int) -> None:
    """Spec: R14. Checks: FREE, ABORT, STOP, ONCE."""
    lengths = [1 + seed * place % 9 for place in range(50)]
    config = make_config(shared_samples=50, window_samples=5)
    schedule = ByArrival(seed, [Fault(kind, seed % 3, 8 + 7 * seed)])
    world = World(config, [()] * 3, order=make_shard(lengths), schedule=schedule).run()
    assert all(node.finish is not None or node.is_dead for node in world.nodes)
    emitted = Counter(list_emitted(world))
    assert set(emitted.values()) <= {1}
    if kind == "urge":
        assert len(emitted) == 50


@pytest.mark.parametrize("mode", list(Mode))
def test_an_epoch_goes_on_from_where_any_step_was_taken(mode: Mode) -> None:
    """Spec: R14.6, R10.1, R10.2. Checks: RESUME, REPLAY, DEAL."""
    lengths = [1 + 7 * place % 11 for place in range(60)]
    quota = 50 if mode is Mode.QUOTA else None
    config = make_config(shared_samples=60, window_samples=6, mode=mode, quota_samples=quota, budget_tokens=14)
    order: Shard = make_shard(lengths)
    whole = World(config, [()] * 3, order=order).run()
    total = len(whole.nodes[0].taken)
    assert total > 6
    for count in range(total + 1):
        first = World(config, [()] * 3, order=order, seed=count, stops=dict.fromkeys(range(3), count)).run()
        checkpoints = first.save()
        known = [node.shard[: point.start.read_samples] for node, point in zip(first.nodes, checkpoints, strict=True)]
        rest = World(config, known, order=order, seed=99 - count, checkpoints=checkpoints).run()
        assert rest.is_over
        for node, before, point in zip(rest.nodes, whole.nodes, checkpoints, strict=True):
            assert node.taken[point.taken_steps :] == before.taken[count:]


def test_the_start_of_a_round_holds_what_is_drawn_for_it() -> None:
    """Spec: R14.6, R10.1."""
    config, machine = begin()
    machine.begin()
    assert compute_round_start(machine.state) == RoundStart(draw=Draw(4, 4, 8))
    again = Machine(config)
    assert again.begin(RoundStart(draw=Draw(4, 4, 8))) == (Read(4, 4),)
    ended = Machine(config)
    carried = make_shard([3, 4])
    begun = RoundStart(
        round=2, read_samples=2, carried=(0, 1), marks=(2, 2), planned_steps=3, global_samples=9, draw=Draw(20, 0, 20)
    )
    (post,) = ended.begin(begun, carried)
    assert isinstance(post, PostOffer)
    assert ended.state.is_ended


def list_windows(config: Config, node: Node) -> tuple[list[int], list[Event]]:
    """Returns the actual sizes of a rank's windows, and the corresponding events on a rank without a shared order.

    A rank that draws none of the last places is asked for one sample more than it has, and reports its end.
    """
    state, _ = start(config)
    sizes = [len(state.window) + (state.wanted_samples or int(state.is_ended))]
    told: list[Event] = [SamplesRead((), True)] if state.is_ended and not state.wanted_samples else []
    for event, _ in node.events:
        before = state
        state, _ = transition(config, state, event)
        match event:
            case SamplesRead(samples):
                told.append(SamplesRead(samples, state.is_ended and not state.wanted_samples))
            case Counted(counts):
                is_last = state.is_ended and not before.is_ended
                sizes.append(len(state.window) + (state.wanted_samples or int(is_last)))
                told.append(Counted(counts))
                told += [SamplesRead((), True)] if is_last and not state.wanted_samples else []
            case _:
                told.append(event)
    return sizes, told


def list_deeds(effects: Iterable[Effect]) -> list[object]:
    """Returns what a rank does that others, or its trainer, see."""
    deeds: list[object] = []
    for effect in effects:
        match effect:
            case Read():
                pass
            case PostOffer(offer):
                deeds.append(replace(offer, fingerprint_min=0, fingerprint_max=0))
            case PostCounts(counts):
                deeds.append(counts)
            case _:
                deeds.append(effect)
    return deeds


@pytest.mark.parametrize("seed", range(30))
def test_a_rank_does_what_one_does_whose_source_is_what_it_drew(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Spec: R14. Checks: DEAL.

    So what is proved for ranks with any sources and any sizes of windows also holds for ranks that share an order.
    """
    draw = random.Random(seed)
    lengths = [draw.randint(1, draw.choice((3, 12))) for _ in range(draw.choice((2, 30, 70)))]
    faults = [Fault(draw.choice(("stop", "urge")), 1, draw.randint(5, 90))] if seed % 3 == 0 else []
    config = make_config(
        shared_samples=len(lengths), window_samples=draw.randint(1, 8), ramp_rounds=draw.randint(0, 2), budget_tokens=12
    )
    world = World(config, [()] * 3, order=make_shard(lengths), schedule=ByArrival(seed, faults)).run()
    for node in world.nodes:
        shared = node.machine.config
        sizes, told = list_windows(shared, node)
        own = replace(shared, shared_samples=None)
        with monkeypatch.context() as patch:
            patch.setattr(Config, "compute_window_samples", lambda _, round_, sizes=sizes: (*sizes, 0)[round_])
            state, done = start(own)
            for event in told:
                state, effects = transition(own, state, event)
                done += effects
        assert list_deeds(done) == list_deeds((*node.begun, *node.posted))
