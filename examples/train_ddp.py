"""Plain DDP over shards of very different sizes, to the end, on the CPU.

    torchrun --nproc-per-node 4 examples/train_ddp.py
    odb-ref check ddp-trace/*.ndjson

Rank 0 holds 40 samples, ranks 1 and 2 hold 13 each and rank 3 holds 1. Every rank takes the same number of steps, every sample
is trained on exactly once, and the gradient of each step is that of the mean over all supervised tokens of all ranks.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset

from odb_ref.torch import Batching, ODBDataLoader, gather_objects

VOCABULARY = 128


class Texts(Dataset):
    """Made-up token sequences of uneven lengths, the first quarter of each masked as a prompt."""

    def __init__(self, start: int, count: int) -> None:
        self.start, self.count = start, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, object]:
        number = self.start + index
        generator = torch.Generator().manual_seed(number)
        length = int(torch.randint(4, 200, (), generator=generator))
        ids = torch.randint(1, VOCABULARY, (length,), generator=generator)
        labels = ids.clone()
        labels[: length // 4] = -100
        return {"number": number, "input_ids": ids, "labels": labels}


def collate(samples: list[dict]) -> dict[str, object]:
    return {
        "numbers": [sample["number"] for sample in samples],
        "input_ids": pad_sequence([sample["input_ids"] for sample in samples], batch_first=True),
        "labels": pad_sequence([sample["labels"] for sample in samples], batch_first=True, padding_value=-100),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="DDP over uneven shards.")
    parser.add_argument("--shards", type=int, nargs="+", default=[40, 13, 13, 1], help="samples of each rank")
    parser.add_argument("--trace", type=Path, default=Path("ddp-trace"), help="folder for the traces, one file a rank")
    args = parser.parse_args()

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if len(args.shards) != world_size:
        parser.error(
            f"{len(args.shards)} shards for {world_size} ranks: start with --nproc-per-node {len(args.shards)}"
        )
    args.trace.mkdir(parents=True, exist_ok=True)

    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Embedding(VOCABULARY, 32), nn.Linear(32, VOCABULARY)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = ODBDataLoader(
        Texts(sum(args.shards[:rank]), args.shards[rank]),
        shard="given",  # this rank's data set is its shard
        token_budget=600,
        collate_fn=collate,
        trace=args.trace / "train-rank{rank}.ndjson",
        batching=Batching(window=16),
    )

    steps, idle_steps, numbers = 0, 0, []
    for batch, info in loader.steps():
        logits = model(batch["input_ids"])
        # The mean over this batch's supervised tokens; the scale makes DDP's average the mean over all ranks' tokens.
        loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())
        optimizer.zero_grad()
        info.scale(loss).backward()
        optimizer.step()
        steps += 1
        idle_steps += info.is_idle
        if not info.is_idle:
            numbers += batch["numbers"]
    loader.close()

    results = gather_objects((steps, idle_steps, numbers))
    if rank == 0:
        emitted = sorted(number for _, _, numbers in results for number in numbers)
        for other, (steps, idle_steps, numbers) in enumerate(results):
            print(f"rank {other}: {steps} steps, {idle_steps} of them idle, {len(numbers)} samples")
        is_exact = emitted == list(range(sum(args.shards)))
        print(f"{len(emitted)} samples trained on, each exactly once: {is_exact}")
    dist.destroy_process_group()


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
