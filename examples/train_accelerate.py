"""An Accelerate loop over shards of different sizes, to the end, with gradient accumulation, on the CPU.

    pip install 'odb-ref[torch,accelerate]'
    torchrun --nproc-per-node 2 examples/train_accelerate.py

`Accelerator.prepare` is for the model and the optimizer. It may also be given the loader, which changes nothing: an
`ODBDataLoader` is not re-sharded or re-batched. For a plain loader prepare would also move batches to the device, which is one
line here. Ranks see different samples, and this loop weighs their losses once. Gradients are averaged over ranks at the end of
each update, which the loader knows.
"""

from __future__ import annotations

import torch
from accelerate import Accelerator
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset

from odb_ref.integrations.accelerate import accumulate
from odb_ref.torch import Batching, Loss, ODBDataLoader, gather_objects

VOCABULARY = 128
SAMPLES = 61


class Texts(Dataset):
    """Made-up token sequences of uneven lengths, the first quarter of each masked as a prompt."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, object]:
        generator = torch.Generator().manual_seed(index)
        length = int(torch.randint(4, 200, (), generator=generator))
        ids = torch.randint(1, VOCABULARY, (length,), generator=generator)
        labels = ids.clone()
        labels[: length // 4] = -100
        return {"number": index, "input_ids": ids, "labels": labels}


def collate(samples: list[dict]) -> dict[str, object]:
    return {
        "numbers": [sample["number"] for sample in samples],
        "input_ids": pad_sequence([sample["input_ids"] for sample in samples], batch_first=True),
        "labels": pad_sequence([sample["labels"] for sample in samples], batch_first=True, padding_value=-100),
    }


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    loader = ODBDataLoader(
        Texts(),
        token_budget=600,
        collate_fn=collate,
        shuffle=True,
        batching=Batching(window=16),
        loss=Loss(accumulation_steps=2),
    )
    model = nn.Sequential(nn.Embedding(VOCABULARY, 32), nn.Linear(32, VOCABULARY))
    model, optimizer, loader = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2), loader)

    steps, numbers = 0, []
    for batch, info in loader.steps():
        ids, labels = batch["input_ids"].to(accelerator.device), batch["labels"].to(accelerator.device)
        with accumulate(accelerator, model, info):
            loss = nn.functional.cross_entropy(model(ids)[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
            accelerator.backward(info.scale(loss))
        if info.is_update_end:
            optimizer.step()
            optimizer.zero_grad()
        steps += 1
        if not info.is_idle:
            numbers += batch["numbers"]
    loader.close()

    checksum = sum(parameter.detach().sum().item() for parameter in model.parameters())
    # Not `accelerator.gather`, after which a process that ends at once may hang (docs/howto/diagnose.md).
    results = gather_objects((steps, numbers, checksum))
    if accelerator.is_main_process:
        for rank, (count, own, _) in enumerate(results):
            print(f"rank {rank}: {count} steps, {len(own)} samples")
        emitted = sorted(number for _, own, _ in results for number in own)
        print(f"{len(emitted)} samples trained on, each exactly once: {emitted == list(range(SAMPLES))}")
        print(f"the same weights on every rank: {len({weights for *_, weights in results}) == 1}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
