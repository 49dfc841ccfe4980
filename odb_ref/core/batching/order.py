"""The order in which the steps of a round leave. Spec: R2.6, R4.8, R4.9.

Alignment puts the fullest groups first on every rank, so that the batches of a step are equally full. In that order the steps
of every window would be a small curriculum: batches of few long samples first, batches of many short ones last. So whole steps
are shuffled, by a permutation that all ranks compute alike. If the sampler's own order matters, batches consist of neighbours
instead and leave in that order. They then hold more padding, and the batches of a step are unequally full.
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
    """The order in which the steps of a round leave. Its name enters the fingerprint, as the seed does."""

    SHUFFLED = "shuffled"
    """Steps permuted by a hash of seed and round; each step keeps its groups. Spec: R4.9."""
    SAMPLER = "sampler"
    """The sampler's order: no sample leaves in a later step than one positioned after it. Spec: R2.6."""
    FULLEST = "fullest"
    """The order of alignment, fullest or most costly first: a length curriculum in every window. Spec: R4.1."""

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
        """Returns the samples in groups. A group of two or more fits the budget and every limit. If padded, and not in sampler
        order, it holds at most ``most_padding`` tokens of padding. Preserves: BUDGET, CONSERVE.
        """
        if sizes != _ANY:  # `Config` allows this only for padded groups, and not in sampler order
            return compute_sized_groups(samples, sizes, budget_tokens, limits, most_padding)
        if self is StepOrder.SAMPLER:
            return compute_runs(samples, layout.count_tokens, budget_tokens, limits)
        return layout.compute_groups(samples, budget_tokens, limits, most_padding)

    def compute_rank(self, group: Group, layout: Layout, cost: Cost = TOKENS) -> int:
        """Returns the sort key by which a rank's steps are lined up, the least first. With tokens as the cost, it also decides
        which groups are emitted. Spec: R4.1.
        """
        return group[0].position if self is StepOrder.SAMPLER else -layout.compute_cost(group, cost)

    def arrange(self, steps: tuple[Group, ...], seed: int, round_: int) -> tuple[Group, ...]:
        """Returns the aligned steps in the order they leave, idle ones last. Spec: R4.8. Preserves: ORDER."""
        if self is not StepOrder.SHUFFLED:
            return steps
        filled = tuple([steps[number] for number in permute(len(steps), seed, round_) if steps[number]])
        return filled + ((),) * (len(steps) - len(filled))


_ANY: Final = Sizes.ANY


@lru_cache(maxsize=8)
def permute(count: int, seed: int, round_: int) -> tuple[int, ...]:
    """Returns 0 to ``count - 1`` in an order that depends on seed and round, the same on every rank. Spec: R4.9."""
    key = mix(mix(seed) ^ round_)
    return tuple(sorted(range(count), key=lambda number: mix(key ^ number)))


def mix(number: int) -> int:
    """Returns a 64-bit hash of a 64-bit number, one to one: a step of SplitMix64. Spec: R4.9."""
    number = (number + 0x9E3779B97F4A7C15) & _MASK
    number = ((number ^ number >> 30) * 0xBF58476D1CE4E5B9) & _MASK
    number = ((number ^ number >> 27) * 0x94D049BB133111EB) & _MASK
    return number ^ number >> 31
