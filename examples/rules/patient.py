"""A target rule of one's own that is more patient: while nothing is due, every reading rank keeps back a group more than by
the default rule.

    odb-ref verify --policy examples/rules/patient.py:PatientRule

finds nothing against it. On most traces it fills batches better, on some with packed rows worse: docs/explanation/figures.md.

The last group of a window is only as full as what is left of the window makes it. The rank with the fewest groups emits it
under the default rule; here it too is carried, into a window that fills it, until something in it is due by age: then it must
leave, and to keep back a fuller group instead would not help. It costs more rounds, and so more exchanges.
"""

from __future__ import annotations

from dataclasses import dataclass

from odb_ref.core.offer import NONE, Offer


@dataclass(frozen=True, slots=True)
class PatientRule:
    """One step fewer than the default rule has while a rank reads and nothing is due: not even the fewest groups all leave."""

    name: str = "patient"

    def compute_target(self, agreement: Offer) -> int:
        """The fewest groups of any reading rank, or while nothing is due one less; at least one, and as many as are due."""
        if agreement.groups_min == NONE:  # No rank reads any more: everything left is emitted.
            return agreement.groups_max
        kept_back = 0 if agreement.due_max else 1
        return max(1, agreement.due_max, agreement.groups_min - kept_back)
