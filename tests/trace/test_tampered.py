"""The checker must be able to fail: it refuses each tampered trace, naming the property that is broken and no other."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

import odb_ref.core.machine as machine_module
import odb_ref.core.rounds as rounds_module
from odb_ref.core.batching.cost import get_cost
from odb_ref.core.batching.layouts import Layout
from odb_ref.core.batching.order import StepOrder
from odb_ref.core.batching.sizes import Sizes
from odb_ref.core.offer import Offer
from odb_ref.trace.check import Property, check_traces
from tests.helpers.tamper import Tampered
from tests.helpers.world import make_configs, run_by_arrival
from tests.trace.lies import FAIL, LIMITS, QUOTA, SHARDS, STOP, Change, Lie, Lies, configure, find_broken, run, tell
from tests.trace.said import check_said

SHARED: dict[str, Any] = {"shared_samples": sum(map(len, SHARDS)), "max_age_rounds": 3}

lie = Lies()


@lie("EXCHANGE")
def tell_one_rank_another_agreement(trace: Tampered) -> None:
    trace.events("agreed", 1)[2]["agreement"]["groups_max"] += 1


@lie("ABORT EXCHANGE", FAIL)
def tell_one_rank_another_report(trace: Tampered) -> None:
    trace.events("reported", 0)[0]["reports"][1]["cause"] = "something else"


@lie("EXCHANGE")
def offer_for_another_round(trace: Tampered) -> None:
    for rank in trace.ranks:
        trace.effects("post_offer", rank)[2]["offer"] |= {"round_min": 1, "round_max": 1}
    trace.reduce_again()


@lie("ALIGN REPLAY")
def form_fewer_steps_on_one_rank(trace: Tampered) -> None:
    trace.effects("post_counts", 1)[1]["counts"].pop()


@lie("ALIGN")
def drop_a_step_on_one_rank(trace: Tampered) -> None:
    collate = next(effect for effect in trace.effects("collate", 2) if not effect["steps"][-1]["positions"])
    collate["steps"].pop()


@lie("ALIGN")
def allow_fewer_steps_than_planned(trace: Tampered) -> None:
    for effect in trace.effects("finish"):
        effect["step_limit"] -= 1


@lie("CONSERVE COVER EXCHANGE FEWEST RELEASE REPLAY TERM")
def read_nothing(trace: Tampered) -> None:
    for event in trace.events("samples_read"):
        event["samples"] = []


@lie("ALIGN")
def renumber_a_step(trace: Tampered) -> None:
    trace.effects("collate", 0)[1]["steps"][0]["number"] += 100


@lie("ALIGN")
def deliver_out_of_order(trace: Tampered) -> None:
    in_records = [[effect for effect in record["effects"] if effect["kind"] == "deliver"] for record in trace.records]
    first, second = next(pair for pair in in_records if len(pair) == 2)
    first["number"], second["number"] = second["number"], first["number"]


@lie("CONSERVE")
def offer_more_samples_than_held(trace: Tampered) -> None:
    offer = trace.effects("post_offer", 0)[1]["offer"]
    offer["samples_min"] += 1
    offer["samples_max"] += 1
    trace.reduce_again()


@lie("CONSERVE")
def form_a_step_of_a_sample_never_read(trace: Tampered) -> None:
    trace.effects("collate", 0)[-1]["steps"][0]["positions"].append(1000)


@lie("CONSERVE")
def read_past_a_gap(trace: Tampered) -> None:
    for event in trace.events("samples_read", 0):
        for row in event["samples"]:
            row[1] += 1 if row[1] >= 38 else 0
    for effect in trace.effects("collate", 0):
        for step in effect["steps"]:
            step["positions"] = [position + (position >= 38) for position in step["positions"]]


@lie("CONSERVE REPLAY")
def read_more_than_asked_for(trace: Tampered) -> None:
    trace.effects("read", 1)[1]["count"] -= 1


@lie("COVER ONCE REPLAY")
def read_a_sample_again(trace: Tampered) -> None:
    first, *_, last = trace.events("samples_read", 2)
    trace.effects("read", 2)[-1]["count"] += 1
    last["samples"].append(first["samples"][0])


@lie("ONCE")
def emit_a_sample_again(trace: Tampered) -> None:
    collates = trace.effects("collate", 0)
    again = next(step["positions"][0] for step in collates[0]["steps"] if step["positions"])
    collates[2]["steps"][0]["positions"].append(again)


@lie("ONCE REPLAY")
def emit_a_sample_twice_in_a_round(trace: Tampered) -> None:
    steps = trace.effects("collate", 0)[1]["steps"]
    steps[-1]["positions"].append(steps[0]["positions"][0])


@lie("COVER FEWEST REPLAY")
def do_not_end_the_source(trace: Tampered) -> None:
    for event in trace.events("samples_read", 1):
        event["is_ended"] = False


lie("QUOTA", name="lower_the_quota", **QUOTA)(configure(quota_samples=20))
lie("QUOTA REPLAY", name="raise_the_quota", **QUOTA)(configure(quota_samples=10_000))


lie("ALIGN FREE QUOTA RELEASE REPLAY STOP", name="call_a_join_a_quota")(configure(mode="quota"))


@lie("FREE")
def lose_the_end_of_the_file(trace: Tampered) -> None:
    del trace.records[len(trace.records) // 2 :]


@lie("FREE")
def lose_a_finish(trace: Tampered) -> None:
    record, effect = next(trace.iterate("finish", 1))
    record["effects"].remove(effect)


@lie("FREE")
def finish_twice(trace: Tampered) -> None:
    record, effect = next(trace.iterate("finish", 1))
    record["effects"].append(effect)


@lie("ABORT", FAIL)
def end_one_rank_otherwise(trace: Tampered) -> None:
    trace.effects("finish", 2)[0]["outcome"]["cause"] = "something else"


@lie("ABORT", FAIL)
def end_all_ranks_otherwise(trace: Tampered) -> None:
    for effect in trace.effects("finish"):
        effect["outcome"]["rank"] = 0


@lie("ABORT RELEASE", FAIL)
def end_one_rank_a_round_early(trace: Tampered) -> None:
    own = [record for record in trace.records if record["rank"] == 2]
    last = next(i for i, record in enumerate(own) if any(item["kind"] == "post_report" for item in record["effects"]))
    late = [effect for record in own[last:] for effect in record["effects"]]
    for record in own[last:]:
        if record["event"] != {"kind": "step_taken"}:
            trace.drop(record)
    own[last - 1]["effects"] += [effect for effect in late if effect["kind"] != "deliver"]


@lie("ABORT", FAIL)
def complete_in_spite_of_a_failure(trace: Tampered) -> None:
    for effect in trace.effects("finish"):
        effect["outcome"] = {"kind": "complete", "rank": None, "cause": ""}
        effect["step_limit"] = max(0, effect["step_limit"])


@lie("ABORT FREE")
def keep_a_failure_to_oneself(trace: Tampered) -> None:
    record = next(record for record in trace.records if record["rank"] == 1 and len(record["effects"]) == 1)
    trace.records.insert(
        trace.records.index(record) + 1, {"rank": 1, "event": {"kind": "local_failed", "cause": "disk"}, "effects": []}
    )


@lie("ABORT")
def lose_a_peer_without_notice(trace: Tampered) -> None:
    trace.effects("finish", 0)[0]["outcome"] = {"kind": "lost", "rank": 1, "cause": "gone"}


@lie("EXCHANGE RELEASE")
def deliver_when_formed(trace: Tampered) -> None:
    """A loader might do this, handing out a batch as soon as it is collated."""
    record, effect = next(trace.iterate("deliver", 1))
    record["effects"].remove(effect)
    target, _ = next(trace.iterate("collate", 1))
    target["effects"].append(effect)


@lie("RELEASE")
def say_ready_before_collated(trace: Tampered) -> None:
    record = trace.answers("collated", 1)[1]
    place = trace.drop(record)
    later = next(item for item in trace.records[place:] if item["rank"] == 1)
    later["effects"] += record["effects"]  # its offer is sent nevertheless


@lie("RELEASE")
def collate_another_round(trace: Tampered) -> None:
    trace.effects("collate", 0)[1]["round"] += 1


@lie("FREE RELEASE")
def say_that_another_round_is_collated(trace: Tampered) -> None:
    trace.events("collated", 0)[1]["round"] += 1


@lie("RELEASE")
def agree_before_all_have_offered(trace: Tampered) -> None:
    for rank in trace.ranks:
        for number, record in enumerate(trace.answers("agreed", rank)):
            posts = [[record for record, _ in trace.iterate("post_offer", other)][number] for other in trace.ranks]
            last = max(map(trace.records.index, posts))
            between = trace.records[last : trace.records.index(record)]
            if all(item["rank"] != rank for item in between):
                trace.drop(record)
                trace.records.insert(last, record)
                return
    raise AssertionError("this trace does not fit the lie")


@lie("RELEASE")
def take_before_delivery(trace: Tampered) -> None:
    trace.drop(trace.answers("step_taken", 0)[-1])
    trace.records.insert(5, {"rank": 0, "event": {"kind": "step_taken"}, "effects": []})


@lie("STOP", STOP)
def blame_another_rank_for_the_stop(trace: Tampered) -> None:
    for effect in trace.effects("finish"):
        effect["outcome"]["rank"] = 0


@lie("RELEASE STOP", STOP)
def take_a_step_after_leaving(trace: Tampered) -> None:
    place = next(i for i, record in enumerate(trace.records) if record["event"] == {"kind": "consumer_stopped"})
    trace.records.insert(place + 1, {"rank": 2, "event": {"kind": "step_taken"}, "effects": []})


@lie("FREE STOP", STOP)
def leave_before_the_last_steps(trace: Tampered) -> None:
    stopped = trace.answers("consumer_stopped", 2)[0]
    delivering = [item for item in trace.answers("step_taken", 2) if item["effects"]][-1]
    trace.drop(stopped)
    place = trace.drop(delivering)
    trace.records[place:place] = [{**stopped, "effects": []}, delivering]
    later = next(item for item in trace.records[place + 2 :] if item["rank"] == 2)
    later["effects"] += stopped["effects"]


@lie("FREE STOP", STOP)
def allow_more_steps_than_the_leaver_took(trace: Tampered) -> None:
    for effect in trace.effects("finish"):
        effect["step_limit"] += 3


@lie("STOP", STOP)
def do_not_tell_of_the_stop(trace: Tampered) -> None:
    trace.effects("post_offer", 2)[-1]["offer"]["stop_step"] += 1
    trace.reduce_again()


@lie("BUDGET REPLAY")
def put_two_groups_into_one(trace: Tampered) -> None:
    for collate in trace.effects("collate", 0):
        steps = [step for step in collate["steps"] if step["positions"] and step["counts"][0] > len(step["positions"])]
        if len(steps) > 1:
            steps[0]["positions"] += steps[1]["positions"]
            steps[1]["positions"] = []
            break
    trace.count_again()


lie("BUDGET FEWEST REPLAY", name="lower_a_limit", **LIMITS)(configure(limits=[20, 4]))


@lie("BUDGET FEWEST REPLAY WEIGHT", **LIMITS)
def use_more_of_a_resource(trace: Tampered) -> None:
    collates = trace.effects("collate", 0)
    position = next(step["positions"][0] for effect in collates for step in effect["steps"] if step["positions"][1:])
    rows = [row for event in trace.events("samples_read", 0) for row in event["samples"]]
    rows[position][4] += 100


@lie("BUDGET FEWEST REPLAY WEIGHT", **LIMITS)
def leave_a_cost_out(trace: Tampered) -> None:
    trace.events("samples_read", 1)[0]["samples"][0].pop()


@lie("FEWEST")
def offer_a_group_more(trace: Tampered) -> None:
    trace.effects("post_offer", 0)[1]["offer"]["groups_max"] += 1
    trace.reduce_again()


@lie("FEWEST REPLAY")
def offer_to_emit_what_is_left_over(trace: Tampered) -> None:
    offers = [effect["offer"] for effect in trace.effects("post_offer", 0)]
    offer = next(offer for offer in offers if offer["groups_min"] < offer["groups_max"])
    offer["groups_min"] += 1
    trace.reduce_again()


@lie("FEWEST REPLAY")
def offer_to_keep_a_full_group_back(trace: Tampered) -> None:
    offers = [effect["offer"] for effect in trace.effects("post_offer", 0)]
    offer = next(offer for offer in offers if offer["groups_min"] == offer["groups_max"] > 1)
    offer["groups_min"] -= 1
    trace.reduce_again()


lie("AGE REPLAY", name="lower_the_age", max_age_rounds=3, window_samples=4, budget_tokens=23)(
    configure(max_age_rounds=1)
)


@lie("WEIGHT")
def tell_one_rank_another_sum(trace: Tampered) -> None:
    trace.events("counted", 1)[1]["counts"][0][2] += 1


@lie("WEIGHT")
def count_input_tokens_as_supervised(trace: Tampered) -> None:
    """The released peer's exact mode does this."""
    for effect in trace.effects("post_counts"):
        for row in effect["counts"]:
            row[2] = row[1]
    trace.sum_again()


lie("ORDER", name="say_that_steps_are_balanced_by_attention")(configure(cost="attention/1"))
lie("ORDER", name="say_that_steps_are_balanced_by_tokens", max_age_rounds=3, cost=get_cost("attention/1"))(
    configure(cost="tokens")
)


@lie("WEIGHT", **LIMITS)
def say_that_nobody_uses_a_resource(trace: Tampered) -> None:
    """It claims this on all ranks alike. Those without an image then skip the tower that another rank runs."""
    for effect in trace.effects("post_counts"):
        for row in effect["counts"]:
            row[4] = 0
    trace.sum_again()


@lie("WEIGHT", **LIMITS)
def tell_one_rank_of_less_of_a_resource(trace: Tampered) -> None:
    trace.events("counted", 1)[0]["counts"][0][3] -= 1


@lie("WEIGHT")
def carry_other_counts_in_a_step(trace: Tampered) -> None:
    trace.effects("collate", 1)[1]["steps"][0]["counts"][1] += 5


def swap_two_like_steps(trace: Tampered) -> None:
    """Counts and costs are equal, and both groups are whole. Only REPLAY can tell which of them leaves first."""
    for collate, posted in zip(trace.effects("collate", 0), trace.effects("post_counts", 0), strict=True):
        if posted["counts"][:1] == posted["counts"][1:2]:
            first, second = collate["steps"][:2]
            first["positions"], second["positions"] = second["positions"], first["positions"]
            return
    raise AssertionError("this trace does not fit the lie")


@lie("DEAL", **SHARED)
def want_another_number(trace: Tampered) -> None:
    trace.effects("post_counts", 1)[1]["wanted"] -= 1
    for rank in trace.ranks:
        trace.events("counted", rank)[1]["wants"][1] -= 1


@lie("DEAL", **SHARED, layout=Layout.PACKED)
def want_more_near_the_end(trace: Tampered) -> None:
    posted = trace.effects("post_counts", 1)
    last = max(i for i, counts in enumerate(posted) if counts["wanted"])
    posted[last]["wanted"] += 1
    for rank in trace.ranks:
        trace.events("counted", rank)[last]["wants"][1] += 1


@lie("DEAL WEIGHT", **SHARED)
def tell_one_rank_other_wants(trace: Tampered) -> None:
    wants = trace.events("counted", 0)[1]["wants"]
    wants[1], wants[2] = wants[2] + 1, wants[1]


@lie("COVER DEAL ONCE", **SHARED)
def read_from_another_place(trace: Tampered) -> None:
    trace.effects("read", 1)[1]["first"] -= 1


@lie("COVER DEAL", **SHARED)
def read_from_a_source_of_ones_own(trace: Tampered) -> None:
    del trace.effects("read", 1)[1]["first"]


@lie("CONSERVE COVER DEAL", **SHARED)
def leave_places_out(trace: Tampered) -> None:
    """Consistently, a rank draws one sample fewer in the round before the last, and reads what it has not drawn."""
    trace.effects("read", 2)[1]["count"] -= 1
    trace.events("samples_read", 2)[1]["is_ended"] = True


@lie("ORDER")
def exchange_two_steps(trace: Tampered) -> None:
    """On one rank, one fuller than the other, with their counts, and both with their lengths unchanged."""
    samples = {row[1]: row for event in trace.events("samples_read", 0) for row in event["samples"]}

    def compute_padded(step: dict[str, Any]) -> int:
        return len(step["positions"]) * max((samples[position][2] for position in step["positions"]), default=0)

    for counted, collate in zip(trace.effects("post_counts", 0), trace.effects("collate", 0), strict=True):
        rows, steps = counted["counts"], collate["steps"]
        tokens = [compute_padded(step) for step in steps]
        if 0 < min(tokens) < max(tokens):
            i, j = tokens.index(min(tokens)), tokens.index(max(tokens))
            rows[i], rows[j] = rows[j], rows[i]
            steps[i]["positions"], steps[j]["positions"] = steps[j]["positions"], steps[i]["positions"]
            trace.sum_again()
            return
    raise AssertionError("this trace does not fit the lie")


lie("ORDER", name="leave_the_order_of_the_sampler", order=StepOrder.SAMPLER)(exchange_two_steps)
lie("ORDER", name="let_the_fullest_wait", order=StepOrder.FULLEST)(exchange_two_steps)


@lie("ORDER REPLAY SIZES WEIGHT", sizes=Sizes.POWERS, budget_tokens=60)
def move_a_sample_to_another_step(trace: Tampered) -> None:
    steps = max((effect["steps"] for effect in trace.effects("collate", 0)), key=len)
    from_, to = (step["positions"] for step in steps[:2])
    to.append(from_.pop())


@pytest.mark.parametrize(("change", "property_"), [(exchange_two_steps, "ORDER"), (renumber_a_step, "ALIGN")])
def test_what_is_wrong_with_the_steps_of_a_round_is_said_of_that_round(
    change: Change, property_: str, tmp_path: Path
) -> None:
    """The rank, which has been told the sums of the round, is in the next one."""
    trace = run(tmp_path / "t")
    before = copy.deepcopy(trace.effects("collate", 0))
    change(trace)
    number = next(old["round"] for old, new in zip(before, trace.effects("collate", 0), strict=True) if old != new)
    told = check_traces([trace.write(tmp_path / "t")]).violations
    assert {(str(item.property), item.round) for item in told} == {(property_, number)}


@pytest.mark.parametrize("told", lie, ids=str)
def test_a_tampered_trace_is_refused_with_its_property(told: Lie, tmp_path: Path) -> None:
    check_said(told.name, told.check(tmp_path / "t"))


def test_replay_sees_a_swap_that_no_property_can_see(tmp_path: Path) -> None:
    run_by_arrival([[3] * 20, [5] * 9], make_configs(2, budget_tokens=9), trace=tmp_path / "t")
    trace = Tampered(tmp_path / "t")
    swap_two_like_steps(trace)
    path = trace.write(tmp_path / "swapped")
    assert find_broken(path) == set()
    assert find_broken(path, is_replayed=True) == {"REPLAY"}


def test_a_failure_without_a_cause_is_an_unknown_one(tmp_path: Path) -> None:
    """Spec: R5.8. The trace is true: the machine itself writes this if a driver gives no cause."""
    path = tmp_path / "t"
    run(path, FAIL)
    path.write_text(path.read_text().replace("broken sample", "unknown failure"))
    trace = Tampered(path)
    trace.events("local_failed", 1)[0]["cause"] = ""
    assert tell(trace.write(path), is_replayed=True) == []


# Wrong protocols: the machine itself is changed, and its trace is honest.


def test_closing_when_the_first_rank_runs_dry_violates_cover(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(machine_module, "is_closing", lambda _, agreement: agreement.samples_min == 0)
    path = tmp_path / "t"
    run(path)
    # By the agreement the epoch is not over, because some rank holds samples.
    assert find_broken(path) == {"ALIGN", "COVER", "RELEASE"}
    assert [line for line in tell(path) if line.startswith("COVER")] == [
        "COVER rank 0 round 6 step 11: closes before its source has ended",
        "COVER rank 0 round 6 step 11: closes with 6 samples not emitted: position 31, 32, 33, 34, 35",
        "COVER rank 1 round 6 step 11: closes with 6 samples not emitted: position 25, 26, 27, 28, 29",
        "COVER rank 0 round - step -: it has trained on 31 samples of 40",
        "COVER rank 1 round - step -: it has trained on 25 samples of 31",
    ]


def test_a_round_with_an_empty_step_violates_term(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    right = rounds_module.compute_round_target

    def one_too_many(config: Any, agreement: Offer) -> int:
        return agreement.samples_max + 1 if agreement.samples_max == 1 else right(config, agreement)

    monkeypatch.setattr(machine_module, "compute_round_target", one_too_many)
    path = tmp_path / "t"
    run_by_arrival([[5] * 7, [5] * 3], make_configs(2, window_samples=1), seed=1, trace=path)
    said = [line for line in tell(path) if not line.startswith("REPLAY")]
    assert all(line.startswith("TERM ") for line in said)
    assert said[1:3] == [
        "TERM rank 0 round 0 step -: 2 steps; expected 1 to 1, the most samples of a rank",
        "TERM rank 1 round 0 step 1: no rank has a sample in this step",
    ]


def test_carrying_without_regard_to_age_violates_age(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(rounds_module, "compute_due_before", lambda config, state: 0)
    monkeypatch.setattr(machine_module, "check_transition", lambda *transition: None)
    path = tmp_path / "t"
    # The window of rank 1 always makes one group, so rank 0 always carries its shortest groups.
    run_by_arrival([[1, 30, 30, 30] * 9, [1] * 36], make_configs(2, window_samples=4, max_age_rounds=2), trace=path)
    offered = "offers 0 due groups, but 1 hold a sample that is due"
    carried = "position 0 is carried for more than 2 rounds"
    assert [line for line in tell(path) if not line.startswith("REPLAY")] == [
        f"AGE rank 0 round {round_} step -: {what}" for round_ in range(2, 5) for what in (offered, carried)
    ][:5]


def test_every_property_has_a_lie() -> None:
    elsewhere = {"RESUME", "UPDATE", "PEERS"}
    assert {item for told in lie for item in told.properties} | elsewhere == {str(item) for item in Property}
