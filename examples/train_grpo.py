"""GRPO as verl trains it, with one import changed: rollouts of very different lengths, in micro-batches planned by ours.

    torchrun --standalone --nproc-per-node 2 examples/train_grpo.py            # a toy policy learns to end its answers
    torchrun --standalone --nproc-per-node 2 examples/train_grpo.py --check    # gradients are those of one process

Each rank answers prompts of its own, several times each, so ranks have different numbers of answers. A rank with fewer answers
than there are micro-batches runs its shortest again, with an empty loss mask. An answer is judged against the other answers to
its prompt. The loss is the mean over all tokens of all ranks.
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

# from verl.utils.seqlen_balancing import rearrange_micro_batches
from odb_ref.compat.verl import rearrange_micro_batches

WORDS, END = 32, 0
ANSWERS = 6
LONGEST = 200
BUDGET = 200
Columns = dict[str, torch.Tensor]


class Rollouts(dict):
    """Columns with a row for each answer. They replace a TensorDict."""

    def __init__(self, columns: Columns, batch_size: int) -> None:
        super().__init__(columns)
        self.batch_size = batch_size


class Policy(nn.Module):
    """Predicts the next token from the last one only."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Embedding(WORDS, 16), nn.Tanh(), nn.Linear(16, WORDS))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return torch.log_softmax(self.layers(ids), -1)


@torch.no_grad()
def roll_out(policy: nn.Module, prompts: list[int], generator: torch.Generator) -> Rollouts:
    """Answers each prompt several times; a few answers are very long."""
    ids = torch.tensor([prompt for prompt in prompts for _ in range(ANSWERS)])[:, None]
    for _ in range(LONGEST - 1):
        chosen = torch.multinomial(policy(ids[:, -1]).exp(), 1, generator=generator)
        ids = torch.cat([ids, chosen], 1)
    ends = (ids == END).cumsum(1)
    mask = (ends == 0) | ((ids == END) & (ends == 1))  # up to and including the first END
    lengths = mask.sum(1)
    groups = (-lengths.double()).view(len(prompts), ANSWERS)  # shorter is better
    advantages = (groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-6)
    loss_mask = mask.clone()
    loss_mask[:, 0] = False  # the prompt
    columns = {
        "input_ids": ids,
        "attention_mask": mask.long(),
        "loss_mask": loss_mask,
        "advantages": advantages.view(-1),
    }
    return Rollouts(columns, len(ids))


def compute_loss(policy: nn.Module, batch: Rollouts) -> torch.Tensor:
    """Sums the loss over all tokens that carry loss."""
    chosen = policy(batch["input_ids"][:, :-1]).gather(2, batch["input_ids"][:, 1:, None])[..., 0]
    return -(chosen * batch["advantages"][:, None] * batch["loss_mask"][:, 1:]).sum()


def update(policy: nn.Module, rollouts: Rollouts, group: dist.ProcessGroup | None) -> tuple[int, int]:
    """Adds the gradient of an optimizer step. Returns each rank's micro-batches, and the idle ones of all ranks."""
    tokens = rollouts["loss_mask"].sum()
    dist.all_reduce(tokens, group=group)
    parts, _ = rearrange_micro_batches(rollouts, BUDGET, dp_group=group)
    for part in parts:  # the same number on each rank
        (compute_loss(policy, part) * dist.get_world_size(group) / tokens).backward()
    idle = torch.tensor(sum(not part["loss_mask"].any() for part in parts))
    dist.all_reduce(idle, group=group)
    return len(parts), int(idle)


def compute_whole_gradient(policy: nn.Module, rollouts: Rollouts) -> list[torch.Tensor]:
    """Computes the gradient in a single process that has the answers of all ranks."""
    every: list[Rollouts | None] = [None] * dist.get_world_size()
    dist.all_gather_object(every, rollouts)
    tokens = sum(int(own["loss_mask"].sum()) for own in every if own is not None)
    loss = sum(compute_loss(policy, own) / tokens for own in every if own is not None)
    return [*torch.autograd.grad(loss, [*policy.parameters()])]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--check", action="store_true", help="compare each gradient with that of one process: 1e-9")
    options = parser.parse_args()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.set_default_dtype(torch.float64)
    model = Policy()
    policy = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(policy.parameters(), lr=1.0)
    generator = torch.Generator().manual_seed(rank)
    prompts = [1 + rank] if rank else [*range(3, 15)]  # rank 0 has twelve times as many answers
    for step in range(options.steps):
        rollouts = roll_out(model, prompts, generator)
        optimizer.zero_grad()
        count, idle = update(policy, rollouts, dist.group.WORLD)
        lengths = rollouts["attention_mask"].sum(1)
        if options.check:
            wanted = compute_whole_gradient(model, rollouts)
            found = [parameter.grad for parameter in model.parameters()]
            norm = max(float(own.norm()) for own in found)
            largest = max(float((own - other).abs().max()) for own, other in zip(found, wanted, strict=True))
            if largest > 1e-9:
                raise SystemExit(f"the gradient differs by {largest}")
            says = f"gradient of {norm:.3f}, differs by {largest:.1e}"
        else:
            says = f"answers of {int(lengths.min())} to {int(lengths.max())} tokens"
        if rank == 0:
            print(f"step {step}: {count} micro-batches, {idle} idle, {says}")
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
