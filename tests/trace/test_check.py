"""The checker on correct traces, on files of every shape, and on files that are not traces."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from odb_sim.cli.main import main

from odb_ref.core.batching.layouts import Layout
from odb_ref.core.errors import UsageError
from odb_ref.core.machine import Machine
from odb_ref.core.types import Mode
from odb_ref.trace.check import Property, Status, check_traces
from odb_ref.trace.check.own.groups import compute_fewest_groups
from odb_ref.trace.writing import TraceWriter
from tests.helpers.commands import refuse
from tests.helpers.effort import few
from tests.helpers.partitions import count_fewest
from tests.helpers.tamper import Tampered
from tests.helpers.world import Fault, World, make_config, make_configs, make_shards, run_by_arrival
from tests.trace.lies import find_broken, get_verdict
from tests.trace.said import SHARDS
from tests.trace.said import write as run


@settings(max_examples=few(60), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_whatever_the_machine_does_the_checker_accepts(data: st.DataObject, tmp_path: Path) -> None:
    """Spec: R6, R6.1, R6.2, R6.3, R6.5, R6.6. Checks: ALIGN, ONCE, RELEASE, TERM.

    `tests.trace.lies` shows that it refuses a second read, another round, other counts, and steps before they are collated.
    """
    world_size = data.draw(st.integers(1, 4))
    lengths = st.lists(st.integers(1, 30), max_size=14)
    mode = data.draw(st.sampled_from(Mode))
    configs = make_configs(
        world_size,
        data.draw(st.sampled_from(["odb", "paper"])),
        budget_tokens=data.draw(st.integers(1, 60)),
        limits=tuple(data.draw(st.lists(st.integers(1, 12), max_size=2))),
        window_samples=data.draw(st.integers(1, 8)),
        depth_steps=data.draw(st.integers(1, 3)),
        max_age_rounds=data.draw(st.integers(1, 3)),
        ramp_rounds=data.draw(st.integers(0, 2)),
        mode=mode,
        quota_samples=data.draw(st.none() | st.integers(1, 30)) if mode is Mode.QUOTA else None,
    )
    fault = st.builds(Fault, st.sampled_from(["fail", "stop"]), st.integers(0, world_size - 1), st.integers(0, 80))
    world = run_by_arrival(
        [data.draw(lengths) for _ in range(world_size)],
        configs,
        seed=data.draw(st.integers(0, 2**16)),
        faults=data.draw(st.lists(fault, max_size=2)),
        trace=tmp_path / "t",
        is_one_file=data.draw(st.booleans()),
    )
    verdict = check_traces(world.paths, is_replayed=True)
    assert verdict.violations == ()
    assert verdict.jobs[0].get_status(Property.REPLAY) is Status.HOLDS
    assert verdict.jobs[0].samples >= sum(len(node.trained) for node in world.nodes)


@given(st.lists(st.integers(1, 12), max_size=7), st.integers(1, 30))
def test_the_fewest_groups_are_those_of_the_best_partition(lengths: list[int], budget: int) -> None:
    assert compute_fewest_groups(lengths, budget) == count_fewest(
        lengths, lambda group: len(group) * max(group) <= budget
    )


def test_one_file_and_one_file_for_each_rank_get_the_same_verdict(tmp_path: Path) -> None:
    (one,) = run(tmp_path / "one")
    many = run(tmp_path / "many", is_one_file=False)
    assert len(many) == 3
    random.Random(0).shuffle(many)
    whole, merged = check_traces([one]).jobs[0], check_traces(many).jobs[0]
    assert (whole.rounds, whole.steps, whole.samples) == (merged.rounds, merged.steps, merged.samples)
    assert whole.samples == sum(map(len, SHARDS))
    assert whole.properties == merged.properties
    assert whole.is_ok and merged.is_ok


def test_files_of_several_jobs_are_told_apart(tmp_path: Path) -> None:
    (join,) = run(tmp_path / "join")
    (quota,) = run(tmp_path / "quota", mode=Mode.QUOTA)
    ranks = run(tmp_path / "ranks", is_one_file=False, driver="another")
    verdict = check_traces([join, ranks[0], quota, *ranks[1:]])
    assert sorted(len(job.paths) for job in verdict.jobs) == [1, 1, 3]
    assert verdict.is_ok


def test_a_file_that_is_given_twice_is_refused(tmp_path: Path) -> None:
    paths = run(tmp_path / "t", is_one_file=False)
    with pytest.raises(UsageError, match="given twice"):
        check_traces([*paths, tmp_path / "." / paths[1].name])


def test_a_packed_trace_is_judged_by_its_sums(tmp_path: Path) -> None:
    """Spec: R2.4, R2.5. Checks: BUDGET."""
    (path,) = run(tmp_path / "t", layout=Layout.PACKED)
    job = check_traces([path], is_replayed=True).jobs[0]
    assert job.is_ok
    assert get_verdict(job, Property.FEWEST).reason == "packed layout"
    assert job.get_status(Property.BUDGET) is Status.HOLDS

    def find(old: str, new: str) -> set[str]:
        text = path.read_text()
        assert old in text
        changed = tmp_path / "changed"
        changed.write_text(text.replace(old, new))
        return find_broken(changed)

    assert "BUDGET" in find('"layout":"packed",', ""), "as padded groups they are over the budget"
    assert "FEWEST" in find('"groups_max":3', '"groups_max":2')


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"limits": (9, 7)}, "limits is [9, 7], rank 0 has None"),
        ({"budget_tokens": 7}, "budget_tokens is 7, rank 0 has 40"),
        ({"rule": "paper"}, "rule is 'paper', rank 0 has 'odb'"),
        (
            {"mode": Mode.QUOTA, "max_age_rounds": 2},
            "max_age_rounds is 2, rank 0 has 4; mode is 'quota', rank 0 has 'join'",
        ),
    ],
)
def test_ranks_configured_differently_end_in_a_mismatch_that_the_checker_accepts(
    change: dict[str, Any], told: str, tmp_path: Path
) -> None:
    """Spec: R7.3. Checks: ABORT. They never take a step."""
    configs = make_configs(3)
    configs[1] = make_configs(3, **change)[1]
    world = run_by_arrival(SHARDS, configs, trace=tmp_path / "t")
    assert not any(node.taken for node in world.nodes)
    job = check_traces([tmp_path / "t"], is_replayed=True).jobs[0]
    assert job.is_ok
    assert job.get_status(Property.BUDGET) is Status.NOT_APPLICABLE, "judged by the limits of rank 0"
    assert job.outcome == f"mismatch by rank 1: {told}"


def test_where_a_quota_meets_windows_bounded_in_bytes_samples_may_wait(tmp_path: Path) -> None:
    """NP26. Spec: R2.3, R3.3. Each window of rank 1 holds one long sample, so the target is below what is due on rank 0."""
    config = make_config(world_size=2, mode=Mode.QUOTA, budget_tokens=1, max_age_rounds=1, window_samples=4)
    trace = tmp_path / "trace"
    with TraceWriter(trace, config, driver="test") as writer:
        World(
            config,
            make_shards([[1] * 12, [4] * 6]),
            window_bytes=4,
            make_machine=lambda own: Machine(own, writer.record),
        ).run()
    assert check_traces([trace]).violations == ()


def test_a_full_disk_is_said_with_the_name_of_the_trace() -> None:
    """In a job of many files, an errno alone would tell nobody which."""
    with pytest.raises(OSError, match=r"No space left on device: '/dev/full'"):
        TraceWriter("/dev/full", make_config(), driver="test")


def test_a_file_with_no_more_than_a_header_is_a_rank_that_did_nothing(tmp_path: Path) -> None:
    paths = run(tmp_path / "t", is_one_file=False, faults=(Fault("kill", 1, 40),))
    trace = Tampered(paths[1])
    trace.records = []
    trace.write(paths[1])
    assert check_traces(paths).violations == ()
    assert [str(item) for item in check_traces([paths[1]]).violations] == [
        f"FREE rank {rank} round - step -: no trace of this rank" for rank in range(3)
    ]


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_a_file_that_ends_inside_a_line_is_cut_off(tmp_path: Path, suffix: str) -> None:
    (path,) = run(tmp_path / f"t{suffix}")
    data = path.read_bytes()
    cut = tmp_path / f"cut{suffix}"
    cut.write_bytes(data[: len(data) * 2 // 3])
    verdict = check_traces([cut])
    assert {item.property for item in verdict.violations} == {Property.FREE}
    assert f"cut off ({cut} ends inside a line)" in verdict.violations[0].what


@pytest.mark.parametrize(("suffix", "end"), [("", b"\0" * 4096), ("", b'{"rank":0'), (".gz", b"")])
def test_what_may_have_followed_a_finish_is_said(suffix: str, end: bytes, tmp_path: Path) -> None:
    """The disk was full, or the file lacks the trailer with its length."""
    (path,) = run(tmp_path / f"t{suffix}")
    before = check_traces([path]).jobs[0].unsaid
    data = path.read_bytes()
    path.write_bytes(data[:-8] if suffix else data + end)
    verdict = check_traces([path])
    assert verdict.violations == ()
    assert verdict.jobs[0].unsaid == (*before, f"whether anything followed: {path} ends inside a line")


def test_answers_that_no_order_of_events_can_explain_are_refused(tmp_path: Path) -> None:
    """Each rank's file is right by itself, but together each rank agrees before the other has offered."""
    paths = run(tmp_path / "t", is_one_file=False)
    for path in paths:
        trace = Tampered(path)
        rank = trace.records[0]["rank"]
        agreed = trace.answers("agreed", rank)[1]
        post, effect = [item for item in trace.iterate("post_offer", rank)][1]
        post["effects"].remove(effect)
        agreed["effects"].append(effect)
        trace.write(path)
    assert "RELEASE" in find_broken(*paths)


def test_what_does_not_apply_is_not_passed(tmp_path: Path) -> None:
    (path,) = run(tmp_path / "t", mode=Mode.QUOTA, faults=(Fault("fail", 0, 50),))
    job = check_traces([path]).jobs[0]
    reasons = {item.property: item.reason for item in job.properties if item.status is Status.NOT_APPLICABLE}
    assert reasons == {
        Property.COVER: "the epoch was not completed",
        Property.QUOTA: "the epoch was not completed",
        Property.STOP: "no consumer left",
        Property.SIZES: "any number of samples",
        Property.DEAL: "each rank has its own source",
        Property.PEERS: "each rank is one process",
        Property.UPDATE: "free mode",
        Property.RESUME: "does not go on from another trace",
        Property.REPLAY: "not asked for (--replay)",
    }
    assert job.get_status(Property.ABORT) is Status.HOLDS


def test_ranks_that_complete_with_different_configurations_are_refused(tmp_path: Path) -> None:
    paths = run(tmp_path / "t", is_one_file=False)
    trace = Tampered(paths[2])
    trace.header["config"]["tag"] = "another seed"
    trace.write(paths[2])
    violations = check_traces(paths).violations
    assert {(item.property, item.rank) for item in violations} == {(Property.ABORT, 2)}
    assert "continues with the fingerprint" in violations[0].what
    assert "completes with another configuration than other ranks" in {item.what for item in violations}


# The command -------------------------------------------------------------------------------------------------------


def test_the_command_says_what_holds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (path,) = run(tmp_path / "t")
    assert main(["check", str(path), "--replay"]) == 0
    first, *rows = capsys.readouterr().out.splitlines()
    assert first.startswith(f"{path}: test, epoch 0, 3 ranks, ")
    unsaid = "  not known: whether an epoch was trained on twice, or left out: the header does not name its run"
    assert rows[-1] == unsaid
    assert [row.split()[0] for row in rows[:-1]] == [str(item) for item in Property]


def test_the_command_counts_the_samples_set_aside(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """All else holds of the other samples, however many these are. Spec: R9.6."""
    (path,) = run(tmp_path / "t")
    for number in (0, 2):
        trace = Tampered(path)
        trace.header.pop("inputs", None)  # whose digests would include them
        events = [{"kind": "set_aside", "id": 77 + place, "place": place} for place in range(number)]
        trace.records[3:3] = [{"rank": 0, "event": event, "effects": []} for event in events]
        assert main(["check", str(trace.write(path)), "--json", str(tmp_path / "verdict")]) == 0
        assert (f" samples, {number} set aside; outcome" in capsys.readouterr().out) == bool(number)
        assert json.loads((tmp_path / "verdict").read_text())["jobs"][0]["set_aside"] == number


def test_the_command_says_what_does_not_hold(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (path,) = run(tmp_path / "t")
    trace = Tampered(path)
    trace.events("counted", 1)[1]["counts"][0][2] += 1
    trace.write(path)
    assert main(["check", str(path)]) == 1
    assert capsys.readouterr().out.splitlines()[0].startswith("WEIGHT rank 1 round 1 step -: ")
    assert main(["check", str(path), "--json", "-"]) == 1
    answer = json.loads(capsys.readouterr().out)
    assert answer["ok"] is False
    assert answer["jobs"][0]["properties"]["WEIGHT"]["status"] == "violated"
    assert answer["jobs"][0]["violations"][0]["rank"] == 1


@pytest.mark.parametrize("name", ["absent", "binary", "empty", "folder", "absent.gz", "plain.gz"])
def test_a_file_that_cannot_be_read_is_one_line_and_status_2(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "binary").write_bytes(bytes(range(256)))
    (tmp_path / "empty").touch()
    (tmp_path / "folder").mkdir()
    (tmp_path / "plain.gz").write_text("{}")
    assert refuse(capsys, ["check", str(tmp_path / name)]).startswith(f"odb-ref check: {tmp_path / name}")


def test_a_folder_is_all_the_traces_in_it(tmp_path: Path) -> None:
    paths = [*run(tmp_path / "t.ndjson"), *run(tmp_path / "u.ndjson.gz", driver="another")]
    (tmp_path / "notes.txt").write_text("not a trace")
    assert [Path(path) for job in check_traces([tmp_path]).jobs for path in job.paths] == sorted(paths)
