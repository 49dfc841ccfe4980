"""What comes back: the micro-batches of a rank, their weights and totals, and how good the plan is.

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
    """What the loss of an optimizer step is the mean of. Spec: R13.9."""

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
    """What all ranks have in one optimizer step."""

    ranks: int
    samples: int
    tokens: int
    """Tokens of the samples as they are, padding not counted."""
    supervised: int
    """Tokens that carry loss."""
    sequences: int
    """Samples with a token that carries loss: the others have no mean."""
    groups: int
    """Keys with a token that carries loss; without keys, `sequences`."""

    def to_row(self) -> list[int]:
        """Returns the totals as integers: how they travel."""
        return [self.ranks, self.samples, self.tokens, self.supervised, self.sequences, self.groups]

    @classmethod
    def from_row(cls, row: Sequence[int]) -> Totals:
        """Returns the totals of six integers."""
        ranks, samples, tokens, supervised, sequences, groups = row
        return cls(
            ranks=ranks, samples=samples, tokens=tokens, supervised=supervised, sequences=sequences, groups=groups
        )


def compute_totals(samples: Samples, ranks: int = 1) -> Totals:
    """Returns what the samples of so many ranks come to."""
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
    """Returns what all ranks have together."""
    return Totals.from_row([*map(sum, zip(*(item.to_row() for item in totals), strict=True))])


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """What makes the sum over all ranks' micro-batches the mean that was asked for. Spec: R13.9.

    A trainer that averages over ranks (DDP, FSDP) needs ``ranks`` times that: ``scales`` has it.
    """

    samples: tuple[tuple[Fraction, ...], ...]
    """For each micro-batch, by sample: what the loss of each of its supervised tokens weighs."""
    batches: tuple[Fraction, ...]
    """For each micro-batch: what all its supervised tokens weigh in sum. Where they weigh alike, as in ``"token-mean"``, it
    is the factor for their mean."""
    scales: tuple[float, ...]
    """``batches`` times the number of ranks, as floats."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanReport:
    """How good a plan is. Spec: R13.10."""

    count: int
    """Micro-batches of each rank."""
    least: int
    """No plan under these terms has fewer."""
    fill: float
    """The samples' tokens, over the budgets of all micro-batches."""
    wait: float | None
    """What the steps cost, each as much as its costliest rank, over the mean rank's sum: at 1 nobody waits. None of
    `plan_rank`, which does not know what the micro-batches of other ranks cost."""
    least_wait: float
    """No plan with so many micro-batches waits less."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlan:
    """The micro-batches of one rank."""

    micro_batches: tuple[Indices, ...]
    """The indices of each one's samples, rising; as many on every rank. An idle one has none."""
    totals: Totals
    spare: int | None
    """The shortest sample at hand that has supervised tokens, if any has, for an idle micro-batch to run again with weight 0;
    none, where there is no sample."""
    report: PlanReport
    samples: Samples
    """What ``micro_batches`` has indices of."""
    group_supervised: Mapping[Key, int]
    """How many tokens carry loss, by key: `Samples.get_keys`."""

    @property
    def count(self) -> int:
        """How many micro-batches each rank has."""
        return len(self.micro_batches)

    @property
    def is_idle(self) -> tuple[bool, ...]:
        """Which of the micro-batches have no sample."""
        return tuple(not batch for batch in self.micro_batches)

    def restore(self, outputs: Iterable[Sequence[Output]]) -> list[Output]:
        """Returns, in the order of its samples, what the micro-batches gave: a sequence from each, such as the rows of a
        tensor.

        What an idle one gave is left out: it ran the spare again.

        Raises: UsageError when one has not given an output for each of its samples.
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
        """Returns the weights of the micro-batches for this mean over the whole optimizer step.

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
        """How good it is."""
        return self.ranks[0].report

    @property
    def count(self) -> int:
        """How many micro-batches each rank has."""
        return self.report.count
