"""Division of units into micro-batches: the fewest that are found, or a given number that cost about the same.

Spec: R13.4, R13.5, R13.6. Preserves: PLAN.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from odb_ref.core.batching.layouts import Layout
from odb_ref.plan.packing import Batch, Bound, list_starts, pack_either_way, spread
from odb_ref.plan.padding import PaddedRuns
from odb_ref.plan.settling import EXCHANGED, FAR, Settling
from odb_ref.plan.terms import BatchOrder, Oversize, PlanTerms
from odb_ref.plan.units import Units, is_oversize


@dataclass(frozen=True, slots=True, kw_only=True)
class Division:
    """The units of one rank, or of all, and the fewest micro-batches found for them, not counting empty ones."""

    units: Units
    terms: PlanTerms
    alone: tuple[int, ...]
    """The units that exceed the budget or a limit."""
    others: Sequence[int]
    fewest: tuple[Batch, ...]
    """The fewest micro-batches found for ``others``."""
    least: int
    """A lower bound on the micro-batches of any division."""

    @property
    def need(self) -> int:
        """The least number of micro-batches that `divide` can make."""
        return len(self.alone) + len(self.fewest)

    def divide(self, count: int, ranks: int = 1) -> list[Batch]:
        """Returns ``count`` micro-batches (at least `need`), the costliest first. None is empty while there are units left.

        With several ``ranks``, that number of consecutive micro-batches will form one step. Spec: R13.5, R13.6.
        """
        left = count - len(self.alone)
        bounds = list_bounds(self.units, self.terms)
        if self.terms.layout is Layout.PADDED:
            batches = PaddedRuns(self.units, self.others, self.terms.budget, bounds).divide(left)
        else:
            batches = self._divide_packed(left, bounds, ranks)
        batches += [[unit] for unit in self.alone]
        batches.sort(key=lambda batch: (-compute_cost(self.units, batch, self.terms.layout), min(batch, default=0)))
        return batches + [[] for _ in range(count - len(batches))]

    def _divide_packed(self, count: int, bounds: Sequence[Bound], ranks: int) -> list[Batch]:
        units, others, budget = self.units, self.others, self.terms.budget
        starts: list[int] = []
        if ranks > 1 and not self.alone:
            starts = list_starts([units.costs[unit] for unit in others], count, ranks)
        found = spread(units, others, count, budget, bounds, starts=starts) if any(starts) else None
        if found is None or not all(found):
            starts = []
            found = spread(units, others, count, budget, bounds)
        if found is None and count > len(self.fewest):
            found = even_out(units, others, count, budget, bounds)
        if found is None:
            found = [[*batch] for batch in self.fewest] + [[] for _ in range(count - len(self.fewest))]
        Settling(units.costs, found, [(units.tokens, budget), *bounds], starts).run()
        return found


def make_division(units: Units, terms: PlanTerms, ranks: int = 1) -> Division:
    """Returns the division of units that ``ranks`` share. Fewer micro-batches are sought only if they save a step.

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
        fewest = _find_fewest(units, others, terms, (least, len(alone), ranks))
    return Division(
        units=units,
        terms=terms,
        alone=tuple(alone),
        others=others,
        fewest=tuple(filter(None, fewest)),
        least=least + len(alone),
    )


def _find_fewest(units: Units, numbers: Sequence[int], terms: PlanTerms, how_many: tuple[int, int, int]) -> list[Batch]:
    """Returns the fewest micro-batches found. ``how_many`` holds the least possible number, the number of units that travel
    alone, and the ranks. The search goes only as far as it lowers the number of micro-batches per rank.
    """
    least, alone, ranks = how_many
    bounds, whole = list_bounds(units, terms), terms.multiple_of * ranks

    def count(steps: int) -> int:
        return steps * whole - alone

    low = -(-max(least + alone, terms.at_least * ranks) // whole)
    fewest = pack_either_way(units, numbers, terms.budget, bounds)
    high, middle = max(low, -(-(len(fewest) + alone) // whole)), low
    while low < high:
        found = spread(units, numbers, count(middle), terms.budget, bounds)
        found = found or even_out(units, numbers, count(middle), terms.budget, bounds)
        if found is None:
            low = middle + 1
        else:
            fewest, high = found, middle
        middle = (low + high) // 2
    return fewest


def even_out(
    units: Units, numbers: Sequence[int], count: int, budget: int, bounds: Sequence[Bound]
) -> list[Batch] | None:
    """Returns ``count`` micro-batches that settling by tokens has brought within the budget. Returns None if that fails, if
    there is a limit, or if there are too many units for exchanges. Spec: R13.4.
    """
    if bounds or len(numbers) > EXCHANGED:
        return None
    found = spread(units, numbers, count, sum_up(units.tokens, numbers), (), costs=units.tokens)
    return found if found is not None and Settling(units.tokens, found, near=FAR).run(budget) else None


def list_bounds(units: Units, terms: PlanTerms) -> list[Bound]:
    """Returns the bounds of a micro-batch beside its tokens."""
    return [(column, limit) for column, (_, limit) in zip(units.uses, terms.limits, strict=True)]


def sum_up(column: Sequence[int], batch: Sequence[int]) -> int:
    """Returns the sum of a column over the units of a micro-batch."""
    return sum(map(column.__getitem__, batch))


def compute_cost(units: Units, batch: Batch, layout: Layout) -> int:
    """Returns the cost of a micro-batch: the sum over its units, or if padded its rows times the cost of its longest sample.

    Spec: R13.2.
    """
    if layout is Layout.PACKED or not batch:
        return sum_up(units.costs, batch)
    longest = max(batch, key=lambda unit: units.longest[unit])
    rows = sum([len(units.members[unit]) for unit in batch])
    return rows * (units.costs[longest] // len(units.members[longest]))


def _compute_least(units: Units, numbers: Sequence[int], budget: int, bounds: Sequence[Bound]) -> int:
    """Returns a lower bound on the micro-batches of any division. Spec: R13.10."""
    columns = [(units.tokens, budget), *bounds]
    shares = [-(-sum([column[unit] for unit in numbers]) // bound) for column, bound in columns]
    halves = [sum([2 * column[unit] > bound for unit in numbers]) for column, bound in columns]
    return max([*shares, *halves])


def arrange(batches: list[Batch], order: BatchOrder) -> list[Batch]:
    """Returns the micro-batches, which come by falling cost, in the order they are run. Spec: R13.8."""
    match order:
        case BatchOrder.COSTLIEST_FIRST:
            return batches
        case BatchOrder.SMALLEST_AT_ENDS:
            return batches[::2][::-1] + batches[1::2]
