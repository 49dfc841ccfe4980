"""Padding: divides units into micro-batches of the padded layout, whose rows are all as long as the longest. Spec: R13.5.

The micro-batches are runs of the units sorted by length. A run within the bounds stays within them without some of its units.
So a sweep from the shortest uses the fewest runs, and bisecting the most that a run may cost makes the costliest as cheap as
possible. (Both are exact if units are single samples and there are no limits.)
"""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate, pairwise
from operator import itemgetter

from odb_ref.plan.packing import Batch, Bound
from odb_ref.plan.units import Units


class PaddedRuns:
    """Units ordered by their longest samples, with sums to measure any run of them."""

    def __init__(self, units: Units, numbers: Sequence[int], budget: int, bounds: Sequence[Bound]) -> None:
        longest = units.longest
        self.numbers = sorted(numbers, key=longest.__getitem__)
        self._budget = budget
        self._limits = [bound for _, bound in bounds]
        self._longest = [longest[unit] for unit in self.numbers]
        sizes = [len(units.members[unit]) for unit in self.numbers]
        self._rows = _sum_up(sizes)
        self._row_costs = [units.costs[unit] // size for unit, size in zip(self.numbers, sizes, strict=True)]
        self._used = [_sum_up([column[unit] for unit in self.numbers]) for column, _ in bounds]

    def find_fewest(self) -> list[Batch]:
        """Returns the micro-batches of a sweep bounded only by the budget and the limits."""
        return self._collect(self._sweep(len(self.numbers), None) or [])

    def divide(self, count: int) -> list[Batch]:
        """Returns ``count`` micro-batches, or one for each unit if there are fewer units. `find_fewest` must not need more than
        ``count``.

        The longest units are set apart as single ones while each costs at least as much as any micro-batch of the others. The
        costliest of the others is then made as cheap as possible. Halving the costliest makes the rest of ``count``.
        """
        whole = len(self.numbers)
        ends = self._sweep(whole, None) or []
        apart, beyond = 0, min(whole, count)
        while beyond - apart > 1:
            middle = (apart + beyond) // 2
            bound = self._compute_cost(whole - middle, whole - middle + 1)
            found = self._sweep(whole - middle, bound, count - middle)
            if found is None:
                beyond = middle
            else:
                apart, ends = middle, found
        ends = self._lower(ends, whole - apart, count - apart)
        return self._split([*ends, *range(whole - apart + 1, whole + 1)], count)

    def _lower(self, best: list[int], end: int, count: int) -> list[int]:
        """Returns the ends of at most ``count`` runs of the units before ``end``, with the costliest run as cheap as possible.
        ``best`` holds the ends of one such division.
        """
        high = max((self._compute_cost(*run) for run in pairwise([0, *best])), default=0)
        low = max((self._compute_cost(place, place + 1) for place in range(end)), default=0)
        while low < high:
            middle = (low + high) // 2
            ends = self._sweep(end, middle, count)
            if ends is None:
                low = middle + 1
            else:
                best, high = ends, middle
        return best

    def _split(self, ends: list[int], count: int) -> list[Batch]:
        """Returns the runs after halving the costliest one of two or more units until there are ``count``."""
        heap = [self._rank(*run) for run in pairwise([0, *ends])]
        heapq.heapify(heap)
        while heap and len(heap) < count and heap[0][0]:
            _, begin, end = heapq.heappop(heap)
            half = (self._rows[begin] + self._rows[end] + 1) // 2
            middle = min(max(bisect_left(self._rows, half, begin, end), begin + 1), end - 1)
            heapq.heappush(heap, self._rank(begin, middle))
            heapq.heappush(heap, self._rank(middle, end))
        return [self.numbers[begin:end] for _, begin, end in sorted(heap, key=itemgetter(1))]

    def _rank(self, begin: int, end: int) -> tuple[int, int, int]:
        return (-self._compute_cost(begin, end) if end - begin > 1 else 0, begin, end)

    def _collect(self, ends: list[int]) -> list[Batch]:
        return [self.numbers[begin:end] for begin, end in pairwise([0, *ends])]

    def _compute_cost(self, begin: int, end: int) -> int:
        """Returns the cost of a run: its rows times the cost of its longest sample."""
        return (self._rows[end] - self._rows[begin]) * self._row_costs[end - 1]

    def _sweep(self, end: int, bound: int | None, most: int | None = None) -> list[int] | None:
        """Returns the ends of the runs of the units before ``end``, or None if there are more than ``most``. Only single units
        may cost more than ``bound``.
        """
        ends: list[int] = []
        begin = 0
        while begin < end:
            if len(ends) == most:
                return None
            known, step = begin + 1, 1  # a unit by itself
            while known + step <= end and self._fits(begin, known + step, bound):
                known, step = known + step, 2 * step
            beyond = min(end + 1, known + step)
            while beyond - known > 1:
                middle = (known + beyond) // 2
                if self._fits(begin, middle, bound):
                    known = middle
                else:
                    beyond = middle
            begin = known
            ends.append(begin)
        return ends

    def _fits(self, begin: int, end: int, bound: int | None) -> bool:
        rows = self._rows[end] - self._rows[begin]
        return (
            rows * self._longest[end - 1] <= self._budget
            and (bound is None or rows * self._row_costs[end - 1] <= bound)
            and all(used[end] - used[begin] <= limit for used, limit in zip(self._used, self._limits, strict=True))
        )


def _sum_up(values: Sequence[int]) -> list[int]:
    """Returns the sums of the first 0, 1, 2, ... values."""
    return list(accumulate(values, initial=0))
