"""What would mislead a planner is cautioned of, or gone."""

from __future__ import annotations

import re

import numpy as np
import pytest
from odb_sim.cli.main import main
from odb_sim.engine.cautions import About, Caution, describe_long, summarize_cautions
from odb_sim.inputs.conditions import BudgetTable, Conditions, Fault, FaultKind
from odb_sim.inputs.costs import CollectiveCost, Costs, FittedTo
from odb_sim.inputs.lengths import Lengths
from odb_sim.studies.runs import POLICIES, Driver, Result, run

from odb_ref.core.batching.layouts import Layout
from odb_ref.core.types import Mode
from tests.helpers.commands import get_answer, get_figures
from tests.helpers.simulated import make_run

TOKENS = np.random.default_rng(1).integers(20, 200, 600)


def simulate(**settings: object) -> Result:
    return run(make_run(TOKENS, 4, **{"budget_tokens": 1000, "window_samples": 128, **settings}))


def list_subjects(result: Result) -> list[About]:
    return [caution.about for caution in result.cautions]


@pytest.mark.parametrize("policy", POLICIES)
def test_an_ordinary_run_gives_no_caution(policy: str) -> None:
    assert simulate(policy=policy).cautions == ()


@pytest.mark.parametrize("policy", ["odb", "standard", "packing"])
def test_samples_over_the_budget_are_said_with_the_memory_they_need(policy: str) -> None:
    result = simulate(policy=policy, budget_tokens=150)
    (caution,) = result.cautions
    over = int((TOKENS > 150).sum())
    assert caution.about is About.MEMORY
    assert caution.text.startswith(f"{over} samples are longer than the budget of 150 tokens")
    assert f"{TOKENS.max()} padded tokens, {TOKENS.max() / 150:.3g} times the budget" in caution.text
    assert result.summary.largest_batch_tokens == TOKENS.max()


@pytest.mark.parametrize(("longest", "text"), [(7, "1.17"), (60, "10"), (12_000_000, "2,000,000")])
def test_the_memory_they_need_reads_well_at_any_size(longest: int, text: str) -> None:
    assert f", {text} times the budget" in describe_long(np.array([longest]), 6)


@pytest.mark.parametrize("policy", ["standard", "hfg", "balanced"])
def test_fixed_batches_may_have_a_size_of_their_own(policy: str) -> None:
    result = simulate(policy=policy, batch_size=8, budget_tokens=1000)
    assert result.summary.batch_size == 8
    assert result.summary.steps == -(-150 // 8)
    assert list_subjects(result) == [About.BATCH_SIZE]
    assert result.summary.over_budget_groups > 0
    assert f"{result.summary.largest_batch_tokens:,} padded tokens" in result.cautions[0].text
    assert result.summary.critical_tokens != simulate(policy=policy, budget_tokens=1000).summary.critical_tokens


def test_a_size_of_fixed_batches_changes_no_other_policy() -> None:
    with_size, without = simulate(batch_size=8).summary, simulate().summary
    assert with_size.batch_size is None
    assert with_size.critical_tokens == without.critical_tokens


def test_fixed_batches_are_compared_with_another_budget(capsys: pytest.CaptureFixture[str]) -> None:
    command = "compare gsm8k --ranks 2 --samples 600 --token-budget 4096 --batch-size 4 --policy standard,odb"
    standard, odb = get_figures(command)
    assert (standard["batch_size"], odb["token_budget"]) == (4, 4096)
    assert standard["steps"] == 75
    assert odb["speedup"] > 1.5
    assert "fixed batches of 4" in capsys.readouterr().out


def test_a_window_above_every_shard_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert list_subjects(simulate(window_samples=150)) == []
    assert list_subjects(simulate(window_samples=151)) == [About.WINDOW]
    assert simulate(window_samples=151, policy="standard").cautions == ()
    assert simulate(window_samples=151, update_samples=20).cautions == ()  # an update is a window
    sweep = ["sweep", "gsm8k", "--ranks", "2", "--samples", "100", "--token-budget", "2048", "--processes", "1"]
    assert main([*sweep, "--window", "16,64,128"]) == 0
    assert capsys.readouterr().out.count("larger than any shard") == 1


def simulate_window(lengths: object, window: int, **settings: object) -> Result:
    return run(make_run(lengths, 4, budget_tokens=1000, window_samples=window, **settings))  # type: ignore[arg-type]


def test_a_window_of_few_batches_is_said_with_one_that_does_better() -> None:
    lengths = np.random.default_rng(1).integers(20, 180, 2400)  # 10 to a batch
    (caution,) = (small := simulate_window(lengths, 32)).cautions
    assert caution.about is About.SMALL_WINDOW
    assert caution.text.startswith("a window of 32 holds 3.2 batches of average samples")
    (named,) = re.findall(r"a window of (\d+) would", caution.text)
    assert int(named) == -(-16 * 1000 // lengths.mean())
    better = simulate_window(lengths, int(named))
    assert better.cautions == ()
    assert better.summary.tokens_per_s > 1.1 * small.summary.tokens_per_s


def test_a_small_window_is_not_blamed_for_what_it_does_not_do() -> None:
    lengths = np.random.default_rng(1).integers(20, 180, 2400)
    assert simulate_window(lengths, 32, layout=Layout.PACKED).cautions == ()
    assert simulate_window(lengths, 32, budget_schedule=BudgetTable(((0, 200),))).cautions == ()
    assert simulate_window(np.full(2400, 100), 32).cautions == ()
    assert simulate_window(lengths[:240], 32).cautions == (), "a shard holds 6 batches, so no window holds more"
    assert (
        simulate_window(lengths[:480], 32).cautions[0].text.endswith("a window of 120 would make them, which holds 12")
    )
    uses = np.ones((2400, 1), dtype=np.int64)
    limited = simulate_window(Lengths("test", lengths, lengths, uses), 32, limits=(2,))
    assert limited.cautions == ()


@pytest.mark.parametrize("policy", ["odb", "standard"])
def test_a_quota_that_is_not_met_does_not_end_complete(policy: str) -> None:
    met = simulate(policy=policy, mode=Mode.QUOTA, quota_samples=300)
    assert (met.summary.outcome, met.cautions) == ("complete", ())
    missed = simulate(policy=policy, mode=Mode.QUOTA, quota_samples=601)
    assert missed.summary.outcome == "short"
    assert missed.summary.outcome_cause.startswith("the quota of 601 samples is not met")
    assert list_subjects(missed) == [About.QUOTA]


def test_a_cost_model_used_beyond_what_it_was_fitted_to_is_said() -> None:
    assert simulate(costs=Costs(fitted=FittedTo(ranks=4, padded_tokens=1000))).cautions == ()
    (ranks,) = simulate(costs=Costs(fitted=FittedTo(ranks=2, padded_tokens=1000))).cautions
    assert "fitted to runs of 2 ranks, and 4 are simulated" in ranks.text
    assert "collectives and steps, which send weights if these are sharded" in ranks.text
    (tokens,) = simulate(costs=Costs(fitted=FittedTo(ranks=4, padded_tokens=500))).cautions
    assert "batches of at most 500 padded tokens" in tokens.text
    assert simulate(costs=Costs(fitted=FittedTo(longest=199))).cautions == ()
    (row,) = simulate(costs=Costs(fitted=FittedTo(longest=198))).cautions
    assert "fitted to rows of at most 198 tokens, and the longest sample here has 199" in row.text


@pytest.mark.parametrize("kind", FaultKind)
def test_a_fault_beyond_the_end_is_said(kind: FaultKind) -> None:
    first, late = Fault(kind, 1, 1), Fault(kind, 1, 10_000)
    assert simulate(conditions=Conditions(faults=(first,))).cautions == ()
    missed = simulate(conditions=Conditions(faults=(late,)))
    assert missed.summary.outcome == "complete"
    (caution,) = missed.cautions
    assert caution.about is About.FAULT
    assert caution.text == f"1 fault asked for never happened, the run ended before: {kind}:1:10000"
    (caution,) = simulate(conditions=Conditions(faults=(first, late))).cautions
    assert caution.text.endswith(f"before: {kind}:1:10000"), "the first has ended the run"


def test_waiting_for_ranks_is_told_from_the_collective() -> None:
    free, dear = (simulate(costs=Costs(collective=CollectiveCost(fixed_s=seconds))).summary for seconds in (0.0, 1.0))
    waited_s = [summary.trainer_wait_share * summary.sim_time_s for summary in (free, dear)]
    assert waited_s[0] == pytest.approx(waited_s[1])
    assert dear.sim_time_s - free.sim_time_s == pytest.approx(dear.steps)
    one = simulate(policy="standard", costs=Costs(collective=CollectiveCost(fixed_s=1.0))).summary
    assert one.collective_share * one.sim_time_s > one.steps


@pytest.mark.parametrize("driver", [Driver.ROUNDS, Driver.EVENTS])
@pytest.mark.parametrize("policy", ["odb", "standard"])
def test_one_rank_waits_for_no_other(policy: str, driver: Driver) -> None:
    result = run(make_run(TOKENS, 1, policy=policy, budget_tokens=1000, window_samples=128, driver=driver))
    assert min(row.sync_wait_s for row in result.rows) >= 0
    assert f"{result.summary.trainer_wait_share:.3f}" == "0.000", "and not -0.000"


def test_the_wait_for_a_killed_rank_counts(capsys: pytest.CaptureFixture[str]) -> None:
    fault = Fault(FaultKind.KILL, 1, 3)
    result = simulate(conditions=Conditions(faults=(fault,), deadline_s=60.0))
    summary, last_s = result.summary, result.rows[-1].end_s
    assert summary.outcome == "lost"
    assert summary.sim_time_s == pytest.approx(last_s + 60, abs=1)
    assert summary.ending_share == pytest.approx(1 - last_s / summary.sim_time_s)
    assert summary.samples_per_s == pytest.approx(summary.samples_emitted / summary.sim_time_s)
    shares = ("compute_share", "data_wait_share", "trainer_wait_share", "collective_share", "ending_share")
    assert sum(getattr(summary, name) for name in shares) == pytest.approx(1)
    command = "simulate gsm8k --ranks 2 --samples 200 --token-budget 2000 --fault kill:1:3"
    assert main(command.split()) == 0
    printed = dict(re.findall(r"(\w+_share) +([0-9.]+)", capsys.readouterr().out))
    assert set(printed) == set(shares)
    assert sum(map(float, printed.values())) == pytest.approx(1, abs=1e-3)


def test_many_runs_with_the_same_to_say_say_it_once() -> None:
    lines = summarize_cautions(
        [Caution(About.WINDOW, "a"), Caution(About.MEMORY, "b"), Caution(About.WINDOW, "c"), Caution(About.WINDOW, "a")]
    )
    assert lines == ["a (and so on, in 1 more runs)", "b"]


def test_the_command_prints_and_writes_cautions(capsys: pytest.CaptureFixture[str]) -> None:
    figures, shown = get_answer(
        capsys, "simulate gsm8k --ranks 2 --samples 200 --token-budget 300 --mode quota --quota 900"
    )
    assert shown.count("Caution: ") == 3
    assert "; short: the quota of 900 samples is not met" in shown
    assert len(figures["cautions"]) == 3
