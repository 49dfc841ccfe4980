"""Calibration recovers the costs that a run had, says its error, and is not misled by pauses."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from odb_ref.core.errors import UsageError
from simulator.calibrate import calibrate
from simulator.cli import main
from simulator.conditions import Conditions
from simulator.cost_files import load_costs
from simulator.costs import Costs, GpuCost, LoaderCost, NetworkCost, StepTable, Transport
from simulator.fitting import Spans, fit_component, fit_values
from simulator.recorded import load_runs
from simulator.workload import Sharding
from tests.simulator_answers.helpers import record

COSTS = Costs(
    gpu=GpuCost(fixed_s=0.11, per_token_s=3e-4, per_token2_s=0, sync_s=0.04),
    network=NetworkCost(alpha_s=4e-4, beta_s=2e-6),
    loader=LoaderCost(workers=3, sample_s=2e-3, per_token_s=5e-6, collate_step_s=3e-3, collate_per_token_s=1e-6),
)


def record_timed(path: Path, costs: Costs = COSTS, conditions: Conditions | None = None) -> Path:
    even = Sharding.EVEN
    return record(path, sharding=even, samples=900, costs=costs, conditions=conditions or Conditions())


def test_the_costs_of_a_simulated_run_are_recovered(tmp_path: Path) -> None:
    calibration = calibrate(load_runs([record_timed(tmp_path / "t.ndjson")]), workers=3)
    found = calibration.costs
    assert found.gpu.fixed_s == pytest.approx(0.15, rel=1e-3), "the collective that ends a step is part of it"
    assert found.gpu.per_token_s == pytest.approx(3e-4, rel=1e-3)
    assert found.gpu.per_token2_s == 0
    assert found.gpu.sync_s == 0
    assert found.network.alpha_s == pytest.approx(4e-4, rel=0.02)
    assert found.network.beta_s == pytest.approx(2e-6, rel=0.05)
    assert found.loader.workers == 3
    assert found.loader.sample_s == pytest.approx(2e-3, rel=1e-3)
    assert found.loader.per_token_s == pytest.approx(5e-6, rel=1e-2)
    assert found.loader.collate_step_s == pytest.approx(3e-3, rel=1e-2)
    assert found.loader.collate_per_token_s == pytest.approx(1e-6, rel=1e-2)
    assert all(not fit.reason and fit.median_error < 0.01 for fit in calibration.fits)


def test_the_quadratic_part_of_attention_is_fitted_where_it_shows(tmp_path: Path) -> None:
    costs = Costs(gpu=GpuCost(fixed_s=0.1, per_token_s=1e-5, per_token2_s=1e-7, sync_s=0))
    found = calibrate(load_runs([record_timed(tmp_path / "t.ndjson", costs)])).costs.gpu
    assert found.per_token2_s == pytest.approx(1e-7, rel=1e-2)
    assert found.per_token_s == pytest.approx(1e-5, rel=5e-2)


def test_the_other_transport_is_fitted_by_its_own_formula(tmp_path: Path) -> None:
    costs = Costs(network=NetworkCost(alpha_s=1e-3, beta_s=0, transport=Transport.GATHER))
    runs = load_runs([record_timed(tmp_path / "t.ndjson", costs)])
    found = calibrate(runs, transport=Transport.GATHER).costs.network
    assert found.transport is Transport.GATHER
    assert found.alpha_s == pytest.approx(1e-3, rel=1e-2)


def test_jitter_is_an_error_and_not_a_bias(tmp_path: Path) -> None:
    jittered = record_timed(tmp_path / "t.ndjson", conditions=Conditions(jitter=0.1))
    step = calibrate(load_runs([jittered])).fits[0]
    assert 0.005 < step.median_error < 0.1
    assert abs(step.total_error) < 0.1


def test_of_several_runs_every_second_one_is_held_back(tmp_path: Path) -> None:
    other = Costs(gpu=GpuCost(fixed_s=0.3, per_token_s=6e-4, per_token2_s=0, sync_s=0))
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
    values = fit_values(Spans(("fixed_s", "per_token_s"), np.stack([np.ones(60), tokens], axis=1), seconds))
    assert values == pytest.approx({"fixed_s": 0.2, "per_token_s": 1e-4}, rel=1e-3)


def test_no_number_is_negative() -> None:
    tokens = np.linspace(1000, 2000, 20)
    spans = Spans(("fixed_s", "per_token_s"), np.stack([np.ones(20), tokens], axis=1), 1e-3 * tokens - 0.5)
    values = fit_values(spans)
    assert min(values.values()) >= 0
    assert values["per_token_s"] > 0


def test_too_few_spans_are_not_fitted_and_it_says_so() -> None:
    spans = Spans(("fixed_s",), np.ones((3, 1)), np.ones(3))
    fit = fit_component("step", spans, spans, "the run is short")
    assert fit.values == {}
    assert fit.reason == "6 spans, needs 8: the run is short"


def test_a_table_follows_a_device_that_no_line_describes(tmp_path: Path) -> None:
    steps = StepTable(rows=((100, 0.1), (1000, 0.12), (1500, 0.5), (2100, 0.52)))
    path = record_timed(tmp_path / "t.ndjson", replace(COSTS, step_table=steps))
    calibration = calibrate(load_runs([path]), has_table=True)
    formula, table = calibration.fits[:2]
    assert table.component == "step table"
    assert table.median_error < min(0.05, formula.median_error)
    found = calibration.costs.step_table
    for tokens in (1850, 2000):
        assert found.compute_step_s(tokens) == pytest.approx(steps.compute_step_s(tokens) + COSTS.gpu.sync_s, rel=0.05)
    assert calibrate(load_runs([path])).costs.step_table.rows == ()


def test_a_trace_without_times_and_a_short_one_are_refused(tmp_path: Path) -> None:
    path = record_timed(tmp_path / "t.ndjson")
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for line in lines:
        line.pop("time_s", None)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(UsageError, match="no times"):
        calibrate(load_runs([path]))
    with pytest.raises(UsageError, match="cannot be fitted"):
        calibrate(load_runs([record(tmp_path / "short.ndjson", samples=20)]))


def test_the_command_s_file_prices_a_simulation_as_the_run_was(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace, out, figures = str(record_timed(tmp_path / "t.ndjson")), tmp_path / "costs.json", tmp_path / "fit.json"
    assert main(["calibrate", trace, "--workers", "3", "--out", str(out), "--json", str(figures)]) == 0
    assert load_costs(out).gpu.per_token_s == pytest.approx(3e-4, rel=1e-3)
    (entry,) = json.loads(figures.read_text())["replays"]
    assert abs(entry["timing"]["total_error"]) < 0.01
    assert entry["timing"]["step_error"] < 0.01
    assert main(["replay", trace, "--cost-model", str(out)]) == 0
    assert "measured s" in capsys.readouterr().out
    assert main(["calibrate", trace, "--workers", "0"]) == 2
