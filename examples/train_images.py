"""A sharded vision tower, and ranks without an image in a step, on the CPU.

    torchrun --nproc-per-node 2 examples/train_images.py

A sharded tower (FSDP, ZeRO-3) has collectives of its own: a rank that calls it waits for every other rank to call it too.
Whether a batch has images differs from rank to rank, and no rank knows about the others. `StepInfo.global_costs` tells it how
many patches the step has on all ranks. If there are any, every rank runs the tower, and one without an image runs it on a dummy
patch that counts for nothing. Otherwise no rank does, even if its idle batch is a replay of a sample with an image.
"""

from __future__ import annotations

import argparse
import os
import warnings
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.utils.rnn import pad_sequence

from odb_ref import Batching, ODBDataLoader, StepInfo, gather_objects

VOCABULARY = 128
IMAGE = 1
"""The token that stands in the place of a patch."""
PATCH = 12
SHARDS = (40, 11)


def make_sample(number: int) -> dict[str, torch.Tensor]:
    """Makes a text of uneven length. One in five has an image, which takes some of its tokens."""
    generator = torch.Generator().manual_seed(number)
    length = int(torch.randint(4, 200, (), generator=generator))
    ids = torch.randint(2, VOCABULARY, (length,), generator=generator)
    sample = {"number": torch.tensor(number), "input_ids": ids, "labels": ids.clone()}
    if number % 5 == 0:
        patches = int(torch.randint(1, length, (), generator=generator))
        ids[:patches], sample["labels"][:patches] = IMAGE, -100
        sample["pixel_values"] = torch.randn(patches, PATCH, generator=generator)
    return sample


def collate(samples: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    batch = {
        "numbers": torch.stack([sample["number"] for sample in samples]),
        "input_ids": pad_sequence([sample["input_ids"] for sample in samples], batch_first=True),
        "labels": pad_sequence([sample["labels"] for sample in samples], batch_first=True, padding_value=-100),
    }
    images = [sample["pixel_values"] for sample in samples if "pixel_values" in sample]
    return batch | ({"pixel_values": torch.cat(images)} if images else {})


class Model(nn.Module):
    """Embeds tokens, and puts the patches of images in their places. The tower is sharded separately."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 32)
        self.tower = nn.Sequential(nn.Linear(PATCH, 64), nn.GELU(), nn.Linear(64, 32))
        self.head = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, VOCABULARY))
        self.tower_runs = self.dummy_runs = 0

    def forward(self, input_ids: torch.Tensor, patches: torch.Tensor | None, *, is_dummy: bool) -> torch.Tensor:
        hidden = self.embedding(input_ids)
        if patches is not None:
            seen = self.tower(patches)
            self.tower_runs += 1
            self.dummy_runs += is_dummy
            # A dummy must be part of the graph too, or the tower's backward pass on other ranks would wait for this rank.
            is_image = (input_ids == IMAGE)[..., None]
            hidden = hidden + 0 * seen.sum() if is_dummy else hidden.masked_scatter(is_image, seen)
        return self.head(hidden)


def choose_patches(batch: dict[str, torch.Tensor], info: StepInfo) -> tuple[torch.Tensor | None, bool]:
    """Returns the patches that this rank runs the tower on, or None if no rank runs it, and whether they are a dummy."""
    if not info.global_costs[0]:
        return None, False
    own = batch.get("pixel_values")
    return (torch.zeros(1, PATCH), True) if own is None else (own, False)


def main() -> None:
    parser = argparse.ArgumentParser(description="A sharded vision tower over uneven shards.")
    parser.add_argument("--no-dummies", action="store_true", help="each rank by its own batch: it hangs, for --timeout")
    parser.add_argument("--timeout", type=float, default=60, help="seconds that a collective may take")
    args = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings(
        "ignore", message="FSDP2-wrapped module"
    )  # about outputs that are views, which are never written to
    dist.init_process_group("gloo", timeout=timedelta(seconds=args.timeout))
    rank = dist.get_rank()
    if dist.get_world_size() != len(SHARDS):
        parser.error(f"start with --nproc-per-node {len(SHARDS)}")

    torch.manual_seed(0)
    model = Model()
    fully_shard(model.tower)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    first = sum(SHARDS[:rank])
    loader = ODBDataLoader(
        [make_sample(number) for number in range(first, first + SHARDS[rank])],
        shard="given",
        token_budget=600,
        collate_fn=collate,
        batching=Batching(max_patches=300, window=16),
    )
    steps, numbers = 0, []
    with loader:
        for batch, info in loader.steps():
            patches, is_dummy = choose_patches(batch, info)
            if args.no_dummies:
                patches, is_dummy = batch.get("pixel_values"), False
            logits = model(batch["input_ids"], patches, is_dummy=is_dummy)
            loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())
            optimizer.zero_grad()
            info.scale(loss, logits).backward()
            optimizer.step()
            steps += 1
            numbers += [] if info.is_idle else batch["numbers"].tolist()

    results = gather_objects((steps, model.tower_runs, model.dummy_runs, numbers))
    if rank == 0:
        for other, (steps, runs, dummies, numbers) in enumerate(results):
            print(
                f"rank {other}: {steps} steps, the tower ran in {runs}, on a dummy in {dummies}, {len(numbers)} samples"
            )
        emitted = sorted(number for *_, numbers in results for number in numbers)
        print(f"{len(emitted)} samples trained on, each exactly once: {emitted == list(range(sum(SHARDS)))}")
    dist.destroy_process_group()


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
