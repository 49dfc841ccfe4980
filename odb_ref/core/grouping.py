"""Local grouping: a window of samples into the fewest groups under the token budget. Spec: R2.

Padding makes a group cost ``len(group) * longest``. Sorted by length, any sub-run of a group that fits also fits, so a
greedy sweep over the sorted samples uses the fewest groups (FEWEST; proved in `proofs/`).
"""

from __future__ import annotations

from collections.abc import Iterable

from odb_ref.core.types import Group, Sample


def _longest_first(sample: Sample) -> tuple[int, int]:
    return -sample.length, sample.position


def compute_groups(samples: Iterable[Sample], budget_tokens: int) -> tuple[Group, ...]:
    """The samples as groups of at most ``budget_tokens`` padded tokens; a longer sample is a group of its own.

    Groups come longest first, and so do the samples of each. Every group but the last is *full*: the next sample in
    order would not have fitted.

    Spec: R2.1, R2.2. Preserves: BUDGET, FEWEST.
    """
    ordered = sorted(samples, key=_longest_first)
    groups: list[Group] = []
    start = 0
    while start < len(ordered):
        capacity = max(1, budget_tokens // ordered[start].length)
        groups.append(tuple(ordered[start : start + capacity]))
        start += capacity
    return tuple(groups)
