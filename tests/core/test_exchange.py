"""Offers and their reduction, which on the wire is an elementwise maximum, and the answers of an exchange after all ranks have
posted. Spec: R6.2, R6.3, R6.4.
"""

from __future__ import annotations

from dataclasses import fields

import pytest
from hypothesis import given
from hypothesis import strategies as st

from odb_ref.core.effects import Post, PostCounts, PostOffer, PostReport
from odb_ref.core.errors import InvariantError, PeerError, UsageError
from odb_ref.core.events import Agreed, Counted, Report, Reported, SamplesRead
from odb_ref.core.exchange import combine_posts
from odb_ref.core.machine import Machine
from odb_ref.core.offer import NONE, WIRE_SIZE, Offer, Reduction, combine, reduce_offers
from odb_ref.core.types import StepCounts
from tests.helpers.errors import refused
from tests.helpers.world import make_configs

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
    with refused(PeerError, f"offer: expected {WIRE_SIZE} integers, got {size}"):
        Offer.from_wire([0] * size)


def test_no_offers_have_no_agreement() -> None:
    with refused(UsageError, "reduce_offers needs at least one offer"):
        reduce_offers([])


def make_offers() -> list[PostOffer]:
    """Returns the first offers of two ranks without samples."""
    found = []
    for config in make_configs(2):
        machine = Machine(config)
        machine.begin()
        found += [item for item in machine.handle(SamplesRead((), True)) if isinstance(item, PostOffer)]
    return found


def test_offers_are_reduced_and_the_reduction_may_be_another() -> None:
    posts = make_offers()
    assert combine_posts(posts) == Agreed(reduce_offers(post.offer for post in posts))
    asked: list[list[Offer]] = []

    def reduce(offers: object) -> Offer:
        assert isinstance(offers, list)
        asked.append(offers)
        return posts[1].offer

    assert combine_posts(posts, reduce) == Agreed(posts[1].offer)
    assert asked == [[post.offer for post in posts]]


def test_counts_are_summed_step_by_step() -> None:
    """Spec: R4.5. Checks: WEIGHT. This holds for numbers of many bits too."""
    posts = [
        PostCounts((StepCounts(2**33, 2**41, 2**40), StepCounts(0, 0, 0))),
        PostCounts((StepCounts(2**33 + 4, 2**41 + 50, 2**40 + 6), StepCounts(7, 80, 9))),
    ]
    assert combine_posts(posts) == Counted((StepCounts(2**34 + 4, 2**42 + 50, 2**41 + 6), StepCounts(7, 80, 9)))
    posts = [PostCounts((StepCounts(rank, 20, 3, (rank, 10 * rank, 0)),)) for rank in range(4)]
    assert combine_posts(posts) == Counted((StepCounts(6, 80, 12, (6, 60, 0)),))


def test_reports_come_in_the_order_of_the_ranks() -> None:
    reports = [Report(rank, f"cause {rank}", 3, "{}") for rank in range(3)]
    assert combine_posts([PostReport(report) for report in reports]) == Reported(tuple(reports))


@pytest.mark.parametrize(
    ("posts", "detail"),
    [
        ([PostCounts(()), PostReport(Report(1, "", 0, "{}"))], "the ranks are in different exchanges: counts, reports"),
        ([make_offers()[0], PostCounts(())], "the ranks are in different exchanges: counts, offers"),
        (
            [PostCounts((StepCounts(1, 1, 1),)), PostCounts((StepCounts(1, 1, 1),) * 3)],
            "the ranks post the counts of [1, 3] steps",
        ),
    ],
)
def test_ranks_that_do_not_meet_are_refused(posts: list[Post], detail: str) -> None:
    """Checks: ALIGN."""
    with pytest.raises(InvariantError) as caught:
        combine_posts(posts)
    assert (caught.value.invariant, caught.value.detail) == ("ALIGN", detail)
