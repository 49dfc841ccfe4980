"""Known lengths over real ranks: the same number of micro-batches, the gradient of the whole, and an error for everybody."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

from odb_ref.core.batching.known_lengths import plan  # noqa: E402
from odb_ref.core.errors import UsageError  # noqa: E402
from odb_ref.torch.info import LossReduction, Weighting  # noqa: E402
from odb_ref.torch.micro_batches import plan_micro_batches  # noqa: E402
from tests.torch.ranks import run_ranks  # noqa: E402

pytestmark = pytest.mark.torch

SHARDS = [[9, 4, 30, 17, 2], [12], [25, 26, 27, 28, 5, 5, 6]]
"""Unequal, and one rank has fewer samples than there are micro-batches."""


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(32, 6), nn.Tanh(), nn.Linear(6, 32)).double()


def make_tokens(rank: int, index: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * rank + index)
    return torch.randint(0, 32, (SHARDS[rank][index],), generator=generator)


def compute_loss(model: nn.Module, rank: int, indices: tuple[int, ...]) -> torch.Tensor:
    """The mean over the tokens of a row in which the samples lie end to end."""
    row = torch.cat([make_tokens(rank, index) for index in indices])
    return nn.functional.cross_entropy(model(row), (row + 1) % 32)


def get_gradient(model: nn.Module) -> list[float]:
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters()]).tolist()


def train(rank: int, weighting: Weighting, options: dict[str, Any]) -> tuple[list[tuple[Any, ...]], list[float]]:
    model = DistributedDataParallel(make_model())
    batches = plan_micro_batches(SHARDS[rank], budget_tokens=40, weighting=weighting, **options)
    for batch in batches:
        loss = compute_loss(model, rank, batch.indices) * batch.loss_scale
        (loss / len(batches) if weighting.is_divided_by_steps else loss).backward()
    return [(batch.indices, batch.is_idle) for batch in batches], get_gradient(model)


@pytest.mark.parametrize("is_divided_by_steps", [False, True])
def test_the_gradient_is_that_of_the_whole_and_the_plan_that_of_the_pure_function(is_divided_by_steps: bool) -> None:
    """Spec: R13.1, R13.3, R4.5. Checks: WEIGHT."""
    weighting = Weighting(is_divided_by_steps=is_divided_by_steps)
    results = run_ranks(3, train, weighting, {"multiple_of": 2})
    assert not [result.error for result in results if result.error], results
    planned = plan(SHARDS, budget_tokens=40, multiple_of=2)
    model = make_model()
    rows = [torch.cat([make_tokens(rank, index) for index in range(len(SHARDS[rank]))]) for rank in range(3)]
    everything = torch.cat(rows)
    nn.functional.cross_entropy(model(everything), (everything + 1) % 32).backward()
    for rank, result in enumerate(results):
        batches, gradient = result.value
        assert tuple(indices if not is_idle else () for indices, is_idle in batches) == planned[rank]
        assert gradient == pytest.approx(get_gradient(model), rel=1e-9, abs=1e-12)
    assert results[1].value[0].count(((0,), True)) == len(planned[0]) - 1  # it has one sample, and runs it again


DIFFERENT: list[tuple[dict[str, Any], str]] = [
    ({"budget_tokens": 50}, "budget_tokens differs: 40 on rank 0, 50 on rank 1"),
    ({"layout": "padded"}, "layout differs: packed on rank 0, padded on rank 1"),
    ({"may_exceed": True}, "may_exceed differs: False on rank 0, True on rank 1"),
    ({"cost": abs}, "cost differs: one with the digest"),
    ({"weighting": Weighting(reduction=LossReduction.SUM)}, "weighting differs: one with the digest"),
]
FAILING: list[tuple[dict[str, Any], str]] = [
    ({"budget_tokens": 20}, "sample 1 has 26 tokens|sample 0 has 25 tokens"),
    ({"supervised": [1]}, "7 lengths, but 1 numbers"),
    ({"supervised": [99] * 7}, "sample 0 has 99 supervised tokens of 25"),
    ({"cost": lambda tokens: 1 // 0}, "by zero"),
    ({"layout": "folded"}, "layout must be one of padded, packed, got 'folded'"),
]


def collect_errors(rank: int, culprit: int, cases: list[dict[str, Any]]) -> list[str]:
    """What each case raises, one after another in the same process group: none may leave anything behind."""
    found = []
    for case in cases:
        options = {"budget_tokens": 40} | (case if rank == culprit else {})
        try:
            plan_micro_batches(SHARDS[rank], **options)
        except (UsageError, ZeroDivisionError) as error:
            found.append(str(error))
    dist.barrier()
    return found


def test_a_setting_that_differs_is_named_on_every_rank() -> None:
    """Spec: R13.4."""
    for result in run_ranks(3, collect_errors, 1, [case for case, _ in DIFFERENT]):
        for text, (_, message) in zip(result.value, DIFFERENT, strict=True):
            assert text.startswith(message)


def test_a_rank_that_cannot_plan_is_named_by_all_others() -> None:
    """Spec: R13.4."""
    results = run_ranks(3, collect_errors, 2, [case for case, _ in FAILING])
    for result in results[:2]:
        assert result.value == ["rank 2 cannot plan its micro-batches: its own error says why"] * len(FAILING)
    for text, (_, message) in zip(results[2].value, FAILING, strict=True):
        assert any(part in text for part in message.split("|"))


def test_a_single_process_needs_no_group() -> None:
    batches = plan_micro_batches([30, 20, 10], budget_tokens=40, supervised=[3, 2, 0])
    assert [batch.indices for batch in batches] == [(1, 2), (0,)]
    assert [batch.loss_scale for batch in batches] == pytest.approx([2 / 5, 3 / 5])
