"""R3: offers, agreement, target."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from odb_ref.core.batching.layouts import Layout
from odb_ref.core.batching.order import StepOrder
from odb_ref.core.batching.rules import OdbRule, PaperRule
from odb_ref.core.events import SamplesRead
from odb_ref.core.machine import Machine
from odb_ref.core.offer import NONE, Offer, Reduction
from odb_ref.core.rounds import post_when_ready
from odb_ref.core.state import State
from tests.helpers.world import make_config, make_offer, make_shard

VALUE = st.integers(0, 5) | st.just(NONE)
OFFERS = st.builds(Offer, **{field.name: VALUE for field in fields(Offer)})

NAMES = [
    "round_min", "round_max", "fingerprint_min", "fingerprint_max", "ready_min", "failed_rank", "stop_step",
    "stop_rank", "samples_min", "samples_max", "groups_min", "groups_max", "due_max",
    "budget_min",
]  # fmt: skip


def _post_first(lengths: list[int], **options: object) -> Offer:
    machine = Machine(make_config(**options))
    machine.begin()
    (post,) = machine.handle(SamplesRead(make_shard(lengths), len(lengths) < machine.config.window_samples))
    return post.offer


@pytest.mark.parametrize(
    ("layout", "lengths", "to_emit"),
    [
        (Layout.PADDED, [8, 8, 8, 4], 4),  # half of the budget of 8
        (Layout.PADDED, [8, 8, 8, 3], 3),
        (Layout.PADDED, [2, 2, 8, 8], 3),  # two rows of two tokens hold half of it
        (Layout.PADDED, [1, 2, 8, 8], 3),  # and so do a row and its padding
        (Layout.PADDED, [1, 1, 8, 8], 2),
        (Layout.PACKED, [1, 2, 8, 8], 2),  # without padding they hold only three
        (Layout.PADDED, [1, 3, 8, 20], 3),
        (Layout.PADDED, [1, 1, 1, 1], 1),  # the only group
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
        assert post.offer.groups_min == to_emit


@given(st.lists(st.integers(1, 12), min_size=1, max_size=9), st.sampled_from(Layout), st.sampled_from(StepOrder))
def test_a_reading_rank_offers_at_least_one_group_and_at_most_one_fewer_than_it_has(
    lengths: list[int], layout: Layout, order: StepOrder
) -> None:
    """Spec: R3.1, R3.3. Checks: TERM."""
    offer = _post_first(lengths, layout=layout, order=order, window_samples=len(lengths))
    assert max(1, offer.groups_max - 1) <= offer.groups_min <= offer.groups_max


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
    agreement = make_offer(samples_max=9, groups=2, groups_max=5, due_max=1)
    assert OdbRule().compute_target(agreement) == 2
    assert OdbRule().compute_target(replace(agreement, due_max=4)) == 4
    assert OdbRule().compute_target(replace(agreement, groups_min=NONE)) == 5
    assert PaperRule().compute_target(agreement) == 5
