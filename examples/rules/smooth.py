"""A target rule that is wrong in a way that no single agreement shows: it remembers.

    odb-ref verify --policy examples/rules/smooth.py:SmoothRule

refuses it, because a rule that keeps something is not arithmetic on the agreement alone. Each answer lies within the bounds,
but depends on the answers before. A job that resumes starts without that memory and forms other batches, and ranks that share
a process, as in a simulation, stop agreeing.
"""

from __future__ import annotations

from odb_ref.core.offer import NONE, Offer


class SmoothRule:
    """The default rule, limited to one step of change from its last answer."""

    name = "smooth"

    def __init__(self) -> None:
        self._last = 1

    def compute_target(self, agreement: Offer) -> int:
        """Returns the default rule's answer, or the nearest to it within one step of the last answer."""
        wanted = agreement.groups_max if agreement.groups_min == NONE else agreement.groups_min
        near = min(max(wanted, self._last - 1), self._last + 1, agreement.samples_max)
        self._last = max(near, agreement.due_max, 1)
        return self._last
