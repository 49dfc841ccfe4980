"""The same training run, twice: fixed batches with gradient accumulation, and micro-batches formed by length.

    torchrun --standalone --nproc-per-node 2 examples/same_updates.py             # real text: Python's own docstrings
    torchrun --standalone --nproc-per-node 2 examples/same_updates.py --double    # the weights agree to 1e-9 after each update
    torchrun --standalone --nproc-per-node 2 examples/same_updates.py --lengths mm_mix_real --longest 1024

Both have the same samples in each optimizer update. Prints loss, time and the greatest difference between the weights of the
two runs. ``--lengths`` makes random texts as long as those of a trace: a name that `odb-ref simulate` knows, or a file.
"""

from __future__ import annotations

import argparse
import random
import string
import time
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from demo.demo_texts import ByteTexts, Part, Text, read_docstrings
from odb_sim.inputs.lengths import load_lengths
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Dataset, DistributedSampler

from odb_ref import Loss, ODBDataLoader


def make_texts(options: argparse.Namespace) -> list[Text]:
    if options.lengths is None:
        return read_docstrings(options.texts)
    letters = random.Random(0)
    tokens = load_lengths(options.lengths).tokens[: options.texts]
    return [(Part("".join(letters.choices(string.ascii_lowercase, k=count)), True),) for count in tokens]


def collate(samples: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    pad = nn.utils.rnn.pad_sequence
    return {
        "input_ids": pad([sample["input_ids"] for sample in samples], batch_first=True),
        "labels": pad([sample["labels"] for sample in samples], batch_first=True, padding_value=-100),
    }


class Order(DistributedSampler):
    """The order of a DistributedSampler with one rank, which is that of all ranks together."""

    def __init__(self, data: Dataset) -> None:
        super().__init__(data, 1, 0, seed=1)


@dataclass
class Run:
    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    weights: list[torch.Tensor] = field(default_factory=list)


class Model(nn.Module):
    """A small causal transformer over bytes."""

    def __init__(self, width: int) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.embedding = nn.Embedding(257, width)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, 257)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(ids.shape[1]).to(self.head.weight.dtype)
        return self.head(self.encoder(self.embedding(ids), mask=mask, is_causal=True))


def compute_loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Sums the loss over the supervised tokens. Padding follows the tokens that are predicted from, so it changes nothing."""
    logits, labels = model(batch["input_ids"])[:, :-1], batch["labels"][:, 1:].flatten()
    return nn.functional.cross_entropy(logits.flatten(0, 1), labels, ignore_index=-100, reduction="sum")


class Trainer:
    """Makes one update after another, with the same optimizer and learning rate."""

    def __init__(self, options: argparse.Namespace) -> None:
        torch.manual_seed(0)
        model = Model(options.width)
        self.model = DistributedDataParallel(model.double() if options.double else model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-3)
        self.run = Run()
        self._began_s = time.monotonic()

    def update(self, loss: float) -> None:
        """Steps the optimizer, and notes the mean loss over the update's tokens."""
        self.optimizer.step()
        self.optimizer.zero_grad()
        total = torch.tensor([loss], dtype=torch.float64)
        dist.all_reduce(total)
        self.run.losses.append(float(total) / dist.get_world_size())
        self.run.seconds.append(time.monotonic() - self._began_s)
        self.run.weights.append(torch.cat([p.detach().flatten().clone() for p in self.model.parameters()]))


def train_fixed(data: ByteTexts, options: argparse.Namespace) -> Run:
    """Trains with fixed batches. Each rank accumulates its part of an update, weighted by the update's tokens."""
    trainer, rank, world_size = Trainer(options), dist.get_rank(), dist.get_world_size()
    order = Order(data)
    for epoch in range(options.epochs):
        order.set_epoch(epoch)
        places = list(order)
        for first in range(0, len(places), options.update_samples):
            samples = [data[i] for i in places[first : first + options.update_samples][rank::world_size]]
            count = torch.tensor([sum(int((sample["labels"][1:] != -100).sum()) for sample in samples)])
            dist.all_reduce(count)
            steps = -(-options.update_samples // world_size // options.batch)
            groups = [samples[i * options.batch : (i + 1) * options.batch] for i in range(steps)]
            total = 0.0
            for number, group in enumerate(groups, 1):
                trainer.model.require_backward_grad_sync = number == steps
                # A rank with too few samples in the last update trains on one of its own again, with weight 0.
                weight = world_size / int(count) if group else 0.0
                loss = compute_loss(trainer.model, collate(group or [data[places[rank]]])) * weight
                loss.backward()
                total += float(loss.detach())
            trainer.update(total)
    return trainer.run


def train_ours(data: ByteTexts, options: argparse.Namespace) -> Run:
    """Makes the same updates, with their samples in micro-batches formed by length, in the memory of the fixed batches."""
    trainer, total = Trainer(options), 0.0
    loader = ODBDataLoader(
        data,
        token_budget=options.batch * options.longest,
        update_samples=options.update_samples,
        sampler=Order(data),
        shard="shared",
        collate_fn=collate,
        loss=Loss(reduction="sum"),
    )
    with loader:
        for _ in range(options.epochs):
            for batch, info in loader.steps():
                trainer.model.require_backward_grad_sync = info.is_update_end
                loss = info.scale(compute_loss(trainer.model, batch))
                loss.backward()
                total += float(loss.detach())
                if info.is_update_end:
                    trainer.update(total)
                    total = 0.0
    return trainer.run


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--update-samples", type=int, default=64, help="of all ranks in an optimizer update (%(default)s)"
    )
    parser.add_argument("--batch", type=int, default=4, help="samples of a fixed batch: so many of the longest fit")
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--texts", type=int, default=900, help="at most so many (%(default)s)")
    parser.add_argument("--longest", type=int, default=512, help="bytes at which a text is cut (%(default)s)")
    parser.add_argument("--lengths", metavar="TRACE", help="random texts of these lengths in place of docstrings")
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--double", action="store_true", help="float64: the weights are compared after every update")
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    data = ByteTexts(make_texts(options), options.longest)
    fixed, ours = train_fixed(data, options), train_ours(data, options)
    difference = max(float((a - b).abs().max()) for a, b in zip(fixed.weights, ours.weights, strict=True))
    if dist.get_rank() == 0:
        updates = f"{len(ours.losses)} updates of {options.update_samples} samples, on {dist.get_world_size()} ranks"
        print(
            f"{len(data)} texts, {updates}; the last loss: fixed {fixed.losses[-1]:.6f}, formed by length {ours.losses[-1]:.6f}"
        )
        print(f"weights differ by {difference:.1e} at most, over all updates")
        print(
            f"formed by length: {fixed.seconds[-1] / ours.seconds[-1]:.2f} times as fast as fixed batches of {options.batch}"
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
