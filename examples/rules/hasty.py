"""A target rule that is subtly wrong: it leaves its bounds on a few agreements only.

    odb-ref verify --policy examples/rules/hasty.py:HastyRule
    odb-ref explore --policy examples/rules/hasty.py:HastyRule --shard-sizes 3,1 --lengths 9 --token-budget 9 --window 3

The first refutes it, and the second shows how two ranks come to that. The idea sounds reasonable: a rank that is about to
run dry will idle, so hurry while it still has samples. But if every group of the fullest rank is already a single sample, one
step more than groups is one step more than any rank has samples for: a step that is idle on every rank.
"""

from __future__ import annotations

from dataclasses import dataclass

from odb_ref.core.offer import NONE, Offer


@dataclass(frozen=True, slots=True)
class HastyRule:
    """The default rule, with one step more while some rank holds less than half of what another does."""

    name: str = "hasty"

    def compute_target(self, agreement: Offer) -> int:
        """Returns the fewest groups that a reading rank would emit, no fewer than are due, and one more in a hurry."""
        wanted = agreement.groups_max if agreement.groups_min == NONE else agreement.groups_min
        is_in_a_hurry = 0 < 2 * agreement.samples_min < agreement.samples_max
        return max(wanted + is_in_a_hurry, agreement.due_max)
