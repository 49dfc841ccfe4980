"""`odb-ref plan`: its figures are consistent, its recommendation can be run, and its page shows both."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from odb_sim.cli.main import main
from odb_sim.inputs.cost_files import load_costs, write_costs
from odb_sim.inputs.costs import NO_COLLECTIVE, Costs, GpuCost, LoaderCost, StepTable
from odb_sim.inputs.jobs import build_job
from odb_sim.inputs.lengths import Lengths
from odb_sim.studies.plan import Wanted
from odb_sim.studies.runs import Result, Run, run

from odb_ref.core.batching.updates import PADDING_SHARE
from tests.helpers.commands import get_figures, hear, refuse, tell

SAMPLES = 240
SMALL = "--model qwen2.5-0.5b --gpu rtx4090 --gpus 4 --strategy ddp --processes 1"


@pytest.fixture(scope="module")
def lengths(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("plan") / "lengths.csv"
    tokens = np.clip(np.random.default_rng(3).lognormal(5, 0.7, SAMPLES), 8, 1500).astype(int)
    path.write_text("total_tokens\n" + "\n".join(map(str, tokens)) + "\n")
    return path


@pytest.fixture(scope="module")
def made(lengths: Path) -> tuple[dict[str, Any], Path]:
    folder = lengths.parent
    options = f"--global-batch 32 --epochs 3 --price 900000 --json {folder / 'p.json'} --html {folder / 'p.html'}"
    assert main(["plan", str(lengths), *f"{SMALL} {options} --write-costs {folder / 'planned.json'}".split()]) == 0
    figures: dict[str, Any] = json.loads((folder / "p.json").read_text())
    return figures, folder


def test_hours_money_and_speed_ups_follow_from_the_time(made: tuple[dict[str, Any], Path]) -> None:
    figures, _ = made
    ways = figures["ways"]
    assert [way["name"] for way in ways][::2] == ["online batches", "online, packed rows"]
    assert figures["samples"] == 3 * SAMPLES
    for way in ways:
        summary = way["summary"]
        assert way["seconds"] == pytest.approx(summary["sim_time_s"] / summary["samples_emitted"] * 3 * SAMPLES)
        assert way["gpu_hours"] == pytest.approx(way["seconds"] * 4 / 3600)
        assert way["usd"] == pytest.approx(900_000 * way["gpu_hours"])
        assert way["speedup"] == pytest.approx(ways[1]["seconds"] / way["seconds"])
        assert summary["samples_per_update"] == pytest.approx(32, rel=0.1)
        for name, band in way["bands"].items():
            assert band["low"] <= way[name] <= band["high"], name
        assert way["bands"]["usd"]["low"] == pytest.approx(900_000 * way["bands"]["gpu_hours"]["low"]), (
            "the price is certain"
        )
        low, high = way["bands"]["speedup"]["low"], way["bands"]["speedup"]["high"]
        assert high / low < way["bands"]["seconds"]["high"] / way["bands"]["seconds"]["low"], "most slows both"
        assert way["token_budget"] <= figures["memory"]["range"][0]
    assert ways[1]["bands"]["speedup"]["low"] == ways[1]["bands"]["speedup"]["high"] == 1


def test_the_lines_that_it_prints_can_be_run(
    made: tuple[dict[str, Any], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    figures, folder = made
    monkeypatch.chdir(folder)
    loader, torchrun, simulate = figures["commands"]
    best = figures["ways"][0]
    assert f"token_budget={best['token_budget']}, update_samples=32," in loader
    assert torchrun == "torchrun --nnodes 1 --nproc-per-node 4 train.py"
    program, *arguments = shlex.split(simulate, comments=True)
    assert program == "odb-ref"
    arguments[1] = "lengths.csv"
    assert get_figures(arguments)["sim_time_s"] == pytest.approx(best["summary"]["sim_time_s"])


def test_the_answer_says_why_its_budget_is_far_below_the_memory(
    lengths: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    figures = plan(lengths, SMALL)
    low, budget = figures["memory"]["range"][0], figures["ways"][0]["token_budget"]
    said = hear(capsys)
    assert f"({low:,} to " in said
    assert f"up to the low end no budget is notably faster than {budget:,}." in said
    smallest = low // 8 // 64 * 64
    assert (f"no budget below {smallest:,} was tried" in said) == (budget == smallest)
    figures = plan(lengths, f"{SMALL} --memory-tokens {16 * budget}")
    assert figures["ways"][0]["token_budget"] == 2 * budget
    assert f"no budget below {2 * budget:,} was tried" in hear(capsys)


def plan(lengths: Path, options: str) -> dict[str, Any]:
    """Returns all figures of a plan."""
    figures: dict[str, Any] = get_figures(f"plan {lengths} {options}")
    return figures


def test_each_node_starts_as_many_ranks(lengths: Path) -> None:
    assert "--nnodes 2 --nproc-per-node 6 " in plan(lengths, f"{SMALL} --gpus 12")["commands"][1]


def test_where_a_step_costs_much_a_group_may_hold_more_padding(lengths: Path) -> None:
    """Spec: R16.3. Every micro-step gathers weights, so fewer and fuller micro-steps are faster."""
    job = "--model qwen2.5-7b --gpu h100 --gpus 8 --strategy fsdp --global-batch 64 --processes 1"
    loader, _, simulate = plan(lengths, job)["commands"]
    (share,) = re.findall(r"update_samples=64, batching=Batching\(padding_share=(\d+)\)", loader)
    assert int(share) < PADDING_SHARE
    assert f"--padding-share {share}" in simulate


def test_each_way_has_the_batches_that_are_fastest_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The alternatives are not slowed down by the largest batches that fit: padded to 8,000 tokens, or fewer than ranks."""
    monkeypatch.chdir(tmp_path)
    tokens = np.clip(np.random.default_rng(3).lognormal(7, 1, SAMPLES), 8, 8000).astype(int)
    Path("long.csv").write_text("total_tokens\n" + "\n".join(map(str, tokens)) + "\n")
    options = "--global-batch 32 --memory-tokens 32000 --json plan.json --write-costs costs.json"
    assert main(["plan", "long.csv", *f"{SMALL} {options}".split()]) == 0
    ways = json.loads(Path("plan.json").read_text())["ways"]
    for way, policy in ((ways[1], "standard"), (ways[3], "packing")):
        for budget in (32000, 16000, 8000):
            run = f"--ranks 4 --policy {policy} --token-budget {budget} --global-batch 32 --json run.json"
            assert main(["simulate", "long.csv", *run.split(), "--cost-model", "costs.json"]) == 0
            took_s = json.loads(Path("run.json").read_text())["sim_time_s"]
            assert way["summary"]["sim_time_s"] <= 1.011 * took_s


def test_the_cost_model_that_it_writes_has_ranges(made: tuple[dict[str, Any], Path]) -> None:
    costs = load_costs(made[1] / "planned.json")
    rows = {name: (low, high) for name, low, high in costs.ranges.rows}
    low, high = rows["gpu.per_token_s"]
    assert low < costs.gpu.per_token_s < high
    assert 1.2 < high / low < 3
    assert costs.gpu != Costs().gpu


def test_the_page_says_it_first(made: tuple[dict[str, Any], Path]) -> None:
    figures, folder = made
    text = (folder / "p.html").read_text()
    headline = re.search(r"<h1>(.*?)</h1>", text)
    assert headline is not None
    assert f"{figures['ways'][0]['speedup']:.2f} times as fast" in headline[1]
    assert text.index("Nine times of ten") < text.index("<h2>")
    assert figures["commands"][1] in text
    usd = figures["ways"][0]["bands"]["usd"]
    assert text.count(f"{usd['low']:,.0f} to {usd['high']:,.0f}") == 3, "in the band, the paragraph and the table"


def test_a_run_of_tokens_and_steps_of_their_own(lengths: Path, capsys: pytest.CaptureFixture[str]) -> None:
    figures = plan(lengths, f"{SMALL} --tokens 1000000 --memory-tokens 4000 --recompute no --price 0")
    said = hear(capsys)
    assert "1,000,000 tokens of lengths" in said
    assert "Caution: without --global-batch each step of online batches is an update" in said
    mean = np.loadtxt(lengths, skiprows=1).mean()
    assert figures["samples"] == pytest.approx(1_000_000 / mean)
    assert figures["ways"][0]["token_budget"] <= 4000
    assert figures["ways"][0]["bands"]["usd"]["high"] == figures["ways"][0]["usd"] == 0
    assert "batching=Batching(window=" in figures["commands"][0]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("--epochs 0", "--epochs must be more than 0"),
        ("--tokens 0", "--tokens must be at least 1"),
        ("--global-batch 3", "is less than one sample for each of 4 ranks"),
        ("--gpus 500", f"{SAMPLES} samples are too few for 500 ranks"),
        ("--model nothing", "--model nothing"),
        ("--memory-tokens 0", "--memory-tokens"),
        ("--epochs 2 --tokens 100", "leave one out"),
        ("--memory-tokens 7", "--memory-tokens 7: the shortest sample has 20"),
    ],
)
def test_what_makes_no_sense_is_refused(
    given: str, said: str, lengths: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert said in refuse(capsys, ["plan", str(lengths), *f"{SMALL} {given}".split()])


def test_what_was_timed_was_timed_as_the_run_is(lengths: Path, tmp_path: Path) -> None:
    """Measured costs do not include recomputed activations. Otherwise these would look free, and their budgets faster."""
    costs = tmp_path / "costs.json"
    write_costs(costs, Costs(gpu=GpuCost(fixed_s=1.0, per_token_s=1e-5)))
    for options, recomputes in (("", False), ("--recompute yes", True)):
        asked = f"{SMALL} --global-batch 256 {options} --cost-model {costs} --html {tmp_path / 'p.html'}"
        assert plan(lengths, asked)["recomputes"] is recomputes
    assert "Times are those of --cost-model: a micro-batch 1 s, a token 1e-05 s" in (tmp_path / "p.html").read_text()
    write_costs(costs, Costs(step_table=StepTable(rows=((1.0, 0.1), (9000.0, 0.5)))))
    plan(lengths, asked)
    assert "--cost-model: a table of the seconds of 2 sizes of micro-batches. " in (tmp_path / "p.html").read_text()


def test_a_loader_that_is_assumed_is_named_where_it_matters(
    lengths: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    costs = tmp_path / "costs.json"
    said = "is waiting for data, by a loader that is assumed (4 workers, 0.001 s a sample"
    for gpu, loader, is_said in (
        (GpuCost(fixed_s=1.0), LoaderCost(), False),
        (GpuCost(fixed_s=0.0, per_token_s=1e-8), LoaderCost(), True),
        (GpuCost(fixed_s=0.0, per_token_s=1e-8), LoaderCost(sample_s=2e-3), False),
    ):
        write_costs(costs, Costs(gpu=gpu, loader=loader))
        assert (said in tell(capsys, f"plan {lengths} {SMALL} --cost-model {costs}")) == is_said


def test_sharded_ranks_meet_in_each_micro_batch_whatever_was_timed(lengths: Path, tmp_path: Path) -> None:
    """A table of timed steps does not record it, and without it fixed batches would not seem to wait for one another."""
    costs = tmp_path / "costs.json"
    write_costs(costs, Costs(gpu=GpuCost(fixed_s=0.01, per_token_s=1e-4), collective=NO_COLLECTIVE))
    speedups = {}
    for strategy in ("ddp", "fsdp"):
        asked = f"--model qwen2.5-0.5b --gpu h100 --gpus 8 --strategy {strategy} --processes 1 --global-batch 64"
        speedups[strategy] = plan(lengths, f"{asked} --cost-model {costs}")["ways"][0]["speedup"]
    assert speedups["fsdp"] > 1.05 * speedups["ddp"]


def test_memory_that_is_known_gains_nothing_by_computing_again(
    lengths: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The faster setting is chosen even if it does not hold the longest sample."""
    tokens = int(np.loadtxt(lengths, skiprows=1).max()) - 1
    asked = f"{SMALL} --global-batch 32 --memory-tokens {tokens}"
    assert not plan(lengths, asked)["recomputes"]
    assert "Caution: 1 sample is longer than the 1,472 tokens that fit by" in hear(capsys)
    assert plan(lengths, f"{asked} --recompute yes")["recomputes"]
    assert "cut it. " in hear(capsys) + " "


def test_nodes_are_filled_as_torchrun_fills_them(lengths: Path) -> None:
    """Thirteen GPUs are thirteen nodes of one, also in the price."""
    seconds = []
    for nodes in ("", "--node-gpus 1"):
        asked = f"--model qwen2.5-0.5b --gpu h100 --gpus 13 --processes 1 --global-batch 64 {nodes}"
        figures = plan(lengths, asked)
        assert "torchrun --nnodes 13 --nproc-per-node 1 train.py" in figures["commands"]
        seconds.append(figures["ways"][0]["seconds"])
        told = "13 GPUs are 1 on each of 13 nodes, since torchrun starts as many on all"
        assert any(told in text for text in figures["cautions"]) == (not nodes)
    assert seconds[0] == seconds[1]


def test_a_cost_model_that_is_written_says_for_how_many_ranks(
    made: tuple[dict[str, Any], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = made[1]
    assert load_costs(folder / "planned.json").fitted.ranks == 4
    said = tell(capsys, f"simulate gsm8k --ranks 8 --token-budget 20000 --cost-model {folder / 'planned.json'}")
    assert "fitted to runs of 4 ranks, and 8 are simulated" in said


def write_lengths(path: Path, tokens: list[int]) -> Path:
    path.write_text("total_tokens\n" + "\n".join(map(str, tokens)) + "\n")
    return path


def test_the_search_sees_a_part_and_the_figures_are_of_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One long sample determines the size of fixed batches and the memory, whatever the seed."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("odb_sim.studies.plan.LARGEST_SEARCHED", (256, 256))
    tokens = np.random.default_rng(1).integers(50, 400, 1000).tolist()
    tokens[777] = 9000
    write_lengths(tmp_path / "lengths.csv", tokens)
    figures = plan(Path("lengths.csv"), f"{SMALL} --gpu l40s --global-batch 32 --seed 1 --write-costs planned.json")
    said = hear(capsys)
    online, fixed, *_ = figures["ways"]
    assert fixed["name"] == "fixed batches of 1"
    assert (
        "searched for with 256 samples, spread evenly over the 1,000 sorted by length; the figures are those of all"
        in said
    )
    assert online["summary"]["samples_emitted"] == 1000
    assert online["seconds"] == online["summary"]["sim_time_s"]
    found = get_figures(shlex.split(figures["commands"][-1], comments=True)[1:])
    assert found["sim_time_s"] == pytest.approx(online["seconds"])


def test_even_of_a_part_memory_is_that_of_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("odb_sim.studies.plan.LARGEST_SEARCHED", (256, 256))
    monkeypatch.setattr("odb_sim.studies.plan.LARGEST_SIMULATED", (512, 512))
    tokens = [*np.random.default_rng(1).integers(50, 400, 1000).tolist(), *range(7000, 7010)]
    asked = f"{SMALL} --global-batch 32 --memory-tokens 2000 --recompute no"
    figures = plan(write_lengths(tmp_path / "lengths.csv", tokens), asked)
    said = hear(capsys)
    assert "the 1,010 sorted by length; the figures are those of 512" in said
    assert figures["ways"][0]["summary"]["samples_emitted"] == 512
    assert "10 samples are longer than the budget of" in said
    assert "for the longest of 7,009 padded tokens" in said


def test_evenly_spaced_lengths_keep_the_longest_and_the_mean(lengths: Path) -> None:
    tokens = np.loadtxt(lengths, skiprows=1).astype(np.int64)
    job = build_job(gpu="l40s", model="qwen2.5-0.5b", strategy="ddp", gpus=1)
    drawn = Wanted(job=job, lengths=Lengths("all", tokens, tokens), global_batch=8).draw((0, 0)).tokens
    assert (len(drawn), drawn.max()) == (64, tokens.max())
    assert drawn.mean() == pytest.approx(tokens.mean(), rel=0.05)


def test_of_tiny_updates_which_take_long_fewer_samples_are_drawn() -> None:
    tokens = np.arange(1, 10_001)
    job = build_job(gpu="l40s", model="qwen2.5-0.5b", strategy="ddp", gpus=1)
    drawn = [
        Wanted(job=job, lengths=Lengths("all", tokens, tokens), global_batch=size).draw((0, 6000)) for size in (1, 8)
    ]
    assert [len(one) for one in drawn] == [750, 6000]


def test_tiny_updates_bring_little_and_are_judged_by_as_few_samples_as_were_searched_with(
    lengths: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Neither fewer GPUs nor packed rows would help an update of one sample, and nothing would if all are alike."""
    seen = set()

    def watch(what: Run) -> Result:
        seen.add(what.workload.samples_total)
        return run(what)

    monkeypatch.setattr("odb_sim.studies.plan.LARGEST_SEARCHED", (256, 256))
    monkeypatch.setattr("odb_sim.studies.bands.run", watch)
    plan(lengths, f"{SMALL} --gpus 1 --global-batch 1")
    assert seen == {64}
    said = hear(capsys)
    assert " on 1 GPU (" in said
    assert "and online ones in 1.0. More would come of a larger global batch." in said
    plan(write_lengths(tmp_path / "equal.csv", [300] * 64), f"{SMALL} --global-batch 8")
    assert "So they bring little here: all samples are about as long." in hear(capsys)


def test_memory_that_is_known_holds_for_one_setting_of_recomputation(
    lengths: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = "--model llama-3-8b --gpu h100 --gpus 8 --processes 1 --global-batch 32 --memory-tokens"
    for tokens, activations in ((6000, "kept"), (22_720, "computed again"), (2_000_000, "computed again")):
        assert plan(lengths, f"{asked} {tokens}")["recomputes"] is (activations != "kept")
        said = hear(capsys)
        assert f"{tokens:,} padded tokens fit by --memory-tokens" in said
        assert f"taken to be measured with activations {activations}" in said
        assert ("check the unit" in said) is (tokens > 1_000_000)
    plan(lengths, f"{asked} 22720 --recompute no")
    assert "22,720 is more than the 5,725 to 9,131 that fit with activations kept" in hear(capsys)


def test_options_for_texts_are_refused_and_lengths_are_cut(lengths: Path, capsys: pytest.CaptureFixture[str]) -> None:
    figures = plan(lengths, f"{SMALL} --max-length 300 --global-batch 32")
    assert figures["samples"] == SAMPLES
    tokens = np.minimum(np.loadtxt(lengths, skiprows=1), 300)
    assert figures["ways"][0]["summary"]["real_tokens"] == tokens.sum()
    assert figures["commands"][2] == f"# lengths.csv: {lengths}, each length at most 300"
    capsys.readouterr()
    for given in ("--tokenizer nope", "--template chatml", "--column foo", "--split bar"):
        flag = given.split()[0]
        said = refuse(capsys, ["plan", str(lengths), *f"{SMALL} {given}".split()])
        assert f"{flag}: has no effect on {lengths}, which holds lengths" in said


def test_the_costs_in_the_figures_are_those_that_are_written(made: tuple[dict[str, Any], Path]) -> None:
    figures, folder = made
    costs = load_costs(folder / "planned.json")
    assert figures["costs"]["ranges"]["rows"] == [list(row) for row in costs.ranges.rows]
    assert figures["costs"]["fitted"]["ranks"] == 4


def test_less_than_an_update_is_said_and_no_budget_is_below_the_shortest_sample(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    five = write_lengths(tmp_path / "five.csv", [100, 200, 300, 400, 5000])
    asked = "--model llama-3-8b --gpu a100-40gb --gpus 4 --processes 1 --tokens 100"
    assert plan(five, asked)["ways"][0]["token_budget"] >= 100
    said = hear(capsys)
    assert "(0.0833 samples)" in said
    assert "the run trains on 0.0833 samples, fewer than an update of 2" in said
    assert "2 samples are longer than the 320 tokens that surely fit" in said


def test_other_ways_with_larger_updates_are_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An update of accumulated steps ends with a step."""
    over = write_lengths(tmp_path / "over.csv", [500] * 1999 + [20_000])
    ways = plan(over, f"{SMALL} --gpu l40s")["ways"]
    said = hear(capsys)
    sizes = [way["summary"]["samples_per_update"] for way in ways]
    assert (
        f"of {sizes[0]:,.0f} samples; the other methods are compared with updates of up to {max(sizes):,.0f}," in said
    )
