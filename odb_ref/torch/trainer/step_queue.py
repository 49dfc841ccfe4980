"""The batches that are made, by the number of their step."""

from __future__ import annotations


class StepQueue:
    """Holds batches until their steps are taken. Its owner holds a lock around each call."""

    def __init__(self, first_step: int) -> None:
        self._first_step = first_step
        self._batches: dict[int, object] = {}
        self._is_closed = False

    def add(self, number: int, batch: object) -> None:
        """Adds a step's batch, unless that step is skipped."""
        if not self._is_closed and number >= self._first_step:
            self._batches[number] = batch

    def pop(self, number: int) -> object:
        """Returns a step's batch, once; None where an idle step has none."""
        return self._batches.pop(number, None)

    def close(self) -> None:
        """Forgets all batches, and those still to come."""
        self._is_closed = True
        self._batches.clear()
