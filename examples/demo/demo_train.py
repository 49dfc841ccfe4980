"""Trains a small model on real text, with two ranks that hold very different amounts of it; twice.

    python -m torch.distributed.run --standalone --nproc-per-node 2 examples/demo/demo_train.py --out DIR [--text PATH]

Once with `ODBDataLoader`, once with a plain DataLoader: fixed batches, as large as the longest text allows under the same
token budget, and DDP's Join for the uneven end. Writes a trace for each rank, and the figures as ``train.json``.

With ``--runs N`` it trains N times with `ODBDataLoader` instead, each time on the texts in another order, and writes the
traces ``runNN-rankR.ndjson``: what ``odb-ref calibrate DIR/run*.ndjson`` fits a cost model to and judges it on. A ``--width``
of 256 gives steps long enough (0.2 s on a slow core) for their time to be that of their tokens.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import torch
import torch.distributed as dist
from demo_texts import IGNORE_INDEX, ByteTexts, read_docstrings, read_json_lines
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Subset

from odb_ref import Batching, Loss, ODBDataLoader, UsageError, gather_objects

TOKEN_BUDGET: Final = 4096
MAX_TOKENS: Final = 1024
WINDOW: Final = 256
FIRST_SHARE: Final = 0.65
"""Rank 0 holds this share of the texts; the other ranks share the rest."""
WIDTH: Final = 48
SHOWN_STEPS: Final = 10


class ByteModel(nn.Module):
    """A causal transformer of one layer over bytes."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.tokens = nn.Embedding(257, width, padding_idx=0)
        self.places = nn.Embedding(MAX_TOKENS, width)
        self.layer = nn.TransformerEncoderLayer(width, 2, 2 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.head = nn.Linear(width, 257)

    def forward(self, ids: Tensor) -> Tensor:
        """Logits for the next byte: (samples, tokens, 257)."""
        length = ids.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length)
        hidden = self.tokens(ids) + self.places(torch.arange(length))
        logits: Tensor = self.head(self.layer(hidden, src_mask=mask, is_causal=True))
        return logits


Batch = dict[str, Tensor]


def collate(samples: Sequence[Batch]) -> Batch:
    """A padded batch."""
    return {
        "input_ids": pad_sequence([sample["input_ids"] for sample in samples], batch_first=True),
        "labels": pad_sequence([sample["labels"] for sample in samples], batch_first=True, padding_value=IGNORE_INDEX),
    }


def compute_loss(model: nn.Module, batch: Batch) -> Tensor:
    """The sum over the batch's supervised tokens: unlike a mean it is defined where there is none."""
    logits = model(batch["input_ids"])
    loss: Tensor = cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten(), reduction="sum")
    return loss


@dataclass(slots=True)
class Run:
    """What one rank notes of a training run, step by step."""

    losses: list[float] = field(default_factory=list)
    """Contributions to the global mean loss: their sum over ranks is the loss of the step."""
    padded_tokens: list[int] = field(default_factory=list)
    real_tokens: int = 0
    samples: int = 0
    idle_steps: int = 0
    data_wait_s: float = 0.0
    train_s: float = 0.0
    cpu_s: float = 0.0


def _make_model(width: int) -> tuple[DistributedDataParallel, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = DistributedDataParallel(ByteModel(width))
    return model, torch.optim.AdamW(model.parameters(), lr=3e-3)


def _train_step(model: nn.Module, optimizer: torch.optim.Optimizer, loss: Tensor) -> None:
    optimizer.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()


def train_odb(loader: ODBDataLoader[dict[str, Tensor]], width: int = WIDTH) -> Run:
    """One epoch over `ODBDataLoader`."""
    model, optimizer = _make_model(width)
    world_size = dist.get_world_size()
    run = Run()
    dist.barrier()
    began, began_cpu = time.monotonic(), time.process_time()
    for batch, info in loader.steps():
        loss = compute_loss(model, batch) * info.loss_scale
        _train_step(model, optimizer, loss)
        run.losses.append(loss.item() / world_size)
        run.padded_tokens.append(info.padded_tokens)
        run.real_tokens += info.local_tokens
        run.samples += info.local_samples
        run.idle_steps += info.is_idle
    run.train_s, run.cpu_s = time.monotonic() - began, time.process_time() - began_cpu
    run.data_wait_s = loader.metrics()["odb/data_wait_s"]
    return run


def train_fixed(loader: Iterable[Batch], width: int = WIDTH) -> Run:
    """One epoch over a plain DataLoader, with DDP's Join for ranks that run dry early."""
    model, optimizer = _make_model(width)
    run = Run()
    dist.barrier()
    began, began_cpu = time.monotonic(), time.process_time()
    with model.join():
        batches = iter(loader)
        while True:
            asked = time.monotonic()
            batch = next(batches, None)
            run.data_wait_s += time.monotonic() - asked
            if batch is None:
                break
            supervised = int((batch["labels"][:, 1:] != IGNORE_INDEX).sum())
            loss = compute_loss(model, batch) / max(1, supervised)
            _train_step(model, optimizer, loss)
            run.losses.append(loss.item())
            run.padded_tokens.append(batch["input_ids"].numel())
            run.real_tokens += int((batch["input_ids"] != 0).sum())
            run.samples += batch["input_ids"].shape[0]
    run.train_s, run.cpu_s = time.monotonic() - began, time.process_time() - began_cpu
    return run


def summarize(runs: Sequence[Run], prefix: str = "") -> dict[str, float]:
    """Figures over all ranks. ``efficiency`` and ``excess`` compare with the tokens of the fullest rank of each step."""
    steps = max(len(run.padded_tokens) for run in runs)
    columns = [[run.padded_tokens[step] for run in runs if step < len(run.padded_tokens)] for step in range(steps)]
    critical = sum(map(max, columns))
    padded = sum(map(sum, columns))
    real = sum(run.real_tokens for run in runs)
    wall_s = max(run.train_s for run in runs)
    figures = {
        "steps": steps,
        "samples": sum(run.samples for run in runs),
        "idle_steps": sum(steps - len(run.padded_tokens) + run.idle_steps for run in runs),
        "padding_ratio": 1 - real / padded,
        "efficiency": real / (len(runs) * critical),
        "excess": critical / max(run.real_tokens for run in runs) - 1,
        "data_wait_share": sum(run.data_wait_s for run in runs) / sum(run.train_s for run in runs),
        "train_s": wall_s,
        "cpu_s": sum(run.cpu_s for run in runs),
    }
    return {prefix + key: value for key, value in figures.items()}


def _compute_losses(runs: Sequence[Run]) -> tuple[float, float]:
    """The mean loss over the first and over the last steps."""
    losses = [sum(column) for column in zip(*(run.losses for run in runs), strict=True)]
    count = min(SHOWN_STEPS, len(losses))
    return sum(losses[:count]) / count, sum(losses[-count:]) / count


def _compute_shard(count: int, rank: int, world_size: int) -> range:
    first = count if world_size == 1 else round(count * FIRST_SHARE)
    rest = range(first, count)
    return range(first) if rank == 0 else rest[rank - 1 :: world_size - 1]


def _make_loader(shard: Subset[Batch], trace: Path, seed: int) -> ODBDataLoader[dict[str, Tensor]]:
    return ODBDataLoader(
        shard,
        shard="given",
        shuffle=True,
        seed=seed,
        token_budget=TOKEN_BUDGET,
        collate_fn=collate,
        trace=trace,
        batching=Batching(window=WINDOW),
        loss=Loss(reduction="sum"),
    )


def _record(shard: Subset[Batch], out: Path, runs: int, width: int) -> None:
    """Traces of ``runs`` runs in ``out``; rank 0 prints a line for each."""
    for number in range(runs):
        with _make_loader(shard, out / f"run{number:02}-rank{{rank}}.ndjson", number) as loader:
            figures = summarize(gather_objects(train_odb(loader, width)))
        if dist.get_rank() == 0:
            steps, train_s = figures["steps"], figures["train_s"]
            sys.stdout.write(f"run {number + 1} of {runs}: {steps} steps in {train_s:.1f} s\n")
            sys.stdout.flush()


def _compare(shard: Subset[Batch], out: Path, width: int) -> None:
    """Trains with `ODBDataLoader`, then with fixed batches; rank 0 writes the figures."""
    with _make_loader(shard, out / "train-rank{rank}.ndjson", 0) as loader:
        odb = gather_objects(train_odb(loader, width))
    batch_size = TOKEN_BUDGET // MAX_TOKENS
    generator = torch.Generator().manual_seed(0)
    plain = DataLoader(shard, batch_size, shuffle=True, collate_fn=collate, generator=generator)
    fixed = gather_objects(train_fixed(plain, width))
    if dist.get_rank() == 0:
        first, last = _compute_losses(odb)
        figures: dict[str, float] = {
            "ranks": dist.get_world_size(),
            "token_budget": TOKEN_BUDGET,
            "window": WINDOW,
            "width": width,
        }
        figures |= summarize(odb) | {"loss_first": first, "loss_last": last}
        figures |= {"fixed_batch_size": batch_size} | summarize(fixed, "fixed_")
        # On a machine that is busy otherwise, the processor time says more than the wall clock.
        figures["speedup_cpu"] = figures["fixed_cpu_s"] / figures["cpu_s"]
        figures["speedup"] = figures["fixed_train_s"] / figures["train_s"]
        (out / "train.json").write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")


def main() -> None:
    """Both runs and their figures, or with ``--runs`` traces alone.

    Raises: UsageError when the texts cannot be read, or are fewer than the ranks, or a number makes no sense.
    """
    parser = argparse.ArgumentParser(description="Train two uneven ranks on real text.")
    parser.add_argument("--out", type=Path, required=True, help="folder for traces and train.json")
    parser.add_argument("--text", type=Path, help="JSON lines; default: the standard library's docstrings")
    parser.add_argument("--samples", type=int, default=1600, help="texts to read")
    parser.add_argument("--runs", type=int, metavar="N", help="record N runs to calibrate with, and compare nothing")
    parser.add_argument("--width", type=int, default=WIDTH, help="width of the model, an even number")
    args = parser.parse_args()
    if args.runs is not None and args.runs < 1:
        raise UsageError(f"--runs must be at least 1, got {args.runs}")
    if args.width < 2 or args.width % 2:
        raise UsageError(f"--width must be even and at least 2, got {args.width}")

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    texts = read_docstrings(args.samples) if args.text is None else read_json_lines(args.text, args.samples)
    if len(texts) < 2 * world_size:
        raise UsageError(f"{args.text or 'the standard library'}: {len(texts)} texts, too few for {world_size} ranks")
    shard = Subset(ByteTexts(texts, MAX_TOKENS), _compute_shard(len(texts), rank, world_size))
    args.out.mkdir(parents=True, exist_ok=True)
    if args.runs is None:
        _compare(shard, args.out, args.width)
    else:
        _record(shard, args.out, args.runs, args.width)
    dist.barrier()
    with contextlib.suppress(RuntimeError):
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
