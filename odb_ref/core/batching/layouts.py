"""Layouts: how the samples of a group share a batch, and so what tokens a group has and what it costs. Spec: R2.4.

A layout is a parameter, as the target rule is: the machine asks it for groups, for their tokens, and where to halve one.
What the properties need of it: a group of two or more fits the budget and every limit, and so does each part of it.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum
from itertools import accumulate
from typing import Final

from odb_ref.core.batching.cost import TOKENS, Cost
from odb_ref.core.batching.grouping import compute_groups, compute_rows
from odb_ref.core.batching.sizes import Sizes
from odb_ref.core.types import Group, Sample, compute_padded_tokens, compute_real_tokens


class Layout(StrEnum):
    """How samples share a batch; its name enters the fingerprint, so ranks with different layouts refuse to start."""

    PADDED = "padded"
    """A row for each sample, all as long as the longest. Spec: R2.1."""
    PACKED = "packed"
    """One row, in which the samples are laid end to end. Spec: R2.5."""

    def compute_groups(
        self,
        samples: Iterable[Sample],
        budget_tokens: int,
        limits: tuple[int, ...] = (),
        most_padding: int | None = None,
    ) -> tuple[Group, ...]:
        """Returns the samples as groups; one of two or more fits the budget and every limit. Preserves: BUDGET, CONSERVE."""
        match self:
            case Layout.PADDED:
                return compute_groups(samples, budget_tokens, limits, most_padding)
            case Layout.PACKED:
                return compute_rows(samples, budget_tokens, limits)

    def count_tokens(self, size: int, longest: int, total: int) -> int:
        """Returns the tokens of a batch of ``size`` samples, the ``longest`` of so many tokens, all of them of ``total``."""
        match self:
            case Layout.PADDED:
                return size * longest
            case Layout.PACKED:
                return total

    def compute_tokens(self, group: Group) -> int:
        """Returns the tokens of the collated batch: rows times longest, or the sum of the lengths; 0 for an idle step."""
        return compute_real_tokens(group) if self is _PACKED else compute_padded_tokens(group)

    def compute_cost(self, group: Group, cost: Cost) -> int:
        """Returns what the collated batch costs: rows times what the longest does, or the sum over the samples; 0 for an idle
        step. Spec: R2.7.
        """
        if cost is TOKENS or cost == TOKENS or not group:  # mostly the first, which takes no time
            return self.compute_tokens(group)
        match self:
            case Layout.PADDED:
                return len(group) * cost.of_tokens(max(sample.length for sample in group))
            case Layout.PACKED:
                return sum([cost.of_tokens(sample.length) for sample in group])

    def find_middle(self, group: Group, cost: Cost = TOKENS, sizes: Sizes = Sizes.ANY) -> int:
        """Returns how many samples of a group of two or more its first half has. Spec: R4.2.

        Half of a padded group's samples, or a little more where that is friendly (R2.8): the longer ones, so that the shorter
        ones are padded less. For a packed group, the
        fewest first samples that hold half of the cost, but not all.
        """
        match self:
            case Layout.PADDED:
                return sizes.find_middle(len(group))
            case Layout.PACKED:
                half = (self.compute_cost(group, cost) + 1) // 2
                sums = accumulate(cost.of_tokens(sample.length) for sample in group[:-2])
                return next((size for size, held in enumerate(sums, 1) if held >= half), len(group) - 1)

    def compute_shared_window(self, size: int, left: int) -> int:
        """Returns the size of a window of shared shards, of ``size`` elsewhere, where ``left`` samples are left for each rank.

        Smaller windows at the end share out what is left by what the ranks turn out to hold. Rows are as full in half a
        window; padded groups need a whole one, in which more samples are of one length. Spec: R14.2.
        """
        match self:
            case Layout.PADDED:
                return size
            case Layout.PACKED:
                return min(size, max(left, (size + 1) // 2))


_PACKED: Final = Layout.PACKED
"""To look a member up takes a good part of what `Layout.compute_tokens` takes, which is asked for every group several times."""
