"""R3: offers, agreement, target."""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass, fields, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from odb_ref.core.batching.layouts import Layout
from odb_ref.core.batching.order import StepOrder
from odb_ref.core.batching.rules import OdbRule, PaperRule, compute_bounds, compute_checked_target
from odb_ref.core.effects import PostOffer
from odb_ref.core.errors import RuleError
from odb_ref.core.events import Agreed, Collated, ConsumerStopped, LocalFailed, SamplesRead, Urged
from odb_ref.core.machine import Machine
from odb_ref.core.offer import NONE, Offer, Reduction, combine, reduce_offers
from odb_ref.core.rounds import post_when_ready
from odb_ref.core.state import State
from odb_ref.core.types import Mode
from tests.helpers.world import World, make_config, make_shard, make_shards, run

VALUE = st.integers(0, 5) | st.just(NONE)
OFFERS = st.builds(Offer, **{field.name: VALUE for field in fields(Offer)})

NAMES = [
    "round_min", "round_max", "fingerprint_min", "fingerprint_max", "ready_min", "failed_rank", "stop_step",
    "stop_rank", "samples_min", "samples_max", "groups_min", "groups_max", "due_max",
    "budget_min",
]  # fmt: skip


def _make_agreement(**values: int) -> Offer:
    base = dict.fromkeys(NAMES, 0) | {"failed_rank": NONE, "stop_rank": NONE, "stop_step": NONE, "ready_min": 1}
    return Offer(**(base | values))


def _post_first(lengths: list[int], **options: object) -> Offer:
    machine = Machine(make_config(**options))
    machine.begin()
    (post,) = machine.handle(SamplesRead(make_shard(lengths), len(lengths) < machine.config.window_samples))
    assert isinstance(post, PostOffer)
    return post.offer


def test_all_ranks_learn_one_number_of_steps_a_round() -> None:
    """Spec: R3. Checks: ALIGN."""
    world = run([[3, 3, 3, 9, 1], [2], []], make_config())
    agreements = [[event for event, _ in node.events if isinstance(event, Agreed)] for node in world.nodes]
    assert agreements[0] == agreements[1] == agreements[2]
    assert len(agreements[0]) > 1


def test_an_offer_says_what_the_rank_holds() -> None:
    """Spec: R3.1."""
    offer = _post_first([5, 5, 1, 1])
    assert (offer.samples_min, offer.samples_max) == (4, 4)
    assert (offer.groups_min, offer.groups_max, offer.due_max) == (2, 3, 0)
    assert (offer.round_min, offer.round_max, offer.ready_min) == (0, 0, 1)
    assert (offer.failed_rank, offer.stop_rank, offer.stop_step) == (NONE, NONE, NONE)
    assert _post_first([5, 5, 1]).groups_min == NONE  # the source has ended


@pytest.mark.parametrize(
    ("layout", "lengths", "to_emit"),
    [
        (Layout.PADDED, [8, 8, 8, 4], 4),  # half of the budget of 8
        (Layout.PADDED, [8, 8, 8, 3], 3),
        (Layout.PADDED, [2, 2, 8, 8], 3),  # two rows of two tokens hold half of it
        (Layout.PADDED, [1, 2, 8, 8], 3),  # and a row and its padding
        (Layout.PADDED, [1, 1, 8, 8], 2),
        (Layout.PACKED, [1, 2, 8, 8], 2),  # without padding they hold three
        (Layout.PADDED, [1, 3, 8, 20], 3),
        (Layout.PADDED, [1, 1, 1, 1], 1),  # the only group there is
    ],
)
def test_a_reading_rank_keeps_back_a_group_that_is_less_than_half_full(
    layout: Layout, lengths: list[int], to_emit: int
) -> None:
    """Spec: R3.1."""
    assert _post_first(lengths, layout=layout).groups_min == to_emit


def test_half_full_is_half_of_the_budget_in_force() -> None:
    """Spec: R3.1, R15.1."""
    config = make_config()
    for tokens, to_emit in ((8, 3), (6, 4)):
        state = State(window=make_shard([8, 8, 8, 3]), agreed_tokens=tokens, round=1)
        _, (post,) = post_when_ready(config, state)
        assert isinstance(post, PostOffer)
        assert post.offer.groups_min == to_emit


@given(st.lists(st.integers(1, 12), min_size=1, max_size=9), st.sampled_from(Layout), st.sampled_from(StepOrder))
def test_a_reading_rank_offers_at_least_one_group_and_at_most_one_fewer_than_it_has(
    lengths: list[int], layout: Layout, order: StepOrder
) -> None:
    """Spec: R3.1, R3.3. Checks: TERM."""
    offer = _post_first(lengths, layout=layout, order=order, window_samples=len(lengths))
    assert max(1, offer.groups_max - 1) <= offer.groups_min <= offer.groups_max


@given(OFFERS, OFFERS, OFFERS)
def test_the_reduction_is_a_semilattice(a: Offer, b: Offer, c: Offer) -> None:
    """Spec: R3.2. Checks: ALIGN."""
    assert combine(a, combine(b, c)) == combine(combine(a, b), c)
    assert combine(a, b) == combine(b, a)
    assert combine(a, a) == a
    for order in itertools.permutations([a, b, c]):
        assert reduce_offers(order) == functools.reduce(combine, order)


@given(OFFERS)
def test_the_wire_holds_the_fields_in_order_with_min_negated(offer: Offer) -> None:
    """Spec: R3.2."""
    assert [field.name for field in fields(Offer)] == NAMES
    signs = [-1 if field.metadata["reduction"] is Reduction.MIN else 1 for field in fields(Offer)]
    assert signs == [-1, 1, -1, 1, -1, -1, -1, -1, -1, 1, -1, 1, 1, -1]
    assert offer.to_wire() == tuple(s * getattr(offer, name) for s, name in zip(signs, NAMES, strict=True))
    assert Offer.from_wire(offer.to_wire()) == offer
    assert all(-(2**63) <= value < 2**63 for value in offer.to_wire()), "fits an int64 tensor"


def test_the_shipped_rules_answer_as_written() -> None:
    """Spec: R3.3."""
    agreement = _make_agreement(samples_min=1, samples_max=9, groups_min=2, groups_max=5, due_max=1)
    assert OdbRule().compute_target(agreement) == 2
    assert OdbRule().compute_target(replace(agreement, due_max=4)) == 4
    assert OdbRule().compute_target(replace(agreement, groups_min=NONE)) == 5
    assert PaperRule().compute_target(agreement) == 5


@given(st.lists(st.lists(st.integers(1, 9), max_size=7), min_size=1, max_size=4), st.integers(1, 3), st.booleans())
def test_the_shipped_rules_keep_the_bounds_on_every_offer_a_run_makes(
    shards: list[list[int]], age: int, is_paper: bool
) -> None:
    """Spec: R3.3. Checks: TERM, AGE."""
    rule = PaperRule() if is_paper else OdbRule()
    world = run(shards, make_config(max_age_rounds=age, rule=rule, window_samples=3))
    for event, _ in world.nodes[0].events:
        if isinstance(event, Agreed) and event.agreement.samples_max:
            low, high = compute_bounds(event.agreement)
            assert low == max(1, event.agreement.due_max)
            assert high == event.agreement.samples_max
            assert low <= compute_checked_target(rule, event.agreement) <= high


@dataclass(frozen=True)
class _Fixed:
    target: int
    name: str = "fixed"

    def compute_target(self, agreement: Offer) -> int:
        """Always the same."""
        return self.target


@pytest.mark.parametrize("target", [0, -1, 5])
def test_a_rule_outside_its_bounds_is_an_error(target: int) -> None:
    """Spec: R3.3, R8."""
    with pytest.raises(RuleError) as caught:
        run([[1, 1, 1, 1]], make_config(rule=_Fixed(target)))
    assert caught.value.invariant == "RULE-BOUNDS"


def test_quota_mode_lowers_the_target_to_what_the_poorest_rank_can_fill() -> None:
    """Spec: R3.3, R1.5."""
    world = run([[8] * 4, [8]], make_config(mode=Mode.QUOTA, rule=PaperRule()))
    assert [len(node.taken) for node in world.nodes] == [1, 1]


def test_an_offer_waits_for_reads_collation_and_room() -> None:
    """Spec: R3.4. Checks: RELEASE."""
    world = World(make_config(depth_steps=1, window_samples=2), make_shards([[8] * 8]))
    posted_in = []
    while world.step():
        for event, effects in world.nodes[0].events[len(posted_in) :]:
            posted_in.append(event)
            if any(isinstance(effect, PostOffer) for effect in effects):
                state = world.nodes[0].machine.state
                assert not state.wanted_samples
                assert state.is_collated
                assert not state.released
    assert world.is_over


def test_an_urged_rank_waits_for_its_input_but_not_for_its_consumer() -> None:
    """Spec: R3.4, R5.9. Checks: FREE."""
    machine = Machine(make_config())
    machine.begin()
    assert machine.handle(Urged()) == ()
    (post,) = machine.handle(SamplesRead(make_shard([8]), True))
    assert isinstance(post, PostOffer)
    assert post.offer.ready_min == 1


@pytest.mark.parametrize("event", [LocalFailed("x"), ConsumerStopped()])
def test_a_failure_or_a_stop_posts_at_once(event: LocalFailed | ConsumerStopped) -> None:
    """Spec: R3.4. Checks: ABORT, STOP."""
    machine = Machine(make_config())
    machine.begin()
    (post,) = machine.handle(event)
    assert isinstance(post, PostOffer)
    assert post.offer.ready_min == 0
    assert (post.offer.failed_rank == 0) == isinstance(event, LocalFailed)
    assert (post.offer.stop_rank == 0) == isinstance(event, ConsumerStopped)
    assert (post.offer.stop_step == 0) == isinstance(event, ConsumerStopped)


def test_the_epoch_closes_when_nobody_holds_anything() -> None:
    """Spec: R3.5. Checks: COVER."""
    world = run([[8, 8], []], make_config())
    last = [event.agreement for event, _ in world.nodes[0].events if isinstance(event, Agreed)]
    assert [agreement.samples_max for agreement in last] == [2, 0]
    assert not any(isinstance(event, Collated) and event.round > 0 for event, _ in world.nodes[0].events)


def test_quota_mode_closes_when_one_rank_holds_nothing() -> None:
    """Spec: R3.5. Checks: QUOTA."""
    world = run([[8, 8], []], make_config(mode=Mode.QUOTA))
    assert [len(node.taken) for node in world.nodes] == [0, 0]
    assert world.is_over
