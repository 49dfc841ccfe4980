"""Trains a small model on real text, with two ranks, three times.

    python -m torch.distributed.run --standalone --nproc-per-node 2 examples/demo/demo_train.py --out DIR [--text PATH]

The first training uses fixed batches and gradient accumulation, with batches as large as the longest text allows under the
token budget. The second uses `ODBDataLoader` with the same samples in every optimizer update, so that only the time can differ.
The third uses its free mode, whose updates are full steps, at the same learning rate. Writes a trace of the second for each
rank, and in ``train.json`` the figures, and the loss over held-out texts by updates and by seconds.

With ``--runs N`` it trains N times in the free mode instead, with uneven shards and the texts in a different order each time,
and writes traces ``runNN-rankR.ndjson``. ``odb-ref calibrate DIR/run*.ndjson`` fits and judges a cost model on them. A
``--width`` of 256 makes steps long enough (0.2 s on a slow core) for their time to depend on their tokens.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import sys
import time
from collections.abc import Sequence
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
from torch.utils.data import Dataset, DistributedSampler, Subset

from odb_ref import Batching, Loss, ODBDataLoader, UsageError, gather_objects

TOKEN_BUDGET: Final = 4096
MAX_TOKENS: Final = 1024
WINDOW: Final = 256
FIRST_SHARE: Final = 0.65
"""With ``--runs`` rank 0 holds this share of the texts; the other ranks share the rest."""
UPDATE_SAMPLES: Final = 64
FIXED: Final = TOKEN_BUDGET // MAX_TOKENS
"""The number of samples in a fixed batch."""
HELD_OUT: Final = 12
"""One text in this many is held out."""
EVALUATED: Final = 2
"""The number of updates between evaluations on the held-out texts."""
WIDTH: Final = 48


class ByteModel(nn.Module):
    """A causal transformer of one layer over bytes."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.tokens = nn.Embedding(257, width, padding_idx=0)
        self.places = nn.Embedding(MAX_TOKENS, width)
        self.layer = nn.TransformerEncoderLayer(width, 2, 2 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.head = nn.Linear(width, 257)

    def forward(self, ids: Tensor) -> Tensor:
        """Returns logits for the next byte, of shape (samples, tokens, 257)."""
        length = ids.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length)
        hidden = self.tokens(ids) + self.places(torch.arange(length))
        logits: Tensor = self.head(self.layer(hidden, src_mask=mask, is_causal=True))
        return logits


Batch = dict[str, Tensor]


def collate(samples: Sequence[Batch]) -> Batch:
    """Returns a padded batch."""
    return {
        "input_ids": pad_sequence([sample["input_ids"] for sample in samples], batch_first=True),
        "labels": pad_sequence([sample["labels"] for sample in samples], batch_first=True, padding_value=IGNORE_INDEX),
    }


def compute_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Sums the loss over the batch's supervised tokens, because a mean is undefined if there are none."""
    logits = model(batch["input_ids"])
    loss: Tensor = cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten(), reduction="sum")
    return loss


@dataclass(slots=True)
class Run:
    """One rank's record of a training run, step by step."""

    padded_tokens: list[int] = field(default_factory=list)
    real_tokens: int = 0
    samples: int = 0
    idle_steps: int = 0
    updates: int = 0
    data_wait_s: float = 0.0
    train_s: float = 0.0
    cpu_s: float = 0.0
    curve: list[tuple[int, float, float]] = field(default_factory=list)
    """Updates done, seconds of training, and the mean loss over the held-out texts."""
    weights: Tensor = field(default_factory=lambda: torch.zeros(0))


class Training:
    """A model, its optimizer, and a clock that stops while the held-out texts are evaluated."""

    def __init__(self, width: int, held: Sequence[Batch] = ()) -> None:
        torch.manual_seed(0)
        self.model = DistributedDataParallel(ByteModel(width))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-3)
        self.run = Run()
        rank, world_size = dist.get_rank(), dist.get_world_size()
        own = sorted(held, key=lambda sample: len(sample["input_ids"]))[rank::world_size]
        self._held = [collate(own[first : first + 16]) for first in range(0, len(own), 16)]
        self._evaluate()
        dist.barrier()
        self._began = time.monotonic(), time.process_time()

    def step(self, batch: Batch, scale: float, *, samples: int, is_update_end: bool) -> None:
        """Computes a micro-batch. At the end of an update, averages gradients over ranks and steps the optimizer."""
        self.model.require_backward_grad_sync = is_update_end
        (compute_loss(self.model, batch) * scale).backward()  # type: ignore[no-untyped-call]
        self.run.padded_tokens.append(batch["input_ids"].numel() if samples else 0)
        self.run.real_tokens += int((batch["input_ids"] != 0).sum()) if samples else 0
        self.run.samples += samples
        self.run.idle_steps += not samples
        if is_update_end:
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.run.updates += 1
            if self.run.updates % EVALUATED == 0:
                self.stop()
                self._evaluate()
                self._began = time.monotonic(), time.process_time()

    def stop(self) -> None:
        """Stops the clock."""
        self.run.train_s += time.monotonic() - self._began[0]
        self.run.cpu_s += time.process_time() - self._began[1]

    def finish(self) -> Run:
        """Returns the record."""
        self.stop()
        if self.run.curve and self.run.curve[-1][0] < self.run.updates:
            self._evaluate()
        self.run.weights = torch.cat([weight.detach().flatten() for weight in self.model.parameters()])
        return self.run

    def _evaluate(self) -> None:
        if not self._held:
            return
        with torch.no_grad():
            losses = [float(compute_loss(self.model.module, batch)) for batch in self._held]
        counts = [int((batch["labels"][:, 1:] != IGNORE_INDEX).sum()) for batch in self._held]
        found = torch.tensor([sum(losses), sum(counts)], dtype=torch.float64)
        dist.all_reduce(found)
        self.run.curve.append((self.run.updates, self.run.train_s, float(found[0] / found[1])))


def train_odb(loader: ODBDataLoader[dict[str, Tensor]], training: Training) -> Run:
    """Trains for one epoch with `ODBDataLoader`."""
    for batch, info in loader.steps():
        training.step(batch, info.loss_scale, samples=info.local_samples, is_update_end=info.is_update_end)
    training.run.data_wait_s = loader.metrics()["odb/data_wait_s"]
    return training.finish()


def train_fixed(data: Dataset[Batch], order: Sequence[int], training: Training) -> Run:
    """Trains for one epoch on the same updates in batches of one size, weighted by the supervised tokens of their update."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    steps = UPDATE_SAMPLES // world_size // FIXED
    for first in range(0, len(order), UPDATE_SAMPLES):
        asked = time.monotonic()
        own = [data[place] for place in order[first : first + UPDATE_SAMPLES][rank::world_size]]
        tokens = torch.tensor(sum(int((sample["labels"][1:] != IGNORE_INDEX).sum()) for sample in own))
        training.run.data_wait_s += time.monotonic() - asked
        dist.all_reduce(tokens)
        for step in range(steps):
            group = own[step * FIXED : (step + 1) * FIXED]
            # A rank may have too few samples in the last update. Then it computes another one, with weight 0.
            scale = world_size / max(1, int(tokens)) if group else 0.0
            batch = collate(group or [data[order[0]]])
            training.step(batch, scale, samples=len(group), is_update_end=step + 1 == steps)
    return training.finish()


def summarize(runs: Sequence[Run], prefix: str = "") -> dict[str, float]:
    """Returns figures over all ranks. ``efficiency`` and ``excess`` compare with the fullest rank's tokens in each step."""
    steps = max(len(run.padded_tokens) for run in runs)
    columns = [[run.padded_tokens[step] for run in runs if step < len(run.padded_tokens)] for step in range(steps)]
    critical = sum(map(max, columns))
    padded = sum(map(sum, columns))
    real = sum(run.real_tokens for run in runs)
    wall_s = max(run.train_s for run in runs)
    figures = {
        "updates": runs[0].updates,
        "steps": steps,
        "samples": sum(run.samples for run in runs),
        "idle_steps": sum(steps - len(run.padded_tokens) + run.idle_steps for run in runs),
        "padding_ratio": 1 - real / padded,
        "efficiency": real / (len(runs) * critical),
        "excess": critical / max(run.real_tokens for run in runs) - 1,
        "data_wait_share": sum(run.data_wait_s for run in runs) / sum(run.train_s for run in runs),
        "train_s": wall_s,
        "cpu_s": sum(run.cpu_s for run in runs),
        "held_out_loss": runs[0].curve[-1][2] if runs[0].curve else math.nan,
    }
    return {prefix + key: value for key, value in figures.items()}


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
    """Traces ``runs`` runs in ``out``. Rank 0 prints a line for each."""
    for number in range(runs):
        with _make_loader(shard, out / f"run{number:02}-rank{{rank}}.ndjson", number) as loader:
            figures = summarize(gather_objects(train_odb(loader, Training(width))))
        if dist.get_rank() == 0:
            steps, train_s = figures["steps"], figures["train_s"]
            sys.stdout.write(f"run {number + 1} of {runs}: {steps} steps in {train_s:.1f} s\n")
            sys.stdout.flush()


def _compare(texts: ByteTexts, out: Path, width: int) -> None:
    """Trains in the three ways. Rank 0 writes the figures."""
    held = [texts[place] for place in range(0, len(texts), HELD_OUT)]
    data = Subset(texts, [place for place in range(len(texts)) if place % HELD_OUT])
    order: DistributedSampler[int] = DistributedSampler(data, num_replicas=1, rank=0)  # the order of all ranks together
    runs = {"fixed": train_fixed(data, list(order), Training(width, held))}
    for name, update_samples in {"odb": UPDATE_SAMPLES, "free": None}.items():
        with ODBDataLoader(
            data,
            token_budget=TOKEN_BUDGET,
            update_samples=update_samples,
            sampler=order if update_samples else None,
            shuffle=not update_samples,
            shard="shared",
            collate_fn=collate,
            trace=out / "train-rank{rank}.ndjson" if update_samples else None,
            batching=Batching(window=WINDOW),
            loss=Loss(reduction="sum"),
        ) as loader:
            runs[name] = train_odb(loader, Training(width, held))
    fixed, odb, free = (gather_objects(run) for run in runs.values())
    if dist.get_rank() == 0:
        figures: dict[str, object] = {
            "ranks": dist.get_world_size(),
            "texts": len(data),
            "held_out_texts": len(held),
            "token_budget": TOKEN_BUDGET,
            "update_samples": UPDATE_SAMPLES,
            "fixed_batch_size": FIXED,
            "window": WINDOW,
            "width": width,
        }
        figures |= summarize(odb) | summarize(fixed, "fixed_") | summarize(free, "free_")
        figures["weights_differ"] = float((odb[0].weights - fixed[0].weights).abs().max())
        # On a busy machine, processor time tells more than the wall clock.
        figures["speedup_cpu"] = sum(run.cpu_s for run in fixed) / sum(run.cpu_s for run in odb)
        figures["speedup"] = max(run.train_s for run in fixed) / max(run.train_s for run in odb)
        figures["curves"] = {name: run.curve for name, run in runs.items()}
        (out / "train.json").write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")


def main() -> None:
    """Trains in three ways and writes figures, or with ``--runs`` only traces.

    Raises: UsageError when the texts cannot be read, or are fewer than the ranks, or a number makes no sense.
    """
    parser = argparse.ArgumentParser(description="Train two ranks on real text.")
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
    data = ByteTexts(texts, MAX_TOKENS)
    args.out.mkdir(parents=True, exist_ok=True)
    if args.runs is None:
        _compare(data, args.out, args.width)
    else:
        _record(Subset(data, _compute_shard(len(texts), rank, world_size)), args.out, args.runs, args.width)
    dist.barrier()
    with contextlib.suppress(RuntimeError):
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
