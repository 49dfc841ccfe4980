"""Shared parts of the integrations' tests: a model whose loss is exact in float64, and one process to compare with."""

from __future__ import annotations

import functools
import itertools
import os
import sys
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset

from odb_ref.torch import ODBDataLoader, StepInfo
from tests.helpers.options import nested
from tests.torch import ranks
from tests.torch.data import make_sample

SIZES = (23, 8)
"""The samples of each rank's shard."""
LEARNING_RATE = 0.3
BUDGET_TOKENS = 60
OPTIONS: dict[str, Any] = {"window": 7, "ramp_rounds": 3, "timeout_s": 20}
STEPS = 11
"""The steps of an epoch: an odd number, so that its last update of two is not full."""
PROMPT = 5
"""This sample is too long to share a batch, and has no supervised token: the mean loss of its batch is 0/0."""

Run = tuple[list[list[int]], list[float]]
"""The sample numbers that a rank trained on, by update, and its final weights."""


class Samples(Dataset[Any]):
    """Samples of uneven lengths, with masked prompts."""

    def __init__(self, numbers: Iterable[int]) -> None:
        self.numbers = list(numbers)

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return get_sample(self.numbers[index])


def get_sample(number: int) -> dict[str, Any]:
    sample = make_sample(number)
    if number == PROMPT:
        sample["input_ids"] = torch.arange(BUDGET_TOKENS + 10) % 32
        sample["labels"] = torch.full_like(sample["input_ids"], -100)
    return {"numbers": number, "input_ids": sample["input_ids"], "labels": sample["labels"]}


def make_shard(rank: int) -> Samples:
    return Samples(range(sum(SIZES[:rank]), sum(SIZES[: rank + 1])))


def make_all() -> Samples:
    return Samples(range(sum(SIZES)))


def make_data() -> Samples:
    """Returns this rank's shard, or all samples in a job of one rank."""
    return make_shard(dist.get_rank()) if dist.get_world_size() > 1 else make_all()


def collate(samples: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "numbers": torch.tensor([sample["numbers"] for sample in samples]),
        "input_ids": pad_sequence([sample["input_ids"] for sample in samples], batch_first=True),
        "labels": pad_sequence([sample["labels"] for sample in samples], batch_first=True, padding_value=-100),
    }


def make_loader(data: Samples, **options: Any) -> ODBDataLoader:
    """Returns a loader with `OPTIONS`, unless ``options`` say otherwise."""
    options = OPTIONS | {"collate_fn": collate} | options
    return ODBDataLoader(data, token_budget=BUDGET_TOKENS, **nested(**options))


class Model(nn.Module):
    """A causal model over 32 tokens: the loss is the mean over the batch's supervised tokens."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Embedding(32, 6), nn.Tanh(), nn.Linear(6, 32)).double()

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.layers(input_ids)[:, :-1].flatten(0, 1)
        return {"loss": nn.functional.cross_entropy(logits, labels[:, 1:].flatten())}


def get_weights(model: nn.Module) -> list[float]:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()]).tolist()


def compute_loss(model: nn.Module, numbers: Sequence[int]) -> Tensor:
    """Returns the mean over all supervised tokens of these samples."""
    batch = collate([get_sample(number) for number in numbers])
    loss: Tensor = model(input_ids=batch["input_ids"], labels=batch["labels"])["loss"]
    return loss


def train_alone(
    model: nn.Module, updates: Iterable[list[int]], compute_loss: Any = compute_loss, momentum: float = 0.0
) -> list[float]:
    """Returns the losses of one step of SGD for each list of sample numbers, 0 if no token is supervised."""
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=momentum)
    losses = []
    for numbers in updates:
        loss = compute_loss(model, numbers)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.nan_to_num().item())
    return losses


def join(lists: Iterable[list[int]]) -> list[int]:
    return list(itertools.chain.from_iterable(lists))


def check_weights(
    ranks: Sequence[Run], model: nn.Module, *, precision: float = 1e-9, compute_loss: Any = compute_loss
) -> None:
    """Checks that every rank ends with the weights of one process that trains ``model`` on the union of the ranks' batches."""
    start = torch.tensor(get_weights(model), dtype=torch.float64)
    updates = [join(numbers) for numbers in zip(*(numbers for numbers, _ in ranks), strict=True)]
    train_alone(model, updates, compute_loss)
    change = torch.tensor(get_weights(model), dtype=torch.float64) - start
    assert torch.linalg.norm(change) > 0.01
    for _, weights in ranks:
        error = torch.tensor(weights, dtype=torch.float64) - start - change
        assert torch.linalg.norm(error) <= precision * torch.linalg.norm(change)


def check_coverage(ranks: Sequence[Run], epochs: int = 1) -> None:
    """Checks that every sample was trained on once in each epoch."""
    emitted = join(join(updates) for updates, _ in ranks)
    assert sorted(emitted) == sorted([*range(sum(SIZES))] * epochs)


def check_runs(ranks: Sequence[Run], epochs: int = 1) -> None:
    """Checks both, for a `Model`."""
    check_coverage(ranks, epochs)
    check_weights(ranks, Model())


def find_due(infos: Iterable[StepInfo], *, samples: int, tokens: int) -> tuple[list[int], list[int]]:
    """Returns the updates, counted from 1, that reach a multiple of ``samples`` samples, and of ``tokens`` tokens."""
    updates = [(0, 0)]
    seen = [0, 0]
    for info in infos:
        seen = [seen[0] + info.global_samples, seen[1] + info.global_tokens]
        updates += [(seen[0] // samples, seen[1] // tokens)] if info.is_update_end else []
    steps = list(enumerate(itertools.pairwise(updates), 1))
    return [at for at, ((old, _), (new, _)) in steps if new > old], [
        at for at, ((_, old), (_, new)) in steps if new > old
    ]


@functools.cache
def restore_on_processors() -> None:
    """Makes torch load "cpu:0", Accelerate's name for the processor of a rank, which no release of torch does by itself."""
    torch.serialization.register_package(
        30, lambda storage: None, lambda storage, place: storage if place.startswith("cpu:") else None
    )


def set_environment(rank: int, world_size: int) -> None:
    """Sets what torchrun would have set, in a process that already has a process group."""
    restore_on_processors()
    if "accelerate" in sys.modules:  # state that an earlier test left in this process and the fork copied
        sys.modules["accelerate.state"].AcceleratorState._reset_state(reset_partial_state=True)
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29555",
        "TORCHELASTIC_RUN_ID": "test",
    }


run_ranks = functools.partial(ranks.run_ranks, prepare=set_environment, timeout_s=200)
run_each = functools.partial(ranks.run_each, prepare=set_environment, timeout_s=200)
