"""What `ODBDataLoader` is told, checked and put together."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Final
from weakref import WeakValueDictionary

import torch
from torch.utils.data import DistributedSampler, IterableDataset

from odb_ref.core.errors import UsageError, check_integer
from odb_ref.torch.arguments import check_flag
from odb_ref.torch.plan.order import Order
from odb_ref.torch.plan.sampler import AllReplicas
from odb_ref.torch.reading.collator import OnIdle

SAMPLES: Final = "samples"
"""The bound of ``len()`` that always holds: no step is idle on all ranks, so an epoch has no more steps than samples."""

_LEAST_SEED: Final = -(2**63)
_MOST_SEED: Final = 2**64 - 1
"""As `torch.manual_seed` has them."""


def check_skipping(on_idle: OnIdle, accumulation_steps: int) -> None:
    """Checks that no rank would leave out the step that synchronizes an update.

    Raises: UsageError.
    """
    if on_idle is OnIdle.SKIP and accumulation_steps > 1:
        raise UsageError(
            "on_idle='skip' needs accumulation_steps=1: a rank that skips the step which ends an update "
            "would never synchronize what it has of it; use on_idle='replay'"
        )


def check_updates(update_samples: object, others: Mapping[str, object]) -> int | None:
    """Returns how many samples an optimizer update holds, if that is fixed.

    Raises: UsageError when it is not a number, or with another option that says what an update is or bounds windows.
    """
    if update_samples is None:
        return None
    given = [f"{name}={value!r}" for name, value in others.items() if value is not None]
    if given:
        raise UsageError(
            f"update_samples and {given[0]} exclude each other: an update is formed at once, of its own samples"
        )
    return check_integer(update_samples, "update_samples", 1)


def make_order(
    dataset: object,
    *,
    sampler: Iterable[object] | None,
    shuffle: bool,
    shard: str,
    seed: int,
    generator: torch.Generator | None,
    update_samples: int | None = None,
    drop_last: bool = False,
) -> Order:
    """Returns how the keys of an epoch come about.

    Raises: UsageError when the options exclude each other.
    """
    is_iterable = isinstance(dataset, IterableDataset)
    shuffle = check_flag(shuffle, "shuffle")
    if shard not in ("auto", "shared", "given"):
        raise UsageError(f"shard must be 'auto', 'shared' or 'given', got {shard!r}")
    if shard == "shared" and is_iterable:
        raise UsageError("shard='shared' needs a map-style data set: all ranks draw from one order of it")
    is_common = shard != "given" and not is_iterable and (sampler is None or update_samples is not None)
    if shard == "shared" and not is_common:
        raise UsageError(
            "shard='shared' with a sampler needs update_samples: without it all ranks draw from shuffle and seed"
        )
    if drop_last and update_samples is None:
        raise UsageError(
            "drop_last needs update_samples: there are no batches of a fixed size, so no last one is smaller"
        )
    if drop_last and not is_common:
        raise UsageError("drop_last needs one order of all ranks: a map-style data set, and another shard than 'given'")
    if is_iterable and (sampler is not None or shuffle):
        raise UsageError("an iterable data set takes neither sampler nor shuffle")
    if sampler is not None and shuffle:
        raise UsageError("sampler and shuffle exclude each other")
    if isinstance(sampler, Iterator):  # asking it for its iterator would move some samplers on
        raise UsageError(
            "sampler is an iterator, which is empty from the second epoch on: pass a Sampler or a sequence"
        )
    if generator is not None and seed:
        raise UsageError("seed and generator exclude each other")
    if is_common and isinstance(sampler, DistributedSampler) and type(sampler).__iter__ is DistributedSampler.__iter__:
        sampler = AllReplicas(sampler)
    return Order(
        dataset=dataset,
        sampler=sampler,
        is_iterable=is_iterable,
        is_auto=is_common,
        is_shared=shard == "shared",
        is_shuffled=shuffle,
        seed=check_integer(seed, "seed", _LEAST_SEED, _MOST_SEED) if generator is None else draw_seed(generator),
        seed_source="" if generator is None else " drawn from generator",
        update_samples=update_samples,
        drops_last=drop_last,
    )


def draw_seed(generator: torch.Generator) -> int:
    """Returns a seed drawn from a generator, as a DataLoader draws one.

    Raises: UsageError when it is of another device.
    """
    if generator.device.type != "cpu":
        raise UsageError(f"generator must be one of the CPU, got one of {generator.device}")
    return int(torch.empty((), dtype=torch.int64).random_(generator=generator).item())


def check_len_bound(bound: int | str | None, order: Order) -> int | str | None:
    """Returns the bound: a number of steps, or `SAMPLES`; None when it was not asked for.

    Raises: UsageError when it makes no sense.
    """
    match bound:
        case None:
            return None
        case str() if bound == SAMPLES:
            if not order.is_auto:
                raise UsageError(
                    "len_bound='samples' needs shard='auto': no rank knows how many samples the others hold"
                )
            order.count_samples()  # or says that nobody knows
            return bound
        case bool() | str():
            raise UsageError(f"len_bound must be a number of steps or 'samples', got {bound!r}")
        case _:
            return check_integer(bound, "len_bound", 1)


def compute_trace_path(
    path: str | Path, rank: int, world_size: int, epoch: int, resumed_at: int = 0, *, peer: int = 0
) -> Path:
    """Returns where a rank writes the trace of an epoch: ``{rank}`` and ``{epoch}`` in the name are replaced.

    Without them ``-rank0`` is added where there are several ranks, and ``-epoch1`` from the second epoch on; for the further
    processes of a rank ``-peer1`` in any case. A rank of a group has its number in the job. The rest of an epoch that was saved
    after so many steps does not overwrite its beginning: ``-step36`` is added.
    """
    path = Path(path)
    name = path.name
    stem, dot, suffix = name.partition(".")
    if "{rank}" not in name and world_size > 1:
        stem += "-rank{rank}"
    if peer:
        stem += f"-peer{peer}"
    if "{epoch}" not in name and epoch:
        stem += "-epoch{epoch}"
    if resumed_at:
        stem += f"-step{resumed_at}"
    name = f"{stem}{dot}{suffix}".replace("{rank}", str(rank)).replace("{epoch}", str(epoch))
    return path.with_name(name)


_writers: Final[WeakValueDictionary[Path, object]] = WeakValueDictionary()
"""By the file of a trace, the loader that writes it."""


def claim_trace(path: Path, owner: object) -> None:
    """Notes that a loader writes a trace there.

    Raises: UsageError when another loader does, which is neither closed nor gone: one trace would be lost.
    """
    if _writers.setdefault(path.absolute(), owner) is not owner:
        raise UsageError(
            f"trace: another loader of this process writes {path}; give each a path of its own, or close the one before"
        )


def release_traces(owner: object) -> None:
    """Forgets what a loader writes."""
    for path in [path for path, other in _writers.items() if other is owner]:
        _writers.pop(path, None)
