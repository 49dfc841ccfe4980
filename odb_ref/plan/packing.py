"""Packing: divides units into few micro-batches of the packed layout, or into a given number of equally costly ones.

The tokens of a packed micro-batch are the sum over its units. Finding the fewest under a budget is bin packing, which is
NP-hard; `pack` uses best fit, the longest first. `spread` starts with a given number of micro-batches and gives each unit, the
longest first, to the cheapest one with room. If the budget leaves a little room, one pass makes them practically even.

Spec: R13.4, R13.5.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Sequence
from typing import Final, TypeAlias

from odb_ref.plan.units import Units

Batch: TypeAlias = list[int]
"""The numbers of the units of a micro-batch."""

TRIED: Final = 32_768
"""The most units for which a second order is tried, because the time of packing with limits grows faster than their number."""

Bound: TypeAlias = "tuple[Sequence[int], int]"
"""How much each unit uses of a resource, and how much of it a micro-batch may use."""


def sort_longest_first(units: Units, numbers: Sequence[int]) -> list[int]:
    """Returns the numbers by falling tokens, then falling cost, then number."""
    tokens, costs = units.tokens, units.costs
    if costs == tokens:
        return sorted(numbers, key=tokens.__getitem__, reverse=True)
    return sorted(sorted(numbers, key=costs.__getitem__, reverse=True), key=tokens.__getitem__, reverse=True)


def sort_neediest_first(units: Units, numbers: Sequence[int], budget: int, bounds: Sequence[Bound]) -> list[int]:
    """Returns the numbers by the largest share of any bound that a unit takes, falling."""
    columns = [(units.tokens, budget), *bounds]
    shares = {unit: max([column[unit] / bound for column, bound in columns]) for unit in numbers}
    return sorted(numbers, key=shares.__getitem__, reverse=True)


class _Uses:
    """How much the micro-batches use of each bound beside the tokens."""

    def __init__(self, numbers: Sequence[int], bounds: Sequence[Bound]) -> None:
        self._bounds = bounds
        self._used: dict[int, list[int]] = {}
        self._nothing = [0] * len(bounds)
        self._least = [min((column[unit] for unit in numbers), default=0) for column, _ in bounds]

    def has_room(self, batch: int, unit: int) -> bool:
        """Returns True when the micro-batch stays within all bounds with the unit added."""
        used = self._get(batch)
        return all(mine + column[unit] <= bound for mine, (column, bound) in zip(used, self._bounds, strict=True))

    def add(self, batch: int, unit: int) -> bool:
        """Adds the unit. Returns True while there may be room for another."""
        used = [mine + column[unit] for mine, (column, _) in zip(self._get(batch), self._bounds, strict=True)]
        self._used[batch] = used
        return all(
            mine + least <= bound for mine, least, (_, bound) in zip(used, self._least, self._bounds, strict=True)
        )

    def _get(self, batch: int) -> list[int]:
        return self._used.get(batch, self._nothing)


def pack_either_way(units: Units, numbers: Sequence[int], budget: int, bounds: Sequence[Bound]) -> list[Batch]:
    """Returns the fewer micro-batches of two ways to `pack`: by falling tokens and, if there are limits, also by falling share
    of what is bounded.
    """
    found = pack(units, sort_longest_first(units, numbers), budget, bounds)
    if bounds and len(numbers) <= TRIED:
        other = pack(units, sort_neediest_first(units, numbers, budget, bounds), budget, bounds)
        found = min(found, other, key=len)
    return found


def pack(units: Units, numbers: Sequence[int], budget: int, bounds: Sequence[Bound] = ()) -> list[Batch]:
    """Returns micro-batches of at most ``budget`` tokens within all ``bounds``. Each unit in turn goes where it leaves least
    room, or begins a new micro-batch. No unit may exceed a bound by itself.
    """
    batches: list[Batch] = []
    rooms: list[int] = []  # the distinct amounts of room left, ascending
    by_room: dict[int, Batch] = {}  # the micro-batches with each amount of room
    uses = _Uses(numbers, bounds)
    tokens = units.tokens
    for unit in numbers:
        size = tokens[unit]
        place = bisect_left(rooms, size)
        chosen = None
        while chosen is None and place < len(rooms):
            among = by_room[rooms[place]]
            chosen = (
                next((at for at in range(len(among) - 1, -1, -1) if uses.has_room(among[at], unit)), None)
                if bounds
                else -1
            )
            place += chosen is None
        if chosen is None:
            batch, room = len(batches), budget
            batches.append([])
        else:
            batch, room = by_room[rooms[place]].pop(chosen), rooms[place]
            if not by_room[room]:
                del by_room[room], rooms[place]
        batches[batch].append(unit)
        if bounds and not uses.add(batch, unit):
            continue
        room -= size
        if room in by_room:
            by_room[room].append(batch)
        else:
            by_room[room] = [batch]
            insort(rooms, room)
    return batches


def spread(
    units: Units,
    numbers: Sequence[int],
    count: int,
    budget: int,
    bounds: Sequence[Bound] = (),
    *,
    starts: Sequence[int] = (),
    costs: Sequence[int] | None = None,
) -> list[Batch] | None:
    """Returns ``count`` micro-batches of at most ``budget`` tokens within all ``bounds``, or None if a unit finds no room.

    Units come by falling tokens, and each goes to the cheapest micro-batch, by ``costs``. ``starts`` holds the costs of the
    micro-batches before they hold anything. Those without room for a unit wait, the roomiest first, until a shorter one comes.
    """
    unit_costs = units.costs if costs is None else costs
    loads = [*starts] or [0] * count
    active = [(load, batch) for batch, load in enumerate(loads)]  # by cost
    heapq.heapify(active)
    waiting: list[tuple[int, int]] = []  # by the room left, the most first
    batches: list[Batch] = [[] for _ in range(count)]
    rooms = [budget] * count
    uses = _Uses(numbers, bounds)
    tokens = units.tokens
    for unit in sort_longest_first(units, numbers):
        size = tokens[unit]
        while waiting and -waiting[0][0] >= size:
            batch = heapq.heappop(waiting)[1]
            heapq.heappush(active, (loads[batch], batch))
        passed: Batch = []  # lacks room in another bound than tokens, of which the next unit may need less
        while active:
            batch = active[0][1]
            if rooms[batch] < size:
                heapq.heappop(active)
                heapq.heappush(waiting, (-rooms[batch], batch))
            elif bounds and not uses.has_room(batch, unit):
                passed.append(heapq.heappop(active)[1])
            else:
                break
        if not active:
            return None
        batches[batch].append(unit)
        rooms[batch] -= size
        loads[batch] += unit_costs[unit]
        if bounds and not uses.add(batch, unit):
            heapq.heappop(active)
        else:
            heapq.heapreplace(active, (loads[batch], batch))
        for other in passed:
            heapq.heappush(active, (loads[other], other))
    return batches


def list_starts(costs: Sequence[int], count: int, ranks: int) -> list[int]:
    """Returns a starting cost for each of ``count`` micro-batches, so that those of each step end up costing the same.

    If one unit costs more than the mean of a step, its step cannot cost less. So the other ranks may do as much work in that
    step, and less in later ones. Spec: R13.5.
    """
    falling = sorted(costs, reverse=True)[::ranks]
    left, steps = sum(costs), count // ranks
    levels: list[int] = []
    while len(levels) < min(steps, len(falling)) and (steps - len(levels)) * ranks * falling[len(levels)] > left:
        levels.append(falling[len(levels)])
        left = max(0, left - ranks * levels[-1])
    levels += [-(-left // (ranks * max(1, steps - len(levels))))] * (steps - len(levels))
    return [levels[0] - level for level in levels for _ in range(ranks)]
