"""Accelerate over gloo: exact weights after several updates, and every sample once an epoch."""

from __future__ import annotations

import warnings
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.integrations import require

require("accelerate")

import torch
from accelerate import Accelerator, DataLoaderConfiguration

from odb_ref.integrations.accelerate import accumulate
from odb_ref.integrations.progress import Intervals, Progress
from odb_ref.torch import JobState, ODBDataLoader, UsageError
from odb_ref.torch.loop import StepGuard
from tests.integrations.common import (
    BUDGET_TOKENS,
    LEARNING_RATE,
    SIZES,
    STEPS,
    Model,
    check_runs,
    collate,
    get_weights,
    make_all,
    make_loader,
    make_shard,
    run_each,
    run_ranks,
)
from tests.torch.ranks import get_values, in_a_rank


def train_epoch(
    accelerator: Any, model: Any, optimizer: Any, loader: Any, *, is_told_always: bool = False
) -> list[list[int]]:
    """Returns the sample numbers of each update. The optimizer is called in every step, as in Accelerate's guides, or at the
    end of a window.
    """
    updates: list[list[int]] = [[]]
    for batch, info in loader.steps():
        with accumulate(accelerator, model, info):
            accelerator.backward(info.scale(model(batch["input_ids"], batch["labels"])["loss"]))
            if is_told_always:
                optimizer.step()
                optimizer.zero_grad()
        updates[-1] += [] if info.is_idle else batch["numbers"].tolist()
        if info.is_update_end:
            if not is_told_always:
                optimizer.step()
                optimizer.zero_grad()
            updates.append([])
    assert updates.pop() == []
    return updates


def train(rank: int, steps: int, is_told_always: bool) -> Any:
    """Trains two epochs."""
    accelerator, model = Accelerator(cpu=True), Model()
    with make_loader(make_shard(rank), shard="given", accumulation_steps=steps) as loader:
        wrapped, optimizer, prepared = accelerator.prepare(
            model, torch.optim.SGD(model.parameters(), lr=LEARNING_RATE), loader
        )
        assert prepared is loader
        parts = accelerator, wrapped, optimizer, loader
        updates = [update for _ in range(2) for update in train_epoch(*parts, is_told_always=is_told_always)]
    return updates, get_weights(model)


def test_the_weights_are_those_of_one_process_on_the_union() -> None:
    """Checks: WEIGHT, COVER, ALIGN. Uneven shards, masked labels, a batch without a label, windows of 1 and 2, two epochs."""
    cases = [(1, False), (2, False), (2, True)]
    for (steps, _), results in zip(cases, run_each(len(SIZES), train, cases), strict=True):
        runs = get_values(results)
        assert [len(updates) for updates, _ in runs] == [2 * -(-STEPS // steps)] * len(SIZES)
        check_runs(runs, epochs=2)


def train_guarded(rank: int, folder: Path) -> Any:
    """Rank 1 runs out of memory whenever it has several samples. Checkpoints are due by numbers of samples."""
    accelerator = Accelerator(cpu=True)
    model, updates = Model(), [[]]
    intervals, saved, seen = Intervals(save_samples=10), [], []
    with make_loader(make_all(), accumulation_steps=2) as loader:
        wrapped, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=LEARNING_RATE))
        progress = Progress(loader.estimate_steps() / 2)
        accelerator.register_for_checkpointing(progress, JobState(loader))

        def compute_loss(model: Any, batch: Any) -> Any:
            if rank == 1 and len(batch["numbers"]) > 1:
                raise torch.OutOfMemoryError("CUDA out of memory: injected")
            return model(batch["input_ids"], batch["labels"])["loss"]

        guard = StepGuard(wrapped, compute_loss, backward=accelerator.backward)
        for _ in range(2):
            for batch, info in loader.steps():
                guard.backward(batch, info)
                updates[-1] += [] if info.is_idle else batch["numbers"].tolist()
                if info.is_update_end:
                    optimizer.step()
                    updates.append([])
                progress.note_step(info)
                seen.append((progress.epochs, info.epoch + (info.progress or 0.0), info.is_update_end))
                if intervals.is_save_due(progress):
                    accelerator.save_state(str(folder / str(progress.samples)))
                    saved.append(progress.samples)
    assert updates.pop() == []
    again = Progress(1)
    again.load_state_dict(progress.state_dict())
    assert again.state_dict() == progress.state_dict()
    return (updates, get_weights(model)), (guard.failures, guard.all_failures), saved, seen


def test_a_guard_runs_its_passes_and_progress_says_when_to_save(tmp_path: Path) -> None:
    """Checks: WEIGHT, ONCE, COVER. The share of the epoch is that of the samples trained on."""
    values = get_values(run_ranks(len(SIZES), train_guarded, tmp_path))
    runs, failures, saved, seen = zip(*values, strict=True)
    check_runs(runs, epochs=2)
    assert failures[0][0] == 0 < failures[1][0] == failures[0][1] == failures[1][1]
    assert saved[0] == saved[1]
    assert len(saved[0]) >= 4
    assert [number // 10 for number in saved[0]] == sorted({number // 10 for number in saved[0]})
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(map(str, saved[0]))
    for own in seen:
        assert all(found == share for found, share, is_update_end in own if is_update_end)
        assert own[-1][0] == 2.0


def schedule(rank: int, settings: dict[str, Any], taken: int = 0) -> Any:
    """Returns the warnings, the scheduler's steps and the updates, as if ``taken`` steps of the epoch had been taken."""
    accelerator, model = Accelerator(cpu=True, **settings), Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
    wrapped, optimizer, prepared = accelerator.prepare(model, optimizer, scheduler)
    updates = 0
    with (
        warnings.catch_warnings(record=True, action="always") as caught,
        make_loader(make_all(), accumulation_steps=2) as loader,
    ):
        for batch, info in loader.steps():
            with accumulate(accelerator, wrapped, replace(info, step=info.step + taken)):
                accelerator.backward(info.scale(wrapped(batch["input_ids"], batch["labels"])["loss"]))
            if info.is_update_end:
                optimizer.step()
                prepared.step()
                optimizer.zero_grad()
                updates += 1
    return [str(item.message) for item in caught], scheduler.last_epoch, updates


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_schedule_that_goes_by_processes_is_said(world_size: int) -> None:
    """The rate falls too fast by a factor of the number of ranks, and below 0 if it is linear."""
    shared_out = {"dataloader_config": DataLoaderConfiguration(split_batches=True)}
    cases: list[Any] = [(settings,) for settings in ({}, shared_out, {"step_scheduler_with_optimizer": False})]
    cases.append(({}, 4))
    found = [get_values(results) for results in run_each(world_size, schedule, cases)]
    for is_said, values in zip((world_size > 1, False, False, world_size > 1), found, strict=True):
        for said, steps, updates in values:
            assert steps == updates * (world_size if is_said else 1)
            assert [text for text in said if f"take {world_size} steps in each update" in text] == said
            assert len(said) == is_said


@in_a_rank(run_ranks)
def test_an_accelerator_that_divides_as_well_or_is_expected_to_is_refused() -> None:
    with ODBDataLoader(make_shard(0), token_budget=BUDGET_TOKENS, collate_fn=collate) as loader:
        _, info = next(loader.steps())
        divided = replace(info, weighting=replace(info.weighting, is_divided_by_steps=True))
    with pytest.raises(UsageError, match="normalised twice: leave it at 1"):
        accumulate(Accelerator(cpu=True, gradient_accumulation_steps=2), Model(), info)
    undivided: Any = SimpleNamespace(gradient_accumulation_steps=1)
    with pytest.raises(UsageError, match=r"Loss\(is_divided_by_trainer=True\) is wrong with Accelerate"):
        accumulate(undivided, Model(), divided)
