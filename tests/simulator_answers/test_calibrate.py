"""Calibration recovers the costs of a run, reports its error, and is not misled by pauses."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from odb_sim.cli.main import main
from odb_sim.engine.updates import GlobalBatch
from odb_sim.inputs.conditions import Conditions
from odb_sim.inputs.cost_files import load_costs, write_costs
from odb_sim.inputs.costs import (
    NO_COLLECTIVE,
    CollectiveCost,
    Costs,
    FittedTo,
    GpuCost,
    LoaderCost,
    NetworkCost,
    PricedTransport,
    StepTable,
)
from odb_sim.inputs.lengths import Lengths
from odb_sim.inputs.workload import Sharding
from odb_sim.recorded.calibrate import calibrate
from odb_sim.recorded.fitting import (
    TimedSpans,
    compute_paced_errors,
    compute_ranges,
    compute_scatter,
    fit_apart_from_zero,
    fit_component,
    fit_values,
    fit_with_floor,
)
from odb_sim.recorded.replay import replay
from odb_sim.recorded.runs import RecordedRun, load_runs

from odb_ref.core.batching.layouts import Layout
from odb_ref.core.batching.order import StepOrder
from odb_ref.core.errors import UsageError
from tests.helpers.commands import get_figures, hear, refuse, tell
from tests.helpers.tamper import Tampered, tamper
from tests.simulator_answers.helpers import make_lengths, record

COSTS = Costs(
    gpu=GpuCost(fixed_s=0.11, per_token_s=3e-4, per_token2_s=0),
    collective=CollectiveCost(fixed_s=0.04, latency_s=0, transfer_s=0),
    network=NetworkCost(alpha_s=4e-4, beta_s=2e-6),
    loader=LoaderCost(
        workers=3, sample_s=2e-3, per_token_s=5e-6, collate_step_s=3e-3, collate_per_token_s=1e-6, receive_sample_s=2e-4
    ),
)


def record_timed(
    path: Path, costs: Costs = COSTS, conditions: Conditions | None = None, layout: Layout = Layout.PADDED
) -> Path:
    even, conditions = Sharding.EVEN, conditions or Conditions()
    return record(path, sharding=even, samples=450, costs=costs, conditions=conditions, layout=layout)


def record_noisy(path: Path, seed: int, costs: Costs, jitter: float, samples: int = 800) -> RecordedRun:
    """Records a run of one rank on texts of few lengths, so that batches of equal size recur."""
    tokens = np.random.default_rng(seed).choice([128, 256, 512, 700, 1100, 1500, 1700, 1900], samples)
    record(
        path,
        lengths=Lengths("few", tokens, tokens),
        ranks=1,
        sharding=Sharding.EVEN,
        order=StepOrder.FULLEST,  # so that the seed, which would shuffle steps, determines only the noise
        seed=seed,
        costs=costs,
        conditions=Conditions(jitter=jitter),
    )
    (recorded,) = load_runs([path])
    return recorded


def slow_first_steps(path: Path, steps: int, extra_s: float) -> Path:
    """Makes each of the first ``steps`` steps ``extra_s`` longer on every rank's clock."""
    trace, taken = Tampered(path), Counter[int]()
    for line in trace.records:
        line["time_s"] += extra_s * min(taken[line["rank"]], steps)
        taken[line["rank"]] += (line["event"] or {}).get("kind") == "step_taken"
    return trace.write(path)


@pytest.mark.parametrize("layout", Layout)
def test_the_costs_of_a_simulated_run_are_recovered(layout: Layout, tmp_path: Path) -> None:
    calibration = calibrate(load_runs([record_timed(tmp_path / "t.ndjson", layout=layout)]), workers=3)
    found = calibration.costs
    largest, longest = 2048 if layout is Layout.PACKED else 2044, int(make_lengths(450).tokens.max())
    assert found.fitted == FittedTo(ranks=3, padded_tokens=largest, longest=longest)
    assert found.gpu.fixed_s == pytest.approx(0.15, rel=1e-3), "the collective that ends a step is part of it"
    assert found.gpu.per_token_s == pytest.approx(3e-4, rel=1e-3)
    assert found.gpu.per_token2_s == 0
    assert found.collective == NO_COLLECTIVE
    assert found.network.alpha_s == pytest.approx(4e-4, rel=0.02)
    assert found.network.beta_s == pytest.approx(2e-6, rel=0.05)
    assert found.loader.workers == 3
    assert found.loader.sample_s == pytest.approx(2e-3, rel=1e-3)
    assert found.loader.per_token_s == pytest.approx(5e-6, rel=1e-2)
    assert found.loader.collate_step_s == pytest.approx(3e-3, rel=1e-2)
    assert found.loader.collate_per_token_s == pytest.approx(1e-6, rel=1e-2)
    assert found.loader.receive_sample_s == pytest.approx(2e-4, rel=1e-2)
    assert all(not fit.reason and fit.median_error < 0.01 for fit in calibration.fits)


def test_full_batches_of_one_budget_do_not_say_what_a_token_takes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Rows that are packed are all as full: a larger batch must not seem to take no longer than they do."""

    def record_packed(seed: int, budget: int) -> str:
        packed = {"sharding": Sharding.EVEN, "layout": Layout.PACKED, "conditions": Conditions(jitter=0.1)}
        path, lengths = tmp_path / f"{budget}-{seed}.ndjson", make_lengths(2000)
        return str(record(path, lengths=lengths, costs=COSTS, seed=seed, budget_tokens=budget, **packed))

    runs = [record_packed(seed, budget) for budget in (2048, 6144) for seed in (0, 1)]
    assert "all of about one size" in tell(capsys, f"calibrate {runs[0]} --out {tmp_path / 'costs.json'}")
    found = load_costs(tmp_path / "costs.json").gpu
    assert (found.fixed_s, found.per_token_s) == (0, pytest.approx(3e-4 + 0.15 / 2048, rel=0.1))
    assert "of about one size" not in tell(capsys, f"calibrate {' '.join(runs)} --out {tmp_path / 'costs.json'}")
    found = load_costs(tmp_path / "costs.json").gpu
    assert (found.fixed_s, found.per_token_s) == (pytest.approx(0.15, rel=0.2), pytest.approx(3e-4, rel=0.1))


def test_the_quadratic_part_of_attention_is_fitted_where_it_shows(tmp_path: Path) -> None:
    costs = Costs(gpu=GpuCost(fixed_s=0.1, per_token_s=1e-5, per_token2_s=1e-7), collective=NO_COLLECTIVE)
    found = calibrate(load_runs([record_timed(tmp_path / "t.ndjson", costs)])).costs.gpu
    assert found.per_token2_s == pytest.approx(1e-7, rel=1e-2)
    assert found.per_token_s == pytest.approx(1e-5, rel=5e-2)


def test_the_other_transport_is_fitted_by_its_own_formula(tmp_path: Path) -> None:
    costs = Costs(network=NetworkCost(alpha_s=1e-3, beta_s=0, transport=PricedTransport.GATHER))
    runs = load_runs([record_timed(tmp_path / "t.ndjson", costs)])
    found = calibrate(runs, transport=PricedTransport.GATHER).costs.network
    assert found.transport is PricedTransport.GATHER
    assert found.alpha_s == pytest.approx(1e-3, rel=1e-2)


def test_jitter_is_an_error_and_not_a_bias(tmp_path: Path) -> None:
    jittered = record_timed(tmp_path / "t.ndjson", conditions=Conditions(jitter=0.1))
    step = calibrate(load_runs([jittered])).fits[0]
    assert 0.005 < step.median_error < 0.1
    assert abs(step.total_error) < 0.1


def test_the_error_on_noisy_runs_is_that_of_the_noise_and_no_more(tmp_path: Path) -> None:
    costs = replace(COSTS, gpu=GpuCost(fixed_s=0.05, per_token_s=3e-4, per_token2_s=4e-8), collective=NO_COLLECTIVE)
    # In some draws of four runs the noise hides the square of the tokens.
    runs = [record_noisy(tmp_path / f"{seed}.ndjson", seed, costs, 0.15) for seed in range(8)]
    calibration = calibrate(runs)
    step = calibration.fits[0]
    noise = 0.15 * 0.6745  # the median of the absolute value of a normal variable
    assert step.scatter.spans > 100
    assert step.scatter.median == pytest.approx(noise, rel=0.25)
    assert step.median_error == pytest.approx(noise, rel=0.25)
    assert step.p90_error == pytest.approx(step.scatter.p90, rel=0.25)
    tokens = np.array([1100, 1700, 1900, 2048])
    size = tokens, tokens * np.array([1100, 1700, 1900, 256])
    assert calibration.costs.compute_steps_s(*size) == pytest.approx(costs.compute_steps_s(*size), rel=0.05)
    truth = {"fixed_s": 0.05, "per_token_s": 3e-4, "per_token2_s": 4e-8}
    assert {item.name for item in step.ranges} == set(truth)
    for item in step.ranges:
        assert item.low < item.high
        assert 0.8 * item.low < truth[item.name] < 1.25 * item.high


def test_a_model_that_cannot_describe_the_device_is_told_from_noise(tmp_path: Path) -> None:
    cliff = replace(COSTS, step_table=StepTable(rows=((1450, 0.1), (1600, 0.5), (1800, 0.1), (1950, 0.6))))
    step = calibrate([record_noisy(tmp_path / f"{seed}.ndjson", seed, cliff, 0.02) for seed in range(2)]).fits[0]
    assert step.scatter.median < 0.03
    assert step.p90_error > 5 * step.scatter.p90


def test_a_wrong_cost_model_has_a_large_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recorded = record_noisy(tmp_path / "t.ndjson", 0, COSTS, 0.05, samples=200)
    right, wrong = COSTS, replace(COSTS, gpu=replace(COSTS.gpu, fixed_s=0.01, per_token_s=9e-4))
    by_right, by_wrong = replay(recorded, costs=right).timing, replay(recorded, costs=wrong).timing
    assert by_right.step_error < 0.06
    assert by_wrong.step_error > 0.5
    write_costs(tmp_path / "wrong.json", wrong, {})
    shown = tell(capsys, ["replay", recorded.paths[0], "--cost-model", str(tmp_path / "wrong.json")])
    assert f"{by_wrong.step_error:.1%}" in shown
    assert f"{by_wrong.total_error:+.1%}" in shown


def test_a_slow_start_can_be_left_out_of_fit_and_error(tmp_path: Path) -> None:
    slow = slow_first_steps(record_timed(tmp_path / "t.ndjson"), 12, 2.0)
    runs = load_runs([slow, record_timed(tmp_path / "other.ndjson")])
    with_start, without = calibrate(runs[::-1]), calibrate(runs[::-1], warm_up_steps=13)
    assert with_start.fits[0].p90_error > 0.3
    assert without.fits[0].p90_error < 0.01
    assert without.warm_up_steps == 13
    for name in ("spans_fitted", "spans_held"):
        assert getattr(with_start.fits[0], name) - getattr(without.fits[0], name) > 5


def test_a_number_that_does_not_show_ranges_from_nothing() -> None:
    random = np.random.default_rng(0)
    columns = np.stack([np.ones(200), random.uniform(50, 250, 200)], axis=1)
    spans = TimedSpans(("alpha_s", "beta_s"), columns, 2e-3 * np.exp(random.normal(0, 0.5, 200)))
    alpha, beta = compute_ranges(spans)
    assert alpha.low > 1e-3
    assert beta.low == 0
    assert beta.high < 2e-3 / 50
    assert compute_ranges(spans) == (alpha, beta), "the same spans give the same ranges"


def test_how_much_equal_spans_differ() -> None:
    sizes = np.array([[1.0, 7.0]] * 6 + [[1.0, 9.0]] * 6 + [[1.0, 8.0]] * 2)
    seconds = np.array([1.0, 1, 1, 1, 1, 2] + [3.0] * 6 + [1.0, 100])
    scatter = compute_scatter(TimedSpans(("fixed_s", "per_token_s"), sizes, seconds))
    assert scatter.spans == 12, "two of a size say too little"
    assert scatter.median == 0
    assert compute_scatter(TimedSpans(("fixed_s", "per_token_s"), sizes[:6], seconds[:6])) is None


def test_of_several_runs_every_second_one_is_held_back(tmp_path: Path) -> None:
    other = Costs(gpu=GpuCost(fixed_s=0.3, per_token_s=6e-4, per_token2_s=0), collective=NO_COLLECTIVE)
    runs = load_runs([record_timed(tmp_path / "a.ndjson"), record_timed(tmp_path / "b.ndjson", other)])
    calibration = calibrate(runs)
    assert calibration.held_back == "every second run"
    assert calibration.costs.gpu.per_token_s == pytest.approx(3e-4, rel=1e-3)
    assert calibration.fits[0].total_error == pytest.approx(-0.5, abs=0.02), "half as slow as the run held back"


def test_a_pause_moves_nothing() -> None:
    random = np.random.default_rng(0)
    tokens = random.uniform(100, 4000, 60)
    seconds = 0.2 + 1e-4 * tokens
    seconds[::7] += 30
    values = fit_values(TimedSpans(("fixed_s", "per_token_s"), np.stack([np.ones(60), tokens], axis=1), seconds))
    assert values == pytest.approx({"fixed_s": 0.2, "per_token_s": 1e-4}, rel=1e-3)


def test_no_number_is_negative() -> None:
    tokens = np.linspace(1000, 2000, 20)
    spans = TimedSpans(("fixed_s", "per_token_s"), np.stack([np.ones(20), tokens], axis=1), 1e-3 * tokens - 0.5)
    values = fit_values(spans)
    assert min(values.values()) >= 0
    assert values["per_token_s"] > 0


def test_too_few_spans_are_not_fitted_and_it_says_so() -> None:
    spans = TimedSpans(("fixed_s",), np.ones((3, 1)), np.ones(3))
    fit = fit_component("step", spans, spans, "the run is short")
    assert fit.values == {}
    assert fit.reason == "3 spans to fit to and 3 held back, needs 4 of each: the run is short"


def test_a_table_follows_a_device_that_no_line_describes(tmp_path: Path) -> None:
    steps = StepTable(rows=((100, 0.1), (1000, 0.12), (1500, 0.5), (2100, 0.52)))
    costs = replace(COSTS, step_table=steps)
    path = record(
        tmp_path / "t.ndjson", policy="paper", sharding=Sharding.EVEN, samples=900, costs=costs
    )  # of any size
    calibration = calibrate(load_runs([path]), has_table=True)
    formula, table = calibration.fits[:2]
    assert table.component == "step table"
    assert table.median_error < min(0.05, formula.median_error)
    found = calibration.costs.step_table
    for tokens in (1850, 2000):
        assert found.compute_step_s(tokens) == pytest.approx(
            steps.compute_step_s(tokens) + COSTS.collective.fixed_s, rel=0.05
        )
    assert calibrate(load_runs([path])).costs.step_table.rows == ()
    alike = load_runs([record(tmp_path / "alike.ndjson", lengths=Lengths("alike", *[np.full(900, 500)] * 2))])
    with pytest.raises(UsageError, match=r"alike\.ndjson: --table: too few steps whose data was there"):
        calibrate(alike, has_table=True)


def test_a_trace_without_times_and_a_short_one_are_refused(tmp_path: Path) -> None:
    path = record_timed(tmp_path / "t.ndjson")
    tamper(path, lambda trace: [record.pop("time_s") for record in trace.records])
    with pytest.raises(UsageError, match="no times"):
        calibrate(load_runs([path]))
    with pytest.raises(UsageError, match="cannot be fitted"):
        calibrate(load_runs([record(tmp_path / "short.ndjson", samples=20)]))


def test_the_command_s_file_prices_a_simulation_as_the_run_was(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace, out = str(record_timed(tmp_path / "t.ndjson")), tmp_path / "costs.json"
    written = get_figures(f"calibrate {trace} --workers 3 --out {out}")
    assert load_costs(out).gpu.per_token_s == pytest.approx(3e-4, rel=1e-3)
    assert written["fit"]["warm_up_steps"] == 0
    step = written["fit"]["components"][0]
    assert step["median_error"] <= step["p90_error"] < 0.01
    assert step["spans_held"] > 10
    (entry,) = written["replays"]
    assert abs(entry["timing"]["total_error"]) < 0.01
    assert entry["timing"]["step_error"] < 0.01
    shown = capsys.readouterr().out
    assert "warm-up left out: 0 steps" in shown
    assert "exchange: beta_s" in shown
    assert "measured s" in tell(capsys, f"replay {trace} --cost-model {out}")
    assert main(["calibrate", trace, "--workers", "-1"]) == 2
    assert main(["calibrate", trace, "--warm-up", "-1"]) == 2


def test_the_command_says_which_runs_were_held_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    costs = [replace(COSTS, gpu=replace(COSTS.gpu, fixed_s=0.11 + number / 1000)) for number in range(3)]
    traces = [str(record_timed(tmp_path / f"{number}.ndjson", one)) for number, one in enumerate(costs)]
    assert main(["calibrate", *traces, "--warm-up", "5"]) == 0
    shown = capsys.readouterr().out
    assert "every second run; warm-up left out: 5 steps of each run" in shown
    table = shown.split("Times, from the first")[1]
    rows = {trace: next(line for line in table.splitlines() if trace in line) for trace in traces}
    assert ["held back" in rows[trace] for trace in traces] == [False, True, False]
    assert ["fitted to" in rows[trace] for trace in traces] == [True, False, True]


def test_a_fit_that_predicts_nothing_is_cautioned_of(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    slower = replace(COSTS, gpu=replace(COSTS.gpu, fixed_s=1.0, per_token_s=9e-4))
    for number, costs in enumerate((COSTS, slower)):
        record_noisy(tmp_path / f"{number}.ndjson", number, costs, 0.02, samples=200)
    traces = [str(tmp_path / f"{number}.ndjson") for number in range(2)]
    assert "Caution: the step times of half the spans held back are off by" in tell(capsys, ["calibrate", *traces])
    assert "Caution" not in tell(capsys, f"calibrate {traces[0]}")


def test_the_pace_around_takes_out_a_drifting_machine_and_nothing_else() -> None:
    random = np.random.default_rng(0)
    work = random.uniform(1, 4, 300)
    pace = np.where(np.arange(300) // 50 % 2, 1.6, 1.0)
    noise = random.normal(1, 0.03, 300)
    assert np.median(np.abs(work / (work * pace * noise) - 1)) > 0.1
    assert np.median(compute_paced_errors(work, work * pace * noise)) == pytest.approx(0.02, abs=0.01)
    wrong_model = np.full(300, work.mean())
    assert np.median(compute_paced_errors(wrong_model, work * pace * noise)) > 0.2


def test_a_number_that_cannot_be_told_from_nothing_is_left_out() -> None:
    random = np.random.default_rng(8)
    columns = np.stack([np.ones(200), random.uniform(50, 250, 200)], axis=1)
    seconds = 2e-3 * np.exp(random.normal(0, 0.5, 200))
    spans = TimedSpans(("alpha_s", "beta_s"), columns, seconds)
    plain = fit_component("exchange", spans, spans, "")
    fit = fit_apart_from_zero("exchange", spans, spans, "")
    assert plain.values["beta_s"] > 0, "it would have been written"
    assert fit.values["beta_s"] == 0
    assert fit.dropped == ("beta_s",)
    assert fit.values["alpha_s"] == pytest.approx(np.median(seconds), rel=0.02)
    assert [item.name for item in fit.ranges] == ["alpha_s"]
    clear = TimedSpans(("alpha_s", "beta_s"), columns, columns @ np.array([1e-3, 1e-5]))
    assert fit_apart_from_zero("exchange", clear, clear, "").dropped == ()


def test_a_least_time_that_only_some_draws_show_has_no_range() -> None:
    tokens = np.repeat(np.arange(1, 9) * 256.0, 3)
    seconds = np.maximum(0.1, 1e-4 * tokens) * np.random.default_rng(8).lognormal(0, 0.12, len(tokens))
    spans = TimedSpans(("fixed_s", "per_token_s"), np.stack([np.ones(len(tokens)), tokens], axis=1), seconds)
    assert "floor_s" in [item.name for item in compute_ranges(spans, fit_with_floor)]
    fit = fit_apart_from_zero("step", spans, spans, "", fit_with_floor)
    assert [item.name for item in fit.ranges] == list(fit.values) == ["fixed_s", "per_token_s"]


def test_what_a_model_was_fitted_to_goes_with_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace, out = str(record_timed(tmp_path / "t.ndjson")), tmp_path / "costs.json"
    assert "Fitted to 3 ranks, batches of up to 2,0" in tell(capsys, f"calibrate {trace} --out {out}")
    assert load_costs(out).fitted.ranks == 3
    simulate = ["simulate", "gsm8k", "--ranks", "64", "--samples", "640", "--token-budget", "2000"]
    assert "fitted to runs of 3 ranks, and 64 are simulated" in tell(capsys, [*simulate, "--cost-model", str(out)])


def record_updates(path: Path, costs: Costs, *, update_samples: int | None = 64, goal: int | None = None) -> Path:
    tokens = np.clip(np.random.default_rng(5).lognormal(5, 0.7, 1500), 8, 1500).astype(np.int64)
    updates = {"update_samples": update_samples, "global_batch": GlobalBatch(samples=goal)}
    return record(
        path, lengths=Lengths("long", tokens, tokens), ranks=4, sharding=Sharding.EVEN, costs=costs, **updates
    )


@pytest.mark.parametrize("each_step", [False, True])
@pytest.mark.parametrize("goal", [None, 64])
def test_accumulated_steps_are_fitted_whether_or_not_ranks_meet_in_each(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], goal: int | None, *, each_step: bool
) -> None:
    costs = replace(COSTS, collective=replace(COSTS.collective, each_step=each_step))
    trace = record_updates(tmp_path / "t.ndjson", costs, update_samples=None if goal else 64, goal=goal)
    out = tmp_path / "costs.json"
    figures = get_figures(f"calibrate {trace} --workers 3 --out {out} {f'--global-batch {goal}' if goal else ''}")
    found = load_costs(out)
    assert found.gpu.per_token_s == pytest.approx(3e-4, rel=0.02)
    assert found.gpu.fixed_s == pytest.approx(0.11, rel=0.02), (
        "the collective ends an update, and is not part of a step"
    )
    assert found.collective.fixed_s == pytest.approx(0.04, rel=0.05)
    assert found.collective.each_step == each_step
    (entry,) = figures["replays"]
    assert abs(entry["timing"]["total_error"]) < 0.03
    assert f"ranks {'meet after every step' if each_step else 'do not meet'}" in hear(capsys)


def test_runs_that_accumulate_steps_are_not_fitted_with_runs_that_do_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    free, fixed = str(record_timed(tmp_path / "free.ndjson")), str(record_updates(tmp_path / "fixed.ndjson", COSTS))
    for traces in ([free, fixed], [fixed, free]):
        error = refuse(capsys, ["calibrate", *traces])
        assert (
            f"{fixed}: accumulates steps to updates, and in {free} each step is an update: calibrate them apart"
            in error
        )


def test_a_run_that_lends_no_step_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = replace(COSTS, gpu=replace(COSTS.gpu, fixed_s=0.12))
    traces = [str(record_timed(tmp_path / f"{number}.ndjson", one)) for number, one in enumerate((COSTS, other))]
    traces.append(str(record(tmp_path / "short.ndjson", samples=5, costs=COSTS)))
    assert f"step: no step of {traces[2]} was used" in tell(capsys, ["calibrate", *traces])
    assert "was used" not in tell(capsys, ["calibrate", *traces[:2]])


def test_a_trace_that_is_given_twice_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, copy = record_timed(tmp_path / "t.ndjson"), tmp_path / "copy.ndjson"
    copy.write_bytes(first.read_bytes())
    for second in (first, copy):
        assert f"{second}: holds the same as {first}" in refuse(capsys, ["calibrate", str(first), str(second)])


def test_the_error_of_a_cost_model_is_no_less_than_that_of_its_own_runs(tmp_path: Path) -> None:
    # The median ignores slow first steps, and the half that is held back has none.
    trace = str(slow_first_steps(record_timed(tmp_path / "t.ndjson"), steps=2, extra_s=6.0))
    out = tmp_path / "costs.json"
    for warm_up_steps, is_wide in ((0, True), (2, False)):
        figures = get_figures(f"calibrate {trace} --workers 3 --warm-up {warm_up_steps} --out {out}")
        (entry,) = figures["replays"]
        timing, (error,) = entry["timing"], [row for row in load_costs(out).ranges.rows if row[0] == "error"]
        assert timing["total_error"] < -0.2
        assert (error[2] - 1 >= abs(timing["total_error"])) == is_wide, "a warm-up that is left out has no part in it"
        # The band printed beside the times is the wider one.
        assert (timing["measured_s"] <= 1.01 * timing["high_s"]) == is_wide


def test_one_rank_has_no_collective_to_speak_of(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "steps.csv"
    path.write_text("tokens,seconds\n1000,0.1\n2000,0.2\n")
    assert "collective" not in tell(capsys, f"calibrate {path}")
    assert "gpu.fixed_s holds the collective" in tell(capsys, f"calibrate {path} --ranks 2")


def test_steps_that_launching_makes_equally_long_give_a_floor(tmp_path: Path) -> None:
    costs = replace(
        COSTS, gpu=GpuCost(fixed_s=0, per_token_s=1e-3, per_token2_s=0, floor_s=1.5), collective=NO_COLLECTIVE
    )
    calibration = calibrate([record_noisy(tmp_path / "t.ndjson", 0, costs, jitter=0.02)])
    step, found = calibration.fits[0], calibration.costs.gpu
    assert found.floor_s == pytest.approx(1.5, rel=0.02)
    assert found.per_token_s == pytest.approx(1e-3, rel=0.05)
    assert step.median_error < 0.03
    assert "gpu.floor_s" in [name for name, _, _ in calibration.costs.ranges.rows]
