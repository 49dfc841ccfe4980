"""The results of planning: a rank's micro-batches, their weights and totals, and the quality of the plan.

Spec: R13.9, R13.10.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from fractions import Fraction
from typing import TypeVar

from odb_ref.core.errors import UsageError, choose
from odb_ref.plan.units import Indices, Key, Samples

Output = TypeVar("Output")


class Mean(StrEnum):
    """The mean that the loss of an optimizer step takes. Spec: R13.9."""

    TOKEN = "token-mean"
    """All supervised tokens."""
    SEQUENCE = "sequence-mean"
    """All sequences, each with the sum over its tokens."""
    SEQUENCE_TOKEN = "sequence-mean-token-mean"
    """All sequences, each with the mean over its tokens."""
    GROUP = "group-mean"
    """All groups (samples of one key), each with the mean over its tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Totals:
    """The totals of one optimizer step over all ranks."""

    ranks: int
    samples: int
    tokens: int
    """Tokens of the samples, without padding."""
    supervised: int
    """Tokens that carry loss."""
    sequences: int
    """Samples with a token that carries loss. The others have no mean."""
    groups: int
    """Keys with a token that carries loss; without keys the same as ``sequences``."""

    def to_row(self) -> list[int]:
        """Returns the totals as integers for the exchange."""
        return [self.ranks, self.samples, self.tokens, self.supervised, self.sequences, self.groups]

    @classmethod
    def from_row(cls, row: Sequence[int]) -> Totals:
        """Returns the totals in ``row``, which holds six integers."""
        ranks, samples, tokens, supervised, sequences, groups = row
        return cls(
            ranks=ranks, samples=samples, tokens=tokens, supervised=supervised, sequences=sequences, groups=groups
        )


def compute_totals(samples: Samples, ranks: int = 1) -> Totals:
    """Returns the totals of the samples, which belong to ``ranks`` ranks."""
    sums = samples.sum_by_key()
    return Totals(
        ranks=ranks,
        samples=len(samples.lengths),
        tokens=sum(samples.lengths),
        supervised=sum(samples.supervised),
        sequences=sum(map(bool, samples.supervised)),
        groups=sum(map(bool, sums.values())),
    )


def sum_totals(totals: Iterable[Totals]) -> Totals:
    """Returns the sum of the totals of several ranks."""
    return Totals.from_row([*map(sum, zip(*(item.to_row() for item in totals), strict=True))])


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """The weights that turn the sum over all ranks' micro-batches into the requested mean. Spec: R13.9.

    A trainer that averages over ranks (DDP, FSDP) needs these times the number of ranks: see ``scales``.
    """

    samples: tuple[tuple[Fraction, ...], ...]
    """For each micro-batch, by sample: the weight of the loss of each supervised token."""
    batches: tuple[Fraction, ...]
    """For each micro-batch: the sum of its supervised tokens' weights. If these are equal, as in ``"token-mean"``, it is the
    factor for the mean loss of the micro-batch."""
    scales: tuple[float, ...]
    """``batches`` times the number of ranks, as floats."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanReport:
    """The quality of a plan. Spec: R13.10."""

    count: int
    """The micro-batches of each rank."""
    least: int
    """A lower bound: no plan with these terms has fewer."""
    fill: float
    """The samples' tokens divided by the sum of all micro-batches' budgets."""
    wait: float | None
    """The cost of the steps, where each costs what its costliest rank does, divided by the mean cost of a rank. At 1 no rank
    waits. None from `plan_rank`, which does not know the costs of other ranks' micro-batches."""
    least_wait: float
    """A lower bound of ``wait`` for plans with this number of micro-batches."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlan:
    """The micro-batches of one rank."""

    micro_batches: tuple[Indices, ...]
    """For each micro-batch the indices of its samples, ascending. An idle one has none. Every rank has the same number."""
    totals: Totals
    spare: Indices
    """Samples that an idle micro-batch can run again with weight 0: the shortest with supervised tokens, or the shortest of all
    if none has any; or all of a key if ``within="micro-batch"``. Empty without samples, which only ``short="empty"`` allows."""
    report: PlanReport
    samples: Samples
    """The samples to which the indices in ``micro_batches`` refer."""
    group_supervised: Mapping[Key, int]
    """The supervised tokens of each key (see `Samples.get_keys`)."""

    @property
    def count(self) -> int:
        """The number of micro-batches of each rank."""
        return len(self.micro_batches)

    @property
    def is_idle(self) -> tuple[bool, ...]:
        """For each micro-batch, whether it has no sample."""
        return tuple(not batch for batch in self.micro_batches)

    def restore(self, outputs: Iterable[Sequence[Output]]) -> list[Output]:
        """Returns the outputs of the micro-batches in the order of the samples.

        ``outputs`` has a sequence for each micro-batch, such as the rows of a tensor. That of an idle micro-batch is left out,
        because it ran the spare sample again.

        Raises: UsageError when a micro-batch does not have one output for each of its samples.
        """
        given = [*outputs]
        if len(given) != self.count:
            raise UsageError(f"{self.count} micro-batches, but outputs of {len(given)}")
        found: dict[int, Output] = {}
        for place, (batch, own) in enumerate(zip(self.micro_batches, given, strict=True)):
            if batch and len(own) != len(batch):
                raise UsageError(f"micro-batch {place} has {len(batch)} samples, but {len(own)} outputs")
            found.update(zip(batch, own, strict=False))
        return [found[index] for index in sorted(found)]

    def weights(self, mean: Mean | str = Mean.TOKEN) -> Weights:
        """Returns the weights of the micro-batches for ``mean`` over the whole optimizer step.

        Raises: UsageError when there is no such mean. Spec: R13.9. Preserves: WEIGHT.
        """
        chosen = choose(Mean, mean, "mean")
        samples = tuple(tuple(self._weigh(index, chosen) for index in batch) for batch in self.micro_batches)
        batches = tuple(
            sum(
                (weight * self.samples.supervised[index] for index, weight in zip(batch, own, strict=True)), Fraction(0)
            )
            for batch, own in zip(self.micro_batches, samples, strict=True)
        )
        scales = tuple(float(weight * self.totals.ranks) for weight in batches)
        return Weights(samples=samples, batches=batches, scales=scales)

    def _weigh(self, index: int, mean: Mean) -> Fraction:
        own = self.samples.supervised[index]
        if not own:
            return Fraction(0)
        match mean:
            case Mean.TOKEN:
                return Fraction(1, self.totals.supervised)
            case Mean.SEQUENCE:
                return Fraction(1, self.totals.sequences)
            case Mean.SEQUENCE_TOKEN:
                return Fraction(1, self.totals.sequences * own)
            case Mean.GROUP:
                return Fraction(1, self.totals.groups * self.group_supervised[self.samples.get_keys()[index]])


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The micro-batches of all ranks."""

    ranks: tuple[RankPlan, ...]

    @property
    def report(self) -> PlanReport:
        """The quality of the plan."""
        return self.ranks[0].report

    @property
    def count(self) -> int:
        """The number of micro-batches of each rank."""
        return self.report.count
