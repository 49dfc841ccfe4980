"""The timeline is a Chrome trace-event file whose spans of a track follow one another and add up to the figures."""

from __future__ import annotations

import json
from collections import defaultdict
from itertools import pairwise
from pathlib import Path

import pytest

from simulator.cli import main


@pytest.mark.parametrize("policy", ["odb", "standard"])
def test_spans_add_up_and_do_not_overlap(policy: str, tmp_path: Path) -> None:
    path, figures_path = tmp_path / "timeline.json", tmp_path / "figures.json"
    arguments = [
        "simulate",
        "sgd_dialogues",
        "--ranks",
        "3",
        "--shards",
        "uneven",
        "--samples",
        "300",
        "--window",
        "32",
    ]
    arguments += ["--token-budget", "4096", "--policy", policy, "--perfetto", str(path), "--json", str(figures_path)]
    assert main(arguments) == 0
    figures = json.loads(figures_path.read_text())
    events = json.loads(path.read_text())["traceEvents"]
    names = [event["args"]["name"] for event in events if event["name"] == "process_name"]
    assert names == ["rank 0", "rank 1", "rank 2"]
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
    expected = {"fill", "compute", "idle", "wait for data", "wait for ranks"}
    assert set(counts) == (expected | {"exchange", "collate"} if policy == "odb" else expected)
