"""Padding: units into micro-batches of the padded layout, whose rows are all as long as the longest. Spec: R13.5.

Sorted by length, the micro-batches are runs. Any run that keeps within the bounds also does so without some of its
units, so a sweep from the shortest uses the fewest runs, and a bisection of what a run may cost finds the least that
the costliest can. (Both exactly, where units are single samples and there are no limits.)
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
    """Units in order of their longest samples, and what any run of them takes."""

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
        """Returns the micro-batches of a sweep that only the budget and the limits bound."""
        return self._collect(self._sweep(len(self.numbers), None) or [])

    def divide(self, count: int) -> list[Batch]:
        """Returns exactly ``count`` micro-batches, at least as many as `find_fewest`, or one for each unit where these
        are fewer.

        The longest are set apart, those that cost at least what the costliest of the others then costs; that one costs
        as little as can be; and what is left of ``count`` is made by halving the costliest.
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
        """Returns where the runs of the units before ``end`` end, at most ``count``, as ``best`` are; the costliest is as cheap
        as can be.
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
        """Returns the runs, the costliest of two or more units halved until there are ``count``."""
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
        """Returns what a run costs: its rows times what its longest sample does."""
        return (self._rows[end] - self._rows[begin]) * self._row_costs[end - 1]

    def _sweep(self, end: int, bound: int | None, most: int | None = None) -> list[int] | None:
        """Returns where the runs of the units before ``end`` end, or None where there are more than ``most``; only single units
        cost more than ``bound``.
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
    """Returns the sum of the first 0, 1, 2, ... of the values."""
    return list(accumulate(values, initial=0))
