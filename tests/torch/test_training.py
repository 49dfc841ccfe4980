"""Real processes over gloo: the same steps on every rank, and the gradient of the whole."""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from odb_ref.torch import StepInfo
from tests.torch import data
from tests.torch.data import Numbers, Prompts, Stream, collate, make_sample
from tests.torch.models import (
    check_gradient,
    check_updates,
    compute_gradient,
    compute_loss,
    get_gradient,
    list_updates,
    make_model,
)
from tests.torch.ranks import check_errors, get_values, run_each

make_loader = partial(data.make_loader, window=12, shard="given")


def make_shard(rank: int, sizes: list[int], kind: Any = Numbers) -> Any:
    return kind(sum(sizes[:rank]), sizes[rank])


def wrap(model: nn.Module, kind: str) -> nn.Module:
    if kind == "ddp":
        return DistributedDataParallel(model)
    fully_shard(model[2])
    return fully_shard(model)


def train(rank: int, sizes: list[int], options: dict[str, Any], kind: str) -> Any:
    wrapped = wrap(make_model(), kind)
    reduction = options.get("loss_reduction", "mean")
    steps = 0

    def step(batch: Any, info: StepInfo) -> None:
        nonlocal steps
        steps += 1
        given = collate([make_sample(3)]) if batch is None else batch  # what the page on the loader says to do
        info.scale(compute_loss(wrapped, given, reduction)).backward()

    def take() -> list[float]:
        found = get_gradient(wrapped)
        wrapped.zero_grad()
        return found

    options = dict(options)
    with make_loader(make_shard(rank, sizes, options.pop("data", Numbers)), **options) as loader:
        return list_updates(loader, step, take), steps


VARIANTS = [
    {"accumulation_steps": steps, "loss_reduction": reduction, "transport": transport}
    for steps, reduction, transport in itertools.product((1, 4), ("mean", "sum"), ("reduce", "gather"))
]
# Streams of unknown length.
# https://github.com/huggingface/datasets/issues/6594
# https://github.com/huggingface/datasets/issues/6719
STREAMS = [{"data": Stream, "num_workers": workers} for workers in (0, 2)]
WITHOUT_REPLAY = [{"on_idle": "none", "accumulation_steps": steps} for steps in (1, 4)]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")
@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_the_gradient_of_uneven_shards_is_that_of_the_union(kind: str) -> None:
    """Checks: ALIGN, COVER, WEIGHT."""
    # https://github.com/pytorch/pytorch/issues/33148
    sizes = [30, 9, 1]
    variants: list[dict[str, Any]] = [*VARIANTS, *STREAMS] if kind == "ddp" else VARIANTS[::3]
    cases = [(sizes, options, kind) for options in variants + WITHOUT_REPLAY]
    for results in run_each(3, train, cases, timeout_s=120):
        updates, steps = zip(*get_values(results), strict=True)
        assert len(set(steps)) == 1
        check_updates(updates, sum(sizes))


def compute_own_mean(logits: torch.Tensor, batch: dict[str, Any]) -> torch.Tensor:
    """Computes the mean as many do: 0/0 if nothing is supervised, and then NaN in every gradient."""
    labels = batch["labels"][:, 1:].flatten()
    mask = labels != -100
    losses = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels, reduction="none")
    return (losses * mask).sum() / mask.sum()


def train_on_prompts(rank: int, masked: list[str], options: dict[str, Any]) -> Any:
    """Returns for each step whether its loss was NaN, its samples and the gradient."""
    settings = dict(options)
    own_mean = settings.pop("own_mean", False)
    dataset = Prompts(100 * rank, 12 if rank == 0 else 4, masked[rank])
    wrapped = wrap(make_model(), "ddp")
    rows = []
    # Batches of about one sample, some of them without a supervised token.
    with make_loader(dataset, token_budget=30, **settings) as loader:
        for batch, info in loader.steps():
            wrapped.zero_grad()
            if own_mean:
                logits = wrapped(batch["input_ids"])
                loss = compute_own_mean(logits, batch)
                info.scale(loss, logits).backward()
            else:
                loss = compute_loss(wrapped, batch, settings.get("loss_reduction", "mean"))
                info.scale(loss).backward()
            numbers = [] if info.is_idle else batch["numbers"]
            rows.append((torch.isnan(loss).item(), numbers, get_gradient(wrapped)))
    return rows


@pytest.mark.slow
@pytest.mark.parametrize("masked", [["odd", "all"], ["all", "all"], ["no", "odd"]])
def test_batches_without_a_supervised_token_leave_every_gradient_finite_and_exact(masked: list[str]) -> None:
    """Checks: WEIGHT. This covers idle replays and real batches, whose mean loss is 0/0."""
    # https://github.com/instructlab/training/issues/547
    variants: list[dict[str, Any]] = [{}, {"own_mean": True}, {"loss_reduction": "sum"}, {"loss_scaling": "samples"}]
    found = run_each(2, train_on_prompts, [(masked, options) for options in variants])
    prompts = [Prompts(0, 200, kind) for kind in masked]
    for options, results in zip(variants, found, strict=True):
        steps = list(zip(*get_values(results), strict=True))
        if masked != ["no", "odd"] and "loss_reduction" not in options:
            assert any(is_nan for step in steps for is_nan, _, _ in step)
        for step in steps:
            gradient, other = (torch.tensor(gradient, dtype=torch.float64) for _, _, gradient in step)
            assert torch.isfinite(gradient).all()
            assert torch.equal(gradient, other)
            if "loss_scaling" not in options:
                union = [prompts[rank][number] for rank, (_, numbers, _) in enumerate(step) for number in numbers]
                check_gradient(gradient, compute_gradient(union))


def test_idle_steps_may_be_none_and_else_need_a_sample() -> None:
    def read_on_idle(rank: int, on_idle: str) -> Any:
        with make_loader(make_shard(rank, [20, 0]), on_idle=on_idle) as loader:
            scales = []
            for batch, info in loader.steps():
                assert info.is_idle == (batch is None)
                scales.append(None if batch is None else info.loss_scale)
            return scales

    (busy, idle), replayed = run_each(2, read_on_idle, [("none",), ("replay",)])
    assert all(scale == 2.0 for scale in busy.value)
    assert idle.value == [None] * len(busy.value)
    check_errors(replayed, "rank 1 failed", "idle_sample=")


def test_a_generator_seeds_the_shuffling_and_must_be_the_same_on_every_rank() -> None:
    """Checks: COVER, REPLAY."""

    def read_with_generator(rank: int, seeds: list[int]) -> list[list[int]]:
        generator = torch.Generator().manual_seed(seeds[rank])
        with make_loader(Numbers(0, 31), generator=generator, shard="auto", shuffle=True) as loader:
            return [numbers for _ in range(2) for _, numbers, _ in data.read(loader)]

    *alike, different = run_each(2, read_with_generator, [([3, 3],), ([3, 3],), ([4, 4],), ([3, 4],)])
    first, second, other = map(get_values, alike)
    assert first == second != other
    assert sorted(n for batches in first for batch in batches for n in batch) == sorted(2 * list(range(31)))
    check_errors(different, "rank 1 is configured differently", "drawn from generator")
