"""The fewest groups of a window, by trying all partitions, independently of how the core and the checker find them."""

from __future__ import annotations

from collections.abc import Callable, Sequence


def count_fewest(lengths: Sequence[int], fits: Callable[[list[int]], bool]) -> int:
    """Returns the number of groups needed if every group of several must fit."""
    if not lengths:
        return 0
    first, *rest = lengths
    best = len(lengths)
    for picked in range(2 ** len(rest)):  # the first, and every subset of the others
        group = [first, *(length for i, length in enumerate(rest) if picked >> i & 1)]
        if len(group) == 1 or fits(group):
            best = min(best, 1 + count_fewest([length for i, length in enumerate(rest) if not picked >> i & 1], fits))
    return best
