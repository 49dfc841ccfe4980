"""What `ODBDataLoader` is told, checked and put together."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Final

import torch
from torch.utils.data import IterableDataset, default_collate

from odb_ref.core.batching.layouts import Layout
from odb_ref.core.errors import UsageError, check_integer
from odb_ref.torch.flattening import FlattenSamples
from odb_ref.torch.plan.order import Order
from odb_ref.torch.reading.collator import CollateFn, OnIdle

SAMPLES: Final = "samples"
"""The bound of ``len()`` that always holds: no step is idle on all ranks, so an epoch has no more steps than samples."""

_LEAST_SEED: Final = -(2**63)


def choose_collate(layout: Layout, *, causal_shift: bool) -> CollateFn:
    """Returns what makes batches where the user gives no ``collate_fn``."""
    return FlattenSamples(causal_shift) if layout is Layout.PACKED else default_collate


def check_skipping(on_idle: OnIdle, accumulation_steps: int) -> None:
    """Checks that no rank would leave out the step that synchronizes an accumulation window.

    Raises: UsageError.
    """
    if on_idle is OnIdle.SKIP and accumulation_steps > 1:
        raise UsageError(
            "on_idle='skip' needs accumulation_steps=1: a rank that skips the step which ends an accumulation window "
            "would never synchronize what it has of it; use on_idle='replay'"
        )


def make_order(
    dataset: object,
    *,
    sampler: Iterable[object] | None,
    shuffle: bool,
    shard: str,
    seed: int,
    generator: torch.Generator | None,
) -> Order:
    """Returns how the keys of an epoch come about.

    Raises: UsageError when the options exclude each other.
    """
    is_iterable = isinstance(dataset, IterableDataset)
    if shard not in ("auto", "shared", "given"):
        raise UsageError(f"shard must be 'auto', 'shared' or 'given', got {shard!r}")
    if shard == "shared" and (is_iterable or sampler is not None):
        raise UsageError(
            "shard='shared' needs a map-style data set, and no sampler: all ranks draw from one order of it"
        )
    if is_iterable and (sampler is not None or shuffle):
        raise UsageError("an iterable data set takes neither sampler nor shuffle")
    if sampler is not None and shuffle:
        raise UsageError("sampler and shuffle exclude each other")
    if sampler is not None and iter(sampler) is sampler:
        raise UsageError(
            "sampler is an iterator, which is empty from the second epoch on: pass a Sampler or a sequence"
        )
    if generator is not None and seed:
        raise UsageError("seed and generator exclude each other")
    return Order(
        dataset=dataset,
        sampler=sampler,
        is_iterable=is_iterable,
        is_auto=shard != "given" and sampler is None and not is_iterable,
        is_shared=shard == "shared",
        is_shuffled=shuffle,
        seed=check_integer(seed, "seed", _LEAST_SEED) if generator is None else draw_seed(generator),
        seed_source="" if generator is None else " drawn from generator,",
    )


def draw_seed(generator: torch.Generator) -> int:
    """Returns a seed drawn from a generator, as a DataLoader draws one.

    Raises: UsageError when it is of another device.
    """
    if generator.device.type != "cpu":
        raise UsageError(f"generator must be one of the CPU, got one of {generator.device}")
    return int(torch.empty((), dtype=torch.int64).random_(generator=generator).item())


def check_len_bound(bound: int | str | None, order: Order) -> int | None:
    """Returns what ``len()`` says; None when it was not asked for.

    Raises: UsageError when the bound makes no sense.
    """
    match bound:
        case None:
            return None
        case str() if bound == SAMPLES:
            if not order.is_auto:
                raise UsageError(
                    "len_bound='samples' needs shard='auto': no rank knows how many samples the others hold"
                )
            return order.count_samples()
        case bool() | str():
            raise UsageError(f"len_bound must be a number of steps or 'samples', got {bound!r}")
        case _:
            return check_integer(bound, "len_bound", 1)


def compute_trace_path(path: str | Path, rank: int, world_size: int, epoch: int, resumed_at: int = 0) -> Path:
    """Returns where a rank writes the trace of an epoch: ``{rank}`` and ``{epoch}`` in the name are replaced.

    Without them ``-rank0`` is added where there are several ranks, and ``-epoch1`` from the second epoch on. The rest of an
    epoch that was saved after so many steps does not overwrite its beginning: ``-step36`` is added.
    """
    path = Path(path)
    name = path.name
    stem, dot, suffix = name.partition(".")
    if "{rank}" not in name and world_size > 1:
        stem += "-rank{rank}"
    if "{epoch}" not in name and epoch:
        stem += "-epoch{epoch}"
    if resumed_at:
        stem += f"-step{resumed_at}"
    name = f"{stem}{dot}{suffix}".replace("{rank}", str(rank)).replace("{epoch}", str(epoch))
    return path.with_name(name)
