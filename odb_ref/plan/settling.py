"""Settling: moves or exchanges units between micro-batches until the costliest get no cheaper. Spec: R13.5."""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Final

from odb_ref.plan.packing import Batch, Bound

NEAR: Final = 64
"""The number of cheapest micro-batches tried as the other side of a move or exchange."""
FAR: Final = 1_024
"""The same, when the result decides how many micro-batches are needed."""
EXCHANGED: Final = 32_768
"""With more units than this, none are exchanged: so many even out by their number."""


class Settling:
    """Micro-batches with their costs, and the moves that would improve them.

    ``starts`` are the costs of the micro-batches before they hold anything. ``batches`` is changed in place.
    """

    def __init__(
        self,
        costs: Sequence[int],
        batches: list[Batch],
        bounds: Sequence[Bound] = (),
        starts: Sequence[int] = (),
        near: int = NEAR,
    ) -> None:
        self._batches = batches
        self._near = near
        self._costs = costs
        self._bounds = bounds
        self._loads = [sum(map(costs.__getitem__, batch)) for batch in batches]
        if starts:
            self._loads = [start + load for start, load in zip(starts, self._loads, strict=True)]
        self._used = [[sum(map(column.__getitem__, batch)) for column, _ in bounds] for batch in batches]
        self._rising = sorted((load, batch) for batch, load in enumerate(self._loads))
        self._has_exchange = sum(map(len, batches)) <= EXCHANGED
        self._kinds: dict[int, tuple[list[int], Batch]] = {}

    def run(self, enough: int | None = None) -> bool:
        """Moves and exchanges units, from the costliest micro-batch first, until no micro-batch gets cheaper.

        With ``enough`` it stops as soon as all cost at most that, and returns True, or as soon as this proves out of reach, and
        returns False. After each move both micro-batches cost less than the costlier did before. So the sum of squares falls,
        and the search ends.
        """
        pending = [(-load, batch) for batch, load in enumerate(self._loads)]
        heapq.heapify(pending)
        while pending:
            load, source = heapq.heappop(pending)
            if -load != self._loads[source]:
                continue
            if enough is not None and -load <= enough:
                return True
            found = self._find(source)
            if found is None and enough is not None:
                return False
            if found is not None:
                for batch in self._exchange(source, *found):
                    heapq.heappush(pending, (-self._loads[batch], batch))
        return True

    def _find(self, source: int) -> tuple[int, int, int | None] | None:
        """Returns the target micro-batch, the unit that moves there, and the one that comes back, or None for a plain move.

        The costlier of the two micro-batches then costs as little as possible. The result is None if no move helps.
        """
        load, found = self._loads[source], None
        worst = load
        is_one = len(self._batches[source]) == 1
        costs, units = self._list_kinds(source)
        if not self._has_exchange:
            costs, units = ([], []) if is_one else (costs[:1], units[:1])
        least = 1 if self._has_exchange else sum(costs)  # the least cost that can move
        for lower, target in islice(self._rising, self._near):
            if worst <= max((load + lower + 1) // 2, lower + least):
                break
            if target == source:
                continue
            others, taken = self._list_kinds(target) if self._has_exchange else ([], [])
            for cost, unit in zip(costs, units, strict=True):
                for fall, place in _list_falls(cost, others, load - lower, is_one=is_one):
                    after = max(load - fall, lower + fall)
                    if after >= worst:
                        break
                    other = None if place is None else taken[place]
                    if self._has_room(source, target, unit, other):
                        worst, found = after, (target, unit, other)
                        break
        return found

    def _list_kinds(self, batch: int) -> tuple[list[int], Batch]:
        """Returns the distinct costs of a micro-batch's units, ascending, and the lowest-numbered unit of each."""
        if batch not in self._kinds:
            first: dict[int, int] = {}
            for unit in sorted(self._batches[batch], reverse=True):
                first[self._costs[unit]] = unit
            self._kinds[batch] = (sorted(first), [first[cost] for cost in sorted(first)])
        return self._kinds[batch]

    def _has_room(self, source: int, target: int, unit: int, other: int | None) -> bool:
        for place, (column, bound) in enumerate(self._bounds):
            more = column[unit] - (0 if other is None else column[other])
            if self._used[target][place] + more > bound or self._used[source][place] - more > bound:
                return False
        return True

    def _exchange(self, source: int, target: int, unit: int, other: int | None) -> tuple[int, int]:
        self._move(source, target, unit)
        if other is not None:
            self._move(target, source, other)
        return source, target

    def _move(self, source: int, target: int, unit: int) -> None:
        self._batches[source].remove(unit)
        self._batches[target].append(unit)
        for batch, sign in ((source, -1), (target, 1)):
            del self._rising[bisect_left(self._rising, (self._loads[batch], batch))]
            self._loads[batch] += sign * self._costs[unit]
            insort(self._rising, (self._loads[batch], batch))
            for place, (column, _) in enumerate(self._bounds):
                self._used[batch][place] += sign * column[unit]
            self._kinds.pop(batch, None)


def _list_falls(cost: int, others: Sequence[int], gap: int, *, is_one: bool) -> Iterator[tuple[int, int | None]]:
    """Yields by how much a micro-batch gets cheaper if it gives a unit of ``cost`` to one that costs ``gap`` less.

    In return it receives the unit at a place in ``others`` (costs, ascending), or nothing (None). The falls that bring the two
    costs nearest to each other come first, the greater of two equally near ones before the other.
    """
    right = bisect_left(others, cost - gap // 2)
    left = right - 1
    least = 0 if is_one else -1  # -1 is a plain move, which would leave a micro-batch of one unit empty
    while True:
        more = cost - (others[left] if left >= 0 else 0) if left >= least else gap
        less = cost - others[right] if right < len(others) else 0
        if more < gap and (less <= 0 or more + less <= gap):
            yield more, left if left >= 0 else None
            left -= 1
        elif less > 0:
            yield less, right
            right += 1
        else:
            return
