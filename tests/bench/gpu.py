"""A plan, and the training that it plans, on one GPU: ``python -m tests.bench --only gpu``.

`odb-ref plan` predicts how long an epoch takes in fixed batches, in ours and in ours with packed rows, at the same optimizer
updates. It predicts first from data sheets alone, then from timed steps of a few sizes, as its page recommends. Then each is
trained for an epoch, in turn, as planned: Qwen2.5-0.5B in bf16 with AdamW, random weights and ids, real lengths.
"""

from __future__ import annotations

import contextlib
import csv
import io
import json
import random
import tempfile
import time
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from odb_sim.cli.main import main
from odb_sim.inputs.lengths import load_lengths
from odb_sim.inputs.presets import list_names, load_model
from torch.utils.data import DataLoader, Dataset

from tests.bench.data import collate
from tests.bench.report import Spread, compute_ratios, print_table, say

MODEL: Final = "qwen2.5-0.5b"
TRACE: Final = "mm_mix_real"
UPDATE_SAMPLES: Final = 64
UPDATES: Final = 24
WORKERS: Final = 4
SHAPES: Final = ((2, 256), (4, 512), (4, 1024), (5, 2048), (8, 1024), (8, 2048), (16, 512), (32, 256), (64, 256))
"""Rows and longest sample of the batches that are timed for `odb-ref calibrate`."""
LENGTHS: Final = "lengths.csv"
FIXED: Final = "fixed batches"
WAYS: Final = {"online batches": "padded", FIXED: "padded", "online, packed rows": "packed"}
"""The ways to make batches, named as in the plan, and their layouts."""

Batch = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Time:
    """The seconds of an epoch, and the bounds for nine in ten."""

    seconds: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.seconds:.1f} ({self.low:.1f} to {self.high:.1f})"


@dataclass(frozen=True, slots=True)
class Way:
    """A plan's settings for a way to make batches, and its time."""

    token_budget: int
    batch_size: int | None
    planned: Time


class Ids(Dataset[Batch]):
    """Random ids in samples as long as those of a trace."""

    def __init__(self, lengths: list[int], vocabulary: int) -> None:
        self.lengths, self.vocabulary = lengths, vocabulary

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> Batch:
        generator = torch.Generator().manual_seed(index)
        ids = torch.randint(self.vocabulary, (self.lengths[index],), generator=generator)
        return {"input_ids": ids, "labels": ids}


def collate_rows(samples: list[Batch]) -> Batch:
    """Pads the samples and adds a mask."""
    return collate([sample | {"attention_mask": torch.ones_like(sample["input_ids"])} for sample in samples])


def make_model() -> Any:
    """Returns the model in the plan, with random weights."""
    import transformers

    transformers.AttentionInterface.register("varlen", _attend)
    transformers.AttentionMaskInterface.register("varlen", lambda *_args, **_more: None)
    sizes = load_model(MODEL)
    config = transformers.Qwen2Config(
        vocab_size=sizes.vocabulary,
        hidden_size=sizes.hidden,
        intermediate_size=sizes.feed_forward,
        num_hidden_layers=sizes.layers,
        num_attention_heads=sizes.heads,
        num_key_value_heads=sizes.kv_heads,
        tie_word_embeddings=sizes.is_tied,
        use_cache=False,
    )
    torch.manual_seed(0)
    with torch.device("cuda"):
        return transformers.Qwen2ForCausalLM(config)


def _attend(
    _module: Any, query: Any, key: Any, value: Any, _mask: Any, *, cu_seq_lens_q: Any, max_length_q: int, **more: Any
) -> tuple[Any, None]:
    """Computes attention within each sample of a row, with torch's variable-length kernel."""
    from torch.nn.attention.varlen import varlen_attn

    shared = query.shape[1] // key.shape[1]
    heads = (query, key.repeat_interleave(shared, 1), value.repeat_interleave(shared, 1))
    flat = (item[0].transpose(0, 1).to(torch.bfloat16) for item in heads)
    ends, most = (cu_seq_lens_q, cu_seq_lens_q), (max_length_q, max_length_q)
    return varlen_attn(*flat, *ends, *most, scale=more["scaling"], window_size=(-1, 0))[None], None


class Trainer:
    """A model and an optimizer, for any way to make batches."""

    def __init__(self) -> None:
        self.model = make_model()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)

    def compute_loss(self, batch: Batch) -> torch.Tensor:
        there = {
            name: value.cuda(non_blocking=True) if isinstance(value, torch.Tensor) else value
            for name, value in batch.items()
        }
        with torch.autocast("cuda", torch.bfloat16):
            return self.model(**there).loss

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()


# What is planned -----------------------------------------------------------------------------------------------------------


def find_gpu() -> str:
    """Returns the simulator's name for this machine's GPU.

    Raises: SystemExit when there is no GPU, or an unknown one.
    """
    name = torch.cuda.get_device_name().lower() if torch.cuda.is_available() else "nothing"
    found = [gpu for gpu in list_names("gpu") if gpu in name]
    if not found:
        raise SystemExit(f"--only gpu needs one of {', '.join(list_names('gpu'))}; here is {name}")
    return found[0]


def make_plan(gpu: str, folder: Path) -> dict[str, Way]:
    """Returns what `odb-ref plan` predicts for each way."""
    out = folder / "plan.json"
    asked = f"plan {folder / LENGTHS} --model {MODEL} --gpu {gpu} --gpus 1 --strategy ddp --processes 1"
    command(f"{asked} --global-batch {UPDATE_SAMPLES} --json {out}")
    ways = {}
    for way in json.loads(out.read_text())["ways"]:
        size = way["summary"]["batch_size"]
        ways[way["name"].removesuffix(f" of {size}")] = Way(
            way["token_budget"],
            size,
            Time(way["seconds"], **{end: way["bands"]["seconds"][end] for end in ("low", "high")}),
        )
    return {name: ways[name] for name in WAYS}


def predict(name: str, way: Way, costs: Path) -> Time:
    """Returns what `odb-ref simulate` predicts for a way with measured costs."""
    out = costs.with_name("run.json")
    policy = f"--policy standard --batch-size {way.batch_size}" if name == FIXED else f"--layout {WAYS[name]}"
    asked = f"simulate {costs.with_name(LENGTHS)} --ranks 1 --token-budget {way.token_budget} {policy}"
    command(f"{asked} --global-batch {UPDATE_SAMPLES} --cost-model {costs} --bands --json {out}")
    found = json.loads(out.read_text())
    return Time(found["sim_time_s"], **found["band"]["sim_time_s"])


def command(text: str) -> None:
    """Runs a command of the simulator that writes files."""
    with contextlib.redirect_stdout(io.StringIO()):
        assert main(text.split()) == 0


def time_steps(trainer: Trainer, repetitions: int) -> list[tuple[int, int, float]]:
    """Returns rows, longest sample and seconds of micro-batches, each size in turn, after one for warm-up."""
    found = []
    for repetition in range(repetitions + 1):
        for rows, longest in SHAPES:
            seconds = _time_step(trainer, rows, longest)
            if repetition:
                found.append((rows, longest, seconds))
    trainer.optimizer.zero_grad()
    return found


def _time_step(trainer: Trainer, rows: int, longest: int) -> float:
    ids = torch.randint(trainer.model.config.vocab_size, (rows, longest))
    batch = {"input_ids": ids, "labels": ids, "attention_mask": torch.ones_like(ids)}
    torch.cuda.synchronize()
    began = time.monotonic()
    trainer.compute_loss(batch).backward()
    torch.cuda.synchronize()
    return time.monotonic() - began


def time_new_shapes(trainer: Trainer) -> tuple[list[float], list[float]]:
    """Returns the seconds of micro-batches of shapes not met before, and of the same once more."""
    times: tuple[list[float], list[float]] = [], []
    for found in times:
        for extra in range(1, 13):
            found.append(_time_step(trainer, 4, 512 + 11 * extra))
    trainer.optimizer.zero_grad()
    return times


def calibrate(steps: list[tuple[int, int, float]], folder: Path) -> Path:
    """Returns the file of the costs that `odb-ref calibrate` fits to ``steps``."""
    table, costs = folder / "steps.csv", folder / "costs.json"
    with table.open("w", newline="") as file:
        csv.writer(file).writerows([("rows", "longest", "seconds"), *steps])
    command(f"calibrate {table} --out {costs}")
    return costs


# What is trained -----------------------------------------------------------------------------------------------------------


def iterate(data: Ids, name: str, way: Way, seed: int) -> Iterator[tuple[Batch, Any, bool]]:
    """Yields each micro-batch of an epoch, the weight of its mean loss, and whether it ends an update."""
    from odb_ref import ODBDataLoader

    shared: dict[str, Any] = {"num_workers": WORKERS, "pin_memory": True}
    if name == FIXED:
        order, size = random.Random(seed).sample(range(len(data)), len(data)), way.batch_size or 1
        updates = [order[at : at + UPDATE_SAMPLES] for at in range(0, len(order), UPDATE_SAMPLES)]
        batches = [[update[at : at + size] for at in range(0, len(update), size)] for update in updates]
        flat = [batch for update in batches for batch in update]
        loader = iter(DataLoader(data, batch_sampler=flat, collate_fn=collate_rows, **shared))
        for update, parts in zip(updates, batches, strict=True):
            total = sum(data.lengths[i] - 1 for i in update)
            for part in parts:
                yield next(loader), sum(data.lengths[i] - 1 for i in part) / total, part is parts[-1]
        return
    shared["layout"] = WAYS[name]
    if WAYS[name] == "padded":
        shared["collate_fn"] = collate_rows
    shared |= {"token_budget": way.token_budget, "update_samples": UPDATE_SAMPLES, "shuffle": True, "seed": seed}
    with ODBDataLoader(data, **shared) as ours:
        for batch, info in ours.steps():
            yield batch, info.scale(1.0), info.is_update_end


def train_epoch(trainer: Trainer, data: Ids, name: str, way: Way, seed: int) -> dict[str, float]:
    """Trains on every sample once. Returns seconds, updates, micro-batches, and the peak memory in gigabytes."""
    trainer.model.set_attn_implementation("varlen" if WAYS[name] == "packed" else "sdpa")
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    began, updates, steps = time.monotonic(), 0, 0
    for batch, weight, is_end in iterate(data, name, way, seed):
        (trainer.compute_loss(batch) * weight).backward()
        steps += 1
        if is_end:
            trainer.update()
            updates += 1
    torch.cuda.synchronize()
    seconds = time.monotonic() - began
    held = torch.cuda.max_memory_allocated() / 1e9
    return {"seconds": seconds, "updates": updates, "steps": steps, "gigabytes": held}


def run(options: Namespace) -> bool:
    """Plans, trains, and prints the table. Returns True if each way's median time lies within both predicted bands."""
    gpu, repetitions = find_gpu(), options.times
    trainer = Trainer()
    lengths = random.Random(0).sample([int(tokens) for tokens in load_lengths(TRACE).tokens], UPDATES * UPDATE_SAMPLES)
    data = Ids(lengths, trainer.model.config.vocab_size)
    say("steps of a few sizes")
    steps = time_steps(trainer, max(3, repetitions))
    new, again = time_new_shapes(trainer)
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        (folder / LENGTHS).write_text("\n".join(["total_tokens", *map(str, lengths)]) + "\n")
        ways = make_plan(gpu, folder)
        costs = calibrate(steps, folder)
        timed = {name: predict(name, way, costs) for name, way in ways.items()}
    epochs: dict[str, list[dict[str, float]]] = {name: [] for name in WAYS}
    for repetition in range(repetitions + 1):
        for name, way in ways.items():
            say(f"an epoch of {name}, {repetition} of {repetitions}")
            epoch = train_epoch(trainer, data, name, way, repetition)
            if repetition:  # the first one loads kernels, and allocates memory for every shape
                epochs[name].append(epoch)
    rows, is_good, fixed = [], True, (ways[FIXED].planned, timed[FIXED])
    for name, found in epochs.items():
        times = (ways[name].planned, timed[name])
        seconds = Spread.of(epoch["seconds"] for epoch in found)
        is_within = all(time.low <= seconds.median <= time.high for time in times)
        is_good &= is_within
        updates = found[0]["updates"]
        row: list[object] = [name, f"{len(data) / updates:.1f}", f"{found[0]['steps'] / updates:.1f}", *times, seconds]
        row += [f"{plain.seconds / time.seconds:.2f}" for plain, time in zip(fixed, times, strict=True)]
        row.append(compute_ratios(*([1 / epoch["seconds"] for epoch in one] for one in (found, epochs[FIXED]))))
        rows.append([*row, f"{max(epoch['gigabytes'] for epoch in found):.1f}", "" if is_within else "OUTSIDE"])
    header = ["way", "samples an update", "micro-batches", "planned, s", "from timed steps, s", "trained, s"]
    header += ["speed-up: planned", "from timed", "trained", "GB", ""]
    print_table(f"An epoch of {TRACE}, {MODEL}, one {gpu}", header, rows)
    medians = [Spread.of(took for *size, took in steps if (*size,) == shape).median for shape in SHAPES]
    timed_steps = [[*shape, f"{median:.4f}"] for shape, median in zip(SHAPES, medians, strict=True)]
    print_table("The timed steps, medians", ["rows", "longest sample", "seconds"], timed_steps)
    more_s = Spread.of(new).median - Spread.of(again).median
    print(
        f"A micro-batch of a new shape takes {more_s * 1e3:.0f} ms longer than a repeated one; see docs/howto/shapes.md"
    )
    return is_good
