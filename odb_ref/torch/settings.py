"""Settings that `ODBDataLoader` has and a DataLoader lacks, in four groups, with defaults that fit most jobs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import wraps
from pathlib import Path
from typing import Final, Literal, Never, ParamSpec, TypeAlias, TypedDict

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from odb_ref.core.batching.budgets import BudgetSchedule
from odb_ref.core.batching.cost import CostOfLength
from odb_ref.core.batching.rules import TargetRule
from odb_ref.core.batching.updates import PADDING_SHARE
from odb_ref.core.config import DEPTH_STEPS, MAX_AGE_ROUNDS
from odb_ref.core.errors import UsageError

P = ParamSpec("P")

LayoutName: TypeAlias = Literal["padded", "packed"]
ShardName: TypeAlias = Literal["auto", "shared", "given"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Batching:
    """How batches are formed.

    Args:
        window: Samples a rank considers when it forms batches. A larger window fills batches better. Default: 1024.
        window_bytes: Limit on the bytes of the samples in a window. Default: none.
        depth: Steps to prepare ahead. Default: 8.
        length_fn: Counts the tokens of a sample. Default: reads the usual fields (`odb_ref.torch.reading.tasks`).
        order: ``"shuffled"`` shuffles the batches of a window (default). ``"sampler"`` makes batches of neighbours, in the
            sampler's order. ``"fullest"`` puts the fullest batches first.
        cost: The quantity in which the batches of one step are alike across ranks: ``"tokens"`` (default), ``"attention/Q"``
            (``tokens + tokens**2 // Q``), or a function of a sample's tokens.
        sizes: Number of samples in a padded batch: ``"any"`` (default), ``"powers"`` of two, ``"threes"`` (powers of two and
            three times these), or an ``"even"`` number. A batch of one sample is always allowed.
        padding_share: With ``update_samples`` a batch holds at most 1/``padding_share`` of the budget as padding. Set it to
            about what a full step costs, divided by what an empty one does. Default: 16. If each step gathers weights (FSDP,
            ZeRO 3) 4 is often better.
        max_patches: Limit on a batch's image and video patches (`odb_ref.torch.count_patches`). Default: none.
        cost_fn: Returns what a sample uses of further resources, as integers. Default: none.
        limits: What a batch may use of each further resource. A sample above one gets a batch of its own. Default: none.
        budget_schedule: ``(step, current) -> token budget``, where ``step`` counts the steps planned since training began. It
            is called once per round, when batches are formed (R15). Default: the budget does not change.
        len_bound: What ``len()`` returns without ``update_samples``: ``"samples"``, which always holds, or a number of steps.
            Default: ``len()`` raises TypeError.
    """

    window: int = 1024
    window_bytes: int | None = None
    depth: int = DEPTH_STEPS
    length_fn: Callable[[Never], int] | None = None
    order: Literal["shuffled", "sampler", "fullest"] = "shuffled"
    cost: str | CostOfLength = "tokens"
    sizes: Literal["any", "powers", "threes", "even"] = "any"
    padding_share: int = PADDING_SHARE
    max_patches: int | None = None
    cost_fn: Callable[[Never], Sequence[int]] | None = None
    limits: Sequence[int] = ()
    budget_schedule: BudgetSchedule | None = None
    len_bound: int | Literal["samples"] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """How `StepInfo.scale` weights a loss: see the table in `odb_ref.core.batching.weighting`. Preserves: WEIGHT.

    Args:
        scaling: The average over ranks becomes the mean over all supervised tokens (``"exact"``, default) or over all
            ``"samples"``; ``"none"`` leaves the loss alone.
        reduction: What the loss function computes over a batch: the ``"mean"`` (default) or the ``"sum"``.
        accumulation_steps: Batches in an optimizer update, without ``update_samples``. Default: 1.
        is_divided_by_trainer: Whether the trainer divides each loss by ``accumulation_steps``. Default: False.
        supervised_fn: Counts the tokens of a sample that carry loss; not the first label of a causal model's sample. Default:
            counts labels other than -100.
        causal_shift: Whether the model shifts its labels by one token, so that the first does not count. Default: True, unless
            an integration finds that the model does not.
    """

    scaling: Literal["exact", "samples", "none"] = "exact"
    reduction: Literal["mean", "sum"] = "mean"
    accumulation_steps: int = 1
    is_divided_by_trainer: bool = False
    supervised_fn: Callable[[Never], int] | None = None
    causal_shift: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Faults:
    """What to do about samples, processes and ranks that fail.

    Args:
        on_bad_sample: If a sample cannot be read or measured, every rank will ``"fail"`` (default), or the sample goes to
            ``"quarantine"``.
        max_bad_samples: How many samples one rank may set aside in an epoch: a number, or a share of its samples (below 1). Any
            share above 0 allows at least ten. Default: 0.01.
        timeout_s: A rank or a loader process without a sign of life for this many seconds is lost. After half that time the
            logger ``odb_ref`` reports what a slow job is waiting for, and repeats it. At least 1. Default: 60.
    """

    on_bad_sample: Literal["fail", "quarantine"] = "fail"
    max_bad_samples: float = 0.01
    timeout_s: float = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Protocol:
    """How ranks agree, and how an epoch ends.

    Args:
        policy: The target rule: ``"odb"`` (default), ``"paper"``, or a rule object of your own.
        max_age_rounds: Rounds that a sample may be put off. Default: 4.
        ramp_rounds: How many of the first windows are smaller, so that the first step comes early. Few of their batches are
            full, and their other samples move on to larger windows. Default: 3, or 1 if the epoch is known to be shorter than
            two windows.
        mode: ``"join"`` reads each sample (default). With ``"quota"`` all ranks stop together, at ``quota`` or when one runs
            dry.
        quota: Number of samples over all ranks after which an epoch ends. Default: none.
        on_idle: What a rank with no samples left does in a step: ``"replay"`` a small batch with weight 0 (default), or
            yield None as the batch (``"none"``).
        idle_sample: The sample to replay on a rank that never gets one. Default: none.
        transport: ``"reduce"`` (default) or ``"gather"``, the paper's exchange.
        process_group: The ranks, if there is no ``mesh``. Default: all.
        is_apart: Promises that no rank outside ``process_group`` is a model-parallel peer of one inside. Default: False, so a
            group that leaves out ranks of the job is refused.
        mesh_dims: The dimensions of ``mesh`` along which ranks lie. Default: those named dp, dp_replicate, dp_shard or batch.
        name: Identifies this loader, the same on all of its ranks, if one line of the script makes several loaders (R18).
            Default: the line that makes it, and what it reads.
    """

    policy: Literal["odb", "paper"] | TargetRule = "odb"
    max_age_rounds: int = MAX_AGE_ROUNDS
    ramp_rounds: int | None = None
    mode: Literal["join", "quota"] = "join"
    quota: int | None = None
    on_idle: Literal["replay", "none"] = "replay"
    idle_sample: object = None
    transport: Literal["reduce", "gather"] = "reduce"
    process_group: dist.ProcessGroup | None = None
    is_apart: bool = False
    mesh_dims: str | Sequence[str] | None = None
    name: str | None = None


class SharedArguments(TypedDict, total=False):
    """Arguments that `ODBDataLoader` and everything that makes one share. `ODBDataLoader` documents them."""

    layout: LayoutName
    collate_fn: Callable[[Never], object] | None
    shuffle: bool
    sampler: Iterable[object] | None
    shard: ShardName
    seed: int
    generator: torch.Generator | None
    drop_last: bool
    num_workers: int
    prefetch_factor: int | None
    persistent_workers: bool | None
    multiprocessing_context: object
    worker_init_fn: Callable[[int], None] | None
    pin_memory: bool
    timeout: float
    mesh: DeviceMesh | None
    batching: Batching
    loss: Loss
    faults: Faults
    protocol: Protocol
    trace: str | Path | None


class LoaderArguments(SharedArguments, total=False):
    """All arguments of `ODBDataLoader` except ``dataset`` and ``token_budget``."""

    update_samples: int | None


Group: TypeAlias = Batching | Loss | Faults | Protocol

GROUPS: Final[Mapping[str, type[Group]]] = {"batching": Batching, "loss": Loss, "faults": Faults, "protocol": Protocol}
GROUP_OF: Final[Mapping[str, str]] = {field.name: name for name, kind in GROUPS.items() for field in fields(kind)}
"""Maps each setting to the argument that holds it."""

RENAMED: Final[Mapping[str, str]] = {
    "device_mesh": "mesh",
    "loss_scaling": "scaling",
    "loss_reduction": "reduction",
    "trainer_divides_loss": "is_divided_by_trainer",
    "loader_timeout_s": "timeout_s",
    "log_wait_s": "timeout_s",
}
"""Arguments renamed since earlier versions. Settings in `GROUP_OF` used to be arguments of their own."""


FORMED: Final = "batches are formed under token_budget=, and update_samples= sets how many samples an update holds"


def check_groups(**given: object) -> None:
    """Checks that each group is an instance of its class. Raises: UsageError."""
    for name, group in given.items():
        if not isinstance(group, GROUPS[name]):
            raise UsageError(f"{name} must be {GROUPS[name].__name__}(...), got {group!r}")


def describe_new_spelling(name: str) -> str | None:
    """Returns how to pass an argument of an earlier version today, or None if there was no such argument."""
    new = RENAMED.get(name, name)
    if (group := GROUP_OF.get(new)) is not None:
        return f"{group}={GROUPS[group].__name__}({new}=...)"
    return f"{new}=..." if name in RENAMED else None


def check_spelling(options: Iterable[str]) -> None:
    """Refuses arguments spelt as in earlier versions, and a DataLoader's arguments for batches of a fixed size.

    Raises: UsageError that names today's spelling.
    """
    for name in options:
        if name in ("batch_size", "batch_sampler"):
            raise UsageError(f"{name}=...: {FORMED}")
        if (new := describe_new_spelling(name)) is not None:
            raise UsageError(f"{name}=... is now {new}")


def refuse_old_spelling(init: Callable[P, None]) -> Callable[P, None]:
    """Wraps a constructor so that it refuses arguments of earlier versions and names today's spelling.

    Raises: UsageError.
    """

    @wraps(init)
    def check(*args: P.args, **options: P.kwargs) -> None:
        check_spelling(options)
        init(*args, **options)

    return check


def arrange(options: Mapping[str, object]) -> dict[str, object]:
    """Returns arguments of `ODBDataLoader`, after moving each setting passed by its own name into its group.

    For integrations, which handle settings one by one.
    """
    found = {name: value for name, value in options.items() if name not in GROUP_OF}
    for name, kind in GROUPS.items():
        if known := {key: value for key, value in options.items() if GROUP_OF.get(key) == name}:
            found[name] = replace(found.get(name) or kind(), **known)  # type: ignore[type-var]
    return found


def spread(options: Mapping[str, object]) -> dict[str, object]:
    """Undoes `arrange`: returns arguments of `ODBDataLoader` with non-default settings by their own names."""
    found = {name: value for name, value in options.items() if name not in GROUPS}
    for name, kind in GROUPS.items():
        group = options.get(name, kind())
        check_groups(**{name: group})
        for field in fields(kind):
            value: object = getattr(group, field.name)
            if value is not field.default and value != field.default:
                found[field.name] = value
    return found
