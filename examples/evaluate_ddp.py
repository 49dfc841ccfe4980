"""Exact evaluation over shards of very different sizes: every sample once, no duplicate, no hang, on the CPU.

    torchrun --nproc-per-node 4 examples/evaluate_ddp.py
    torchrun --nproc-per-node 1 examples/evaluate_ddp.py --shards 67     # the same figures

A DistributedSampler pads shards to one size by repeating samples, so its mean is that of another data set. Here each rank
keeps sums of its own. A rank that runs dry takes part in every step until all ranks are done, and adds nothing. At the end the
sums of all ranks are added, which gives the mean over all supervised tokens for any number of ranks.
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
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
    parser = argparse.ArgumentParser(description="Exact evaluation over uneven shards.")
    parser.add_argument("--shards", type=int, nargs="+", default=[40, 13, 13, 1], help="samples of each rank")
    args = parser.parse_args()

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if len(args.shards) != world_size:
        parser.error(
            f"{len(args.shards)} shards for {world_size} ranks: start with --nproc-per-node {len(args.shards)}"
        )

    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(VOCABULARY, 32), nn.Tanh(), nn.Linear(32, VOCABULARY)).double()
    model.eval()  # without gradients DDP has nothing to synchronize, so the bare model is enough
    loader = ODBDataLoader(
        Texts(sum(args.shards[:rank]), args.shards[rank]),
        shard="given",  # this rank's data set is its shard; for one data set on all ranks leave this out
        token_budget=4096,
        collate_fn=collate,
        batching=Batching(window=16),
    )

    totals = torch.zeros(3, dtype=torch.float64)  # loss, tokens predicted correctly, tokens
    numbers = []
    with loader, torch.no_grad():
        for batch, info in loader.steps():
            # On every rank, idle or not, because a sharded model (FSDP) gathers its weights here.
            logits = model(batch["input_ids"])[:, :-1].flatten(0, 1)
            if info.is_idle:
                continue
            labels = batch["labels"][:, 1:].flatten()
            loss = nn.functional.cross_entropy(logits, labels, reduction="sum")
            is_right = (logits.argmax(1) == labels).sum()
            totals += torch.stack([loss, is_right.double(), (labels != -100).sum().double()])
            numbers += batch["numbers"]

    parts = gather_objects((numbers, totals))
    if rank == 0:
        seen = sorted(number for part, _ in parts for number in part)
        loss, right, tokens = torch.stack([total for _, total in parts]).sum(0).tolist()
        print(f"{len(seen)} samples evaluated, each exactly once: {seen == list(range(sum(args.shards)))}")
        print(f"mean loss {loss / tokens:.12f}, accuracy {right / tokens:.12f}, over {int(tokens)} tokens")
    dist.destroy_process_group()


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
