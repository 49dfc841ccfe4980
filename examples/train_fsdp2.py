"""FSDP2 (`fully_shard`) over shards of very different sizes, with gradient accumulation and a mesh, on the CPU.

    torchrun --nproc-per-node 4 examples/train_fsdp2.py

The mesh has two data-parallel ranks times two that stand for tensor or context parallelism. The loader is given the
data-parallel dimension, so both peers of a data-parallel rank get the same batches. The optimizer steps once every four
micro-steps, with the gradient of the mean over all supervised tokens of all four on all ranks.
"""

from __future__ import annotations

import argparse
import os
import warnings

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.utils.rnn import pad_sequence

from odb_ref.torch import Batching, Loss, ODBDataLoader, gather_objects

VOCABULARY = 128
SHARDS = (40, 11)


def make_sample(number: int) -> dict[str, torch.Tensor]:
    """Makes a token sequence of uneven length, the first quarter of it masked as a prompt."""
    generator = torch.Generator().manual_seed(number)
    length = int(torch.randint(4, 200, (), generator=generator))
    ids = torch.randint(1, VOCABULARY, (length,), generator=generator)
    labels = ids.clone()
    labels[: length // 4] = -100
    return {"number": torch.tensor(number), "input_ids": ids, "labels": labels}


def collate(samples: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {
        "numbers": torch.stack([sample["number"] for sample in samples]),
        "input_ids": pad_sequence([sample["input_ids"] for sample in samples], batch_first=True),
        "labels": pad_sequence([sample["labels"] for sample in samples], batch_first=True, padding_value=-100),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="FSDP2 over uneven shards.")
    parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings(
        "ignore", message="FSDP2-wrapped module"
    )  # about outputs that are views, which are never written to
    dist.init_process_group("gloo")
    world_size = dist.get_world_size()
    if world_size != 2 * len(SHARDS):
        parser.error(f"start with --nproc-per-node {2 * len(SHARDS)}")
    mesh = init_device_mesh("cpu", (len(SHARDS), 2), mesh_dim_names=("dp", "tp"))
    replica = mesh["dp"].get_local_rank()

    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(VOCABULARY, 32), nn.Linear(32, 64), nn.GELU(), nn.Linear(64, VOCABULARY))
    fully_shard(model[3], mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    first = sum(SHARDS[:replica])
    loader = ODBDataLoader(
        [make_sample(number) for number in range(first, first + SHARDS[replica])],
        shard="given",
        token_budget=600,
        collate_fn=collate,
        mesh=mesh,
        batching=Batching(window=16),
        loss=Loss(
            accumulation_steps=4, reduction="sum"
        ),  # unlike a mean, a sum is defined for a batch without a supervised token
    )
    steps, updates, numbers = 0, 0, []
    with loader:
        for batch, info in loader.steps():
            model.set_requires_gradient_sync(info.is_update_end)
            logits = model(batch["input_ids"])[:, :-1].flatten(0, 1)
            loss = nn.functional.cross_entropy(logits, batch["labels"][:, 1:].flatten(), reduction="sum")
            info.scale(loss).backward()
            if info.is_update_end:
                optimizer.step()
                optimizer.zero_grad()
                updates += 1
            steps += 1
            numbers += [] if info.is_idle else batch["numbers"].tolist()

    results = gather_objects((steps, updates, numbers))
    if dist.get_rank() == 0:
        for rank, (steps, updates, numbers) in enumerate(results):
            print(f"rank {rank}: {steps} steps, {updates} updates, {len(numbers)} samples")
        emitted = sorted(number for _, _, numbers in results[::2] for number in numbers)
        print(f"{len(emitted)} samples trained on, each exactly once: {emitted == list(range(sum(SHARDS)))}")
        print(f"the peers of a data-parallel rank saw the same batches: {results[0::2] == results[1::2]}")
    dist.destroy_process_group()


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
