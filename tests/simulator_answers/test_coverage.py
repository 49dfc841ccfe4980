"""Bands keep their promise: the stated share of runs that nothing was fitted to lies within them."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
from odb_sim.cli.demo import find_script
from odb_sim.inputs.conditions import Conditions
from odb_sim.inputs.costs import Costs, GpuCost
from odb_sim.inputs.workload import Sharding
from odb_sim.recorded.calibrate import calibrate
from odb_sim.recorded.replay import replay
from odb_sim.recorded.runs import RecordedRun, load_runs
from odb_sim.studies.bands import scale_steps

from tests.helpers.capture import capture
from tests.simulator_answers.helpers import record

PROMISED, ENOUGH = 0.9, 0.8


def count_inside(costs: Costs, held: list[RecordedRun], workers: int) -> list[bool]:
    inside = []
    for recorded in held:
        timing = replay(recorded, costs=costs, workers=workers).timing
        assert timing.low_s < timing.predicted_s < timing.high_s
        inside.append(timing.low_s <= timing.measured_s <= timing.high_s)
    return inside


@pytest.mark.deep
@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("drift", "jitter", "count", "samples"), [(0.03, 0.05, 18, 150), (0.03, 0.05, 24, 300), (0.1, 0.1, 24, 300)]
)
def test_runs_of_a_machine_whose_speed_drifts_lie_within_the_bands(
    drift: float, jitter: float, count: int, samples: int, tmp_path: Path
) -> None:
    random, costs = np.random.default_rng(7), Costs(gpu=GpuCost(fixed_s=0.1, per_token_s=3e-4, per_token2_s=0))
    runs = []
    for number in range(count):
        paced = scale_steps(costs, float(random.lognormal(0, drift)))
        path = record(
            tmp_path / f"{number}.ndjson",
            sharding=Sharding.EVEN,
            samples=samples,
            costs=paced,
            conditions=Conditions(jitter=jitter),
        )
        runs += load_runs([path])
    fits = {begin: calibrate(runs[begin : begin + 6], workers=4).costs for begin in range(0, count, 6)}
    inside = [one for begin, costs in fits.items() for one in count_inside(costs, runs[:begin], 4)]
    assert len(inside) == sum(fits)
    assert np.mean(inside) >= ENOUGH
    narrow = [costs.ranges.rows[-1][2] for costs in fits.values()]
    assert max(narrow) < 1 + 4 * drift + jitter, "no wider than the drift makes them"


@pytest.mark.deep
@pytest.mark.timeout(600)
def test_real_runs_that_nothing_was_fitted_to_lie_within_the_bands(tmp_path: Path) -> None:
    """Twelve runs that train on processors: four times, a model is fitted to half of them and predicts the other half."""
    pytest.importorskip("torch")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += [str(find_script()), "--out", str(tmp_path), "--runs", "12", "--samples", "400"]
    done = capture(command, timeout=500)
    assert done.returncode == 0, done.stderr[-2000:]
    runs = load_runs(sorted(map(str, tmp_path.glob("run*.ndjson"))))
    assert len(runs) == 12
    halves = [(runs[:6], runs[6:]), (runs[6:], runs[:6]), (runs[::2], runs[1::2]), (runs[1::2], runs[::2])]
    inside = [one for fitted, held in halves for one in count_inside(calibrate(fitted, workers=0).costs, held, 0)]
    assert np.mean(inside) >= ENOUGH
