"""Known lengths on real ranks: the same number of micro-batches, the gradient of the whole, and errors on all ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from odb_ref.core.errors import UsageError
from odb_ref.plan import plan_ranks
from odb_ref.torch.micro_batches import plan_micro_batches
from tests.torch.models import get_gradient, make_model
from tests.torch.ranks import check_errors, get_values, run_each, run_ranks

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
    values = get_values(run_ranks(3, train, {"multiple_of": 2}))
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
    for rank, (batches, gradient, by_sequence) in enumerate(values):
        assert tuple(indices if not is_idle else () for indices, is_idle in batches) == planned[rank].micro_batches
        assert gradient == pytest.approx(by_token, rel=1e-9, abs=1e-12)
        assert by_sequence == pytest.approx(get_gradient(model), rel=1e-9, abs=1e-12)
    assert values[1][0].count(((0,), True)) == planned[0].count - 1  # its only sample, which it runs again


WRONG: list[tuple[dict[str, Any], str]] = [
    (
        {"budget": 20},
        "rank 2: sample 0 has 25 tokens, more than the budget of 20: raise the budget, or say oversize='alone'",
    ),
    (
        {"cost": lambda tokens: {}[tokens]},
        "rank 2: cost must give integers for (1, 2, 1000, 100000) tokens: KeyError: 1",
    ),
    ({"at_least": 2}, "at_least differs: 1 on rank 0, 2 on rank 2"),
    (
        {"mean": "sequence-mean"},
        "mean must be the same on all ranks, got 'token-mean' on rank 0 and 'sequence-mean' on rank 2",
    ),
    ({"mean": "bogus"}, "mean must be the same on all ranks, got 'token-mean' on rank 0 and an unknown one on rank 2"),
]


def test_who_cannot_plan_or_plans_by_other_terms_is_named_on_every_rank() -> None:
    """Spec: R13.11. All cases are in tests/plan/test_agreement.py. None may leave anything behind for the next."""

    def plan(rank: int, options: dict[str, Any]) -> None:
        plan_micro_batches(SHARDS[rank], **{"budget": 40} | (options if rank == 2 else {}))

    for (_, said), results in zip(WRONG, run_each(3, plan, [(options,) for options, _ in WRONG]), strict=True):
        assert {(result.error, result.text) for result in results} == {("UsageError", said)}


def test_a_rank_with_nothing_to_run_is_named_on_every_rank() -> None:
    """Spec: R13.4, R13.11."""

    def plan(rank: int, options: dict[str, Any]) -> list[tuple[Any, Any]]:
        batches = plan_micro_batches([[9, 9], []][rank], budget=9, **options)
        return [(batch.indices, batch.token_weights) for batch in batches]

    refused, emptied = run_each(2, plan, [({},), ({"short": "empty"},)])
    words = "rank 1 has no sample, so none for an idle micro-batch to run: give it one, or say short='empty' if"
    check_errors(refused, words, error="UsageError")
    first, second = get_values(emptied)
    assert len(first) == 2
    assert second == [((), ())] * 2


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
