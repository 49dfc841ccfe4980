"""A hand-written loop in torchtitan's manner, over uneven shards: FSDP2, a schedule, checkpoints of all there is to save.

    torchrun --nproc-per-node 2 examples/train_torchtitan.py --stop-after 5
    torchrun --nproc-per-node 2 examples/train_torchtitan.py --resume

The second command goes on from the first one's checkpoint, in the middle of the epoch, with the batches, rates and losses
that an uninterrupted training has. With ``--torchtitan`` the model is torchtitan's own small Llama 3, sharded by its own
function (``pip install torchtitan triton``); else a small transformer.

Three things change in torchtitan's loop. Batches come with what belongs to them. The number of valid tokens on all ranks,
which it counts and adds up before the forward pass, is in that already: it is what `StepInfo.scale` divides by. And an epoch
ends on all ranks together, where torchtitan raises ``DataloaderExhaustedError`` on whichever rank runs dry first.
"""

from __future__ import annotations

import argparse
import os
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.utils.rnn import pad_sequence

from odb_ref.integrations.progress import Progress
from odb_ref.torch import Batching, JobState, Loss, ODBDataLoader, gather_objects

VOCABULARY = 128
SHARDS = (40, 11)
ACCUMULATION_STEPS = 2
WARM_UP = 0.1
"""The share of the training in which the learning rate rises; it falls in the rest."""


class Block(nn.Module):
    """Rows are padded on the right, so that a causal mask is all the mask they need."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList([nn.RMSNorm(width), nn.RMSNorm(width)])
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.feed_forward = nn.Sequential(nn.Linear(width, 4 * width), nn.SiLU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norms[0](x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        found = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(found.transpose(1, 2).flatten(2))
        return x + self.feed_forward(self.norms[1](x))


class Transformer(nn.Module):
    def __init__(self, width: int = 32, heads: int = 4, layers: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.layers = nn.ModuleList([Block(width, heads) for _ in range(layers)])
        self.norm, self.head = nn.RMSNorm(width), nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def make_model(mesh: dist.DeviceMesh) -> nn.Module:
    """Every layer is sharded by itself, as torchtitan does it."""
    model = Transformer()
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def make_torchtitan_model(mesh: dist.DeviceMesh) -> nn.Module:
    """Two layers of its model for debugging. Its attention of choice has no backward pass on processors: torch's own has."""
    from torchtitan.distributed.fsdp import apply_fsdp_to_decoder
    from torchtitan.models.common.attention import ScaledDotProductAttention
    from torchtitan.models.llama3 import llama3_configs

    config = llama3_configs["debugmodel"]("flex")
    config.layers = config.layers[:2]
    for layer in config.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    model = config.build()
    apply_fsdp_to_decoder(model, mesh, torch.float32, torch.float32, pp_enabled=False)
    for module in model.modules():
        if isinstance(
            module, FSDPModule
        ):  # torchtitan has gradients added up over ranks; weights are for their average
            module.set_gradient_divide_factor(mesh.size())
    model.init_weights(buffer_device=torch.device("cpu"))
    return model


def make_sample(number: int) -> dict[str, Tensor]:
    """A made-up token sequence of uneven length, the first quarter of it masked as a prompt."""
    generator = torch.Generator().manual_seed(number)
    length = int(torch.randint(4, 200, (), generator=generator))
    ids = torch.randint(1, VOCABULARY, (length,), generator=generator)
    labels = ids.clone()
    labels[: length // 4] = -100
    return {"number": torch.tensor(number), "input_ids": ids, "labels": labels}


def collate(samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {
        "numbers": torch.stack([sample["number"] for sample in samples]),
        "input_ids": pad_sequence([sample["input_ids"] for sample in samples], batch_first=True),
        "labels": pad_sequence([sample["labels"] for sample in samples], batch_first=True, padding_value=-100),
    }


class Training:
    """Weights, optimizer, schedule and progress, for torch.distributed.checkpoint."""

    def __init__(self, model: nn.Module, progress: Progress, epochs: int) -> None:
        self.model, self.progress, self.epochs = model, progress, epochs
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda _: self.compute_rate())

    def compute_rate(self) -> float:
        """Goes by the share of all samples, for nobody knows how many steps an epoch takes."""
        share = self.progress.epochs / self.epochs
        return min((share + 0.01) / WARM_UP, (1 - share) / (1 - WARM_UP))

    def state_dict(self) -> dict[str, object]:
        weights, optimizer = self.model.state_dict(), get_optimizer_state_dict(self.model, self.optimizer)
        scheduler, progress = self.scheduler.state_dict(), self.progress.state_dict()
        return {"model": weights, "optimizer": optimizer, "scheduler": scheduler, "progress": progress}

    def load_state_dict(self, state: dict[str, object]) -> None:
        self.model.load_state_dict(state["model"])
        set_optimizer_state_dict(self.model, self.optimizer, state["optimizer"])
        self.scheduler.load_state_dict(state["scheduler"])
        self.progress.load_state_dict(state["progress"])


def train(training: Training, loader: ODBDataLoader, args: argparse.Namespace) -> list[str]:
    """Returns a line for each update: its rate and loss, and the samples that this rank trained on for it."""
    saved = {"training": training, "loader": JobState(loader)}
    if args.resume:
        dcp.load(saved, checkpoint_id=args.folder)
    model, lines, numbers = training.model, [], []
    total, updates = torch.zeros(()), 0
    for _ in range(loader.epoch, training.epochs):
        for batch, info in loader.steps():
            model.set_requires_gradient_sync(info.is_update_end)
            logits = model(batch["input_ids"])[:, :-1].flatten(0, 1)
            loss = nn.functional.cross_entropy(logits, batch["labels"][:, 1:].flatten(), reduction="sum")
            loss = info.scale(loss)
            loss.backward()
            total += loss.detach()
            numbers += [] if info.is_idle else batch["numbers"].tolist()
            training.progress.note_step(info)
            if not info.is_update_end:
                continue
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            training.optimizer.step()
            training.optimizer.zero_grad()
            rate = training.scheduler.get_last_lr()[0]
            training.scheduler.step()
            dist.all_reduce(total, op=dist.ReduceOp.AVG)
            lines.append(f"rate {rate:.6f}, loss {total.item():.6f}, samples {numbers}")
            total, numbers, updates = torch.zeros(()), [], updates + 1
            if updates == args.stop_after:
                dcp.save(saved, checkpoint_id=args.folder)
                return lines
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description="A hand-written loop in torchtitan's manner.")
    parser.add_argument("--torchtitan", action="store_true", help="torchtitan's model and sharding")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--folder", type=Path, default=Path("titan-checkpoint"))
    parser.add_argument("--stop-after", type=int, metavar="N", help="save after N updates, and stop")
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoint")
    args = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module")  # its outputs are views, which nobody writes to
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if world_size > len(SHARDS):
        parser.error(f"start with --nproc-per-node {len(SHARDS)} or 1")
    mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("fsdp",))
    torch.manual_seed(0)
    model = (make_torchtitan_model if args.torchtitan else make_model)(mesh)
    first = sum(SHARDS[:rank])
    count = SHARDS[rank] if world_size > 1 else sum(SHARDS)
    loader = ODBDataLoader(
        [make_sample(number) for number in range(first, first + count)],
        shard="given",
        token_budget=600,
        collate_fn=collate,
        batching=Batching(window=16),
        loss=Loss(
            accumulation_steps=ACCUMULATION_STEPS, reduction="sum"
        ),  # as torchtitan's; defined for a batch without a supervised token, too
        mesh=mesh,
    )
    with loader:
        progress = Progress(loader.estimate_steps() / ACCUMULATION_STEPS)
        lines = train(Training(model, progress, args.epochs), loader, args)
    gathered = gather_objects(lines)
    if rank == 0:
        for other, lines in enumerate(gathered):
            print(*(f"rank {other}: {line}" for line in lines), sep="\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
