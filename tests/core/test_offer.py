"""The offer is a join-semilattice, whose reduction is an elementwise maximum on the wire."""

from __future__ import annotations

from dataclasses import fields

import pytest
from hypothesis import given
from hypothesis import strategies as st

from odb_ref.core.errors import PeerError, UsageError
from odb_ref.core.offer import NONE, WIRE_SIZE, Offer, Reduction, combine, reduce_offers

VALUES = st.integers(0, 9) | st.just(NONE)
OFFERS = st.builds(Offer, **{item.name: VALUES for item in fields(Offer)})


@given(st.lists(OFFERS, min_size=1, max_size=6))
def test_the_agreement_is_the_minimum_or_maximum_of_each_field(offers: list[Offer]) -> None:
    """Spec: R3.2. Checks: ALIGN."""
    agreement = reduce_offers(offers)
    for item in fields(Offer):
        pick = min if item.metadata["reduction"] is Reduction.MIN else max
        assert getattr(agreement, item.name) == pick(getattr(offer, item.name) for offer in offers)


@given(OFFERS, OFFERS)
def test_an_elementwise_maximum_of_wires_is_the_combination(a: Offer, b: Offer) -> None:
    assert Offer.from_wire([max(pair) for pair in zip(a.to_wire(), b.to_wire(), strict=True)]) == combine(a, b)


@pytest.mark.parametrize("size", [0, WIRE_SIZE - 1, WIRE_SIZE + 1])
def test_a_wire_of_another_size_is_a_peers_error(size: int) -> None:
    with pytest.raises(PeerError) as caught:
        Offer.from_wire([0] * size)
    assert str(caught.value) == f"offer: expected {WIRE_SIZE} integers, got {size}"


def test_no_offers_have_no_agreement() -> None:
    with pytest.raises(UsageError) as caught:
        reduce_offers([])
    assert str(caught.value) == "reduce_offers needs at least one offer"
