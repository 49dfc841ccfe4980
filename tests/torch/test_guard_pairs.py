"""Out of memory in a step of preference pairs: halves of whole pairs, the same gradients on all ranks, each pair once."""

from __future__ import annotations

import random
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from odb_ref.core.errors import UsageError
from odb_ref.torch.loop import StepGuard, count_pairs, split_pairs
from odb_ref.torch.loop.splitting import split_batch
from tests.torch.data import make_loader
from tests.torch.models import Update, check_updates, get_gradient, list_updates
from tests.torch.pairs import Preference, check_pairs, collate, compute_loss, make_pair
from tests.torch.ranks import get_values, run_each, run_ranks
from tests.torch.test_step_guard import FIT, Faults, limited_memory

SIZES = (30, 9)
OPTIONS: dict[str, Any] = {"token_budget": 150, "window": 12, "collate_fn": collate, "shard": "given", "timeout_s": 30}
PAIRS: dict[str, Any] = {"split": split_pairs, "count": count_pairs}


def make_data(rank: int) -> list[dict[str, Any]]:
    return [make_pair(number) for number in range(sum(SIZES[:rank]), sum(SIZES[: rank + 1]))]


def compute_checked(model: nn.Module, batch: dict[str, Any]) -> torch.Tensor:
    """Returns the loss of whole pairs."""
    check_pairs(batch)
    loss: torch.Tensor = model(input_ids=batch["input_ids"], margin=batch["margin"])["loss"]
    return loss


class PairFaults(Faults):
    """Makes passes over several pairs fail."""

    def compute(self, model: nn.Module, batch: dict[str, Any], reduction: str) -> torch.Tensor:
        return compute_checked(model, batch)


def train(rank: int, kind: str, options: dict[str, Any], seed: int) -> tuple[list[Update], int, int]:
    """Returns its updates, and the failures on this rank and on all."""
    model: nn.Module = Preference()
    if kind == "fsdp2":
        model = fully_shard(model)
    elif dist.is_initialized():
        model = DistributedDataParallel(model)
    faults = PairFaults(seed + rank, 0.0 if kind == "fsdp2" else 0.6)
    with make_loader(make_data(rank), **OPTIONS, **options) as loader:
        memory: dict[str, Any] = {"memory": FIT} if kind == "fsdp2" else {}
        guard = StepGuard(model, faults.compute_loss, lower_budget=loader.accept_budget, **PAIRS, **memory)
        choose = random.Random(rank)
        with limited_memory(lambda: choose.uniform(61, 150)):
            updates = list_updates(loader, guard.backward, partial(get_gradient, model))
    return updates, guard.failures, guard.all_failures


def compute_union_gradient(numbers: list[int]) -> torch.Tensor:
    model = Preference()
    compute_loss(model, numbers).backward()
    return torch.tensor(get_gradient(model), dtype=torch.float64)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "world_size"), [("ddp", 1), ("ddp", 2), ("fsdp2", 2)])
def test_pairs_go_in_halves_of_whole_pairs_with_exact_gradients(kind: str, world_size: int) -> None:
    """Checks: WEIGHT, ONCE, COVER. If the model is sharded, batches are halved before the pass."""
    cases = [(kind, options, seed) for seed, options in enumerate(({}, {"accumulation_steps": 3}))]
    for results in run_each(world_size, train, cases, timeout_s=120):
        updates, own, everywhere = zip(*get_values(results), strict=True)
        check_updates(updates, sum(SIZES[:world_size]), compute_union_gradient)
        assert set(everywhere) == {sum(own)}
        assert sum(own) > 1


def fail_alone(rank: int) -> Any:
    def run(model: nn.Module, batch: dict[str, Any]) -> torch.Tensor:
        if rank == 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return compute_checked(model, batch)

    accepted: list[int] = []
    guard = StepGuard(Preference(), run, lower_budget=accepted.append, **PAIRS)
    with make_loader(make_data(rank), **OPTIONS) as loader:
        try:
            for batch, info in loader.steps():
                guard.backward(batch, info)
        finally:
            assert bool(accepted) == (rank == 1)


def test_a_pair_that_does_not_fit_alone_fails_on_every_rank() -> None:
    results = run_ranks(2, fail_alone, timeout_s=60)
    assert [result.error for result in results] == ["JobError", "OutOfMemoryError"], results
    assert results[0].rank == 1
    assert "does not fit alone: CUDA out of memory" in results[1].text


# What cannot be halved is reported at once -----------------------------------------------------------------------------------


def test_pairs_whose_layout_nobody_has_said_are_refused_in_the_first_step() -> None:
    """Nothing fails, and rank 1 has nothing that would have to be halved."""

    def guard_unsaid(rank: int, options: dict[str, Any]) -> None:
        guard = StepGuard(Preference(), compute_checked, **options)
        with make_loader([make_pair(50)] if rank else make_data(0), **OPTIONS) as loader:
            for batch, info in loader.steps():
                guard.backward(batch, info)

    unsaid, uncounted = run_each(2, guard_unsaid, [({},), ({"split": split_pairs},)])
    assert [result.error for result in unsaid] == ["UsageError", "JobError"], unsaid
    assert "pass split_pairs and count_pairs of odb_ref.torch.loop" in unsaid[0].text
    assert [result.error for result in uncounted] == ["", ""], uncounted  # a pair is one sample, and counts once


def test_a_batch_of_pairs_is_cut_between_pairs() -> None:
    batch = collate([make_pair(number) for number in range(5)])
    for half, numbers in zip(split_pairs(batch, 5), ([0, 1, 2], [3, 4]), strict=True):
        assert half["numbers"].tolist() == numbers
        check_pairs(half)
        assert count_pairs(half) == len(numbers)
    with pytest.raises(UsageError, match=r"has 10 entries for 5 samples.*pass split_pairs"):
        split_batch(batch, 5)
    with pytest.raises(UsageError, match=r"batch\['patches'\] has 12 entries for 5 samples"):
        split_pairs(batch | {"patches": torch.zeros(12, 3)}, 5)
    with pytest.raises(UsageError, match="no input_ids to count"):
        count_pairs({"texts": []})
