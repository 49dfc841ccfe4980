"""Known lengths on real ranks: the same number of micro-batches, the gradient of the whole, and errors on all ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from odb_ref.core.errors import UsageError
from odb_ref.plan import plan_ranks
from odb_ref.torch.micro_batches import plan_micro_batches
from tests.torch.models import get_gradient, make_model
from tests.torch.ranks import run_ranks

SHARDS = [[9, 4, 30, 17, 2], [12], [25, 26, 27, 28, 5, 5, 6]]
"""Unequal, and one rank has fewer samples than there are micro-batches."""


def make_tokens(rank: int, index: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * rank + index)
    return torch.randint(0, 32, (SHARDS[rank][index],), generator=generator)


def compute_loss(model: nn.Module, rank: int, indices: tuple[int, ...]) -> torch.Tensor:
    """Returns the mean over the tokens of a row that concatenates the samples."""
    row = torch.cat([make_tokens(rank, index) for index in indices])
    return nn.functional.cross_entropy(model(row), (row + 1) % 32)


def train(rank: int, options: dict[str, Any]) -> tuple[list[tuple[Any, ...]], list[float], list[float]]:
    model = DistributedDataParallel(make_model())
    batches = plan_micro_batches(SHARDS[rank], budget=40, **options)
    for batch in batches:
        (compute_loss(model, rank, batch.indices) * batch.loss_scale).backward()
    own = get_gradient(model)
    model.zero_grad()
    for batch in plan_micro_batches(SHARDS[rank], budget=40, mean="sequence-mean-token-mean", **options):
        losses = [
            weight * len(make_tokens(rank, index)) * compute_loss(model, rank, (index,))
            for index, weight in zip(batch.indices, batch.token_weights, strict=True)
        ]
        sum(losses).backward()
    return [(batch.indices, batch.is_idle) for batch in batches], own, get_gradient(model)


def test_the_gradient_is_that_of_the_whole_and_the_plan_that_of_the_pure_function() -> None:
    """Spec: R13.1, R13.9, R13.11. Checks: WEIGHT."""
    results = run_ranks(3, train, {"multiple_of": 2})
    assert not [result.error for result in results if result.error], results
    planned = plan_ranks(SHARDS, budget=40, multiple_of=2).ranks
    model = make_model()
    rows = [make_tokens(rank, index) for rank, own in enumerate(SHARDS) for index in range(len(own))]
    losses = [nn.functional.cross_entropy(model(row), (row + 1) % 32) for row in rows]
    (sum(loss * len(row) for loss, row in zip(losses, rows, strict=True)) / sum(map(len, rows))).backward(
        retain_graph=True
    )
    by_token = get_gradient(model)
    model.zero_grad()
    (sum(losses) / len(losses)).backward()
    for rank, result in enumerate(results):
        batches, gradient, by_sequence = result.value
        assert tuple(indices if not is_idle else () for indices, is_idle in batches) == planned[rank].micro_batches
        assert gradient == pytest.approx(by_token, rel=1e-9, abs=1e-12)
        assert by_sequence == pytest.approx(get_gradient(model), rel=1e-9, abs=1e-12)
    assert results[1].value[0].count(((0,), True)) == planned[0].count - 1  # its only sample, which it runs again


def collect_errors(rank: int, culprit: int, cases: list[dict[str, Any]]) -> list[str]:
    """Returns what each case raises, one after another in the same process group. None may leave anything behind."""
    found = []
    for case in cases:
        options = {"budget": 40} | (case if rank == culprit else {})
        try:
            plan_micro_batches(SHARDS[rank], **options)
        except UsageError as error:
            found.append(str(error))
    dist.barrier()
    return found


def test_who_cannot_plan_or_plans_by_other_terms_is_named_on_every_rank() -> None:
    """Spec: R13.11. All cases are in tests/plan/test_agreement.py."""
    cases: list[dict[str, Any]] = [{"budget": 20}, {"cost": lambda tokens: 1 // 0}, {"at_least": 2}]
    cases += [{"mean": "sequence-mean"}, {"mean": "bogus"}]
    for result in run_ranks(3, collect_errors, 2, cases):
        assert result.value[0].startswith("rank 2: sample 0 has 25 tokens, more than the budget of 20")
        assert result.value[1:] == [
            "rank 2: cost must give integers for (1, 2, 1000, 100000) tokens: ZeroDivisionError: integer division or"
            " modulo by zero",
            "at_least differs: 1 on rank 0, 2 on rank 2",
            "mean must be the same on all ranks, got 'token-mean' on rank 0 and 'sequence-mean' on rank 2",
            "mean must be the same on all ranks, got 'token-mean' on rank 0 and an unknown one on rank 2",
        ]


def plan_or_fail(rank: int, lengths: list[list[int]], options: dict[str, Any]) -> Any:
    try:
        return [(batch.indices, batch.token_weights) for batch in plan_micro_batches(lengths[rank], **options)]
    except UsageError as error:
        return str(error)


def test_a_rank_with_nothing_to_run_is_named_on_every_rank() -> None:
    """Spec: R13.4, R13.11."""
    results = run_ranks(2, plan_or_fail, [[9, 9], []], {"budget": 9})
    words = "rank 1 has no sample, so none for an idle micro-batch to run: give it one, or say short='empty' if"
    assert all(result.value.startswith(words) for result in results), results
    results = run_ranks(2, plan_or_fail, [[9, 9], []], {"budget": 9, "short": "empty"})
    assert [len(result.value) for result in results] == [2, 2]
    assert results[1].value == [((), ())] * 2


def test_a_single_process_needs_no_group() -> None:
    batches = plan_micro_batches([30, 20, 10], budget=40, supervised=[3, 2, 0])
    assert [batch.indices for batch in batches] == [(0,), (1, 2)]
    assert [batch.loss_scale for batch in batches] == pytest.approx([3 / 5, 2 / 5])


def test_keys_of_a_tensor_are_its_numbers() -> None:
    """Spec: R13.3. Equal tensors have different hashes."""
    lengths, keys = torch.tensor([10] * 4), torch.tensor([7, 7, 8, 8])
    for together in (keys, list(keys), keys.numpy()):
        batches = plan_micro_batches(lengths, budget=20, together=together, mean="group-mean")
        assert [batch.indices for batch in batches] == [(0, 1), (2, 3)]
    with pytest.raises(UsageError, match="keys of together must be equal where samples belong together"):
        plan_micro_batches(lengths, budget=20, together=keys[:, None])
