"""A target rule of one's own that is more patient: while nothing is due, every reading rank keeps back a group more than by
the default rule.

    odb-ref verify --policy examples/rules/patient.py:PatientRule

finds nothing against it. It mostly fills padded batches a little better, and packed rows as often worse:
docs/explanation/figures.md.

By the default rule a reading rank keeps back what its window leaves over, if that is less than half a batch. Here every rank
keeps back one group more, however full, until something in it is due by age: then it must leave, and to keep back a fuller
group instead would not help. It costs more rounds, and so more exchanges.
"""

from __future__ import annotations

from dataclasses import dataclass

from odb_ref.core.offer import NONE, Offer


@dataclass(frozen=True, slots=True)
class PatientRule:
    """One step fewer than the default rule has while a rank reads and nothing is due."""

    name: str = "patient"

    def compute_target(self, agreement: Offer) -> int:
        """The fewest groups that a reading rank would emit, or while nothing is due one less; at least one, and what is due."""
        if agreement.groups_min == NONE:  # No rank reads any more: everything left is emitted.
            return agreement.groups_max
        kept_back = 0 if agreement.due_max else 1
        return max(1, agreement.due_max, agreement.groups_min - kept_back)
