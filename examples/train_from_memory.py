"""A budget from the memory that steps take, and steps split in halves when it runs out; both are simulated on the CPU.

    torchrun --nproc-per-node 2 examples/train_from_memory.py

The budget is fitted with fake tensors, so nothing is allocated. Every third batch of several samples then pretends to run out
of memory. It is split into halves, and every sample is trained on exactly once.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils.rnn import pad_sequence

from odb_ref import Batching, ODBDataLoader, gather_objects
from odb_ref.torch.loop import StepGuard, fit_token_budget, rehearse, scaled_learning_rate

VOCABULARY = 128
LENGTHS = [8 + (37 * number) % 120 for number in range(60)]
REFERENCE_TOKENS = 2_000  # in the update for which the learning rate was tuned


class Texts(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return len(LENGTHS)

    def __getitem__(self, index: int) -> dict[str, object]:
        ids = torch.randint(1, VOCABULARY, (LENGTHS[index],), generator=torch.Generator().manual_seed(index))
        return {"number": index, "input_ids": ids, "labels": ids.clone()}


def collate(samples: list[dict]) -> dict[str, object]:
    return {
        "numbers": [sample["number"] for sample in samples],
        "input_ids": pad_sequence([sample["input_ids"] for sample in samples], batch_first=True),
        "labels": pad_sequence([sample["labels"] for sample in samples], batch_first=True, padding_value=-100),
    }


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(VOCABULARY, 32), nn.Linear(32, VOCABULARY))


def compute_loss(model: nn.Module, batch: dict) -> torch.Tensor:
    logits = model(batch["input_ids"])[:, :-1]
    return nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"][:, 1:].flatten())


def choose_budget() -> int:
    with FakeTensorMode():
        model = make_model()

        def step(samples: int, length: int) -> None:
            ids = torch.ones(samples, length, dtype=torch.long)
            compute_loss(model, {"input_ids": ids, "labels": ids}).backward()
            model.zero_grad()

        fit = fit_token_budget(step, LENGTHS, limit_bytes=2**21, multiple_of=8)
        rehearse(step, LENGTHS, fit.token_budget, count=3)
    if dist.get_rank() == 0:
        print(fit)
    return fit.token_budget


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    loader = ODBDataLoader(Texts(), token_budget=choose_budget(), collate_fn=collate, batching=Batching(window=16))
    model = DistributedDataParallel(make_model())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    passes = 0

    def compute(model: nn.Module, batch: dict) -> torch.Tensor:
        nonlocal passes
        passes += 1
        if passes % 3 == 0 and len(batch["numbers"]) > 1:
            raise torch.OutOfMemoryError("pretended")
        return compute_loss(model, batch)

    guard = StepGuard(model, compute)
    numbers: list[int] = []
    with loader:
        for batch, info in loader.steps():
            guard.backward(batch, info)
            numbers += [] if info.is_idle else batch["numbers"]
            with scaled_learning_rate(optimizer, info.update_supervised / REFERENCE_TOKENS):
                optimizer.step()

    results = gather_objects((numbers, guard.failures))
    if dist.get_rank() == 0:
        trained = sorted(number for numbers, _ in results for number in numbers)
        print(f"out of memory {sum(failures for _, failures in results)} times")
        print(f"{len(trained)} samples trained on, each exactly once: {trained == list(range(len(LENGTHS)))}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
