"""The answers of an exchange after all ranks have posted. Spec: R6.2, R6.3, R6.4."""

from __future__ import annotations

import pytest

from odb_ref.core.effects import Post, PostCounts, PostOffer, PostReport
from odb_ref.core.errors import InvariantError
from odb_ref.core.events import Agreed, Counted, Report, Reported, SamplesRead
from odb_ref.core.exchange import combine_posts
from odb_ref.core.machine import Machine
from odb_ref.core.offer import Offer, reduce_offers
from odb_ref.core.types import StepCounts
from tests.helpers.world import make_configs


def make_offers() -> list[PostOffer]:
    """Returns the first offers of two ranks without samples."""
    found = []
    for config in make_configs(2):
        machine = Machine(config)
        machine.begin()
        found += [item for item in machine.handle(SamplesRead((), True)) if isinstance(item, PostOffer)]
    return found


def test_offers_are_reduced() -> None:
    posts = make_offers()
    assert combine_posts(posts) == Agreed(reduce_offers(post.offer for post in posts))


def test_the_reduction_may_be_another() -> None:
    posts = make_offers()
    asked: list[list[Offer]] = []

    def reduce(offers: object) -> Offer:
        assert isinstance(offers, list)
        asked.append(offers)
        return posts[1].offer

    assert combine_posts(posts, reduce) == Agreed(posts[1].offer)
    assert asked == [[post.offer for post in posts]]


def test_counts_are_summed_step_by_step() -> None:
    """Spec: R4.5."""
    posts = [
        PostCounts((StepCounts(1, 20, 3), StepCounts(0, 0, 0))),
        PostCounts((StepCounts(4, 50, 6), StepCounts(7, 80, 9))),
    ]
    assert combine_posts(posts) == Counted((StepCounts(5, 70, 9), StepCounts(7, 80, 9)))
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
