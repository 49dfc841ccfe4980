"""Micro-batches of samples whose lengths are known, over a process group: `odb_ref.plan` with torch's exchange. Spec: R13."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import SupportsIndex, Unpack

from torch import distributed

from odb_ref.core.errors import UsageError
from odb_ref.plan import Mean, Options, plan_rank
from odb_ref.plan.units import Indices, Key
from odb_ref.torch.gathering import gather_integers


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """One micro-batch of this rank."""

    indices: Indices
    """Which of this rank's samples it holds. An idle one holds the shortest, to be run again with weight 0, so that this rank
    takes part in every collective; none, where the rank has no sample, as only ``short="empty"`` plans."""
    is_idle: bool
    loss_scale: float
    """Multiply its loss, the mean over its supervised tokens, by this before ``backward``: gradients averaged over ranks (DDP,
    FSDP) and added up over micro-batches are then those of the mean over all."""
    token_weights: tuple[float, ...]
    """For each sample: multiply the sum over its tokens' losses by this instead, where the tokens of a micro-batch do not weigh
    alike, as in every mean but ``"token-mean"``."""


def plan_micro_batches(
    lengths: Iterable[SupportsIndex],
    *,
    supervised: Iterable[SupportsIndex] | None = None,
    together: Iterable[Key] | None = None,
    group_supervised: Mapping[Key, int] | None = None,
    uses: Mapping[str, Iterable[SupportsIndex]] | None = None,
    mean: Mean | str = Mean.TOKEN,
    group: distributed.ProcessGroup | None = None,
    **terms: Unpack[Options],
) -> tuple[MicroBatch, ...]:
    """Returns this rank's micro-batches of one optimizer step; every rank of the group, and all must call it, gets as many.

    ``lengths`` says how many tokens each of this rank's samples has, ``supervised`` how many of them carry loss (default: all).
    The weights are those of ``mean``. `odb_ref.plan_rank` explains the other arguments, `odb_ref.plan.PlanTerms` the terms. A
    process without a process group plans for itself.

    Raises: UsageError on every rank, with the same message, when one rank cannot plan, or two ranks' terms or means differ.
    Spec: R13.9, R13.11. Preserves: WEIGHT.
    """
    names = [str(one) for one in Mean]

    def exchange(message: list[int]) -> list[list[int]]:
        rows = gather_integers([*message, names.index(mean) if mean in names else -1], group=group)
        means = [repr(names[row[-1]]) if row[-1] >= 0 else "none that is known" for row in rows]
        for rank, found in enumerate(means):
            if found != means[0]:
                raise UsageError(f"mean differs: {means[0]} on rank 0, {found} on rank {rank}")
        return [row[:-1] for row in rows]

    found = plan_rank(
        lengths,
        supervised=supervised,
        together=together,
        group_supervised=group_supervised,
        uses=uses,
        exchange=exchange,
        **terms,
    )
    weights = found.weights(mean)
    ranks = found.totals.ranks
    spare = () if found.spare is None else (found.spare,)
    return tuple(
        MicroBatch(
            indices=indices or spare,
            is_idle=not indices,
            loss_scale=scale,
            token_weights=tuple(float(weight * ranks) for weight in own) if indices else (0.0,) * len(spare),
        )
        for indices, own, scale in zip(found.micro_batches, weights.samples, weights.scales, strict=True)
    )
