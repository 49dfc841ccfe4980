"""Lies that a checker would believe if it trusted the header and the offers. Each is refused without ``--replay``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from odb_ref.core.offer import NONE
from odb_ref.trace.check.decode import compute_fingerprint
from tests.helpers.tamper import Tampered
from tests.helpers.world import Fault
from tests.trace.lies import FAIL, LIMITS, QUOTA, Change, Lie, Lies, configure

lie = Lies()


def say(**changes: object) -> Change:
    """Changes only the header."""
    return lambda trace: trace.header["config"].update(changes)


def offer_otherwise(*, rank: int = 0, **fields: int) -> Change:
    """Changes a rank's offer, and the agreement of all ranks with it."""

    def change(trace: Tampered) -> None:
        trace.effects("post_offer", rank)[2]["offer"] |= fields
        trace.reduce_again()

    return change


def report_otherwise(rank: int, **fields: object) -> Change:
    """Changes a rank's report, and what all ranks are told of it."""

    def change(trace: Tampered) -> None:
        trace.effects("post_report", rank)[0]["report"] |= fields
        for event in trace.events("reported"):
            event["reports"][rank] |= fields

    return change


# The header.


lie("ABORT FEWEST", name="say_another_budget")(say(budget_tokens=41))
lie("ABORT REPLAY", name="say_another_rule")(say(rule="paper"))
lie("ABORT", name="say_another_seed")(say(tag="seed 2"))
lie("ABORT", name="say_a_longer_quota", **QUOTA)(say(quota_samples=51))
lie("ABORT", name="add_a_setting")(say(shuffled=True))
lie("REPLAY", name="claim_a_larger_window")(configure(window_samples=12))


lie("REPLAY", name="claim_a_smaller_window")(configure(window_samples=5))
lie("REPLAY", name="claim_no_ramp")(configure(ramp_rounds=0))


lie("FEWEST REPLAY", name="claim_a_larger_budget")(configure(budget_tokens=60))
lie("AGE REPLAY", name="claim_a_lower_age")(configure(max_age_rounds=1))


@lie("FREE")
def claim_another_rank(trace: Tampered) -> None:
    trace.header["world_size"] = 4
    trace.configure(world_size=4)


# The offers.


@lie("ABORT")
def offer_another_fingerprint(trace: Tampered) -> None:
    for rank in trace.ranks:
        for effect in trace.effects("post_offer", rank):
            effect["offer"] |= {"fingerprint_min": 5, "fingerprint_max": 5}
    trace.reduce_again()


lie("RELEASE", name="go_on_with_another_fingerprint_on_one_rank")(
    offer_otherwise(rank=1, fingerprint_min=5, fingerprint_max=5)
)
lie("EXCHANGE RELEASE", name="offer_two_fingerprints")(offer_otherwise(fingerprint_min=5))


@lie("AGE", max_age_rounds=1, window_samples=4, budget_tokens=23)
def hide_a_due_group(trace: Tampered) -> None:
    offer = next(it["offer"] for it in trace.effects("post_offer") if it["offer"]["due_max"])
    offer["due_max"] -= 1
    trace.reduce_again()


lie("AGE", name="make_up_a_due_group")(offer_otherwise(due_max=1))
lie("FEWEST REPLAY", name="offer_fewer_groups_as_the_fewest")(offer_otherwise(groups_min=1))


lie("FEWEST REPLAY", name="say_that_the_source_has_ended")(offer_otherwise(groups_min=NONE))


@lie("RELEASE EXCHANGE")
def do_not_say_ready(trace: Tampered) -> None:
    trace.effects("post_offer", 0)[2]["offer"]["ready_min"] = 0


lie("STOP", name="say_a_step_where_nobody_stopped")(offer_otherwise(stop_step=7))


@lie("ABORT EXCHANGE")
def fail_without_a_failure(trace: Tampered) -> None:
    trace.effects("post_offer", 0)[2]["offer"]["failed_rank"] = 0


@lie("QUOTA", **QUOTA)
def offer_samples_beyond_the_quota(trace: Tampered) -> None:
    trace.effects("post_offer", 0)[-1]["offer"]["samples_min"] = 3


# Input and reports.


@lie("EXCHANGE RELEASE REPLAY")
def ask_for_more_than_the_window(trace: Tampered) -> None:
    next(it for it in trace.effects("read", 1) if it["count"] > 1)["count"] += 1


@lie("BUDGET ORDER REPLAY WEIGHT")
def lengthen_a_sample(trace: Tampered) -> None:
    trace.events("samples_read", 0)[1]["samples"][0][2] += 9


@lie("WEIGHT")
def supervise_less(trace: Tampered) -> None:
    row = next(row for event in trace.events("samples_read", 0) for row in event["samples"] if row[3])
    row[3] -= 1


@lie("FEWEST REPLAY WEIGHT", **LIMITS)
def use_less_of_a_resource(trace: Tampered) -> None:
    for event in trace.events("samples_read", 0):
        for row in event["samples"]:
            row[5] = 0


@lie("EXCHANGE")
def begin_again(trace: Tampered) -> None:
    trace.records.insert(1, trace.records[0])


@lie("RELEASE")
def collate_twice(trace: Tampered) -> None:
    record = trace.answers("collated", 1)[1]
    trace.records.insert(trace.records.index(record) + 1, record | {"effects": []})


lie("ABORT", FAIL, name="report_another_round")(report_otherwise(2, round=1))
lie("ABORT", FAIL, name="report_no_cause")(report_otherwise(1, cause=""))


@lie("ABORT", FAIL)
def report_another_configuration(trace: Tampered) -> None:
    config = json.dumps(trace.header["config"] | {"tag": "x"}, sort_keys=True)
    assert compute_fingerprint(config) != trace.effects("post_offer", 0)[0]["offer"]["fingerprint_min"]
    report_otherwise(2, config=config)(trace)


@lie("ABORT", Fault("fail", 1, 118), Fault("fail", 2, 119))
def blame_the_second_to_fail(trace: Tampered) -> None:
    assert all(it["report"]["cause"] for rank in (1, 2) for it in trace.effects("post_report", rank))
    for effect in trace.effects("finish"):
        effect["outcome"]["rank"] = 2


@pytest.mark.parametrize("told", lie, ids=str)
def test_a_lie_of_the_header_or_of_an_offer_is_refused(told: Lie, tmp_path: Path) -> None:
    """Spec: R1.4, R2.3, R3.1, R4.3, R7.2."""
    told.check(tmp_path / "t")
