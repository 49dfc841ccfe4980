"""Lies that a checker believes which takes the header and the offers at their word: each is refused without ``--replay``."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from odb_ref.core.offer import NONE
from odb_ref.core.types import Mode
from odb_ref.trace.check import check_traces
from odb_ref.trace.check.decode import compute_fingerprint
from tests.helpers.tamper import Tampered
from tests.helpers.world import Fault, make_configs, run_by_arrival

SHARDS = [[(i * i + 5 * rank) % 23 + 1 for i in range(40 - 9 * rank)] for rank in range(3)]
JOIN: dict[str, Any] = {"max_age_rounds": 3}
OLD: dict[str, Any] = {"max_age_rounds": 1, "window_samples": 4, "budget_tokens": 23}
LIMITS: dict[str, Any] = {"limits": (20, 5)}
QUOTA: dict[str, Any] = {"mode": Mode.QUOTA, "quota_samples": 50}
FAIL = (Fault("fail", 1, 120),)
FAIL_TWICE = (Fault("fail", 1, 118), Fault("fail", 2, 119))
STOP = (Fault("stop", 2, 120),)


def run(path: Path, settings: dict[str, Any], faults: tuple[Fault, ...] = ()) -> Tampered:
    run_by_arrival(SHARDS, make_configs(len(SHARDS), **settings), seed=3, faults=faults, trace=path)
    return Tampered(path)


def offer_otherwise(trace: Tampered, change: dict[str, int], *, rank: int = 0, number: int = 2) -> None:
    """A rank's offer is another, and all ranks are told so."""
    trace.effects("post_offer", rank)[number]["offer"] |= change
    trace.reduce_again()


# The header.


def say_another_budget(trace: Tampered) -> None:
    trace.header["config"]["budget_tokens"] += 1


def say_another_rule(trace: Tampered) -> None:
    trace.header["config"]["rule"] = "paper"


def say_another_seed(trace: Tampered) -> None:
    trace.header["config"]["tag"] = "seed 2"


def say_a_longer_quota(trace: Tampered) -> None:
    trace.header["config"]["quota_samples"] += 1


def add_a_setting(trace: Tampered) -> None:
    trace.header["config"]["shuffled"] = True


def claim_a_larger_window(trace: Tampered) -> None:
    trace.configure(window_samples=12)


def claim_a_smaller_window(trace: Tampered) -> None:
    trace.configure(window_samples=5)


def claim_no_ramp(trace: Tampered) -> None:
    trace.configure(ramp_rounds=0)


def claim_a_larger_budget(trace: Tampered) -> None:
    trace.configure(budget_tokens=60)


def claim_a_lower_age(trace: Tampered) -> None:
    trace.configure(max_age_rounds=1)


def claim_another_rank(trace: Tampered) -> None:
    trace.header["world_size"] = 4
    trace.configure(world_size=4)


# The offers.


def offer_another_fingerprint(trace: Tampered) -> None:
    for rank in trace.ranks:
        for effect in trace.effects("post_offer", rank):
            effect["offer"] |= {"fingerprint_min": 5, "fingerprint_max": 5}
    trace.reduce_again()


def go_on_with_another_fingerprint_on_one_rank(trace: Tampered) -> None:
    offer_otherwise(trace, {"fingerprint_min": 5, "fingerprint_max": 5}, rank=1)


def offer_two_fingerprints(trace: Tampered) -> None:
    offer_otherwise(trace, {"fingerprint_min": 5})


def hide_a_due_group(trace: Tampered) -> None:
    offer = next(it["offer"] for it in trace.effects("post_offer") if it["offer"]["due_max"])
    offer["due_max"] -= 1
    trace.reduce_again()


def make_up_a_due_group(trace: Tampered) -> None:
    offer_otherwise(trace, {"due_max": 1})


def offer_fewer_groups_as_the_fewest(trace: Tampered) -> None:
    offer_otherwise(trace, {"groups_min": 1})


def say_that_the_source_has_ended(trace: Tampered) -> None:
    offer_otherwise(trace, {"groups_min": NONE})


def do_not_say_ready(trace: Tampered) -> None:
    trace.effects("post_offer", 0)[2]["offer"]["ready_min"] = 0


def say_a_step_where_nobody_stopped(trace: Tampered) -> None:
    offer_otherwise(trace, {"stop_step": 7})


def fail_without_a_failure(trace: Tampered) -> None:
    trace.effects("post_offer", 0)[2]["offer"]["failed_rank"] = 0


def offer_samples_beyond_the_quota(trace: Tampered) -> None:
    trace.effects("post_offer", 0)[-1]["offer"]["samples_min"] = 3


# Input and reports.


def ask_for_more_than_the_window(trace: Tampered) -> None:
    next(it for it in trace.effects("read", 1) if it["count"] > 1)["count"] += 1


def lengthen_a_sample(trace: Tampered) -> None:
    trace.events("samples_read", 0)[1]["samples"][0][2] += 9


def supervise_less(trace: Tampered) -> None:
    row = next(row for event in trace.events("samples_read", 0) for row in event["samples"] if row[3])
    row[3] -= 1


def use_less_of_a_resource(trace: Tampered) -> None:
    for event in trace.events("samples_read", 0):
        for row in event["samples"]:
            row[5] = 0


def begin_again(trace: Tampered) -> None:
    trace.records.insert(1, trace.records[0])


def collate_twice(trace: Tampered) -> None:
    record = trace.answers("collated", 1)[1]
    trace.records.insert(trace.records.index(record) + 1, record | {"effects": []})


def report_another_round(trace: Tampered) -> None:
    report(trace, 2, round=1)


def report_no_cause(trace: Tampered) -> None:
    report(trace, 1, cause="")


def report_another_configuration(trace: Tampered) -> None:
    config = json.dumps(trace.header["config"] | {"tag": "x"}, sort_keys=True)
    assert compute_fingerprint(config) != trace.effects("post_offer", 0)[0]["offer"]["fingerprint_min"]
    report(trace, 2, config=config)


def report(trace: Tampered, rank: int, **change: object) -> None:
    """A rank's report is another, and all ranks are told so."""
    trace.effects("post_report", rank)[0]["report"] |= change
    for event in trace.events("reported"):
        event["reports"][rank] |= change


def blame_the_second_to_fail(trace: Tampered) -> None:
    assert all(it["report"]["cause"] for rank in (1, 2) for it in trace.effects("post_report", rank))
    for effect in trace.effects("finish"):
        effect["outcome"]["rank"] = 2


LIES: list[tuple[Callable[[Tampered], None], str, dict[str, Any], tuple[Fault, ...]]] = [
    (say_another_budget, "ABORT FEWEST", JOIN, ()),
    (say_another_rule, "ABORT REPLAY", JOIN, ()),
    (say_another_seed, "ABORT", JOIN, ()),
    (say_a_longer_quota, "ABORT", QUOTA, ()),
    (add_a_setting, "ABORT", JOIN, ()),
    (claim_a_larger_window, "REPLAY", JOIN, ()),
    (claim_a_smaller_window, "REPLAY", JOIN, ()),
    (claim_no_ramp, "REPLAY", JOIN, ()),
    (claim_a_larger_budget, "FEWEST REPLAY", JOIN, ()),
    (claim_a_lower_age, "AGE REPLAY", JOIN, ()),
    (claim_another_rank, "FREE", JOIN, ()),
    (offer_another_fingerprint, "ABORT", JOIN, ()),
    (go_on_with_another_fingerprint_on_one_rank, "RELEASE", JOIN, ()),
    (offer_two_fingerprints, "EXCHANGE RELEASE", JOIN, ()),
    (hide_a_due_group, "AGE", OLD, ()),
    (make_up_a_due_group, "AGE", JOIN, ()),
    (offer_fewer_groups_as_the_fewest, "FEWEST REPLAY", JOIN, ()),
    (say_that_the_source_has_ended, "FEWEST REPLAY", JOIN, ()),
    (do_not_say_ready, "RELEASE EXCHANGE", JOIN, ()),
    (say_a_step_where_nobody_stopped, "STOP", JOIN, ()),
    (fail_without_a_failure, "ABORT EXCHANGE", JOIN, ()),
    (offer_samples_beyond_the_quota, "QUOTA", QUOTA, ()),
    (ask_for_more_than_the_window, "EXCHANGE RELEASE REPLAY", JOIN, ()),
    (lengthen_a_sample, "BUDGET ORDER REPLAY WEIGHT", JOIN, ()),
    (supervise_less, "WEIGHT", JOIN, ()),
    (use_less_of_a_resource, "FEWEST REPLAY WEIGHT", LIMITS, ()),
    (begin_again, "EXCHANGE", JOIN, ()),
    (collate_twice, "RELEASE", JOIN, ()),
    (report_another_round, "ABORT", JOIN, FAIL),
    (report_no_cause, "ABORT", JOIN, FAIL),
    (report_another_configuration, "ABORT", JOIN, FAIL),
    (blame_the_second_to_fail, "ABORT", JOIN, FAIL_TWICE),
]


@pytest.mark.parametrize(("lie", "properties", "settings", "faults"), LIES, ids=[lie[0].__name__ for lie in LIES])
def test_a_lie_of_the_header_or_of_an_offer_is_refused(
    lie: Callable[[Tampered], None],
    properties: str,
    settings: dict[str, Any],
    faults: tuple[Fault, ...],
    tmp_path: Path,
) -> None:
    """Spec: R1.4, R2.3, R3.1, R4.3, R7.2."""
    trace = run(tmp_path / "t", settings, faults)
    assert check_traces([tmp_path / "t"], is_replayed=True).violations == ()
    lie(trace)
    found = check_traces([trace.write(tmp_path / "tampered")]).violations
    assert {str(item.property) for item in found} == set(properties.split()), [str(item) for item in found]
