"""Training on real text with two ranks of uneven shards: packed rows beside padded batches, fixed batches and the peer.

All train the same small transformer on the docstrings of Python's standard library, with the same largest batch. Attention is
computed sample by sample in a row, as by variable-length kernels, so that a row costs what its samples cost. Then the losses of
our first steps are compared with those of one process that gets the samples of a step one by one: they are equal.
"""

from __future__ import annotations

import time
from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from itertools import chain, pairwise, product, zip_longest
from typing import Any, Final

import torch
from torch.distributed.algorithms import Join
from torch.nn.functional import scaled_dot_product_attention
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Subset

from tests.bench.cases import has_peer
from tests.bench.launch import Rank, launch
from tests.bench.report import compute_ratios, print_table, say
from tests.helpers.options import nested

SHARDS: Final = (300, 100)
MAX_TOKENS: Final = 1024
BUDGET_TOKENS: Final = 4096
WINDOW_SAMPLES: Final = 64
COMPARED_STEPS: Final = 8
WORKERS: Final = 1
LIMIT_S: Final = 600.0
LEARNING_RATE: Final = 0.05
TOLERANCE: Final = 1e-5
"""Relative, because transformers computes the loss in float32."""

KINDS: Final = ("packed", "padded", "fixed", "peer")

Ids = list[int]


@dataclass(slots=True)
class Training:
    """The results of one way's repetitions."""

    samples_per_s: list[float] = field(default_factory=list)
    steps: int = 0
    efficiency: float = 0.0
    """Real tokens / (ranks x the largest batch of each step), summed over steps."""
    difference: float | None = None
    """The largest relative difference of a step's loss from that of one process."""
    trouble: str = ""


# In a rank -----------------------------------------------------------------------------------------------------------------


def make_model() -> Any:
    """Returns a small Llama with random weights, the same each time."""
    import transformers

    transformers.AttentionInterface.register("segments", _attend)
    transformers.AttentionMaskInterface.register("segments", lambda *_args, **_more: None)
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=257,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        attn_implementation="segments",
        use_cache=False,  # with a cache, transformers does not look for separate samples in a row
    )
    return transformers.LlamaForCausalLM(config)


def _attend(
    _module: Any, query: Any, key: Any, value: Any, _mask: Any, *, cu_seq_lens_q: Any = None, **more: Any
) -> tuple[Any, None]:
    ends = [0, query.shape[2]] if cu_seq_lens_q is None else cu_seq_lens_q.tolist()
    parts = [
        scaled_dot_product_attention(
            *(item[:, :, begin:end] for item in (query, key, value)), is_causal=True, scale=more.get("scaling")
        )
        for begin, end in pairwise(ends)
    ]
    return torch.cat(parts, 2).transpose(1, 2).contiguous(), None


def learn(spec: dict[str, Any], rank: int, ranks: int) -> dict[str, Any]:
    """Trains for an epoch. Returns the batch and the share of the loss of each step on this rank."""
    from demo_texts import ByteTexts, read_docstrings

    texts = ByteTexts(read_docstrings(sum(spec["shards"])), spec["max_tokens"])
    model = DistributedDataParallel(make_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=spec["learning_rate"])
    steps: list[tuple[int, list[Ids], float]] = []  # tokens of the batch, samples, loss
    began = time.monotonic()
    with _join(model, spec["kind"]):
        for batch, scale, is_idle in _iterate(texts, spec, rank, ranks):
            loss = model(**batch).loss * scale
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            samples = [] if is_idle else list(list_samples(batch))
            steps.append((0 if is_idle else batch["input_ids"].numel(), samples, loss.item() / ranks))
    return {"seconds": time.monotonic() - began, "steps": steps}


def _join(model: DistributedDataParallel, kind: str) -> AbstractContextManager[object]:
    """Returns the context that the peer's README requires if ranks take different numbers of steps, else an empty one."""
    return Join([model]) if kind == "peer" else nullcontext()


def _iterate(texts: Any, spec: dict[str, Any], rank: int, ranks: int) -> Iterator[tuple[Any, float, bool]]:
    first = sum(spec["shards"][:rank])
    shard = Subset(texts, range(first, first + spec["shards"][rank]))
    match spec["kind"]:
        case "packed" | "padded":
            from odb_ref.torch import ODBDataLoader

            own = {} if spec["kind"] == "packed" else {"collate_fn": _pad}
            with ODBDataLoader(
                shard,
                token_budget=spec["budget"],
                **nested(shard="given", layout=spec["kind"], window=spec["window"], num_workers=spec["workers"], **own),
            ) as loader:
                for batch, info in loader.steps():
                    yield batch, float(info.loss_scale), info.is_idle
        case "peer":
            import odb

            loader = odb.ODBDataLoader(
                shard,
                token_budget=spec["budget"],
                batch_size=1,
                loss_scaling="exact",
                num_workers=spec["workers"],
                prefetch_factor=max(1, spec["window"] // spec["workers"]),
                collate_fn=_pad,
            )
            for batch in loader:
                info = odb.pop_step_info(batch, loss_scaling="exact")
                yield batch, float(info.loss_scale), False
        case "fixed":  # every rank needs the same number of batches, so each takes its share of all samples
            mine = Subset(texts, range(rank, len(texts), ranks))
            for batch in DataLoader(
                mine, spec["budget"] // spec["max_tokens"], num_workers=spec["workers"], collate_fn=_pad
            ):
                yield batch, 1.0, False


def _pad(samples: Sequence[Any]) -> Any:
    from demo_train import collate

    batch = collate(samples)
    return batch | {"attention_mask": (batch["input_ids"] != 0).long()}


def list_samples(batch: Any) -> Iterator[Ids]:
    """Yields the ids of each sample of a batch, padded or packed."""
    if "cu_seq_lens_q" in batch:
        for begin, end in pairwise(batch["cu_seq_lens_q"].tolist()):
            yield batch["input_ids"][0, begin:end].tolist()
    else:
        for row in batch["input_ids"]:
            yield row[row != 0].tolist()


# Beside each other ---------------------------------------------------------------------------------------------------------


def run(options: Namespace) -> bool:
    """Trains in every way, in turn, and prints the table. Returns True if our losses are those of one process."""
    found = {kind: Training() for kind in KINDS if kind != "peer" or has_peer()}
    for repetition, (kind, training) in product(range(options.times), found.items()):
        say(f"training, {kind}, {repetition + 1} of {options.times}")
        spec = {
            "kind": kind, "shards": SHARDS, "max_tokens": MAX_TOKENS, "budget": BUDGET_TOKENS, "window": WINDOW_SAMPLES,
            "workers": WORKERS, "learning_rate": LEARNING_RATE,
        }  # fmt: skip
        _add(training, kind, launch("learn", spec, ranks=len(SHARDS), limit_s=LIMIT_S))
    rows = []
    for kind, training in found.items():
        ratios = compute_ratios(found["packed"].samples_per_s, training.samples_per_s)
        difference = None if training.difference is None else f"{training.difference:.1e}"
        rows.append([kind, training.trouble or training.steps, f"{training.efficiency:.3f}", ratios, difference])
    print_table(
        f"Training on real text, {len(SHARDS)} ranks of {SHARDS} samples, budget {BUDGET_TOKENS}",
        ["", "steps", "efficiency", "samples/s: packed / this", "loss against one process"],
        rows,
    )
    ours = [found[kind] for kind in ("packed", "padded")]
    return all(item.difference is not None and item.difference < TOLERANCE for item in ours)


def _add(training: Training, kind: str, results: Sequence[Rank]) -> None:
    found = [rank.found for rank in results]
    errors = [f"rank {number}: {item['error']}" for number, item in enumerate(found) if "error" in item]
    if errors:
        training.trouble = errors[0]
        return
    ranks = [item["steps"] for item in found]
    samples = [list(chain.from_iterable(step[1] for step in steps)) for steps in ranks]
    training.samples_per_s.append(sum(map(len, samples)) / max(item["seconds"] for item in found))
    training.steps = max(map(len, ranks))
    critical = sum(max(step[0] for step in row) for row in zip_longest(*ranks, fillvalue=(0, [], 0.0)))
    real = sum(map(len, chain.from_iterable(samples)))
    training.efficiency = real / (len(ranks) * critical)
    if kind in ("packed", "padded") and training.difference is None:
        training.difference = compare_losses([steps[:COMPARED_STEPS] for steps in ranks])


def compare_losses(ranks: Sequence[Sequence[tuple[int, list[Ids], float]]]) -> float:
    """Returns the largest relative difference between a step's loss over all ranks and the loss of one process that trains on
    the same samples one by one.
    """
    torch.set_num_threads(1)
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    worst = 0.0
    for row in zip(*ranks, strict=True):
        samples = [torch.tensor(ids) for _, parts, _ in row for ids in parts if len(ids) > 1]
        tokens = sum(len(ids) - 1 for ids in samples)
        optimizer.zero_grad()
        total = 0.0
        for ids in samples:
            loss = model(input_ids=ids[None], labels=ids[None]).loss * ((len(ids) - 1) / tokens)
            loss.backward()
            total += loss.item()
        optimizer.step()
        worst = max(worst, abs(sum(loss for *_, loss in row) - total) / total)
    return worst
