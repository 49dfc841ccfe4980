"""The nouns of the protocol: modes, samples, groups, counts and steps. Spec: R1 (types)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import zip_longest
from operator import attrgetter
from typing import Final

from odb_ref.core.values import make_draft


class Mode(StrEnum):
    """When an epoch ends. Spec: R1.5."""

    JOIN = "join"
    """Every sample of every rank is emitted. Ranks that run dry stay idle until all are done."""
    QUOTA = "quota"
    """All ranks stop together, at the quota or when a rank would have to idle."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One processed sample of one rank's input.

    ``position`` is its place in the rank's sampler order (0, 1, 2, ...). It identifies the sample inside the rank, and makes
    every tie-break independent of timing. ``id`` is the caller's name for it, usually the data-set index; a sampler
    that draws with replacement may repeat it. ``length`` counts tokens (at least 1), and ``supervised`` the tokens that
    carry loss (label != -100). ``costs`` holds how much of each further resource the sample uses (image patches, for
    example), one amount for each of ``Config.limits``. Spec: R1.1.
    """

    id: int
    position: int
    length: int
    supervised: int
    costs: tuple[int, ...] = ()


make_sample = make_draft(Sample)
"""A faster constructor of `Sample`."""

_get_length: Final = attrgetter("length")
_get_costs: Final = attrgetter("costs")

Group = tuple[Sample, ...]
"""Samples that are collated into one batch."""


def compute_padded_tokens(group: Group) -> int:
    """Returns the tokens of the collated batch, padding included; 0 for an idle step."""
    longest = 0
    for sample in group:
        if sample.length > longest:  # noqa: PLR1730 (in half the time that ``max`` takes, for as few as these)
            longest = sample.length
    return len(group) * longest


def compute_real_tokens(group: Group) -> int:
    """Returns the tokens of the collated batch without padding."""
    return sum(map(_get_length, group))


@dataclass(frozen=True, slots=True)
class StepCounts:
    """What a step holds, on one rank or summed over all ranks: the weights for exact loss scaling, and the use of each further
    resource. From the sums a rank knows whether any rank uses a resource in the step. Spec: R4.5.
    """

    samples: int
    tokens: int
    supervised: int
    costs: tuple[int, ...] = ()

    def __add__(self, other: StepCounts) -> StepCounts:
        return StepCounts(
            self.samples + other.samples,
            self.tokens + other.tokens,
            self.supervised + other.supervised,
            tuple(map(sum, zip_longest(self.costs, other.costs, fillvalue=0))),
        )

    def to_row(self) -> list[int]:
        """Returns the counts as integers, the costs last, as they are exchanged and written."""
        return [self.samples, self.tokens, self.supervised, *self.costs]

    @classmethod
    def from_row(cls, row: Sequence[int]) -> StepCounts:
        """Returns the counts in ``row``, which holds at least three integers."""
        samples, tokens, supervised, *costs = row
        return cls(samples, tokens, supervised, tuple(costs))


make_counts = make_draft(StepCounts)
ZERO_COUNTS = StepCounts(0, 0, 0)
"""The neutral element of addition, whatever the number of further resources."""


def compute_counts(group: Group, resources: int = 0) -> StepCounts:
    """Returns the local counts of one step, with a cost for each of ``resources`` further resources; zeros for an idle step."""
    costs = _sum_costs(group, resources) if resources else ()
    tokens = supervised = 0
    for sample in group:
        tokens += sample.length
        supervised += sample.supervised
    return make_counts(len(group), tokens, supervised, costs)


def _sum_costs(group: Group, resources: int) -> tuple[int, ...]:
    return tuple(map(sum, zip(*map(_get_costs, group), strict=True))) if group else (0,) * resources


@dataclass(frozen=True, slots=True)
class Step:
    """One training step of one rank, which ``Collate`` prepares and ``Deliver`` hands out. Spec: R1.3.

    ``number`` counts the steps of the epoch from 0 and is the same on all ranks (ALIGN). ``round`` is the round that formed
    the step. ``group`` is empty for an idle step. ``global_counts`` sums the step over all ranks.
    """

    number: int
    round: int
    group: Group
    global_counts: StepCounts

    @property
    def is_idle(self) -> bool:
        """True when this rank has nothing to train on in this step."""
        return not self.group


make_step = make_draft(Step)
"""A faster constructor of `Step`."""
