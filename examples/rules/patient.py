"""A target rule of one's own that is more patient: every reading rank keeps back a group more than by the default rule.

    odb-ref verify --policy examples/rules/patient.py:PatientRule

finds nothing against it. On most traces it fills batches better, on some with packed rows worse: docs/explanation/figures.md.

The last group of a window is only as full as what is left of the window makes it. The rank with the fewest groups emits it
under the default rule; here it too is carried, into a window that fills it. It costs more rounds, and so more exchanges.
"""

from __future__ import annotations

from dataclasses import dataclass

from odb_ref.core.offer import NONE, Offer


@dataclass(frozen=True, slots=True)
class PatientRule:
    """One step fewer than the default rule has while a rank reads, so that not even the fewest groups are all emitted."""

    name: str = "patient"

    def compute_target(self, agreement: Offer) -> int:
        """The fewest groups of any reading rank but one; at least one, and no fewer than are due by age."""
        if agreement.groups_min == NONE:  # No rank reads any more: everything left is emitted.
            return agreement.groups_max
        return max(1, agreement.due_max, agreement.groups_min - 1)
