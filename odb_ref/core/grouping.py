"""Local grouping: a window of samples into the fewest groups under the token budget. Spec: R2.

Padding makes a group cost ``len(group) * longest``. Sorted by length, any run of samples that fits also fits without some
of them, so a greedy sweep over the sorted samples uses the fewest groups (FEWEST; proved in `proofs/`). The sweep starts at
the shortest: the one group that may be far from full then holds the longest samples, which cost least to carry.
"""

from __future__ import annotations

from collections.abc import Iterable

from odb_ref.core.types import Group, Sample


def _length_then_position(sample: Sample) -> tuple[int, int]:
    return sample.length, sample.position


def compute_groups(samples: Iterable[Sample], budget_tokens: int) -> tuple[Group, ...]:
    """The samples as groups of at most ``budget_tokens`` padded tokens; a longer sample is a group of its own.

    Groups come shortest first; inside a group the longest sample is first. Ties in length fall to the position.

    Spec: R2.1, R2.2. Preserves: BUDGET, FEWEST.
    """
    groups: list[Group] = []
    group: list[Sample] = []
    for sample in sorted(samples, key=_length_then_position):
        if group and (len(group) + 1) * sample.length > budget_tokens:
            groups.append(tuple(reversed(group)))
            group = []
        group.append(sample)
    if group:
        groups.append(tuple(reversed(group)))
    return tuple(groups)
