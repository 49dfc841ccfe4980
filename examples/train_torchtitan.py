"""A hand-written loop in the style of torchtitan: FSDP2, a schedule, and checkpoints of the whole training state.

    torchrun --nproc-per-node 2 examples/train_torchtitan.py --stop-after 5
    torchrun --nproc-per-node 2 examples/train_torchtitan.py --resume
    torchrun --nproc-per-node 2 examples/train_torchtitan.py --fixed

The second command continues from the first one's checkpoint, in the middle of the epoch, with the batches, rates and losses of
an uninterrupted training run. The third trains with fixed batches, as torchtitan does: rates, losses and weights after each
update are the same. With ``--torchtitan`` the model is torchtitan's own small Llama 3, sharded by its own function
(``pip install torchtitan triton``). Without it, the model is a small transformer.

Three things change in torchtitan's loop. Batches come with their `StepInfo`. It already contains the number of valid tokens on
all ranks, which torchtitan counts and sums before the forward pass, and `StepInfo.scale` divides by that number. And an epoch
ends on all ranks together, where torchtitan raises ``DataloaderExhaustedError`` on the first rank that runs dry.
"""

from __future__ import annotations

import argparse
import os
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DistributedSampler

from odb_ref import JobState, Loss, ODBDataLoader, gather_objects

VOCABULARY = 128
SAMPLES = 51
UPDATE_SAMPLES = 8
FIXED = 2
"""The number of samples in a fixed batch."""
WARM_UP = 2
"""The number of updates in which the learning rate rises. It falls in the rest."""
Step = tuple[dict[str, Tensor], Callable[[Tensor], Tensor], bool, list[int]]
"""A batch, the function that scales its summed loss, whether it ends an update, and the numbers of its samples."""


class Block(nn.Module):
    """A layer for rows that are padded on the right, which need no mask but the causal one."""

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
    """Makes the model, with every layer sharded separately, as torchtitan does it."""
    model = Transformer()
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def make_torchtitan_model(mesh: dist.DeviceMesh) -> nn.Module:
    """Makes two layers of torchtitan's debug model, with torch's attention, because its own has no backward pass on CPUs."""
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
        ):  # torchtitan sums gradients over ranks, but our weights are made for their average
            module.set_gradient_divide_factor(mesh.size())
    model.init_weights(buffer_device=torch.device("cpu"))
    return model


def make_sample(number: int) -> dict[str, Tensor]:
    """Makes a token sequence of uneven length, the first quarter of it masked as a prompt."""
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
    """Weights, optimizer and schedule, for torch.distributed.checkpoint."""

    def __init__(self, model: nn.Module, updates: int) -> None:
        self.model, self.updates = model, updates
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, self.compute_rate)

    def compute_rate(self, update: int) -> float:
        return min((update + 1) / WARM_UP, (self.updates - update) / (self.updates - WARM_UP))

    def state_dict(self) -> dict[str, object]:
        weights, optimizer = self.model.state_dict(), get_optimizer_state_dict(self.model, self.optimizer)
        return {"model": weights, "optimizer": optimizer, "scheduler": self.scheduler.state_dict()}

    def load_state_dict(self, state: dict[str, object]) -> None:
        self.model.load_state_dict(state["model"])
        set_optimizer_state_dict(self.model, self.optimizer, state["optimizer"])
        self.scheduler.load_state_dict(state["scheduler"])


def read_ours(loader: ODBDataLoader) -> Iterator[Step]:
    for batch, info in loader.steps():
        yield batch, info.scale, info.is_update_end, [] if info.is_idle else batch["numbers"].tolist()


def read_fixed(data: list[dict[str, Tensor]], order: DistributedSampler) -> Iterator[Step]:
    """Yields the same updates as torchtitan reads them: in batches of one size, with the valid tokens of all ranks counted."""
    rank, world_size, places = dist.get_rank(), dist.get_world_size(), list(order)
    for first in range(0, len(places), UPDATE_SAMPLES):
        own = [data[place] for place in places[first : first + UPDATE_SAMPLES][rank::world_size]]
        tokens = torch.tensor(sum(int((sample["labels"][1:] != -100).sum()) for sample in own))
        dist.all_reduce(tokens)
        steps = UPDATE_SAMPLES // world_size // FIXED
        for step in range(steps):
            group = own[step * FIXED : (step + 1) * FIXED]
            # A rank with nothing left computes a sample again, without effect, because FSDP waits for it.
            weight = world_size / int(tokens) if group else 0.0
            batch = collate(group or own[:1] or data[:1])
            numbers = batch["numbers"].tolist() if group else []
            yield batch, lambda loss, weight=weight: loss * weight, step + 1 == steps, numbers


def train(training: Training, steps: Iterator[Step], save_at: int | None) -> list[str]:
    """Returns a line for each update: its rate, its loss, the sum of the weights, and this rank's samples."""
    model, lines, numbers = training.model, [], []
    total = torch.zeros((), dtype=torch.float64)
    for batch, scale, is_update_end, own in steps:
        model.set_requires_gradient_sync(is_update_end)
        logits = model(batch["input_ids"])[:, :-1].flatten(0, 1)
        loss = scale(nn.functional.cross_entropy(logits, batch["labels"][:, 1:].flatten(), reduction="sum"))
        loss.backward()
        total += loss.detach()
        numbers += own
        if not is_update_end:
            continue
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        training.optimizer.step()
        training.optimizer.zero_grad()
        rate = training.scheduler.get_last_lr()[0]
        training.scheduler.step()
        dist.all_reduce(total, op=dist.ReduceOp.AVG)
        weights = sum(float(weight.full_tensor().double().abs().sum()) for weight in model.parameters())
        lines.append(f"rate {rate:.6f}, loss {total.item():.9f}, weights {weights:.9f}, samples {numbers}")
        total, numbers = torch.zeros((), dtype=torch.float64), []
        if len(lines) == save_at:
            break
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description="A hand-written loop in torchtitan's manner.")
    parser.add_argument("--torchtitan", action="store_true", help="torchtitan's model and sharding")
    parser.add_argument("--fixed", action="store_true", help="fixed batches, as torchtitan trains")
    parser.add_argument("--double", action="store_true", help="in double precision")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--folder", type=Path, default=Path("titan-checkpoint"))
    parser.add_argument("--stop-after", type=int, metavar="N", help="save after N updates, and stop")
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoint")
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64 if args.double else torch.float32)
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module")  # its outputs are views, never written to
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("fsdp",))
    torch.manual_seed(0)
    model = (make_torchtitan_model if args.torchtitan else make_model)(mesh)
    training = Training(model, args.epochs * -(-SAMPLES // UPDATE_SAMPLES))
    data = [make_sample(number) for number in range(SAMPLES)]
    order = DistributedSampler(data, num_replicas=1, rank=0, seed=1)  # the order of all ranks together
    lines: list[str] = []
    with ODBDataLoader(
        data,
        token_budget=600,
        update_samples=UPDATE_SAMPLES,
        sampler=order,
        collate_fn=collate,
        loss=Loss(reduction="sum"),  # as in torchtitan, and defined for a batch without a supervised token
        mesh=mesh,
    ) as loader:
        saved = {"training": training, "loader": JobState(loader)}
        if args.resume:
            dcp.load(saved, checkpoint_id=args.folder)
        for epoch in range(loader.epoch, args.epochs):
            if args.fixed:
                order.set_epoch(epoch)
            steps = read_fixed(data, order) if args.fixed else read_ours(loader)
            lines += train(training, steps, args.stop_after and args.stop_after - len(lines))
            if len(lines) == args.stop_after:
                dcp.save(saved, checkpoint_id=args.folder)
                break
    gathered = gather_objects(lines)
    if dist.get_rank() == 0:
        for other, lines in enumerate(gathered):
            print(*(f"rank {other}: {line}" for line in lines), sep="\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
