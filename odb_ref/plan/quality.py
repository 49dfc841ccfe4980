"""The quality of a plan, and its bounds: steps, fill, and how long ranks wait for each other. Spec: R13.10."""

from __future__ import annotations

from collections.abc import Sequence

from odb_ref.core.batching.layouts import Layout
from odb_ref.plan.outcome import PlanReport, Totals
from odb_ref.plan.terms import PlanTerms
from odb_ref.plan.units import Units


def make_report(
    terms: PlanTerms, totals: Totals, counts: tuple[int, int], waits: tuple[float | None, float]
) -> PlanReport:
    """Returns the report of a plan. ``counts`` and ``waits`` each hold the plan's own value and the lower bound."""
    count, least = counts
    wait, least_wait = waits
    fill = totals.tokens / (terms.budget * count * totals.ranks)
    return PlanReport(count=count, least=least, fill=fill, wait=wait, least_wait=least_wait)


def compute_wait(costs: Sequence[Sequence[int]]) -> float:
    """Returns the cost of the steps divided by the mean cost of a rank, or 1 if all costs are 0. ``costs`` holds the costs of
    each rank's micro-batches.
    """
    whole = sum(map(sum, costs))
    return len(costs) * sum(map(max, zip(*costs, strict=True))) / whole if whole else 1.0


def sum_costs(units: Units, terms: PlanTerms) -> int:
    """Returns the total cost of the units if packed. If padded it depends on the micro-batches, and the result is 0."""
    return sum(units.costs) if terms.layout is Layout.PACKED else 0


def compute_least_wait_of_ranks(costs: Sequence[int]) -> float:
    """Returns a lower bound of the wait if samples stay on their ranks, which have these costs: the greatest over the mean."""
    return len(costs) * max(costs) / sum(costs) if sum(costs) else 1.0


def compute_least_wait(units: Units, terms: PlanTerms, count: int, ranks: int) -> float:
    """Returns a lower bound of the wait of packed plans that deal the units out into ``count`` steps; 1 for other layouts.

    The step of the costliest unit costs at least as much as that unit. The other ranks may do as much work in that step, as far
    as the budget allows, and the rest is at best divided evenly.
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
    """Returns an upper bound of the cost of a micro-batch of these units: the costliest per token first, and the last one in
    part.
    """
    room, cost = budget, 0
    for unit in sorted(numbers, key=lambda unit: units.costs[unit] / units.tokens[unit], reverse=True):
        if units.tokens[unit] >= room:
            return cost + -(-units.costs[unit] * room // units.tokens[unit])
        room, cost = room - units.tokens[unit], cost + units.costs[unit]
    return cost
