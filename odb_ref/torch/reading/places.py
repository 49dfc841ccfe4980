"""Where the samples that a rank reads stand in the order that its keys are listed in. Spec: R11.1, R14."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

from odb_ref.core.resume import RoundStart


class Places:
    """The places of a rank's samples, which are numbered from 0 as it reads them, those set aside included.

    With a shard of its own the numbers are the places. With shared shards (``drawn=()``) what it draws are runs of both.
    """

    def __init__(self, drawn: Sequence[range] | None = None) -> None:
        self._numbers, self._firsts = ([0], [0]) if drawn is None else ([], [])
        """Where each run begins."""
        self._count = 0
        for places in drawn or ():
            self.draw(places)

    def resume(self, start: RoundStart, carried: Sequence[int]) -> None:
        """Begins where a round did: with the places of what was ``carried`` into it, and those drawn for it. Spec: R14.6."""
        self._numbers, self._firsts = list(start.carried), list(carried)
        self._count = start.read_samples
        self.draw(range(start.draw.first, start.draw.first + start.draw.count))

    def draw(self, places: range) -> None:
        """Appends what was drawn; again, it is what it was."""
        if len(places) and (not self._firsts or self._firsts[-1] < places.start):
            self._numbers.append(self._count)
            self._firsts.append(places.start)
            self._count += len(places)

    def get_place(self, number: int) -> int:
        """Returns where sample ``number`` stands, as far as is known."""
        run = bisect_right(self._numbers, number) - 1
        return self._firsts[run] + number - self._numbers[run]

    def get_number(self, place: int) -> int:
        """Returns which sample stands at ``place``."""
        run = bisect_right(self._firsts, place) - 1
        return self._numbers[run] + place - self._firsts[run]
