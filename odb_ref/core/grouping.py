"""Local grouping: a window of samples into few groups, each within the token budget and all further limits. Spec: R2.

Padding makes a group cost ``len(group) * longest``. Sorted by length, any run of samples that fits also fits without some
of them, so a greedy sweep over the sorted samples uses the fewest groups (FEWEST; proved in `proofs/`). The sweep starts at
the shortest: the one group that may be far from full then holds the longest samples, which cost least to carry.

Further resources are summed, not padded, and no order suits all of them: with limits the same sweep still keeps them, but
may use more groups than would do (NP21).
"""

from __future__ import annotations

from collections.abc import Iterable
from operator import attrgetter, gt, sub

from odb_ref.core.types import Group, Sample


def compute_groups(samples: Iterable[Sample], budget_tokens: int, limits: tuple[int, ...] = ()) -> tuple[Group, ...]:
    """Returns the samples as groups of at most ``budget_tokens`` padded tokens that use no more of any resource than
    ``limits`` say.

    A sample that exceeds one of these by itself is a group of its own. Groups come shortest first; inside a group the
    longest sample is first. Ties in length fall to the position.

    Spec: R2.1, R2.2. Preserves: BUDGET, FEWEST.
    """
    groups: list[Group] = []
    begin = 0
    room = limits
    # Sorting keeps the order of equals: by whole numbers twice is faster than once by pairs, and a window is in order.
    by_position = sorted(samples, key=attrgetter("position"))
    ordered = sorted(by_position, key=attrgetter("length"))
    for end, sample in enumerate(ordered):
        size = end - begin
        if size and ((size + 1) * sample.length > budget_tokens or (limits and any(map(gt, sample.costs, room)))):
            groups.append(tuple(ordered[begin:end][::-1]))
            begin = end
            room = limits
        if limits:
            room = tuple(map(sub, room, sample.costs))
    if ordered:
        groups.append(tuple(ordered[begin:][::-1]))
    return tuple(groups)
