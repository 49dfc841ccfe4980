"""The order in which the steps of a round follow each other. Spec: R2.6, R4.8, R4.9.

Alignment puts the fullest groups first on every rank, so that what meets in a step is equally full. Handed out like that, the
steps of every window would be a small curriculum: batches of few long samples first, of many short ones last. So the steps are
shuffled as they are, by a permutation that all ranks compute alike. Where the sampler's own order matters, batches are made
of neighbours instead, and leave in that order: they hold more padding, and unequally full ones meet.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum
from functools import lru_cache
from typing import Final

from odb_ref.core.batching.cost import TOKENS, Cost
from odb_ref.core.batching.grouping import compute_runs, compute_sized_groups
from odb_ref.core.batching.layouts import Layout
from odb_ref.core.batching.sizes import Sizes
from odb_ref.core.types import Group, Sample

_MASK: Final = (1 << 64) - 1


class StepOrder(StrEnum):
    """How the steps of a round follow each other; its name enters the fingerprint, as the seed does."""

    SHUFFLED = "shuffled"
    """Permuted by a hash of seed and round: the groups that meet in a step still do. Spec: R4.9."""
    SAMPLER = "sampler"
    """As the sampler has the samples: no sample leaves in a later step than one behind it. Spec: R2.6."""
    FULLEST = "fullest"
    """Fullest first, or the most costly, as they are aligned: a length curriculum in every window. Spec: R4.1."""

    def compute_groups(
        self,
        samples: Iterable[Sample],
        layout: Layout,
        budget_tokens: int,
        limits: tuple[int, ...] = (),
        *,
        sizes: Sizes = Sizes.ANY,
        most_padding: int | None = None,
    ) -> tuple[Group, ...]:
        """Returns the samples as groups; one of two or more fits the budget and every limit, and where it is padded, and not of
        neighbours, holds no more padding than ``most_padding``. Preserves: BUDGET, CONSERVE.
        """
        if sizes != _ANY:  # which only goes with padded groups, in another order than the sampler's
            return compute_sized_groups(samples, sizes, budget_tokens, limits, most_padding)
        if self is StepOrder.SAMPLER:
            return compute_runs(samples, layout.count_tokens, budget_tokens, limits)
        return layout.compute_groups(samples, budget_tokens, limits, most_padding)

    def compute_rank(self, group: Group, layout: Layout, cost: Cost = TOKENS) -> int:
        """Returns the number by which a rank's groups are lined up, the least first; by their tokens, they are chosen too.
        Spec: R4.1.
        """
        return group[0].position if self is StepOrder.SAMPLER else -layout.compute_cost(group, cost)

    def arrange(self, steps: tuple[Group, ...], seed: int, round_: int) -> tuple[Group, ...]:
        """Returns the aligned steps in the order in which they leave, idle ones last. Spec: R4.8. Preserves: ORDER."""
        if self is not StepOrder.SHUFFLED:
            return steps
        filled = tuple([steps[number] for number in permute(len(steps), seed, round_) if steps[number]])
        return filled + ((),) * (len(steps) - len(filled))


_ANY: Final = Sizes.ANY


@lru_cache(maxsize=8)
def permute(count: int, seed: int, round_: int) -> tuple[int, ...]:
    """Returns 0 to ``count - 1`` in an order that follows from seed and round, the same on every rank. Spec: R4.9."""
    key = mix(mix(seed) ^ round_)
    return tuple(sorted(range(count), key=lambda number: mix(key ^ number)))


def mix(number: int) -> int:
    """Returns a hash of 64 bits, another for every number of 64 bits: a step of SplitMix64. Spec: R4.9."""
    number = (number + 0x9E3779B97F4A7C15) & _MASK
    number = ((number ^ number >> 30) * 0xBF58476D1CE4E5B9) & _MASK
    number = ((number ^ number >> 27) * 0x94D049BB133111EB) & _MASK
    return number ^ number >> 31
