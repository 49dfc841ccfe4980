"""The timeline is a Chrome trace-event file. The spans of a track follow one another and add up to the figures."""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from odb_sim.cli.main import main
from odb_sim.engine.timeline import Span, Timeline, choose_fault_begin
from odb_sim.engine.updates import GlobalBatch
from odb_sim.inputs.conditions import Conditions, parse_fault
from odb_sim.inputs.lengths import load_lengths
from odb_sim.inputs.workload import build_workload
from odb_sim.studies.runs import Run, run

from tests.helpers.commands import get_figures


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


Fields = dict[int, list["int | bytes"]]


def read_varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        value |= (data[at] & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if data[at - 1] < 0x80:
            return value, at


def decode(data: bytes) -> Fields:
    """Returns the fields of a protocol buffer: integers, and bytes for anything nested."""
    fields: Fields = defaultdict(list)
    at = 0
    while at < len(data):
        key, at = read_varint(data, at)
        value, at = read_varint(data, at)
        if key & 7 == 2:
            fields[key >> 3].append(data[at : at + value])
            at += value
        else:
            assert key & 7 == 0
            fields[key >> 3].append(value)
    return fields


def get_bytes(fields: Fields, number: int) -> bytes:
    (value,) = fields[number]
    assert isinstance(value, bytes)
    return value


def test_perfetto_s_own_format_says_the_same() -> None:
    timeline = Timeline()
    spans: list[Span] = [
        (0, "trainer", "compute", 0.25, 1.5),
        (0, "reader", "fill", 0.0, 0.1),
        (10, "trainer", "idle", 1.5, 300.125),
        (2, "exchange", "exchange", 0.5, 0.75),
    ]
    for span in spans:
        timeline.add(*span)
    timeline.add(0, "reader", "nothing", 1.0, 1.0)
    packets = [decode(packet) for packet in decode(b"".join(timeline.encode_packets()))[1] if isinstance(packet, bytes)]
    assert [packet[10] for packet in packets] == [[1]] * len(packets), "one sequence"
    assert [packet.get(13) for packet in packets] == [[1]] + [None] * (len(packets) - 1)
    described = [decode(get_bytes(packet, 60)) for packet in packets if 60 in packet]
    names = {track[1][0]: get_bytes(track, 2).decode() for track in described}
    parents = {track[1][0]: track[5][0] for track in described if 5 in track}
    assert len(names) == len(described) == 3 * 5
    assert [names[track[1][0]] for track in described if 5 not in track] == ["rank 00", "rank 02", "rank 10"]
    assert [track[12] for track in described if track.get(5) == described[0][1]] == [[0], [1], [2], [3]]
    found: list[tuple[str, str, str, float, float]] = []
    begun: dict[int | bytes, tuple[str, float]] = {}
    for packet in packets:
        if 11 not in packet:
            continue
        event, (at_ns,) = decode(get_bytes(packet, 11)), packet[8]
        (track,) = event[11]
        assert isinstance(at_ns, int)
        if event[9] == [1]:
            assert get_bytes(event, 22).decode() == names[track]
            begun[track] = get_bytes(event, 23).decode(), at_ns / 1e9
        else:
            assert event[9] == [2]
            name, start_s = begun.pop(track)
            found.append((names[parents[track]], names[track], name, start_s, at_ns / 1e9))
    assert not begun
    assert found == [(f"rank {rank:02}", *rest) for rank, *rest in spans]


def test_the_name_of_the_file_chooses_the_format(tmp_path: Path) -> None:
    arguments = ["simulate", "gsm8k", "--ranks", "2", "--samples", "60", "--token-budget", "2048", "--perfetto"]
    assert main([*arguments, str(tmp_path / "t.pftrace")]) == 0
    assert main([*arguments, str(tmp_path / "t.json")]) == 0
    assert json.loads((tmp_path / "t.json").read_text())["displayTimeUnit"] == "ms"
    assert b"rank 1" in (tmp_path / "t.pftrace").read_bytes()


@pytest.mark.parametrize("fault", ["kill:2:3", "stop:2:3", "kill:2:0", "read:2:90", "collate:2:2"])
@pytest.mark.parametrize("goal", [None, 60])
def test_what_the_others_wait_for_after_a_fault_is_drawn_to_the_end(fault: str, goal: int | None) -> None:
    conditions = Conditions(faults=(parse_fault(fault),), deadline_s=5.0)
    workload = build_workload(load_lengths("gsm8k"), ranks=4, samples=600)
    what = Run(workload=workload, policy="odb", budget_tokens=1024, window_samples=32, conditions=conditions)
    timeline = Timeline()
    summary = run(replace(what, global_batch=GlobalBatch(samples=goal)), timeline=timeline).summary
    assert summary.outcome != "complete"
    for rank in (0, 1, 3):
        spans = sorted((span[3], span[4], span[2]) for span in timeline.list_spans([rank]) if span[1] == "trainer")
        assert all(end <= start + 1e-9 for (_, end, _), (start, _, _) in pairwise(spans))
        assert spans[-1][1] >= summary.sim_time_s - 1e-9, "what a rank computes when it is told may go on"
        if fault.startswith("kill"):
            assert spans[-1][1] == pytest.approx(summary.sim_time_s)
            assert spans[-1][1] - spans[-1][0] > 4.0, "the wait for the one that is gone, not a blank"


@pytest.mark.parametrize("driven", [(0.5, 2), (10.2, 40), (10.2, 10), (0.0, 0)])
def test_a_fault_is_shown_with_the_steps_before_it(driven: tuple[float, int]) -> None:
    """Steps that were released before it may all begin after it."""
    fault_s, steps = driven
    row = run(
        Run(workload=build_workload(load_lengths("gsm8k"), ranks=1, samples=8), policy="odb", budget_tokens=9)
    ).rows[0]
    rows = [replace(row, start_s=float(number), end_s=number + 1.0) for number in range(steps)]
    begin_s = choose_fault_begin(rows, fault_s)
    assert begin_s <= fault_s
    shown = [row for row in rows if begin_s <= row.start_s < fault_s]
    assert len(shown) == min(8, sum(row.start_s < fault_s for row in rows))
