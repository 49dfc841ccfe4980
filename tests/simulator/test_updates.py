"""Optimizer updates of more than one step: every policy at one global batch."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from odb_sim.baselines.figures import simulate_plan
from odb_sim.baselines.plans import PLANNERS
from odb_sim.cli.main import main
from odb_sim.engine.loading import Workers
from odb_sim.engine.updates import EVERY_STEP, Accumulation, GlobalBatch
from odb_sim.inputs.costs import CollectiveCost, Costs, GpuCost, LoaderCost
from odb_sim.studies.comparison import compare
from odb_sim.studies.runs import POLICIES, Driver, Run, run

from odb_ref.core.batching.layouts import Layout
from odb_ref.trace.reading import read_trace
from tests.helpers.commands import get_answer, tell
from tests.helpers.effort import few
from tests.helpers.simulated import make_run
from tests.simulator.test_rounds import draw_run


def build(policy: str, *, ranks: int = 4, samples: int = 1000, **more: object) -> Run:
    settings = {"policy": policy, "budget_tokens": 11_600, "window_samples": 128, **more}
    return make_run("mm_mix_real", ranks, samples, **settings)


@pytest.mark.parametrize("options", [["--global-batch", "12"], []])
def test_where_a_consumer_leaves_inside_an_update_the_others_may_take_the_rest_of_it(
    options: list[str], tmp_path: Path
) -> None:
    """As with ``no_sync``. Checks: STOP."""
    lengths, trace = tmp_path / "l.csv", tmp_path / "t.ndjson"
    lengths.write_text("total_tokens\n" + 24 * "100\n")
    command = ["simulate", str(lengths), "--ranks", "2", "--token-budget", "100", "--fault", "stop:1:1"]
    assert main([*command, *options, "--trace", str(trace)]) == 0
    steps = [record.rank for record in read_trace(trace)[1] if (record.event or {}).get("kind") == "step_taken"]
    assert steps.count(1) == 1
    assert steps.count(0) == (6 if options else 2)
    assert main(["check", str(trace)]) == 0


def test_an_update_ends_with_the_step_that_reaches_the_next_multiple() -> None:
    samples, tokens = np.array([30, 30, 50, 5, 200, 10, 10]), np.array([1, 1, 1, 1, 1, 1, 1])
    accumulation = Accumulation(GlobalBatch(samples=100))
    assert accumulation.find_ends(samples[:4], tokens[:4]).tolist() == [False, False, True, False]
    # After the large step the sum is past two multiples. The next step also ends an update, so the mean is kept.
    assert accumulation.find_ends(samples[4:], tokens[4:]).tolist() == [True, True, False]
    assert accumulation.updates == 3
    assert Accumulation(GlobalBatch(tokens=3)).find_ends(samples, tokens).tolist() == [0, 0, 1, 0, 0, 1, 0]
    assert Accumulation(EVERY_STEP).find_ends(samples, tokens).all()


@settings(max_examples=few(100), deadline=None)
@given(
    draw_run(),
    st.builds(GlobalBatch, samples=st.integers(1, 60)) | st.builds(GlobalBatch, tokens=st.integers(1, 900)),
    st.booleans(),
)
def test_rounds_accumulate_as_events_do(what: Run, global_batch: GlobalBatch, each_step: bool) -> None:
    what = replace(what, costs=replace(what.costs, collective=replace(what.costs.collective, each_step=each_step)))
    if global_batch.samples is not None:
        global_batch = GlobalBatch(samples=max(global_batch.samples, what.workload.ranks))
    by_rounds, by_events = (
        run(replace(what, global_batch=global_batch, driver=driver)) for driver in (Driver.ROUNDS, Driver.EVENTS)
    )
    assert by_rounds.summary.updates == by_events.summary.updates
    for ours, theirs in zip(by_rounds.rows, by_events.rows, strict=True):
        for name, value in asdict(theirs).items():
            if name != "queued_steps":  # rounding decides whether a step was released at the time of a take
                expected = pytest.approx(value, rel=1e-9, abs=1e-9 * max(1.0, theirs.end_s))
                assert getattr(ours, name) == expected, (theirs.step, name)


@pytest.mark.parametrize("policy", list(PLANNERS))
def test_a_plan_accumulates_as_said(policy: str) -> None:
    what = build(policy, samples=300)
    costs = Costs(
        gpu=GpuCost(fixed_s=0.01, per_token_s=1e-5, per_token2_s=0),
        collective=CollectiveCost(fixed_s=0.5, latency_s=0, transfer_s=0),
        loader=LoaderCost(
            workers=1, prefetch_factor=1, sample_s=1e-3, per_token_s=0, collate_step_s=0, collate_per_token_s=0
        ),
    )
    plans = PLANNERS[policy](what.workload, what.budget_tokens, 0)
    record = simulate_plan(replace(what, costs=costs, global_batch=GlobalBatch(samples=50)), plans)
    rows = record.rows
    # The same computation, rank by rank and batch by batch.
    free_s, loaders, trained, updates = [0.0] * 4, [Workers(costs.loader) for _ in plans], 0, 0
    for step in range(len(rows)):
        for rank, plan in enumerate(plans):
            stop = [*plan.starts.tolist()[1:], len(plan.order)][step : step + 1]
            held = plan.order[plan.starts[step] : stop[0]] if stop else []
            tokens = what.workload.tokens[held]
            padded = 0 if not len(held) else tokens.sum() if plan.layout is Layout.PACKED else len(held) * tokens.max()
            loaded_s = loaders[rank].take(1e-3 * len(held), free_s[rank]) if len(held) else free_s[rank]
            free_s[rank] = loaded_s + 0.01 + 1e-5 * float(padded)
            trained += len(held)
        if trained >= 50 * (updates + 1) or step == len(rows) - 1:
            updates += 1
            free_s = [max(free_s) + 0.5] * 4
        assert rows[step].end_s == pytest.approx(sum(free_s) / 4)
    assert record.updates == updates


@pytest.mark.parametrize("policy", POLICIES)
def test_ranks_that_meet_after_each_micro_batch_wait_more(policy: str) -> None:
    """With sharded parameters, an update takes the time of the slowest rank in each micro-batch."""
    costs = Costs(collective=CollectiveCost(fixed_s=0.5))
    free, met = (
        run(
            build(
                policy,
                global_batch=GlobalBatch(samples=250),
                costs=replace(costs, collective=replace(costs.collective, each_step=each_step)),
            )
        )
        for each_step in (False, True)
    )
    assert (met.summary.steps, met.summary.updates) == (free.summary.steps, free.summary.updates)
    assert met.summary.sim_time_s > free.summary.sim_time_s
    assert met.summary.collective_share * met.summary.sim_time_s == pytest.approx(
        free.summary.collective_share * free.summary.sim_time_s
    )
    ends = [row for row in met.rows if row.collective_s]
    assert len(ends) == met.summary.updates
    assert sum(row.sync_wait_s for row in met.rows if not row.collective_s) > 0


def test_no_step_is_shorter_than_what_is_sent_in_it() -> None:
    gpu = GpuCost(fixed_s=0.1, per_token_s=1e-3, per_token2_s=0, floor_s=0.5)
    padded = np.array([0, 100, 1000])
    assert gpu.compute_steps_s(padded, np.zeros(3)).tolist() == [0.5, 0.5, 1.1]


@pytest.mark.parametrize("policy", POLICIES)
def test_updates_hold_the_global_batch_and_time_is_accounted_for(policy: str) -> None:
    own = run(build(policy)).summary
    assert own.updates == own.steps
    for global_batch in (GlobalBatch(samples=250), GlobalBatch(tokens=100_000)):
        one = run(build(policy, global_batch=global_batch)).summary
        parts = (one.compute_share, one.data_wait_share, one.trainer_wait_share, one.collective_share, one.ending_share)
        assert sum(parts) == pytest.approx(1)
        assert (one.steps, one.samples_emitted, one.padded_tokens) == (
            own.steps,
            own.samples_emitted,
            own.padded_tokens,
        )
        assert one.sim_time_s < own.sim_time_s, "fewer collectives, and ranks wait for one another less often"
        total = one.samples_total if global_batch.samples else one.real_tokens
        assert one.updates == -(-total // (global_batch.goal or 1))


def test_a_comparison_is_at_one_global_batch() -> None:
    ((compared,), _) = compare([build("odb")], ["odb", "standard", "packing"])
    assert compared.global_batch.samples == round(0.5 + max(one.samples_per_update for one in compared.summaries))
    held = [one.samples_per_update for one in compared.accumulated]
    assert max(held) <= 1.1 * min(held)
    odb = compared.summaries[0]
    assert 1 < compared.compute_speedup(odb) < compared.compute_own_speedup(odb)


@pytest.mark.deep
@pytest.mark.parametrize("samples", [16, 40, 1000])
def test_a_policy_whose_steps_hold_more_gets_smaller_batches(samples: int) -> None:
    ((compared,), _) = compare([build("odb", global_batch=GlobalBatch(samples=samples))], POLICIES)
    for one in compared.accumulated:
        assert one.samples_per_update <= 1.1 * samples, one.policy
        assert one.samples_emitted == 1000
        if samples == 1000:
            assert one.token_budget == 11_600
            assert one.updates == 1


def test_the_command_says_that_the_baseline_has_smaller_batches(capsys: pytest.CaptureFixture[str]) -> None:
    """Even if other policies have smaller ones too, whose cautions come before."""
    command = "compare mm_mix_real --samples 1000 --ranks 64 --global-batch 128 --policy odb,hfg,peer,standard"
    (*_, standard), said = get_answer(capsys, command)
    own, used = standard["batch_size"], standard["accumulated_batch_size"]
    assert used < own
    assert f"(fixed batches of {own}, {used} at one global batch)" in said
    assert f"policy standard: fixed batches hold {used:,} samples, because" in said


def test_the_command_says_what_an_update_holds(capsys: pytest.CaptureFixture[str]) -> None:
    (odb, standard), said = get_answer(
        capsys, "compare mm_mix_real --samples 1000 --policy odb,standard --global-batch 200"
    )
    assert odb["speedup"] == odb["accumulated_samples_per_s"] / standard["accumulated_samples_per_s"]
    assert odb["own_speedup"] == odb["samples_per_s"] / standard["samples_per_s"]
    held = (
        f"{odb['accumulated_tokens_per_update']:,.0f} tokens in {odb['accumulated_steps_per_update']:.1f} micro-batches"
    )
    assert f"one global batch of 200 samples: odb (200 samples, {held} an update)" in said
    assert f"{odb['speedup']:.2f} times" in said
    assert (odb["updates"], odb["samples_per_update"]) == (5, 200), "the protocol forms these updates itself"
    assert "1.00 times" not in tell(capsys, "compare mm_mix_real --samples 1000 --policy odb"), "there is no ratio"


@pytest.mark.slow
@pytest.mark.parametrize("command", ["simulate", "sweep", "tune"])
@pytest.mark.parametrize(
    ("option", "held"), [("--global-batch", "samples_per_update"), ("--global-tokens", "tokens_per_update")]
)
@pytest.mark.parametrize("policy", ["odb", "standard"])
def test_every_command_keeps_the_global_batch(
    command: str, option: str, held: str, policy: str, tmp_path: Path
) -> None:
    """Steps of the budget alone would hold about 150 samples, 28,000 tokens."""
    path = tmp_path / "out.json"
    goal = 16 if option == "--global-batch" else 4000
    arguments = [command, "gsm8k", "--samples", "600", "--ranks", "8", option, str(goal), "--json", str(path)]
    tuned = ["--memory-tokens", "4096", "--layout", "packed", "--shards", "shared", "--no-beside"]
    arguments += tuned if command == "tune" else ["--token-budget", "4096"]
    if command == "tune" and policy == "standard":
        pytest.skip("a baseline has nothing to tune")
    arguments += ["--policy", policy] + (["--processes", "1"] if command != "simulate" else [])
    assert main(arguments) == 0
    found = json.loads(path.read_text())
    figures = {"simulate": lambda: [found], "sweep": lambda: found, "tune": lambda: found["tried"]}[command]()
    assert figures
    for entry in figures:
        assert entry[held] <= 1.1 * goal
        assert entry["updates"] == pytest.approx(entry["steps"] / entry["steps_per_update"])


def test_smaller_batches_are_said_and_updates_that_hold_too_much(capsys: pytest.CaptureFixture[str]) -> None:
    given = "simulate gsm8k --samples 600 --ranks 8 --token-budget 4096 --global-tokens"
    assert "not 4,096, because steps would otherwise hold more than the global batch of 4,000 tokens" in tell(
        capsys, given, "4000"
    )
    assert "more than the 100 asked for, because it ends with a step, and a step of all ranks holds" in tell(
        capsys, given, "100"
    )
    assert "asked for" not in tell(capsys, given, "60000")


def test_two_updates_of_three_steps_hold_too_much(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "equal.csv"
    path.write_text("total_tokens\n" + "10\n" * 300)
    given = f"simulate {path} --ranks 1 --token-budget 1000 --policy gmt --global-batch"
    said = tell(capsys, given, "101")
    assert "holds 150 samples in the mean, more than the 101 asked for, because it ends with a step" in said
    assert "a step of all ranks holds 100" in said
    assert "asked for" not in tell(capsys, given, "100")
