"""The checker part by part: what it reads from a line, what it reports about a trace, and which files belong together."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from odb_ref.core.errors import UsageError
from odb_ref.core.offer import Offer
from odb_ref.trace.check import Property, Status, check_traces
from odb_ref.trace.check.decode import (
    Settings,
    TracedFinish,
    TracedStep,
    compute_fingerprint,
    decode_finish,
    decode_settings,
    get_counts,
    get_integer,
    get_kind,
    get_object,
    get_offer,
    get_samples,
    iterate_steps,
)
from odb_ref.trace.check.rounds import Rounds
from odb_ref.trace.check.verdict import KEPT_VIOLATIONS, Findings, PropertyVerdict, Violation
from odb_ref.trace.format import Header, TraceError
from tests.helpers.errors import refused
from tests.helpers.tamper import Tampered, tamper
from tests.helpers.world import make_configs
from tests.trace.lies import get_verdict
from tests.trace.said import TRUTHS, check_said, tell_truth, write

OFFER = dict.fromkeys(Offer.__slots__, 3)


@pytest.mark.parametrize("name", TRUTHS)
def test_a_true_trace_is_told_how_often_each_property_was_checked(name: str, tmp_path: Path) -> None:
    """Spec: R9."""
    check_said(name, tell_truth(name, tmp_path / "t"))


# Lines ---------------------------------------------------------------------------------------------------------------


def test_right_values_are_read() -> None:
    """Spec: R9.2, R9.3."""
    assert get_integer({"a": 0}, "a") == 0
    assert get_object({"a": {"b": 1}}, "a") == {"b": 1}
    assert get_kind({"kind": "read"}) == "read"
    assert get_counts({"counts": [[1, 2, 3], [4, 5, 6]]}) == [[1, 2, 3], [4, 5, 6]]
    assert get_counts({"counts": [[1, 2, 3, 0, 9]]}, 5) == [[1, 2, 3, 0, 9]]
    assert get_counts({"counts": []}) == []
    assert get_samples({"samples": [[1, 2, 4, 3], [1, 2, 4, 3, 5]]}) == [[1, 2, 4, 3], [1, 2, 4, 3, 5]]
    assert get_samples({"samples": []}) == []
    assert get_offer({"offer": OFFER}, "offer") == Offer(**OFFER)
    step = {"number": 4, "positions": [7, 8], "counts": [2, 9, 1]}
    assert list(iterate_steps({"steps": [step, step | {"positions": []}]})) == [
        TracedStep(4, [7, 8], [2, 9, 1]),
        TracedStep(4, [], [2, 9, 1]),
    ]


def get_steps(data: dict[str, Any]) -> list[TracedStep]:
    return list(iterate_steps(data))


def make_step(**changes: object) -> dict[str, Any]:
    return {"steps": [{"positions": [], "counts": [1, 2, 3]} | changes]}


SAMPLES = "expected samples, lists of four integers or more"
AN_OFFER = f"expected an offer in 'a', with {', '.join(OFFER)}"


@pytest.mark.parametrize(
    ("read", "data", "message"),
    [
        (partial(get_integer, key="a"), {}, "expected an integer in 'a', got None"),
        (partial(get_integer, key="a"), {"a": True}, "expected an integer in 'a', got True"),
        (partial(get_integer, key="a"), {"a": 1.0}, "expected an integer in 'a', got 1.0"),
        (partial(get_object, key="a"), {"a": []}, "expected an object in 'a', got []"),
        (get_kind, {"kind": 5}, "expected a kind, got 5"),
        (get_kind, [], "expected a kind, got None"),
        (get_counts, {}, "expected counts, lists of 3 integers"),
        (get_counts, {"counts": [[1, 2]]}, "expected counts, lists of 3 integers"),
        (get_counts, {"counts": [[1, 2, 3, 4]]}, "expected counts, lists of 3 integers"),
        (partial(get_counts, width=4), {"counts": [[1, 2, 3]]}, "expected counts, lists of 4 integers"),
        (get_counts, {"counts": [[1, 2, 3], 4]}, "expected counts, lists of 3 integers"),
        (get_counts, {"counts": [[1, 2, True]]}, "expected counts, lists of 3 integers"),
        (get_samples, {}, SAMPLES),
        (get_samples, {"samples": [[1, 2, 3]]}, SAMPLES),
        (get_samples, {"samples": [[1, 2, 3, 4, 5], [1, 2, 3]]}, SAMPLES),
        (get_samples, {"samples": [[1, 2, 3, "4"]]}, SAMPLES),
        (partial(get_offer, key="a"), {"a": 5}, AN_OFFER),
        (partial(get_offer, key="a"), {"a": OFFER | {"due_max": None}}, AN_OFFER),
        (get_steps, {}, "expected steps, a list"),
        (get_steps, {"steps": [5]}, "expected a step, got 5"),
        (get_steps, {"steps": [{}]}, "expected positions and 3 counts in step {}"),
        (get_steps, make_step(counts=[1]), "expected positions and 3 counts in step {'counts': [1], 'positions': []}"),
        (
            get_steps,
            make_step(counts=[1, 2, "3"]),
            "expected positions and 3 counts in step {'counts': [1, 2, '3'], 'positions': []}",
        ),
        (
            get_steps,
            make_step(positions=[None]),
            "expected positions and 3 counts in step {'counts': [1, 2, 3], 'positions': [None]}",
        ),
        (get_steps, make_step(), "expected an integer in 'number', got None"),
    ],
)
def test_a_malformed_value_is_told_from_what_was_expected(read: Callable[..., object], data: Any, message: str) -> None:
    """Spec: R9.2, R9.3."""
    with refused(TraceError, message):
        read(data)


def make_finish(**outcome: object) -> TracedFinish:
    return decode_finish({"outcome": outcome, "step_limit": 9})


def test_an_ending_says_kind_rank_and_cause() -> None:
    """Spec: R9.3."""
    assert make_finish(kind="failed", rank=1, cause="disk") == TracedFinish("failed", 1, "disk", 9)
    assert make_finish(kind="failed", rank=1, cause="disk").outcome == "failed by rank 1: disk"
    assert make_finish(kind="complete", rank=None, cause="").outcome == "complete"
    assert make_finish(kind="stopped", rank=0, cause="").outcome == "stopped by rank 0"
    assert make_finish(kind="lost", rank=None, cause="gone").outcome == "lost: gone"
    with refused(TraceError, "expected an outcome, got {'cause': 'disk', 'kind': 'failed', 'rank': '1'}"):
        make_finish(kind="failed", rank="1", cause="disk")


CONFIG: dict[str, Any] = {
    "world_size": 2, "mode": "quota", "budget_tokens": 9, "max_age_rounds": 4, "quota_samples": 7, "limits": [3],
    "window_samples": 12, "ramp_rounds": 2, "rule": "odb", "tag": "",
}  # fmt: skip


def decode(**changes: object) -> Settings:
    return decode_settings(Header(2, CONFIG | changes, "test", 0))


def test_the_settings_of_a_header_are_read() -> None:
    """Spec: R9."""
    assert decode(tag="x") == Settings(
        budget_tokens=9,
        is_packed=False,
        order="fullest",
        order_seed=0,
        cost="tokens",
        attention_tokens=0,
        limits=(3,),
        world_size=2,
        shared_samples=None,
        window_samples=12,
        ramp_rounds=2,
        is_quota=True,
        quota_samples=7,
        max_age_rounds=4,
        rule="odb",
        fingerprint=compute_fingerprint(json.dumps(CONFIG | {"tag": "x"}, sort_keys=True)),
    )
    assert decode(layout="packed").is_packed
    assert decode(cost="attention/70").attention_tokens == 70
    for own in ("attention/0", "attention", "attention/x", "square/7", "attention/" + "9" * 5000):
        assert decode(cost=own).attention_tokens is None
    with pytest.raises(TraceError, match="has the cost 5"):
        decode(cost=5)
    bare = decode(mode="join", quota_samples=None, limits=[])
    assert (bare.limits, bare.is_quota, bare.quota_samples) == ((), False, None)
    assert [decode().compute_window_samples(round_) for round_ in range(4)] == [3, 6, 12, 12]
    assert decode(ramp_rounds=10**12).compute_window_samples(0) == 1


def test_the_fingerprint_is_that_of_the_core() -> None:
    """Spec: R1.4. There are two implementations of one rule."""
    config = make_configs(3, limits=(9, 7), tag="\u00e9")[0]
    assert compute_fingerprint(config.shared_json) == config.fingerprint
    assert decode_settings(Header(3, json.loads(config.shared_json), "test", 0)).fingerprint == config.fingerprint


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mode": "other"}, "the header's config has the mode 'other'"),
        ({"layout": "stacked"}, "the header's config has the layout 'stacked'"),
        ({"limits": 5}, "the header's config has the limits 5"),
        ({"limits": [0]}, "the header's config has the limits [0]"),
        ({"limits": ["5"]}, "the header's config has the limits ['5']"),
        ({"tag": [[[]]]}, "the header's config has the tag [[[]]]"),
        ({"world_size": 3}, "the header's config is of 3 ranks, the header of 2"),
        ({"budget_tokens": None}, "expected an integer in 'budget_tokens', got None"),
        ({"budget_tokens": 0}, "the header's config has the budget_tokens 0"),
        ({"window_samples": -1}, "the header's config has the window_samples -1"),
        ({"ramp_rounds": -1}, "the header's config has the ramp_rounds -1"),
        ({"quota_samples": "7"}, "expected an integer in 'quota_samples', got '7'"),
        ({"quota_samples": 0}, "the header's config has the quota_samples 0"),
        ({"max_age_rounds": None}, "expected an integer in 'max_age_rounds', got None"),
    ],
)
def test_a_header_without_a_setting_is_refused(changes: dict[str, Any], message: str) -> None:
    """Spec: R9."""
    with refused(TraceError, message):
        decode(**changes)


# Verdicts --------------------------------------------------------------------------------------------------------------


def test_a_violation_says_where_it_is_as_far_as_that_is_known() -> None:
    assert str(Violation(Property.ONCE, "again", 1, 2, 3)) == "ONCE rank 1 round 2 step 3: again"
    assert str(Violation(Property.ONCE, "again")) == "ONCE rank - round - step -: again"
    assert str(Violation(Property.ONCE, "again", step=0)) == "ONCE rank - round - step 0: again"


def test_findings_keep_the_first_violations_and_count_all() -> None:
    findings = Findings()
    findings.checked[Property.ALIGN] += 2
    for step in range(KEPT_VIOLATIONS + 2):
        findings.violate(Property.ONCE, "again", rank=1, round_=2, step=step)
    findings.violate(Property.AGE, "late")
    kept = tuple(Violation(Property.ONCE, "again", 1, 2, step) for step in range(KEPT_VIOLATIONS))
    late = Violation(Property.AGE, "late")
    assert findings.get_violations(frozenset()) == (*kept, late)
    assert findings.get_violations(frozenset({Property.ONCE})) == (late,)
    verdicts = {item.property: item for item in findings.judge({Property.ALIGN: "why", Property.AGE: "why"})}
    assert list(verdicts) == list(Property)
    assert verdicts[Property.ONCE] == PropertyVerdict(Property.ONCE, Status.VIOLATED, KEPT_VIOLATIONS + 2)
    assert verdicts[Property.AGE] == PropertyVerdict(Property.AGE, Status.VIOLATED, 1), "whatever the reason"
    assert verdicts[Property.ALIGN] == PropertyVerdict(Property.ALIGN, Status.NOT_APPLICABLE, 0, "why")
    nothing = "nothing to check in this trace"
    assert verdicts[Property.TERM] == PropertyVerdict(Property.TERM, Status.NOT_APPLICABLE, 0, nothing)
    assert Findings().judge({})[0].status is Status.NOT_APPLICABLE
    findings = Findings()
    findings.checked[Property.EXCHANGE] += 1
    assert findings.judge({})[0] == PropertyVerdict(Property.EXCHANGE, Status.HOLDS, 1)


ROWS = [[5, 50, 9], [3, 30, 9]]


@pytest.mark.parametrize(
    ("quota", "steps", "said"),
    [
        (None, 2, []),
        (4, 1, []),
        (5, 1, []),
        (5, 2, ["QUOTA rank 1 round 4 step 8: is planned when 5 samples are, and the quota is 5"]),
        (6, 1, ["QUOTA rank 1 round 4 step -: round is cut to 1 of 2 steps, but only 5 samples are planned"]),
        (6, 2, []),
        (None, 1, ["QUOTA rank 1 round 4 step -: round is cut to 1 of 2 steps, but only 5 samples are planned"]),
    ],
)
def test_a_round_is_cut_after_the_step_that_reaches_the_quota(quota: int | None, steps: int, said: list[str]) -> None:
    """Spec: R4.6. Checks: QUOTA. The epoch is resumed at round 4, after 7 steps."""
    findings, rounds = Findings(), Rounds(quota)
    assert rounds.begin(4, 7, 0)
    assert rounds.note_round(1, 4, ROWS, steps, findings) == steps
    assert [str(item) for item in findings.get_violations(frozenset())] == said
    assert (rounds.first_round, rounds.steps_before, rounds.total_steps) == (4, 7, 7 + steps)
    assert rounds.total_samples == (5 if steps == 1 else 8)
    assert findings.checked[Property.QUOTA] == (0 if quota is None else steps) + len(said)


def test_a_round_is_followed_once_and_the_others_are_told_of_it() -> None:
    findings, rounds = Findings(), Rounds(9)
    assert (rounds.first_round, rounds.steps_before, rounds.total_samples) == (0, 0, 0)
    assert not rounds.is_quota_met(0)
    assert rounds.begin(0, 0, 0)
    for number, steps in enumerate((2, 1)):
        assert rounds.note_round(0, number, ROWS[:steps], steps, findings) == steps
    assert [rounds.note_round(1, number, ROWS, 9, findings) for number in (-1, 0, 1)] == [9, 2, 1]
    assert rounds.note_round(1, 3, ROWS, 9, findings) == 9, "a round that nobody has come to"
    assert (rounds.steps, rounds.samples_before) == ([2, 1], [0, 8, 13])
    assert [rounds.is_quota_met(number) for number in (-1, 0, 1, 2, 3)] == [False, False, False, True, False]
    assert not Rounds(None).is_quota_met(0)


def test_ranks_begin_alike_or_in_different_rounds() -> None:
    """Spec: R9.4. Different rounds are a mismatch of the job (R7.3), not an error in the trace."""
    rounds = Rounds(None)
    assert rounds.begin(2, 5, 8)
    assert rounds.begin(2, 5, 8)
    assert not rounds.begin(2, 6, 8)
    assert not rounds.begin(2, 5, 9)
    assert rounds.begin(3, 9, 9)
    assert (rounds.total_steps, rounds.samples_before) == (5, [8])


# Files -----------------------------------------------------------------------------------------------------------------


def test_no_file_is_no_job() -> None:
    with refused(UsageError, "no trace to check"):
        check_traces([])


def test_what_is_wrong_in_a_file_is_said_with_its_line(tmp_path: Path) -> None:
    (path,) = write(tmp_path / "t")

    def refuse(what: Callable[[Tampered], None]) -> str:
        with pytest.raises(TraceError) as caught:
            check_traces([tamper(path, what, tmp_path / "changed")])
        return str(caught.value).removeprefix(str(tmp_path / "changed"))

    assert refuse(lambda it: it.records[0].update(rank=3)) == ":2: rank 3 in a world of 3"
    assert refuse(lambda it: it.records[4].update(rank=-1)) == ":6: rank -1 in a world of 3"
    assert refuse(lambda it: it.header["config"].update(mode="x")) == ":1: the header's config has the mode 'x'"
    assert refuse(lambda it: it.records[0]["effects"].append({})) == ":2: expected a kind, got None"


def test_files_of_one_job_agree_in_driver_epoch_and_world_size(tmp_path: Path) -> None:
    paths = write(tmp_path / "t", is_one_file=False)
    assert len(check_traces(paths).jobs) == 1
    for key, value in (("driver", "other"), ("epoch", 1), ("world_size", 4)):
        trace = Tampered(paths[2])
        trace.header[key] = value
        if key == "world_size":
            trace.header["config"][key] = value
        jobs = check_traces([*paths[:2], trace.write(tmp_path / "other")]).jobs
        assert [len(job.paths) for job in jobs] == [2, 1], key
    again = shutil.copy(paths[0], tmp_path / "again")
    assert [len(job.paths) for job in check_traces([*paths, again]).jobs] == [3, 1], "a rank that comes again"


def test_a_replay_says_where_the_machine_differs(tmp_path: Path) -> None:
    (path,) = write(tmp_path / "t")

    def replay(what: Callable[[Tampered], None]) -> str:
        (job,) = check_traces([tamper(path, what, tmp_path / "changed")], is_replayed=True).jobs
        return next(str(item) for item in job.violations if "the machine" in item.what)

    start = "REPLAY rank 0 round 0 step 0: effect 0 of missing is"
    assert (
        replay(lambda it: it.records[0]["effects"][0].update(count=9))
        == f"{start} read(count=9), the machine's read(count=3)"
    )
    assert replay(lambda it: it.records[0]["effects"].clear()) == f"{start} missing, the machine's read(count=3)"
    extra = {"kind": "read", "count": 1}
    assert replay(lambda it: it.records[0]["effects"].append(extra)) == (
        "REPLAY rank 0 round 0 step 0: effect 1 of missing is read(count=1), the machine's missing"
    )
    assert "the machine refuses the event collated(round=5): Collated(5) in round 1" in replay(
        lambda it: it.events("collated", 1)[0].update(round=5)
    )
    said = replay(lambda it: it.effects("post_offer", 2)[1]["offer"].update(due_max=7))
    shown = said.split(" is post_offer(", 1)[1].split("), the machine's ", 1)[0]
    assert len(shown) == 100
    assert shown.startswith("offer={'round_min': 1, 'round_max': 1, ")
    assert shown.endswith("...")


def test_a_replay_notes_the_first_difference_of_each_rank(tmp_path: Path) -> None:
    (path,) = write(tmp_path / "t")
    trace = Tampered(path)
    for rank in (2, 0):
        for offer in trace.effects("post_offer", rank)[2:]:
            offer["offer"]["due_max"] += 1
    (job,) = check_traces([trace.write(path)], is_replayed=True).jobs
    found = [item for item in job.violations if "the machine" in item.what]
    assert sorted(item.rank for item in found if item.rank is not None) == [0, 2]
    assert {item.round for item in found} == {2}
    assert all(" of step_taken(" in item.what or "_read(" in item.what or "collated(" in item.what for item in found)


def test_what_cannot_be_replayed_says_why(tmp_path: Path) -> None:
    (path,) = write(tmp_path / "t")

    def refuse(**changes: object) -> str:
        changed = tamper(path, lambda trace: trace.header["config"].update(changes), tmp_path / "changed")
        (job,) = check_traces([changed], is_replayed=True).jobs
        verdict = get_verdict(job, Property.REPLAY)
        assert verdict.status is Status.NOT_APPLICABLE
        return verdict.reason

    assert refuse(rule="mine") == (
        "the machine cannot be set up as the header says: unknown target rule 'mine'; choose from odb, paper"
    )
    assert refuse(more=1) == "the header's configuration does not belong to this version"
    assert json.loads(path.read_text().splitlines()[0])["config"]["rule"] == "odb"
