"""Dividing units into micro-batches: as few as are found, or a given number, none costlier than need be.

Spec: R13.4, R13.5, R13.6.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Final

from odb_ref.core.batching.layouts import Layout
from odb_ref.plan.packing import Batch, Bound, find_fewest, pack, sort_longest_first, spread
from odb_ref.plan.padding import PaddedRuns
from odb_ref.plan.terms import BatchOrder, Oversize, PlanTerms
from odb_ref.plan.units import Units, is_oversize

_SOUGHT: Final = 4096
"""Among how many units an even division is sought further: more are even by their number."""
_NEAR: Final = 64
"""Seeking ends where the costliest costs less than this part more than it must."""
_CHEAPEST: Final = 32
"""Among how many micro-batches one is sought that a unit may move to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Division:
    """The units of one rank, or of all, and the fewest micro-batches found for them: empty ones are none."""

    units: Units
    terms: PlanTerms
    alone: tuple[int, ...]
    """The units that exceed the budget, or a limit."""
    fewest: tuple[Batch, ...]
    """The fewest micro-batches found for the others."""
    least: int
    """How many micro-batches any division must have."""

    @property
    def need(self) -> int:
        """How many micro-batches there must be for `divide`."""
        return len(self.alone) + len(self.fewest)

    def divide(self, count: int) -> list[Batch]:
        """Returns ``count`` micro-batches, at least `need`, the costliest first; none is empty while units are left.

        Spec: R13.5, R13.6.
        """
        others = [unit for batch in self.fewest for unit in batch]
        left = count - len(self.alone)
        bounds = list_bounds(self.units, self.terms)
        if self.terms.layout is Layout.PADDED:
            batches = PaddedRuns(self.units, others, self.terms.budget, bounds).divide(left)
        else:
            batches = self._divide_packed(others, left, bounds)
        batches += [[unit] for unit in self.alone]
        batches.sort(key=lambda batch: (-compute_cost(self.units, batch, self.terms.layout), min(batch, default=0)))
        return batches + [[] for _ in range(count - len(batches))]

    def _divide_packed(self, others: Sequence[int], count: int, bounds: Sequence[Bound]) -> list[Batch]:
        units, budget = self.units, self.terms.budget
        found = spread(units, others, count, budget, bounds)
        if found is None:
            found = [[*batch] for batch in self.fewest] + [[] for _ in range(count - len(self.fewest))]
        settle(units, found, budget, bounds)
        found.sort(key=lambda batch: sum_up(units.costs, batch), reverse=True)
        apart = count_apart([sum_up(units.costs, batch) for batch in found], [len(batch) for batch in found])
        return found[:apart] + _seek(units, found[apart:], budget, bounds)


def make_division(units: Units, terms: PlanTerms, ranks: int = 1) -> Division:
    """Returns what ``ranks`` divide between them; no fewer micro-batches are sought than make a difference.

    Spec: R13.3, R13.4.
    """
    numbers = range(len(units))
    bounds = list_bounds(units, terms)
    alone: list[int] = []
    others: Sequence[int] = numbers
    if terms.oversize is Oversize.ALONE:
        alone = [unit for unit in numbers if is_oversize(units, unit, terms)]
        others = [unit for unit in numbers if not is_oversize(units, unit, terms)] if alone else numbers
    if terms.layout is Layout.PADDED:
        fewest = PaddedRuns(units, others, terms.budget, bounds).find_fewest()
        is_exact = not bounds and all(len(units.members[unit]) == 1 for unit in others)
        least = len(fewest) if is_exact else _compute_least(units, others, terms.budget, bounds)
    else:
        least = _compute_least(units, others, terms.budget, bounds)
        aim = terms.round_up(-(-(least + len(alone)) // ranks)) * ranks - len(alone)
        fewest = find_fewest(units, others, terms.budget, bounds, aim)
        if len(fewest) > aim:
            fewest = spread(units, others, aim, terms.budget, bounds) or fewest
    return Division(
        units=units, terms=terms, alone=tuple(alone), fewest=tuple(filter(None, fewest)), least=least + len(alone)
    )


def list_bounds(units: Units, terms: PlanTerms) -> list[Bound]:
    """Returns what bounds a micro-batch besides its tokens."""
    return [(column, limit) for column, (_, limit) in zip(units.uses, terms.limits, strict=True)]


def sum_up(column: Sequence[int], batch: Batch) -> int:
    """Returns what the units of a micro-batch have in sum."""
    return sum(map(column.__getitem__, batch))


def compute_cost(units: Units, batch: Batch, layout: Layout) -> int:
    """Returns what a micro-batch costs, 0 when empty: the sum of its units, or its rows times what the longest sample does.

    Spec: R13.2.
    """
    if layout is Layout.PACKED or not batch:
        return sum_up(units.costs, batch)
    longest = max(batch, key=lambda unit: units.longest[unit])
    rows = sum([len(units.members[unit]) for unit in batch])
    return rows * (units.costs[longest] // len(units.members[longest]))


def _compute_least(units: Units, numbers: Sequence[int], budget: int, bounds: Sequence[Bound]) -> int:
    """Returns how many micro-batches any division must have. Spec: R13.10."""
    columns = [(units.tokens, budget), *bounds]
    shares = [-(-sum([column[unit] for unit in numbers]) // bound) for column, bound in columns]
    halves = [sum([2 * column[unit] > bound for unit in numbers]) for column, bound in columns]
    return max([*shares, *halves])


def count_apart(costs: Sequence[int], sizes: Sequence[int]) -> int:
    """Returns how many micro-batches, by falling cost, are single units that cost at least what they and all cheaper ones do on
    average: no division can make those cheaper.

    Spec: R13.6.
    """
    left, rest = sum(costs), len(costs)
    for apart, (cost, size) in enumerate(zip(costs, sizes, strict=True)):
        if size != 1 or cost * rest < left:
            return apart
        left, rest = left - cost, rest - 1
    return len(costs)


def settle(units: Units, batches: list[Batch], budget: int, bounds: Sequence[Bound]) -> None:
    """Moves units until none can go where both micro-batches then cost less than the one it left did.

    So it is by tokens, with nothing limited: a unit looks among the cheapest only, and there the cheapest has room. Every
    move makes the costs, falling, less in the order of dictionaries, so there is an end. Spec: R13.6.
    """
    costs, tokens = units.costs, units.tokens
    loads = [sum_up(costs, batch) for batch in batches]
    columns = [(tokens, budget), *bounds]
    totals = [[sum_up(column, batch) for column, _ in columns] for batch in batches]
    cheapest = sorted((load, batch) for batch, load in enumerate(loads))
    pending = [(-load, batch) for batch, load in enumerate(loads)]
    heapq.heapify(pending)
    while pending:
        load, source = heapq.heappop(pending)
        if -load != loads[source] or len(batches[source]) < 2:
            continue
        unit = min(batches[source], key=lambda unit: (costs[unit], unit))
        for lower, target in islice(cheapest, _CHEAPEST):
            if lower + costs[unit] >= loads[source]:
                break
            if all(
                total + column[unit] <= bound for total, (column, bound) in zip(totals[target], columns, strict=True)
            ):
                batches[source].remove(unit)
                batches[target].append(unit)
                for batch, sign in ((source, -1), (target, 1)):
                    del cheapest[bisect_left(cheapest, (loads[batch], batch))]
                    loads[batch] += sign * costs[unit]
                    insort(cheapest, (loads[batch], batch))
                    totals[batch] = [
                        total + sign * column[unit] for total, (column, _) in zip(totals[batch], columns, strict=True)
                    ]
                    heapq.heappush(pending, (-loads[batch], batch))
                break


def _seek(units: Units, batches: list[Batch], budget: int, bounds: Sequence[Bound]) -> list[Batch]:
    """Returns as many micro-batches of the same units, whose costliest is as cheap as a bisection with `pack` finds.

    Spec: R13.5.
    """
    numbers = sort_longest_first(units, [unit for batch in batches for unit in batch])
    costs = units.costs
    if not numbers or len(numbers) > _SOUGHT:
        return batches
    low = max(*(costs[unit] for unit in numbers), -(-sum_up(costs, numbers) // len(batches)))
    high = max(sum_up(costs, batch) for batch in batches)
    while (high - low) * _NEAR > low:
        middle = (low + high) // 2
        if costs == units.tokens:
            found = pack(units, numbers, min(budget, middle), bounds)
        else:
            found = pack(units, numbers, budget, [*bounds, (costs, middle)])
        if len(found) > len(batches):
            low = middle + 1
            continue
        found += [[] for _ in range(len(batches) - len(found))]
        settle(units, found, budget, bounds)
        batches, high = found, min(middle, max(sum_up(costs, batch) for batch in found))
    return batches


def arrange(batches: list[Batch], order: BatchOrder) -> list[Batch]:
    """Returns the micro-batches, given by falling cost, in the order in which they are run. Spec: R13.8."""
    match order:
        case BatchOrder.COSTLIEST_FIRST:
            return batches
        case BatchOrder.SMALLEST_AT_ENDS:
            rising = batches[::-1]
            return rising[::2] + rising[1::2][::-1]
