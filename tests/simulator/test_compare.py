"""``odb-ref compare`` over many traces: one table, one memory limit, and the settings of every policy."""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from odb_sim.cli.main import main
from odb_sim.inputs.lengths import Lengths, list_bundled_names, load_lengths
from odb_sim.studies.cells import Runner
from odb_sim.studies.comparison import choose_budget, choose_window, compare
from odb_sim.studies.runs import POLICIES

from odb_ref.core.types import Mode
from tests.helpers.commands import get_figures, refuse
from tests.helpers.simulated import make_run


def make(tokens: list[int]) -> Lengths:
    return Lengths("test", np.array(tokens), np.array(tokens))


def test_the_budget_is_the_memory_of_a_fixed_batch() -> None:
    assert choose_budget(make([3, 100, 7])) == 400
    assert choose_budget(make([3, 100, 7]), 2) == 200


def test_the_window_holds_enough_batches_or_the_shard() -> None:
    lengths = make([100] * 1000)
    assert choose_window(lengths, 1600, shard_samples=1000) == 256
    assert choose_window(lengths, 1601, shard_samples=1000) == 512
    assert choose_window(lengths, 100_000, shard_samples=1000) == 1024
    assert choose_window(lengths, 100_000, shard_samples=10) == 256


def test_a_baseline_that_loses_samples_is_a_row_that_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lengths = tmp_path / "five.csv"
    lengths.write_text("total_tokens\n100\n200\n300\n400\n5000\n")
    figures = get_figures(["compare", str(lengths), "--ranks", "2"])
    assert [item["samples_emitted"] for item in figures] == [4 if item["policy"] == "peer" else 5 for item in figures]
    assert "five: policy peer loses 1 sample of 5" in capsys.readouterr().out
    command = ["sweep", str(lengths), "--ranks", "2", "--token-budget", "20000", "--policy", "odb,peer"]
    assert [item["samples_emitted"] for item in get_figures(command)] == [5, 4]
    runs = [make_run([100, 200, 300], 2, policy=policy, budget_tokens=500, window_samples=2) for policy in POLICIES]
    assert {what.policy for what in runs if what.expected_samples != 3} == {"peer"}, "of others it is an error"


def test_policies_that_deal_batches_evenly_say_so(capsys: pytest.CaptureFixture[str]) -> None:
    """They would look fast beside a policy whose ranks have uneven shards, for that reason alone."""
    few = ["gsm8k", "--ranks", "3", "--samples", "60", "--policy", "odb,standard,hfg,gmt,peer", "--shards"]
    for shards, kept in (("uneven", {"odb", "standard", "peer"}), ("shared", {"odb"}), ("even", {*few[6].split(",")})):
        figures = get_figures(["compare", *few, shards])
        assert {item["policy"]: item["shards"] for item in figures} == {
            policy: shards if policy in kept else "even" for policy in few[6].split(",")
        }
        even = ", ".join(policy for policy in few[6].split(",") if policy not in kept)
        said = capsys.readouterr().out
        assert f"({shards} shards{f', but even ones for {even}' if even else ''})" in said
        get_figures(["sweep", *few, shards, "--token-budget", "2000"])
        assert f", {shards} shards{f', but even ones for {even}' if even else ''}" in capsys.readouterr().out


@pytest.mark.deep
def test_every_trace_is_in_one_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = {kind: tmp_path / f"out.{kind}" for kind in ("json", "csv")}
    options = [f"--{kind}={path}" for kind, path in paths.items()]
    arguments = ["--all", "--ranks", "2", "--samples", "200", "--policy", "odb,standard,gmt", *options]
    assert main(["compare", *arguments]) == 0
    figures = json.loads(paths["json"].read_text())
    assert [(item["lengths"], item["policy"]) for item in figures] == [
        (name, policy) for name in list_bundled_names() for policy in ("odb", "standard", "gmt")
    ]
    for name in list_bundled_names():
        own = [item for item in figures if item["lengths"] == name]
        assert len({(item["token_budget"], item["samples_total"]) for item in own}) == 1
        assert [item["window"] for item in own] == [256, None, None]
        assert own[0]["token_budget"] == 4 * load_lengths(name).tokens.max()
        odb, standard, _ = own
        assert standard["batch_size"] >= 4
        assert standard["speedup"] == 1
        assert standard["speedup_low"] == standard["speedup_high"] == 1
        assert (
            odb["speedup_low"] < odb["speedup"] < odb["speedup_high"] < 3 * odb["speedup_low"]
        )  # of a hundred samples
        assert odb["speedup"] == pytest.approx(odb["accumulated_samples_per_s"] / standard["accumulated_samples_per_s"])
    with paths["csv"].open(newline="") as file:
        assert [row["steps"] for row in csv.DictReader(file)] == [str(item["steps"]) for item in figures]
    lines = capsys.readouterr().out.splitlines()
    for name in list_bundled_names():
        rows = [line.split() for line in lines if line.strip().startswith(name)]
        assert len(rows) == 11, (
            "what it was given, speed-ups, bands, updates, efficiency, excess, steps, padding, and what it comes to"
        )
        own = [item for item in figures if item["lengths"] == name]
        assert [row[1:] for row in rows[8:9]] == [[f"{item['steps']:,}" for item in own]]


def test_a_ratio_of_samples_of_other_lengths_is_given_in_tokens_too() -> None:
    """In quota mode online batches hold back long samples, so those within a quota are shorter."""
    budget = choose_budget(load_lengths("mm_mix_real"))
    what = make_run("mm_mix_real", 8, budget_tokens=budget, window_samples=1024)
    quota = replace(what, mode=Mode.QUOTA, quota_samples=1000)
    ((one,), _), ((other,), _) = (compare([run], ["odb", "standard"]) for run in (quota, what))
    odb, standard = one.accumulated
    in_tokens = (odb.real_tokens / odb.sim_time_s) / (standard.real_tokens / standard.sim_time_s)
    assert in_tokens < 0.9 * one.compute_speedup(one.chosen)
    (said,) = [caution.text for caution in one.cautions if "speed-ups are of samples" in caution.text]
    assert f"the speed-ups of tokens are odb {in_tokens:.2f} (samples of " in said
    assert not any("speed-ups are of samples" in caution.text for caution in other.cautions)


def test_several_traces_may_be_named_and_a_budget_given() -> None:
    options = "--ranks 2 --samples 100 --token-budget 3000 --window 32 --policy odb,standard"
    figures = get_figures(f"compare gsm8k sgd_dialogues {options}")
    assert {(item["token_budget"], item["window"]) for item in figures} == {(3000, 32), (3000, None)}
    assert len(figures) == 4


def test_progress_rises_to_the_end_over_all_runs() -> None:
    runs = [make_run(name, 2, 100, budget_tokens=4096) for name in ("gsm8k", "mm_mix_real")]
    heard: list[int] = []
    compare(runs, ["odb", "standard"], Runner(on_done=heard.append))
    assert heard == sorted(heard)
    assert heard[-1] == 8


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], "needs LENGTHS or --all"),
        (["gsm8k", "--all"], "needs LENGTHS or --all"),
        (["gsm8k", "gsm8k"], "named twice"),
        (["gsm8k", "--batch-size", "0"], "at least 1 sample"),
        (["gsm8k", "nothing"], "no such file"),
        (["gsm8k", "--csv", "none/x.csv"], "cannot be written"),
        (["gsm8k", "--policy", "odb,magic"], "unknown policy 'magic'"),
        (["gsm8k", "--policy", "odb,odb"], "has an empty name, or the same name twice"),
        (["gsm8k", "--policy", ","], "has an empty name"),
        (["gsm8k", "--global-batch", "0"], "at least 1"),
        (["gsm8k", "--global-tokens", "-1"], "at least 1"),
        (["gsm8k", "--global-tokens", "5", "--global-batch", "5"], "not both"),
        (["gsm8k", "--global-batch", "7", "--ranks", "8"], "without one"),
    ],
)
def test_bad_input_is_one_line_and_status_2(
    arguments: list[str], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert expected in refuse(capsys, ["compare", *arguments])
