"""Plans micro-batches of samples with known lengths over a process group: `odb_ref.plan` with torch's exchange. Spec: R13."""

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
    """Which of this rank's samples it holds. An idle one holds the rank's spare samples, to run again with weight 0, so that
    this rank takes part in every collective. Empty if the rank has no sample, which only ``short="empty"`` allows."""
    is_idle: bool
    loss_scale: float
    """Multiply the micro-batch's loss, a mean over its supervised tokens, by this before ``backward``. Gradients averaged over
    ranks (DDP, FSDP) and summed over micro-batches are then those of the mean over all."""
    token_weights: tuple[float, ...]
    """For each sample, a factor for the sum of its tokens' losses. Use these instead of ``loss_scale`` if tokens of a
    micro-batch have different weights, as in every mean except ``"token-mean"``."""


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
    """Returns this rank's micro-batches of one optimizer step, the same number on every rank; all must call it.

    ``lengths`` are the numbers of tokens in this rank's samples, ``supervised`` how many of these carry loss (default: all).
    The weights are those of ``mean``. `odb_ref.plan_rank` explains the other arguments, `odb_ref.plan.PlanTerms` the terms.
    Without a process group, a process plans for itself.

    Raises: UsageError on every rank, with the same message, when one rank cannot plan, or two ranks' terms or means differ.
    Spec: R13.9, R13.11. Preserves: WEIGHT.
    """
    names = [str(one) for one in Mean]

    def exchange(message: list[int]) -> list[list[int]]:
        rows = gather_integers([*message, names.index(mean) if mean in names else -1], group=group)
        means = [repr(names[row[-1]]) if row[-1] >= 0 else "an unknown one" for row in rows]
        for rank, found in enumerate(means):
            if found != means[0]:
                raise UsageError(
                    f"mean must be the same on all ranks, got {means[0]} on rank 0 and {found} on rank {rank}"
                )
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
    return tuple(
        MicroBatch(
            indices=indices or found.spare,
            is_idle=not indices,
            loss_scale=scale,
            token_weights=tuple(float(weight * ranks) for weight in own) if indices else (0.0,) * len(found.spare),
        )
        for indices, own, scale in zip(found.micro_batches, weights.samples, weights.scales, strict=True)
    )
