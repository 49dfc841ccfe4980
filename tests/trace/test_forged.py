"""Forged traces: each is consistent in everything that its forger thought of, but breaks one property. None may pass."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import odb_ref.core.batching.alignment as alignment_module
import odb_ref.core.machine as machine_module
import odb_ref.core.rounds as rounds_module
from odb_ref.core.batching.layouts import Layout
from odb_ref.core.batching.shards import Draw
from odb_ref.core.effects import Outcome
from odb_ref.core.offer import Offer
from odb_ref.core.resume import Resumed, RoundStart
from odb_ref.trace.check import Property, Status, check_traces
from odb_ref.trace.format import encode_event
from tests.helpers.tamper import Line, Tampered
from tests.helpers.world import Fault, make_configs, run_by_arrival
from tests.trace.lies import FAIL, KILL, SHARDS, STOP, Lie, Lies, find_broken, run

lie = Lies()


def find(trace: Tampered, kind: str, rank: int | None = None) -> tuple[Line, Line]:
    """Returns the last record with such an effect, and the effect."""
    *_, found = trace.iterate(kind, rank)
    return found


def insert_after(trace: Tampered, record: Line, rank: int, event: Line, *effects: Line) -> None:
    place = trace.records.index(record) + 1
    trace.records.insert(place, {"rank": rank, "event": event, "effects": [*effects]})


def set_limit(trace: Tampered, rank: int, limit: int) -> None:
    find(trace, "finish", rank)[1]["step_limit"] = limit


def lower_limit(trace: Tampered, *ranks: int, by: int = 1) -> None:
    for rank in ranks:
        find(trace, "finish", rank)[1]["step_limit"] -= by


@lie("RELEASE STOP", STOP, depth_steps=9)
def go_on_after_another_left(trace: Tampered) -> None:
    """The consumer of rank 2 leaves after one step, the others take all steps, and no record shows that it left too early."""
    places = [index for index, item in enumerate(trace.records) if item in trace.answers("step_taken", 2)]
    stop = next(item for item in trace.records if item["event"] and item["event"]["kind"] == "consumer_stopped")
    trace.drop(stop)
    for index in reversed(places[1:]):
        trace.records[index]["event"] = {"kind": "urged"}
    trace.records.append({"rank": 2, "event": {"kind": "consumer_stopped"}, "effects": []})


@lie("RELEASE", FAIL)
def allow_fewer_steps_on_one_rank(trace: Tampered) -> None:
    lower_limit(trace, 0)


@lie("FREE RELEASE", FAIL)
def allow_more_steps_on_one_rank(trace: Tampered) -> None:
    lower_limit(trace, 2, by=-1)


@lie("RELEASE", FAIL)
def allow_nobody_what_is_released(trace: Tampered) -> None:
    for rank in trace.ranks:
        set_limit(trace, rank, 0)


@lie("FREE RELEASE", FAIL)
def keep_released_steps_back(trace: Tampered) -> None:
    """One rank finishes without delivering its last released step."""
    record, effect = find(trace, "deliver", 0)
    record["effects"].remove(effect)
    taken = trace.answers("step_taken", 0)[-1]
    trace.drop(taken)


@lie("ABORT", KILL)
def ignore_a_loss(trace: Tampered) -> None:
    """Rank 1 learns of the loss when it could still continue, and finishes later, when it is told again."""
    lost = trace.answers("peer_lost", 1)[0]
    place = trace.records.index(lost)
    trace.records.insert(place, {"rank": 1, "event": dict(lost["event"]), "effects": []})


@lie("ABORT", KILL)
def train_on_after_a_loss(trace: Tampered) -> None:
    taken = trace.answers("peer_lost", 1)[0]
    lower_limit(trace, 1, by=-1)
    insert_after(trace, taken, 1, {"kind": "step_taken"})


@lie("ABORT", KILL)
def lose_another_rank(trace: Tampered) -> None:
    find(trace, "finish", 1)[1]["outcome"]["rank"] = 2
    trace.records.append({"rank": 1, "event": {"kind": "peer_lost", "rank": 2, "cause": "x"}, "effects": []})


@lie("ABORT", KILL)
def lose_for_another_cause(trace: Tampered) -> None:
    find(trace, "finish", 1)[1]["outcome"]["cause"] = "a cable"


@lie("ABORT")
def blame_a_rank_for_completing(trace: Tampered) -> None:
    for effect in trace.effects("finish"):
        effect["outcome"]["rank"] = 1


@lie("FREE")
def offer_late(trace: Tampered) -> None:
    """A rank that has everything it needs waits for its next event before it offers."""
    records = [item for item in trace.records if item["rank"] == 1]
    early = next(
        index
        for index, item in enumerate(records[20:], 20)
        if item["effects"]
        and item["effects"][-1]["kind"] == "post_offer"
        and records[index + 1]["event"]["kind"] == "step_taken"
    )
    records[early + 1]["effects"].append(records[early]["effects"].pop())


@lie("FREE", depth_steps=3, window_samples=16, budget_tokens=20)
def hold_a_step_back(trace: Tampered) -> None:
    """A step for which the queue has room is delivered only when the next is taken."""
    full = [item for item in trace.records if sum(it["kind"] == "deliver" for it in item["effects"]) > 1]
    record = full[-1]
    late = [it for it in record["effects"] if it["kind"] == "deliver"][-1]
    record["effects"].remove(late)
    rest = trace.records[trace.records.index(record) :]
    after = next(it for it in rest if it["rank"] == record["rank"] and it["event"]["kind"] == "step_taken")
    after["effects"].insert(0, late)


@lie("ABORT EXCHANGE FREE RELEASE REPLAY")
def answer_twice(trace: Tampered) -> None:
    record = trace.answers("agreed", 1)[3]
    trace.records.insert(trace.records.index(record) + 1, record | {"effects": []})


@lie("CONSERVE EXCHANGE REPLAY")
def begin_without_a_beginning(trace: Tampered) -> None:
    trace.drop(trace.records[0])


@lie("CONSERVE")
def read_nothing_that_was_asked(trace: Tampered) -> None:
    empty = {"kind": "samples_read", "samples": [], "is_ended": True}
    trace.records.append({"rank": 0, "event": empty, "effects": []})


@lie("EXCHANGE FREE")
def post_after_the_end(trace: Tampered) -> None:
    trace.records.append({"rank": 0, "event": {"kind": "urged"}, "effects": [dict(trace.effects("read", 0)[0])]})


@lie("ABORT EXCHANGE RELEASE")
def report_without_a_failure(trace: Tampered) -> None:
    report = {"rank": 0, "cause": "", "round": 1, "config": "{}"}
    record, _ = find(trace, "post_offer", 0)
    record["effects"].append({"kind": "post_report", "report": report})


@lie("STOP", STOP)
def stop_earlier_than_agreed(trace: Tampered) -> None:
    lower_limit(trace, 0, 1)


@lie("EXCHANGE")
def read_twice_at_once(trace: Tampered) -> None:
    record, effect = find(trace, "read", 1)
    record["effects"].append(dict(effect))


@lie("STOP", KILL, depth_steps=30)
@lie("STOP", KILL, name="fall behind by updates", depth_steps=60, update_samples=9)
def fall_behind_and_be_lost(trace: Tampered) -> None:
    """The consumer of rank 1 takes one step until its rank is lost. That of rank 2 takes all it may."""
    for record in trace.answers("step_taken", 1)[1:]:
        record["event"] = {"kind": "urged"}
    set_limit(trace, 1, 1)


# A start that no rank can have saved. All ranks say the same, and all else is true.


def begin_at(**start: Any) -> Callable[[Tampered], None]:
    """Every rank is resumed at this start, instead of beginning the epoch."""

    def change(trace: Tampered) -> None:
        first = RoundStart(**start)
        for record in trace.records:
            if record["event"] is None:
                record["event"] = encode_event(Resumed(first, ()))
        for step in (*trace.effects("deliver"), *(it for effect in trace.effects("collate") for it in effect["steps"])):
            step["number"] += first.planned_steps
        for effect in trace.effects("finish"):
            effect["step_limit"] += first.planned_steps

    return change


lie("RESUME", name="begin after steps")(begin_at(planned_steps=1000, global_samples=5000))
lie("RESUME", name="begin after steps without a sample", update_samples=9)(begin_at(planned_steps=6, global_samples=5))
lie("RESUME", name="begin with marks")(begin_at(marks=(0, 0, 0)))
lie("RESUME", name="begin with a draw though each rank has its own source")(begin_at(draw=Draw(0, 0, 1)))
lie("EXCHANGE", name="read a source that had ended")(begin_at(is_ended=True))


@pytest.mark.parametrize("told", lie, ids=str)
def test_a_forged_trace_is_refused(told: Lie, tmp_path: Path) -> None:
    """Spec: R3.4, R5, R6.6, R7, R10.6."""
    told.check(tmp_path / "t")


# If a rank is gone, its last post is unknown, but the posts of the others bound the agreement that they are told.


def run_apart(path: Path, **settings: Any) -> list[Path]:
    """Writes a true trace, a file for each rank."""
    configs = make_configs(len(SHARDS), **settings)
    return run_by_arrival(SHARDS, configs, seed=3, trace=path, is_one_file=False).paths


def be_gone(traces: list[Tampered]) -> list[Line]:
    """Rank 0 is gone before its fifth offer. The others are told the agreements, which are returned, and the loss."""
    first, *others = traces
    place = first.records.index([record for record, _ in first.iterate("post_offer")][4])
    del first.records[place:]
    told = []
    for rank, trace in enumerate(others, 1):
        end = trace.records.index(trace.answers("agreed", rank)[4])
        taken = sum(item in trace.answers("step_taken", rank) for item in trace.records[:end])
        outcome = {"kind": "lost", "rank": 0, "cause": "gone"}
        finish = {"kind": "finish", "outcome": outcome, "step_limit": taken}
        told.append(trace.records[end]["event"]["agreement"])
        event = {"kind": "peer_lost", "rank": 0, "cause": "gone"}
        trace.records[end + 1 :] = [{"rank": rank, "event": event, "effects": [finish]}]
    return told


def tell_of_fewer_groups_than_there_are(traces: list[Tampered]) -> None:
    for agreement in be_gone(traces):
        agreement["groups_max"] = agreement["due_max"] = 0


def tell_of_more_samples_than_the_poorest_has(traces: list[Tampered]) -> None:
    for agreement in be_gone(traces):
        agreement["samples_min"] = 4 * 10**9


def tell_ranks_apart(traces: list[Tampered]) -> None:
    be_gone(traces)[0]["samples_max"] += 1


def hide_a_failure(traces: list[Tampered]) -> None:
    """Rank 1 fails before it offers, but the agreement does not include the failure."""
    be_gone(traces)
    trace = traces[1]
    record, effect = find(trace, "post_offer", 1)
    record["effects"].remove(effect)
    effect["offer"]["failed_rank"] = 1
    insert_after(trace, record, 1, {"kind": "local_failed", "cause": "x"}, effect)


@pytest.mark.parametrize(
    ("forge", "broken"),
    [
        (be_gone, set()),
        (tell_of_fewer_groups_than_there_are, {"EXCHANGE"}),
        (tell_of_more_samples_than_the_poorest_has, {"EXCHANGE"}),
        (tell_ranks_apart, {"EXCHANGE"}),
        (hide_a_failure, {"EXCHANGE"}),
    ],
)
def test_what_is_told_without_a_rank_that_is_gone_is_no_less_than_the_others_said(
    forge: Callable[[list[Tampered]], object], broken: set[str], tmp_path: Path
) -> None:
    """Spec: R3.2, R6.2."""
    paths = run_apart(tmp_path / "t")
    traces = [Tampered(path) for path in paths]
    forge(traces)
    for trace, path in zip(traces, paths, strict=True):
        trace.write(path)
    found = find_broken(*paths)
    assert found >= broken and bool(found) == bool(broken), found


def test_counts_that_are_less_than_what_is_known_of_them_are_refused(tmp_path: Path) -> None:
    """Spec: R4.5, R6.3."""
    paths = run_apart(tmp_path / "t", shared_samples=sum(map(len, SHARDS)))
    first = Tampered(paths[0])
    place = first.records.index([record for record, _ in first.iterate("post_counts")][4])
    del first.records[place:]
    first.write(paths[0])
    assert "WEIGHT" not in find_broken(*paths)
    for path in paths[1:]:
        trace = Tampered(path)
        trace.events("counted")[4]["counts"][0][0] = 0
        trace.write(path)
    assert "WEIGHT" in find_broken(*paths)


@pytest.mark.parametrize(
    ("named", "doubt"),
    [
        (2, "whether rank 2 was gone, as rank 1 was told: it has ended by itself"),
        (1, "whether rank 1 was gone, as rank 1 was told: it has ended by itself"),
        (None, "whether rank 0 was gone: rank 1 was told of a loss, but not which rank was lost"),
    ],
)
def test_whose_loss_a_rank_is_told_of_is_said_where_no_trace_can_show_it(
    named: int | None, doubt: str, tmp_path: Path
) -> None:
    """NP18: each rank knows what it saw, and one that gives up names itself. Spec: R7.5."""
    trace = run(tmp_path / "t", KILL)
    for event in trace.events("peer_lost", 1):
        event["rank"] = named
    find(trace, "finish", 1)[1]["outcome"]["rank"] = named
    verdict = check_traces([trace.write(tmp_path / "t")])
    assert verdict.is_ok
    assert doubt in verdict.jobs[0].unsaid


def test_what_a_killed_rank_took_is_said_where_its_trace_cannot_show_it(tmp_path: Path) -> None:
    """Steps whose records it had not yet written are lost with it. Spec: R7.5."""
    trace = run(tmp_path / "t", Fault("kill", 0, 110), depth_steps=30)
    assert len(trace.answers("step_taken", 0)) > 2
    for record in trace.answers("step_taken", 0)[1:]:
        record["event"] = {"kind": "urged"}
    verdict = check_traces([trace.write(tmp_path / "t")])
    assert verdict.is_ok
    assert "whether rank 0 took more than 1 steps: its trace has no finish" in verdict.jobs[0].unsaid


def kill_a_trainer_in_its_last_step(trace: Tampered) -> str:
    """Returns what is said of it, or an empty text if the trace is to be refused."""
    trace.drop(trace.answers("step_taken", 1)[-1])
    return "of the 15 steps that rank 1's loader handed out, its trace shows 14 as taken"


def kill_a_process_that_had_not_written_the_steps_taken(trace: Tampered) -> str:
    """The other ranks have written theirs."""
    place = trace.records.index(find(trace, "finish", 1)[0]) + 1
    trace.records[place:] = [record for record in trace.records[place:] if record["rank"] != 1]
    return "of the 15 steps that rank 1's loader handed out, its trace shows 13 as taken"


def kill_a_rank_at_its_last_agreement(trace: Tampered) -> str:
    """All that is left to do there is to hand out steps: the queue is full."""
    keep_before_last_agreement(trace, and_more=1)
    return "of the 14 steps that rank 1's loader handed out, its trace shows 12 as taken"


def stop_a_loader_before_its_last_agreement(trace: Tampered) -> str:
    keep_before_last_agreement(trace)
    return ""


def stop_a_loader_that_has_room_in_its_queue(trace: Tampered) -> str:
    kill_a_rank_at_its_last_agreement(trace)
    trace.records.append({"rank": 1, "event": {"kind": "step_taken"}, "effects": []})
    return ""


def keep_before_last_agreement(trace: Tampered, and_more: int = 0) -> None:
    """Drops all later records of rank 1, except ``and_more``."""
    place = trace.records.index(trace.answers("agreed", 1)[-1]) + and_more
    trace.records[place:] = [record for record in trace.records[place:] if record["rank"] != 1]


@pytest.mark.parametrize(
    "end",
    [
        kill_a_trainer_in_its_last_step,
        kill_a_process_that_had_not_written_the_steps_taken,
        kill_a_rank_at_its_last_agreement,
        stop_a_loader_before_its_last_agreement,
        stop_a_loader_that_has_room_in_its_queue,
    ],
)
def test_a_loader_that_has_done_its_part_is_not_blamed_for_its_trainer(
    end: Callable[[Tampered], str], tmp_path: Path
) -> None:
    """A trace cannot tell a trainer that was killed from one that is stuck. Checks: FREE."""
    trace = run(tmp_path / "t", depth_steps=2)
    said = end(trace)
    verdict = check_traces([trace.write(tmp_path / "t")])
    assert {str(item.property) for item in verdict.violations} == (set() if said else {"FREE"})
    assert (f"whether a trainer was killed or is stuck: {said}" in verdict.jobs[0].unsaid) == bool(said)


# Peers: the processes of one rank write separate traces, which must contain the same steps. Spec: R17.5.


def write_peers(folder: Path, *shards: list[list[int]]) -> list[Path]:
    """Writes the job of each peer number by itself. Only the checker compares what they hold."""
    paths = [folder / f"peer{peer}" for peer in range(len(shards))]
    for peer, (path, lengths) in enumerate(zip(paths, shards, strict=True)):
        run_by_arrival(lengths, make_configs(2, peers=len(shards), peer=peer), seed=peer, trace=path, run="r")
    return paths


ALIKE = [[3, 5, 7, 2] * 5, [4, 9] * 9]


def test_peers_that_train_alike_are_accepted_and_one_without_the_other_is_said(tmp_path: Path) -> None:
    """Spec: R17.5. Checks: PEERS."""
    paths = write_peers(tmp_path, ALIKE, ALIKE)
    verdict = check_traces(paths, is_replayed=True)
    assert verdict.is_ok, [str(item) for item in verdict.violations]
    assert [(job.get_status(Property.PEERS), job.unsaid) for job in verdict.jobs] == [(Status.HOLDS, ())] * 2
    (alone,) = check_traces(paths[:1]).jobs
    assert alone.unsaid == ("whether the other peers of each rank train on the same: no trace of them is given",)


def have_other_samples(paths: list[Path]) -> None:
    trace = Tampered(paths[1])
    rows = [row for event in trace.events("samples_read", 0) for row in event["samples"]]
    rows[0][0], rows[-1][0] = rows[-1][0], rows[0][0]
    trace.header["inputs"][0].pop("order")
    trace.write(paths[1])


def have_fewer_steps(paths: list[Path]) -> None:
    write_peers(paths[0].parent, ALIKE, [ALIKE[0][:-1], ALIKE[1]])


@pytest.mark.parametrize("differ", [have_other_samples, have_fewer_steps])
def test_peers_that_differ_are_refused(differ: Callable[[list[Path]], None], tmp_path: Path) -> None:
    """Spec: R17.5. Checks: PEERS."""
    paths = write_peers(tmp_path, ALIKE, ALIKE)
    differ(paths)
    assert find_broken(*paths) == {"PEERS"}


# Other protocols under the same name: the machine itself is changed, its trace is honest, and nothing is replayed.


def use_another_target(monkeypatch: pytest.MonkeyPatch) -> None:
    def compute_target(rule: object, agreement: Offer, **options: object) -> int:
        return agreement.groups_max

    monkeypatch.setattr(rounds_module, "compute_checked_target", compute_target)


def emit_the_emptiest(monkeypatch: pytest.MonkeyPatch) -> None:
    right = alignment_module.align

    def align(groups: Any, target: int, *rest: Any, **options: Any) -> Any:
        if len(groups) <= target:
            return right(groups, target, *rest, **options)
        chosen = sorted(groups, key=lambda group: len(group) * group[0].length)[:target]
        left = [sample for group in groups if group not in chosen for sample in group]
        return right(tuple(chosen), target, *rest, **options)[0], tuple(sorted(left, key=lambda it: it.position))

    monkeypatch.setattr(rounds_module, "align", align)


def idle_instead_of_splitting(monkeypatch: pytest.MonkeyPatch) -> None:
    right = alignment_module.align

    def align(groups: Any, target: int, *rest: Any, **options: Any) -> Any:
        steps, carried = right(groups, min(target, len(groups)), *rest, **options)
        return (*steps, *[()] * (target - len(steps))), carried

    monkeypatch.setattr(rounds_module, "align", align)


@pytest.mark.parametrize(
    ("change", "rule"), [(use_another_target, "odb"), (emit_the_emptiest, "odb"), (idle_instead_of_splitting, "paper")]
)
def test_another_protocol_under_the_same_name_is_refused_without_replay(
    change: Callable[[pytest.MonkeyPatch], None], rule: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Spec: R3.3, R4.1, R4.2. Checks: REPLAY."""
    monkeypatch.setattr(machine_module, "check_transition", lambda *transition: None)
    change(monkeypatch)
    path = tmp_path / "t"
    run_by_arrival(SHARDS, make_configs(len(SHARDS), rule, max_age_rounds=9), seed=3, trace=path)
    assert find_broken(path) == {"REPLAY"}


# What only a replay by the machine can detect: `docs/explanation/evidence.md` lists it.


def split_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Layout, "find_middle", lambda *group: 1)


def exchange_steps_of_equal_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    right = alignment_module.align

    def align(groups: Any, target: int, *rest: Any, **options: Any) -> Any:
        steps, carried = right(groups, target, *rest, **options)
        filled = sorted(filter(None, steps), key=lambda group: (-len(group) * group[0].length, -group[0].position))
        return (*filled, *[()] * (len(steps) - len(filled))), carried

    monkeypatch.setattr(rounds_module, "align", align)


def say_why_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_module, "Outcome", lambda kind, rank=None, cause="": Outcome(kind, rank, cause.upper()))


@pytest.mark.parametrize(
    ("change", "faults"),
    [(split_elsewhere, ()), (exchange_steps_of_equal_cost, ()), (say_why_otherwise, (Fault("stop", 2, 30),))],
)
def test_what_only_replay_sees(
    change: Callable[[pytest.MonkeyPatch], None], faults: tuple[Fault, ...], tmp_path: Path
) -> None:
    """Spec: R4.2, R7.4. Checks: REPLAY."""
    path = tmp_path / "t"
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(machine_module, "check_transition", lambda *transition: None)
        change(monkeypatch)
        shards = [[3] * 30, [5] * 30, [7] * 12]
        configs = make_configs(len(shards), "paper", budget_tokens=15, window_samples=16)
        run_by_arrival(shards, configs, seed=3, faults=faults, trace=path)
    assert check_traces([path]).is_ok
    assert find_broken(path, is_replayed=True) == {"REPLAY"}
