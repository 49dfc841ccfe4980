"""How good a plan is, and could be: steps, padding, and how long ranks wait for each other. Spec: R13.10."""

from __future__ import annotations

from collections.abc import Sequence

from odb_ref.core.batching.layouts import Layout
from odb_ref.plan.outcome import PlanReport, Totals
from odb_ref.plan.terms import PlanTerms
from odb_ref.plan.units import Units


def make_report(
    terms: PlanTerms, totals: Totals, counts: tuple[int, int], waits: tuple[float | None, float]
) -> PlanReport:
    """Returns the report of a plan: its count and the least, its wait and the least."""
    count, least = counts
    wait, least_wait = waits
    fill = totals.tokens / (terms.budget * count * totals.ranks)
    return PlanReport(count=count, least=least, fill=fill, wait=wait, least_wait=least_wait)


def compute_wait(costs: Sequence[Sequence[int]]) -> float:
    """Returns what the steps cost over the mean rank's sum, of the costs of each rank's micro-batches; 1 where there are
    none.
    """
    whole = sum(map(sum, costs))
    return len(costs) * sum(map(max, zip(*costs, strict=True))) / whole if whole else 1.0


def sum_costs(units: Units, terms: PlanTerms) -> int:
    """Returns what the units of a rank cost together, in whatever packed micro-batches; padded it depends on these: 0."""
    return sum(units.costs) if terms.layout is Layout.PACKED else 0


def compute_least_wait_of_ranks(costs: Sequence[int]) -> float:
    """Returns a wait that no plan is below where ranks have samples of their own, of so much cost: the slowest over the
    mean.
    """
    return len(costs) * max(costs) / sum(costs) if sum(costs) else 1.0


def compute_least_wait(units: Units, terms: PlanTerms, count: int, ranks: int) -> float:
    """Returns a wait that no packed plan is below that deals units out into ``count`` steps; 1 where that is all we know.

    The costliest unit's step costs as much as it does; the other ranks may have as much to do in it, as far as the budget goes,
    and what is then left is at best even.
    """
    whole = sum_costs(units, terms)
    if not whole:
        return 1.0
    top = max(range(len(units)), key=units.costs.__getitem__)
    most = units.costs[top]
    filled = whole
    if count > 1:
        others = [unit for unit in range(len(units)) if unit != top]
        fullest = max([_fill(units, others, terms.budget), *(units.costs[unit] for unit in others)])
        filled = most + (ranks - 1) * min(most, fullest)
    return max(1.0, (ranks * most + max(0, whole - filled)) / whole)


def _fill(units: Units, numbers: Sequence[int], budget: int) -> int:
    """Returns what a micro-batch of these costs at most, or more: the costliest by the token first, the last of them in
    part.
    """
    room, cost = budget, 0
    for unit in sorted(numbers, key=lambda unit: units.costs[unit] / units.tokens[unit], reverse=True):
        if units.tokens[unit] >= room:
            return cost + -(-units.costs[unit] * room // units.tokens[unit])
        room, cost = room - units.tokens[unit], cost + units.costs[unit]
    return cost
