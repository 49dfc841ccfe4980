"""Where an update begins and ends: at the same step on all ranks, also in an epoch that is broken off."""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from odb_ref.torch import JobError, ODBDataLoader, UsageError
from odb_ref.torch.loop import StepGuard
from tests.torch import data
from tests.torch.data import Numbers
from tests.torch.models import compute_loss, get_gradient, make_model
from tests.torch.ranks import get_values, run_ranks

STEPS = 3
make_loader = partial(data.make_loader, token_budget=40, shard="given", accumulation_steps=2)


def test_a_rank_that_leaves_ends_no_update_of_another() -> None:
    """Spec: R7.1, R7.4. Otherwise one rank would average gradients, or train, with a step that was not the others' last."""

    def take_and_leave(rank: int) -> list[tuple[int, bool, bool]]:
        """Returns what steps say that both take. Rank 1 takes the last long before rank 0, and leaves."""
        found = []
        with make_loader(Numbers(100 * rank, 60), num_workers=1) as loader:
            steps = loader.steps()
            for number in range(STEPS):
                if rank == 0 and number == STEPS - 1:
                    dist.barrier()
                _, info = next(steps)
                found.append((info.step, info.is_last, info.is_update_end))
            if rank == 1:
                loader.close()  # returns when all ranks know
                dist.barrier()
        return found

    values = get_values(run_ranks(2, take_and_leave))
    assert values[0] == values[1]
    assert values[0] == [(0, False, False), (1, False, True), (2, False, False)]


def test_a_failed_epoch_has_no_last_step() -> None:
    """Spec: R7.1, R7.2. Rank 0 is slow with each step, rank 1 is not."""

    def take_and_fail(rank: int) -> list[tuple[int, bool, bool]]:
        found = []
        samples = Numbers(100 * rank, 60, bad=50 if rank else None, fault="raise")
        with make_loader(samples, num_workers=1) as loader, pytest.raises(JobError):
            for _, info in loader.steps():
                found.append((info.step, info.is_last, info.is_update_end))
                time.sleep(0.0 if rank else 0.05)
        return found

    values = get_values(run_ranks(2, take_and_fail))
    assert values[0] == values[1]
    assert [end for _, _, end in values[0]] == [bool(step % 2) for step, _, _ in values[0]]
    assert not any(is_last for _, is_last, _ in values[0])


# A guard's updates ----------------------------------------------------------------------------------------------------------


def get_gradients_after(guard: StepGuard[Any], model: nn.Module, loader: ODBDataLoader[Any]) -> list[list[float]]:
    """Returns the gradient of each update of an epoch."""
    found = []
    for batch, info in loader.steps():
        guard.backward(batch, info)
        if info.is_update_end:
            found.append(get_gradient(model))
    return found


@pytest.mark.parametrize("number", [0, 2])
def test_an_update_that_was_broken_off_adds_nothing_to_the_next(number: int) -> None:
    """Preserves: WEIGHT. One epoch is left in the middle of an update, and another follows."""
    model = make_model()
    guard = StepGuard(model, compute_loss)
    with make_loader(accumulation_steps=3) as loader:
        expected = get_gradients_after(guard, model, loader)
        for batch, info in loader.steps():
            guard.backward(batch, info)
            if info.step == number + 1:
                break
        loader.set_epoch(0)
        assert get_gradients_after(guard, model, loader) == expected


def test_gradients_from_before_the_first_update_are_refused() -> None:
    """Preserves: WEIGHT. Gradients of a checkpoint inside an update, or of another guard, would be lost."""
    model = make_model()
    with make_loader(accumulation_steps=3) as loader:
        for batch, info in loader.steps():
            if info.step == 0:
                StepGuard(model, compute_loss).backward(batch, info)
                expected = get_gradient(model)
            else:
                break
        with pytest.raises(UsageError, match="save where info"):
            StepGuard(model, compute_loss).backward(batch, info)
        assert get_gradient(model) == expected
        model.zero_grad()
        StepGuard(model, compute_loss).backward(batch, info)


def go_on_after_a_failure(rank: int) -> tuple[list[list[float]], list[str]]:
    """Runs two epochs with the same guard. In the first, the second update fails on rank 1."""
    model = make_model()
    is_bad = False

    def step(model: nn.Module, batch: dict[str, Any]) -> torch.Tensor:
        if is_bad:
            raise ValueError("a bug")
        return compute_loss(model, batch)

    guard = StepGuard(model, step)
    errors = []
    with make_loader(Numbers(40 * rank, 40)) as loader:
        for batch, info in loader.steps():
            is_bad = rank == 1 and info.step == 2
            try:
                guard.backward(batch, info)
            except (ValueError, JobError) as error:
                errors.append(type(error).__name__)
        loader.set_epoch(0)
        return get_gradients_after(guard, model, loader), errors


def test_an_update_that_failed_is_over(plain: list[list[float]]) -> None:
    """Preserves: WEIGHT. A caller that continues nevertheless does so with the next update."""
    assert get_values(run_ranks(2, go_on_after_a_failure)) == [(plain, ["JobError"]), (plain, ["ValueError"])]


def train(rank: int, is_frozen: bool) -> list[list[float]]:
    """Trains with a guard that was made while layers were frozen, or not."""
    model = make_model()
    model[0].requires_grad_(not is_frozen)
    guard = StepGuard(model, compute_loss)
    model[0].requires_grad_(True)
    with make_loader(Numbers(40 * rank, 40)) as loader:
        return get_gradients_after(guard, model, loader)


@pytest.fixture(scope="module")
def plain() -> list[list[float]]:
    """Returns the gradients of two ranks without any trouble."""
    return get_values(run_ranks(2, train, False))[0]


def test_what_is_trained_only_later_is_averaged_too(plain: list[list[float]]) -> None:
    """Preserves: WEIGHT. Layers were frozen when the guard was made."""
    assert get_values(run_ranks(2, train, True)) == [plain, plain]
