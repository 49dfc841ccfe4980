"""The command ``odb-ref simulate``: its files, its determinism, and workloads."""

from __future__ import annotations

import csv
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from odb_sim.cli.main import main
from odb_sim.inputs.lengths import load_lengths
from odb_sim.inputs.workload import Sharding, build_workload, compute_shard_sizes

from odb_ref.trace.check import Property, Status, check_traces
from odb_ref.trace.reading import read_trace
from tests.helpers.commands import get_figures

COMMAND = ("simulate", "mm_mix_real", "--token-budget", "4096", "--window", "32")


def simulate(*arguments: str) -> int:
    return main([*COMMAND, *arguments])


def test_a_short_epoch_is_told_with_three_digits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "lengths.csv").write_text("total_tokens\n5\n")
    figures = get_figures(["simulate", str(tmp_path / "lengths.csv"), "--ranks", "1", "--token-budget", "5"])
    assert f"/s) in {figures['sim_time_s']:.3g} simulated seconds" in capsys.readouterr().out


@pytest.mark.parametrize("policy", ["odb", "paper", "standard"])
def test_json_says_what_was_run_and_how_sure_it_is(policy: str, capsys: pytest.CaptureFixture[str]) -> None:
    window, depth = (None, None) if policy == "standard" else (32, 8)
    command = COMMAND if window else COMMAND[:4]
    figures = get_figures(command, "--ranks", "4", "--samples", "400", "--policy", policy)
    assert figures["policy"] == policy
    assert (figures["ranks"], figures["window"], figures["depth"]) == (4, window, depth)
    assert figures["samples_total"] == figures["samples_emitted"] == figures["samples_unique"] == 400
    shown = capsys.readouterr().out
    assert f"{figures['tokens_per_s']:,.0f} tokens/s" in shown
    assert re.search(rf"efficiency +{figures['efficiency']:.4f}", shown)
    assert f"All {len(figures) - 2} figures" in shown, "bands and cautions are not figures"
    for name in ("sim_time_s", "tokens_per_s"):
        assert figures["band"][name]["low"] < figures[name] < figures["band"][name]["high"]
    assert sum(figures["band"]["because"].values()) == pytest.approx(1)
    assert "Nine times of ten " in shown
    assert len(shown.splitlines()) < 28


@pytest.mark.parametrize(
    "options", [["--fault", "kill:1:3"], ["--samples", "120000", "--ranks", "8", "--window", "256"]]
)
def test_a_run_that_ends_early_or_is_long_has_no_band(options: list[str]) -> None:
    assert get_figures(COMMAND, "--ranks", "4", "--samples", "400", *options)["band"] is None


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["join", "quota"])
@pytest.mark.parametrize("policy", ["odb", "paper"])
def test_same_seed_same_trace_bytes_in_another_process(policy: str, mode: str, tmp_path: Path) -> None:
    arguments = ["--ranks", "8", "--shards", "uneven", "--samples", "500", "--policy", policy, "--mode", mode]
    here, there, other = (tmp_path / name for name in ("here", "there", "other"))
    assert simulate(*arguments, "--trace", str(here)) == 0
    command = [sys.executable, "-m", "odb_sim.cli.main", "simulate", "mm_mix_real", "--token-budget", "4096"]
    # A seed different from that of this process, which may have been given one.
    hash_seed = "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"
    subprocess.run(
        [*command, "--window", "32", *arguments, "--trace", str(there)],
        env={"PYTHONHASHSEED": hash_seed},
        check=True,
        capture_output=True,
    )
    assert here.read_bytes() == there.read_bytes()
    assert simulate(*arguments, "--seed", "1", "--trace", str(other)) == 0
    assert other.read_bytes() != here.read_bytes()


def test_the_trace_is_one_of_the_core_with_rising_times(tmp_path: Path) -> None:
    path = tmp_path / "t.ndjson.gz"
    assert simulate("--ranks", "3", "--samples", "200", "--trace", str(path)) == 0
    header, lines = read_trace(path)
    assert (header.world_size, header.driver) == (3, "simulator")
    records = list(lines)
    times = [record.time_s for record in records if record.time_s is not None]
    assert len(times) == len(records)
    assert times == sorted(times)
    delivered = sum(effect["kind"] == "deliver" for record in records for effect in record.effects)
    taken = sum(record.event is not None and record.event["kind"] == "step_taken" for record in records)
    assert delivered == taken == 3 * 12


def test_steps_csv_adds_up_to_the_figures(tmp_path: Path) -> None:
    steps = tmp_path / "steps.csv"
    few = ("--ranks", "4", "--samples", "1000", "--shards", "uneven")
    summary = get_figures(COMMAND, *few, "--steps-csv", str(steps))
    with steps.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [int(row["step"]) for row in rows] == list(range(summary["steps"]))
    assert sum(int(row["critical_tokens"]) for row in rows) == summary["critical_tokens"]
    assert sum(int(row["idle_ranks"]) for row in rows) == summary["idle_steps"]
    assert float(rows[-1]["end_s"]) == pytest.approx(summary["sim_time_s"], abs=1e-5)


def test_no_progress_bar_where_there_is_no_terminal(capfd: pytest.CaptureFixture[str]) -> None:
    assert simulate("--ranks", "2", "--samples", "100") == 0
    out, err = capfd.readouterr()
    assert err == ""
    assert "\x1b" not in out


@pytest.mark.parametrize("sharding", list(Sharding))
@pytest.mark.parametrize(("samples", "ranks"), [(1, 1), (7, 7), (8, 7), (100, 7), (1000, 64), (200_000, 1024)])
def test_shards_hold_every_sample_and_nobody_has_none(samples: int, ranks: int, sharding: Sharding) -> None:
    sizes = compute_shard_sizes(samples, ranks, sharding)
    assert sizes.sum() == samples
    assert sizes.min() >= 1
    if sharding is not Sharding.UNEVEN:
        assert sizes.max() - sizes.min() <= 1
    elif samples > 10 * ranks > 10:
        assert sizes.max() > 2 * samples / ranks > 20 * sizes.min()


def test_a_workload_is_the_trace_shuffled_once() -> None:
    lengths = load_lengths("gsm8k")
    workload = build_workload(lengths, ranks=5, seed=1)
    assert sorted(workload.ids.tolist()) == list(range(len(lengths)))
    assert (lengths.tokens[workload.ids] == workload.tokens).all()
    assert (lengths.supervised_tokens[workload.ids] == workload.supervised_tokens).all()
    assert (workload.ids != build_workload(lengths, ranks=5, seed=2).ids).any()
    assert (workload.ids == build_workload(lengths, ranks=9, seed=1).ids).all()


def test_drawn_samples_repeat_rows_and_never_ids() -> None:
    workload = build_workload(load_lengths("gsm8k"), ranks=2, samples=50_000)
    assert len(np.unique(workload.ids)) == 50_000
    read = workload.read_samples(1, 24_990, 20)
    assert [sample.position for sample in read] == list(range(24_990, 25_000))
    assert [sample.id for sample in read] == list(range(49_990, 50_000))


def test_a_limit_on_a_column_holds_in_every_batch(tmp_path: Path) -> None:
    path = tmp_path / "t.ndjson"
    few = ("--ranks", "2", "--samples", "300")
    limits = ("--limit", "image_tokens=1500", "--limit", "width=4000")
    limited = get_figures(COMMAND, *few, *limits, "--trace", str(path))
    assert limited["steps"] > 1.1 * get_figures(COMMAND, *few)["steps"], "they are reached"
    (job,) = check_traces([path], is_replayed=True).jobs
    assert job.is_ok and job.get_status(Property.BUDGET) is Status.HOLDS
    assert main(["replay", str(path)]) == 0
    header, _ = read_trace(path)
    assert header.config["limits"] == [1500, 4000]


def test_the_columns_that_are_limited_follow_their_samples() -> None:
    lengths = load_lengths("mm_mix_real", ("width", "height"))
    workload = build_workload(lengths, ranks=2, seed=3)
    assert (lengths.resources[workload.ids] == workload.resources).all()
    (sample,) = workload.read_samples(1, 7, 1)
    assert sample.costs == tuple(lengths.resources[sample.id].tolist())
    assert build_workload(load_lengths("mm_mix_real"), ranks=2).read_samples(0, 0, 1)[0].costs == ()
