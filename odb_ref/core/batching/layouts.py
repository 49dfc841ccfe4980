"""Layouts: how the samples of a group share a batch, and so how many tokens a group has and what it costs. Spec: R2.4.

A layout is a parameter, like the target rule: it forms groups, counts their tokens, and decides where to halve a group.
The properties require one thing of it: a group of two or more samples fits the budget and every limit, and so does each part
of it.
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
    """How samples share a batch. Its name enters the fingerprint, so ranks with different layouts refuse to start."""

    PADDED = "padded"
    """One row for each sample, each padded to the longest. Spec: R2.1."""
    PACKED = "packed"
    """One row that holds the samples end to end. Spec: R2.5."""

    def compute_groups(
        self,
        samples: Iterable[Sample],
        budget_tokens: int,
        limits: tuple[int, ...] = (),
        most_padding: int | None = None,
    ) -> tuple[Group, ...]:
        """Returns the samples in groups. A group of two or more fits the budget and all limits. Preserves: BUDGET, CONSERVE."""
        match self:
            case Layout.PADDED:
                return compute_groups(samples, budget_tokens, limits, most_padding)
            case Layout.PACKED:
                return compute_rows(samples, budget_tokens, limits)

    def count_tokens(self, size: int, longest: int, total: int) -> int:
        """Returns the tokens of a batch of ``size`` samples, the longest of which has ``longest`` tokens, and all ``total``."""
        match self:
            case Layout.PADDED:
                return size * longest
            case Layout.PACKED:
                return total

    def compute_tokens(self, group: Group) -> int:
        """Returns the tokens of the collated batch: rows times longest, or the sum of the lengths; 0 for an idle step."""
        return compute_real_tokens(group) if self is _PACKED else compute_padded_tokens(group)

    def compute_cost(self, group: Group, cost: Cost) -> int:
        """Returns the cost of the collated batch: rows times the cost of the longest, or the sum of the samples' costs; 0 for
        an idle step. Spec: R2.7.
        """
        if (
            cost is TOKENS or cost == TOKENS or not group
        ):  # usually decided by the first test, which costs almost nothing
            return self.compute_tokens(group)
        match self:
            case Layout.PADDED:
                return len(group) * cost.of_tokens(max(sample.length for sample in group))
            case Layout.PACKED:
                return sum([cost.of_tokens(sample.length) for sample in group])

    def find_middle(self, group: Group, cost: Cost = TOKENS, sizes: Sizes = Sizes.ANY) -> int:
        """Returns how many samples belong to the first half of a group of two or more. Spec: R4.2.

        The first half of a padded group is half of its samples, or somewhat more if friendly sizes require it (R2.8). These
        are the longer ones, so the others need less padding. For a packed group it is the fewest first samples that hold half
        of the cost, leaving at least one sample.
        """
        match self:
            case Layout.PADDED:
                return sizes.find_middle(len(group))
            case Layout.PACKED:
                half = (self.compute_cost(group, cost) + 1) // 2
                sums = accumulate(cost.of_tokens(sample.length) for sample in group[:-2])
                return next((size for size, held in enumerate(sums, 1) if held >= half), len(group) - 1)

    def compute_shared_window(self, size: int, left: int) -> int:
        """Returns the size of a window with shared shards. ``size`` is its usual size, and ``left`` the samples left per rank.

        Smaller windows at the end divide the last samples by what the ranks turn out to hold. Half a window still fills rows
        equally well. Padded groups need a whole one, which has more samples of the same length. Spec: R14.2.
        """
        match self:
            case Layout.PADDED:
                return size
            case Layout.PACKED:
                return min(size, max(left, (size + 1) // 2))


_PACKED: Final = Layout.PACKED
"""Looked up once, because the lookup is a good part of the time of `Layout.compute_tokens`, which runs often for each group."""
