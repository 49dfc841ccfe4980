"""The batches that are ready, by the number of their step."""

from __future__ import annotations

from collections.abc import Sequence


class StepQueue:
    """Holds batches until their steps are taken. Its owner holds a lock around each call."""

    def __init__(self, first_step: int) -> None:
        self._first_step = first_step
        self._batches: dict[int, object] = {}
        self._is_closed = False

    def add(self, batches: Sequence[tuple[int, object]]) -> None:
        """Adds batches, each with the number of its step; forgets those of steps that are skipped."""
        if not self._is_closed:
            self._batches.update(item for item in batches if item[0] >= self._first_step)

    def pop(self, number: int) -> object:
        """Returns a step's batch, once; None where an idle step has none."""
        return self._batches.pop(number, None)

    def close(self) -> None:
        """Forgets all batches, and those still to come."""
        self._is_closed = True
        self._batches.clear()
