"""The timeline is a Chrome trace-event file. The spans of a track follow one another and add up to the figures."""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from odb_sim.engine.timeline import Timeline, choose_fault_begin
from odb_sim.engine.updates import GlobalBatch
from odb_sim.inputs.conditions import Conditions, parse_fault
from odb_sim.studies.runs import run

from tests.helpers.commands import get_figures
from tests.helpers.simulated import make_run


@pytest.mark.parametrize("policy", ["odb", "standard"])
def test_spans_add_up_and_do_not_overlap(policy: str, tmp_path: Path) -> None:
    path = tmp_path / "timeline.json"
    command = f"simulate sgd_dialogues --ranks 3 --shards uneven --samples 300 --policy {policy} --token-budget 4096"
    command += " --window 32" if policy == "odb" else ""
    figures = get_figures(f"{command} --perfetto {path}")
    events = json.loads(path.read_text())["traceEvents"]
    names = [(event["args"]["name"], event["pid"]) for event in events if event["name"] == "process_name"]
    assert names == [("rank", 0), ("rank", 1), ("rank", 2)], "the viewer puts the number behind the name"
    tracks = {(event["pid"], event["tid"]): event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert not {tid for _, tid in tracks} & {0, 1, 2}, (
        "a thread with its process's number is the main thread to the viewer"
    )
    assert len({tid for _, tid in tracks}) == len(tracks) == 12
    order = [(event["pid"], event["args"]["sort_index"]) for event in events if event["name"].endswith("_sort_index")]
    assert order == [(rank, index) for rank in range(3) for index in (rank, 0, 1, 2, 3)]
    assert all(tracks[event["pid"], event["tid"]] == event["cat"] for event in events if event["ph"] == "X")
    spans = defaultdict(list)
    seconds: dict[str, float] = defaultdict(float)
    counts: dict[str, int] = defaultdict(int)
    for event in events:
        if event["ph"] == "X":
            spans[event["pid"], event["cat"]].append((event["ts"], event["ts"] + event["dur"]))
            seconds[event["name"]] += event["dur"] / 1e6
            counts[event["name"]] += 1
    for track in spans.values():
        track.sort()
        assert all(end <= start + 1e-2 for (_, end), (start, _) in pairwise(track))
    total_s = 3 * figures["sim_time_s"]
    assert counts["idle"] == figures["idle_steps"] > 0
    assert counts["compute"] == 3 * figures["steps"] - figures["idle_steps"]
    assert seconds["compute"] + seconds["idle"] == pytest.approx(figures["compute_share"] * total_s)
    assert seconds["wait for data"] == pytest.approx(figures["data_wait_share"] * total_s, abs=1e-4)
    assert seconds["wait for ranks"] == pytest.approx(figures["trainer_wait_share"] * total_s, abs=1e-4)
    assert seconds["collective"] == pytest.approx(figures["collective_share"] * total_s, abs=1e-4)
    expected = {"fill", "compute", "idle", "wait for data", "wait for ranks", "collective"}
    assert set(counts) == (expected | {"exchange", "collate"} if policy == "odb" else expected)


@pytest.mark.parametrize("fault", ["kill:2:3", "stop:2:3", "kill:2:0", "read:2:90", "collate:2:2"])
@pytest.mark.parametrize("goal", [None, 60])
def test_what_the_others_wait_for_after_a_fault_is_drawn_to_the_end(fault: str, goal: int | None) -> None:
    conditions = Conditions(faults=(parse_fault(fault),), deadline_s=5.0)
    what = make_run("gsm8k", 4, 600, budget_tokens=1024, window_samples=32, conditions=conditions)
    timeline = Timeline()
    summary = run(replace(what, global_batch=GlobalBatch(samples=goal)), timeline=timeline).summary
    assert summary.outcome != "complete"
    ends_s = []
    for rank in (0, 1, 3, 2):
        spans = sorted((span[3], span[4], span[2]) for span in timeline.list_spans([rank]) if span[1] == "trainer")
        assert all(end <= start + 1e-9 for (_, end, _), (start, _, _) in pairwise(spans))
        ends_s.append(spans[-1][1] if spans else 0.0)
        if fault.startswith("kill") and rank != 2:
            assert spans[-1][1] == pytest.approx(summary.sim_time_s)
            assert spans[-1][1] - spans[-1][0] > 4.0, "the wait for the one that is gone, not a blank"
    # Inside an update that a failure cuts short ranks do not meet, and each ends by itself, in the mean at the end.
    is_cut = goal is not None and not fault.startswith(("kill", "stop"))
    end_s = sum(ends_s) / 4 if is_cut else min(ends_s[:3])
    assert end_s >= summary.sim_time_s - 1e-9, "what a rank computes when it is told may go on"


@pytest.mark.parametrize("driven", [(0.5, 2), (10.2, 40), (10.2, 10), (0.0, 0)])
def test_a_fault_is_shown_with_the_steps_before_it(driven: tuple[float, int]) -> None:
    """Steps that were released before it may all begin after it."""
    fault_s, steps = driven
    row = run(make_run("gsm8k", 1, 8, budget_tokens=9)).rows[0]
    rows = [replace(row, start_s=float(number), end_s=number + 1.0) for number in range(steps)]
    begin_s = choose_fault_begin(rows, fault_s)
    assert begin_s <= fault_s
    shown = [row for row in rows if begin_s <= row.start_s < fault_s]
    assert len(shown) == min(8, sum(row.start_s < fault_s for row in rows))
