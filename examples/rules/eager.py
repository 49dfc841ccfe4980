"""A correct target rule of your own: half way between the fewest groups to emit and the most.

    odb-ref verify --policy examples/rules/eager.py:EagerRule

finds nothing against it.
"""

from __future__ import annotations

from dataclasses import dataclass

from odb_ref.core.offer import NONE, Offer


@dataclass(frozen=True, slots=True)
class EagerRule:
    """A rule between the default rule, which carries more, and the paper's, which splits more."""

    name: str = "eager"

    def compute_target(self, agreement: Offer) -> int:
        """Returns the middle, rounded up, but no fewer than are due by age."""
        if agreement.groups_min == NONE:  # No rank reads any more, so everything left is emitted.
            return agreement.groups_max
        return max(agreement.due_max, (agreement.groups_min + agreement.groups_max + 1) // 2)
