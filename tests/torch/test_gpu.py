"""The training program on a GPU, also when memory runs out, and on a CPU, so that the program is checked at least on machines
without a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from odb_ref.torch.loop import StepGuard
from tests.helpers.gpus import show_gpus
from tests.torch.data import Numbers, make_loader
from tests.torch.models import check_gradient, compute_loss, compute_union_gradient, get_gradient, make_model
from tests.torch.ranks import Result, get_values, run_ranks

with show_gpus():
    HAS_GPU = torch.cuda.device_count() > 0  # does not initialize the driver
NEEDS_GPU = pytest.mark.skipif(not HAS_GPU, reason="no CUDA device on this machine")
ON_GPU = (pytest.mark.gpu, NEEDS_GPU)
HAS_NCCL = torch.distributed.is_nccl_available()
EPOCHS = 2
MIB = 2**20


def run_on_gpu(ranks: int, function: Callable[..., Any], *args: Any, backend: str = "gloo") -> list[Result]:
    with show_gpus():
        return run_ranks(ranks, function, *args, timeout_s=200, method="spawn", backend=backend)


def train(rank: int, sizes: list[int], device: str, num_workers: int) -> Any:
    """Returns by epoch and step this rank's sample numbers, and the gradient that DDP averaged over all ranks' batches."""
    if device == "cuda":
        torch.cuda.set_device(0)  # all ranks share the GPU
    model = DistributedDataParallel(make_model().to(device))
    options: dict[str, Any] = {"window": 12, "shard": "given", "loss_reduction": "sum"}
    options |= {"num_workers": num_workers, "pin_memory": device == "cuda", "timeout_s": 60}
    epochs = []
    with make_loader(Numbers(sum(sizes[:rank]), sizes[rank]), **options) as loader:
        for _ in range(EPOCHS):
            steps = []
            for batch, info in loader.steps():
                assert batch["input_ids"].is_pinned() == (device == "cuda")
                there = {key: batch[key].to(device, non_blocking=True) for key in ("input_ids", "labels")}
                model.zero_grad()
                (compute_loss(model, there, "sum") * info.loss_scale).backward()
                steps.append(([] if info.is_idle else batch["numbers"], get_gradient(model)))
            epochs.append(steps)
    return epochs


@pytest.mark.parametrize(
    ("device", "backend", "sizes", "num_workers"),
    [
        pytest.param("cpu", "gloo", [17, 5], 1, id="cpu"),
        pytest.param("cuda", "nccl", [23], 2, id="nccl-world-1", marks=ON_GPU),
        pytest.param("cuda", "gloo", [17, 5, 9], 0, id="three-ranks-share-a-gpu", marks=ON_GPU),
        pytest.param("cuda", "gloo", [17, 5], 2, id="two-ranks-share-a-gpu-with-workers", marks=ON_GPU),
    ],
)
def test_the_gradient_is_that_of_the_union(device: str, backend: str, sizes: list[int], num_workers: int) -> None:
    """Checks: WEIGHT, COVER, ALIGN. Batches are pinned if there is a GPU; float64, relative error below 1e-9."""
    if backend == "nccl" and not HAS_NCCL:
        pytest.skip("this torch has no NCCL")
    arguments = (sizes, device, num_workers)
    if device == "cuda":
        results = run_on_gpu(len(sizes), train, *arguments, backend=backend)
    else:
        results = run_ranks(len(sizes), train, *arguments)
    values = get_values(results)
    for epochs in zip(*values, strict=True):
        emitted = [number for steps in epochs for numbers, _ in steps for number in numbers]
        assert sorted(emitted) == list(range(sum(sizes)))
        for step in zip(*epochs, strict=True):
            expected = compute_union_gradient([number for numbers, _ in step for number in numbers])
            for _, gradient in step:
                check_gradient(gradient, expected)


def train_with_too_little(rank: int, limit_mib: int, sample_mib: int) -> Any:
    """Returns samples, gradients and failures when each sample takes ``sample_mib`` and the process may use ``limit_mib``."""
    torch.cuda.set_device(0)
    torch.cuda.set_per_process_memory_fraction(limit_mib * MIB / torch.cuda.mem_get_info()[1])
    model = make_model().cuda()

    def compute(model: torch.nn.Module, batch: Any) -> torch.Tensor:
        there = {key: batch[key].cuda(non_blocking=True) for key in ("input_ids", "labels")}
        taken = torch.zeros(len(batch["numbers"]), sample_mib * MIB, dtype=torch.uint8, device="cuda")
        return compute_loss(model, there, "mean") + taken[:, 0].sum()

    guard = StepGuard(model, compute)
    updates = []
    options: dict[str, Any] = {"token_budget": 90, "window": 12, "pin_memory": True, "num_workers": 1, "timeout_s": 60}
    with make_loader(**options) as loader:
        for batch, info in loader.steps():
            guard.backward(batch, info)
            updates.append((batch["numbers"], get_gradient(model)))
    return updates, guard.failures, torch.cuda.max_memory_reserved()


@pytest.mark.gpu
@NEEDS_GPU
def test_a_batch_that_does_not_fit_goes_in_halves() -> None:
    """Checks: WEIGHT, COVER. Memory really runs out, and the gradient is still that of the samples of the step."""
    ((updates, failures, most),) = get_values(run_on_gpu(1, train_with_too_little, 400, 150))
    assert sorted(number for numbers, _ in updates for number in numbers) == list(range(40))
    for numbers, gradient in updates:
        check_gradient(gradient, compute_union_gradient(numbers))
    assert failures >= sum(len(numbers) > 2 for numbers, _ in updates) > 3
    assert most <= 400 * MIB
