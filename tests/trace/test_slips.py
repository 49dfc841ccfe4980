"""Slips that the checker must not make: a bound off by one, a field of several not checked, an order taken for granted."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from typing import Any

import pytest

from odb_ref.core.batching.shards import NOTHING_DRAWN, Draw
from odb_ref.core.effects import OutcomeKind
from odb_ref.core.offer import NONE
from odb_ref.core.resume import RoundStart
from odb_ref.trace.check.decode import Settings, TracedFinish, TracedReport, decode_settings
from odb_ref.trace.check.exchanges import Exchanges
from odb_ref.trace.check.known import check_fields
from odb_ref.trace.check.own.draws import DrawnPlaces, RankDraws
from odb_ref.trace.check.own.groups import GroupNumbers, count_groups, list_excesses
from odb_ref.trace.check.own.offers import Seen, compare_window, judge_offer
from odb_ref.trace.check.own.output import Output
from odb_ref.trace.check.verdict import Findings, Property
from odb_ref.trace.format import Header, TraceError
from tests.helpers.world import make_config, make_offer

STOP = make_offer(stop_step=4, stop_rank=1)


def make_settings(limits: tuple[int, ...]) -> Settings:
    """Returns what the checker knows of a configuration, under the fingerprint of `make_offer`."""
    config = make_config(world_size=2, budget_tokens=100, max_age_rounds=1, limits=limits)
    return replace(decode_settings(Header(2, json.loads(config.shared_json), "test", 0)), fingerprint=1)


@pytest.mark.parametrize("place", range(5))
def test_each_of_five_limits_is_looked_at_and_called_by_its_number(place: int) -> None:
    """Checks: BUDGET, FEWEST."""
    settings = make_settings(tuple(7 if i == place else 9 for i in range(5)))
    group = [[0, position, 1, 0, *(4 if i == place else 0 for i in range(5))] for position in range(2)]
    assert list(list_excesses(group, settings)) == [f"2 samples use 8 of resource {place}, over 7"]
    assert list(list_excesses(group[:1], settings)) == []
    assert count_groups(group, settings, 0) == GroupNumbers(2, 1, 0)


@pytest.mark.parametrize(("due_before", "due"), [(0, 0), (3, 0), (4, 1), (9, 1), (10, 2)])
def test_a_sample_is_due_below_the_mark_and_not_at_it(due_before: int, due: int) -> None:
    """Spec: R4.3. Checks: AGE."""
    rows = [[0, 3, 60, 0], [0, 9, 70, 0], [0, 12, 80, 0]]
    assert count_groups(rows, make_settings(()), due_before) == GroupNumbers(3, 3, due)


@pytest.mark.parametrize(("shortest", "to_emit"), [(49, 1), (50, 2)])
def test_a_group_is_kept_back_below_half_of_the_budget_and_not_at_it(shortest: int, to_emit: int) -> None:
    """Spec: R3.1. Checks: FEWEST."""
    rows = [[0, 0, shortest, 0], [0, 1, 80, 0]]
    assert count_groups(rows, make_settings(()), 0) == GroupNumbers(2, to_emit, 0)
    assert count_groups(rows[:1], make_settings(()), 0) == GroupNumbers(1, 1, 0)
    assert count_groups([], make_settings(()), 0) == GroupNumbers(0, 0, 0)


@pytest.mark.parametrize(("limit", "is_right"), [(3, False), (4, True), (5, False)])
@pytest.mark.parametrize("kind", OutcomeKind)
def test_the_limit_of_an_epoch_is_what_it_was_told(kind: OutcomeKind, limit: int, is_right: bool) -> None:
    """Spec: R7.1, R7.2, R7.4, R7.5. Checks: STOP, RELEASE, ALIGN, ABORT."""
    output = Output()
    output.limit(9)
    output.limit(4)
    said = [what for _, what in output.end(TracedFinish(kind, 1, "", limit)) if what]
    assert (not said) is is_right


@pytest.mark.parametrize("read", [0, 2, 3, 4])
def test_a_window_is_read_whole_unless_the_source_ends(read: int) -> None:
    """Spec: R2.3. Checks: REPLAY."""
    assert (compare_window(read + 1, read, 3, 4, is_ended=False) == "") is (read == 3)
    assert (compare_window(read + 1, read, 3, 4, is_ended=True) == "") is (read <= 3)
    # A window that is full in bytes is smaller than asked for.
    assert (compare_window(read + 1, read, 3, 4, is_ended=False, is_full=True) == "") is (read <= 3)


def test_the_fields_of_a_start_are_those_that_are_written() -> None:
    """Spec: R9.4."""
    names = {item.name for item in fields(RoundStart)}
    event: dict[str, Any] = {"kind": "resumed", "start": dict.fromkeys(names, 0), "samples": []}
    assert check_fields(event) == "resumed"
    for name in names:
        with pytest.raises(TraceError, match="'start' has the unknown field"):
            check_fields({**event, "start": {**event["start"], f"{name}_": 0}})


@pytest.mark.parametrize("failed_rank", [NONE, 0, 1, 2])
def test_an_offer_that_fails_names_its_own_rank(failed_rank: int) -> None:
    """Spec: R3.1. Checks: ABORT."""
    offer = replace(STOP, failed_rank=failed_rank, stop_step=NONE, stop_rank=NONE, due_max=0)
    for has_failed, right in ((True, 1), (False, NONE)):
        seen = Seen(
            rank=1, rows=[[0, 0, 8, 0]], due_before=0, is_ended=False, is_collated=True, wanted_samples=0,
            has_failed=has_failed, stopped_after=None, accepted_tokens=NONE,
        )  # fmt: skip
        wrong = {rule for rule, how in judge_offer(offer, seen, make_settings(())) if how}
        assert wrong == (set() if failed_rank == right else {Property.ABORT})


def test_reports_are_those_of_the_ranks_in_their_order_whoever_posts_first() -> None:
    """Spec: R5.5. Checks: ABORT."""
    reports = [TracedReport(rank, "disk" if rank == 2 else "", 1, "{}") for rank in range(3)]
    for said, is_right in ((reports, True), (reports[::-1], False), (reports[:2], False)):
        exchanges = Exchanges(3, Findings())
        for rank in (2, 0, 1):
            exchanges.post_report(rank, reports[rank])
        assert exchanges.answer_reports(1, said) is is_right


@pytest.mark.parametrize("place", range(3))
def test_each_number_of_the_counts_is_summed(place: int) -> None:
    """Spec: R4.5. Checks: WEIGHT."""
    exchanges = Exchanges(2, Findings())
    for rank in range(2):
        exchanges.post_counts(rank, 0, [[5, 2**40, 7]], rank + 3)
    right = [10, 2**41, 14]
    wrong = [value + (i == place) for i, value in enumerate(right)]
    assert not exchanges.answer_counts(0, 0, [wrong], [3, 4])
    assert not exchanges.answer_counts(0, 0, [right], [4, 3])
    assert exchanges.answer_counts(0, 0, [right], [3, 4])


def test_ranks_that_count_different_resources_are_refused() -> None:
    """Spec: R4.5. Checks: ALIGN. Their headers may be false."""
    findings = Findings()
    exchanges = Exchanges(2, findings)
    for rank in range(2):
        exchanges.post_counts(rank, 0, [[5, 9, 7, *(1,) * rank]], None)
    (found,) = findings.get_violations(frozenset())
    assert found.property is Property.ALIGN and "other resources" in found.what


def test_an_answer_before_the_last_rank_has_posted_is_refused() -> None:
    """Checks: RELEASE."""
    findings = Findings()
    exchanges = Exchanges(3, findings)
    for rank in range(2):
        exchanges.post_offer(rank, 0, STOP)
    exchanges.answer_offer(0, 0, {"agreement": {name: getattr(STOP, name) for name in STOP.__slots__}})
    (found,) = findings.get_violations(frozenset())
    assert found.property is Property.RELEASE and "before rank 2 has posted" in found.what


@pytest.mark.parametrize(
    ("round_", "draw", "is_right"),
    [
        (0, NOTHING_DRAWN, True),
        (1, NOTHING_DRAWN, False),
        (0, Draw(2, 0, 0), False),
        (1, Draw(4, 2, 8), True),
        (1, Draw(4, 5, 8), False),
        (1, Draw(4, 2, 11), False),
    ],
)
def test_an_epoch_of_shared_shards_begins_with_no_draw_in_its_first_round_alone(
    round_: int, draw: Draw, *, is_right: bool
) -> None:
    """Spec: R14.6. Checks: DEAL."""
    draws = RankDraws(1, replace(make_settings(()), shared_samples=10), DrawnPlaces())
    assert [not what for _, what in draws.resume(draw.first, draw.count, draw.end, round_)] == [is_right]
    if is_right:
        first, count = (4, 4) if draw == NOTHING_DRAWN else (draw.first, draw.count)
        assert [what for _, what in draws.note_read(count, first)] == ["", ""]
