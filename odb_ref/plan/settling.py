"""Settling: units are moved between micro-batches, or exchanged, until the costliest ones cost no less for it. Spec: R13.5."""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Final

from odb_ref.plan.packing import Batch, Bound

NEAR: Final = 64
"""Among how many of the cheapest micro-batches a unit finds another."""
FAR: Final = 1_024
"""The same, where that decides how many micro-batches are needed."""
EXCHANGED: Final = 32_768
"""Among how many units any are exchanged: more are even by their number."""


class Settling:
    """Micro-batches, what each costs and holds, and what could be better.

    ``starts`` are costs that micro-batches have before they hold anything; the lists are changed in place.
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
        """Moves and exchanges units, of the costliest first, until none costs less for it; returns True when all cost
        ``enough`` or less, and then ends at once, as it does when that cannot be.

        Both micro-batches then cost less than the costlier did, so the sum of the squares falls, and there is an end.
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
        """Returns to which micro-batch which unit goes, and for which: so that the costlier of the two then costs least."""
        load, found = self._loads[source], None
        worst = load
        is_one = len(self._batches[source]) == 1
        costs, units = self._list_kinds(source)
        if not self._has_exchange:
            costs, units = ([], []) if is_one else (costs[:1], units[:1])
        least = 1 if self._has_exchange else sum(costs)  # of what may be given
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
        """Returns the costs that units of a micro-batch have, rising, and the first unit of each cost."""
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
    """Returns by how much less a micro-batch costs that gives a unit of ``cost`` to one that costs ``gap`` less, for one of
    the costs of ``others`` (by its place) or for none: those by which both come nearest to each other first, and of two as
    near the greater.
    """
    right = bisect_left(others, cost - gap // 2)
    left = right - 1
    least = 0 if is_one else -1  # for none is the cheapest: a single unit would leave nothing behind
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
