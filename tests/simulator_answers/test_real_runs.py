"""Real gloo runs of the torch adapter: every decision is predicted, and times by a model fitted to another run.

The loader, its exchange and the trainers' collective are real. The accelerator is emulated: a step sleeps as long as a device
with a cost per step and per padded token would take, so the test needs no quiet machine and no GPU.
"""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402
from odb_sim.recorded.calibrate import calibrate  # noqa: E402
from odb_sim.recorded.replay import replay  # noqa: E402
from odb_sim.recorded.runs import RecordedRun, load_runs  # noqa: E402

from odb_ref.torch import Batching, ODBDataLoader  # noqa: E402
from tests.torch.data import Numbers  # noqa: E402
from tests.torch.ranks import run_ranks  # noqa: E402

RANKS = 3
FIXED_S = 0.03
PER_TOKEN_S = 3e-4
SAMPLE_S = 0.04
WORKERS = 2


def collate(samples: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    pad = torch.nn.utils.rnn.pad_sequence
    return {
        "input_ids": pad([sample["input_ids"] for sample in samples], batch_first=True),
        "labels": pad([sample["labels"] for sample in samples], batch_first=True, padding_value=-100),
    }


class SlowNumbers(Numbers):
    """Samples that take a worker's time to make, but no processor."""

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        time.sleep(SAMPLE_S)
        return super().__getitem__(index)


def train(rank: int, out: str, first: int, workers: int = 0) -> int:
    shard = (SlowNumbers if workers else Numbers)(first + 1000 * rank, 200 + 90 * rank)
    steps = 0
    with ODBDataLoader(
        shard,
        shard="given",
        shuffle=True,
        seed=first,
        token_budget=200,
        num_workers=workers,
        collate_fn=collate,
        trace=Path(out) / "rank{rank}.ndjson",
        batching=Batching(window=48),
    ) as loader:
        for batch, _ in loader.steps():
            time.sleep(FIXED_S + PER_TOKEN_S * batch["input_ids"].numel())
            dist.all_reduce(torch.ones(1))
            steps += 1
    return steps


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[RecordedRun]:
    """Records two runs of the same job on different samples."""
    return record_runs(tmp_path_factory, 0)


@pytest.fixture(scope="module")
def starved_runs(tmp_path_factory: pytest.TempPathFactory) -> list[RecordedRun]:
    """Records the same runs with workers that are slower than the trainers."""
    return record_runs(tmp_path_factory, WORKERS)


def record_runs(tmp_path_factory: pytest.TempPathFactory, workers: int) -> list[RecordedRun]:
    recorded = []
    for number in range(2):
        out = tmp_path_factory.mktemp(f"run{number}")
        results = run_ranks(RANKS, train, str(out), 10_000 * number, workers, timeout_s=90)
        assert not [result.text for result in results if result.error]
        (run,) = load_runs(sorted(out.glob("*.ndjson")))
        assert [result.value for result in results] == [run.steps] * RANKS
        recorded.append(run)
    return recorded


@pytest.mark.timeout(240)
def test_every_decision_of_a_real_run_is_predicted(runs: list[RecordedRun]) -> None:
    for run in runs:
        result = replay(run)
        assert result.driver == "torch"
        assert result.outcome == "complete"
        assert result.difference == ""
        assert result.predicted_steps == result.measured_steps == run.steps > 30


def train_on_changing_budgets(rank: int, out: str) -> list[int]:
    """Rank 1 lowers its budget in the first epoch and raises it a little in the second. A schedule raises it on both ranks."""
    steps = []
    with ODBDataLoader(
        Numbers(1000 * rank, 240 - 60 * rank),
        shard="given",
        shuffle=True,
        token_budget=200,
        num_workers=rank,
        collate_fn=collate,
        trace=Path(out) / "rank{rank}.epoch{epoch}.ndjson",
        batching=Batching(budget_schedule=grow, window=24),
    ) as loader:
        for epoch in range(2):
            for _, info in loader.steps():
                if rank == 1 and info.step == 6:
                    loader.accept_budget(90 + 60 * epoch)
            steps.append(info.step + 1)
    return steps


def grow(step: int, current: int) -> int:
    return 60 + 8 * step


@pytest.mark.timeout(240)
def test_a_real_run_whose_budgets_change_is_replayed_with_the_same_steps(tmp_path: Path) -> None:
    """Spec: R15. The trace's offers contain what each rank accepted, and when the loader was told."""
    results = run_ranks(2, train_on_changing_budgets, str(tmp_path), timeout_s=90)
    assert not [result.text for result in results if result.error]
    runs = load_runs(sorted(tmp_path.glob("*.ndjson")))
    assert [run.steps for run in runs] == results[0].value == results[1].value
    assert [min(run.budgets) for run in runs] == [60, 90]
    for run in runs:
        result = replay(run)
        assert result.difference == ""
        assert result.predicted_steps == result.measured_steps == run.steps
        assert len(set(run.budgets)) > 1
        assert replace(run, ranks=tuple(replace(rank, budgets=[]) for rank in run.ranks)).budget_schedule is None


@pytest.mark.timeout(240)
def test_step_times_of_a_held_back_run_are_predicted_within_a_tenth(runs: list[RecordedRun]) -> None:
    calibration = calibrate(runs, workers=0)
    step = calibration.fits[0]
    assert calibration.held_back == "every second run"
    assert step.median_error < 0.1
    cost = calibration.costs.gpu
    for tokens in (100, 200):  # noise shifts the two coefficients against each other, but hardly the line between them
        slept_s = FIXED_S + PER_TOKEN_S * tokens
        assert 0.9 * slept_s < cost.fixed_s + cost.per_token_s * tokens < 1.4 * slept_s
    timing = replay(runs[1], costs=calibration.costs).timing
    # Medians only, because a busy machine sometimes stalls a process, which does not concern the model.
    assert timing.step_error < 0.1
    assert abs(timing.total_error) < 0.1, "the epoch"


@pytest.mark.deep
@pytest.mark.timeout(240)
def test_an_epoch_that_waits_for_its_workers_is_predicted_within_a_tenth(starved_runs: list[RecordedRun]) -> None:
    calibration = calibrate(starved_runs, workers=WORKERS)
    assert calibration.costs.loader.sample_s == pytest.approx(SAMPLE_S, rel=0.15)
    result = replay(starved_runs[1], costs=calibration.costs)
    assert result.difference == ""
    assert result.predicted_steps == result.measured_steps > 30
    assert abs(result.timing.total_error) < 0.1
    # With instant reading, the same epoch would be much shorter: it is the loader that is predicted here.
    fast = replace(calibration.costs, loader=replace(calibration.costs.loader, sample_s=0.0))
    free = replay(starved_runs[1], costs=fast)
    assert free.timing.predicted_s < 0.8 * result.timing.predicted_s
