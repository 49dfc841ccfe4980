"""How many samples a group may have: any number, or only such as hardware likes. Spec: R2.8.

Kernels are tuned for, and compiled code is specialised to, numbers like 8, 12 or 16. A group that is kept to them holds fewer
samples than would fit, so there are more batches: the price is in `docs/howto/memory.md`.
"""

from __future__ import annotations

from enum import StrEnum


class Sizes(StrEnum):
    """Which numbers of samples are friendly; its name enters the fingerprint, so ranks with different ones refuse to start.

    One is, in each kind, so every number of samples can be had as friendly groups, and every group be split.
    """

    ANY = "any"
    """Every number."""
    EVEN = "even"
    """One, and the even numbers."""
    THREES = "threes"
    """Powers of two, and three times these."""
    POWERS = "powers"
    """Powers of two."""

    def round_down(self, size: int) -> int:
        """Returns the largest friendly number that is at most ``size``, which is at least 1: more than half of it."""
        match self:
            case Sizes.ANY:
                return size
            case Sizes.EVEN:
                return max(1, size & ~1)
            case Sizes.THREES:
                return max(_floor_power(size), 3 * _floor_power(size // 3))
            case Sizes.POWERS:
                return _floor_power(size)

    def is_friendly(self, size: int) -> bool:
        """Returns True when a group may have so many samples; an idle step has none."""
        return not size or self.round_down(size) == size

    def find_middle(self, size: int) -> int:
        """Returns how many of ``size`` samples, two or more and friendly, the first half has: the fewest that are half or more
        and friendly, with a friendly rest. Spec: R4.2.
        """
        middle = (size + 1) // 2
        while not (self.is_friendly(middle) and self.is_friendly(size - middle)):
            middle += 1
        return middle


def _floor_power(size: int) -> int:
    """Returns the largest power of two that is at most ``size``; 0 when there is none."""
    return 1 << size.bit_length() - 1 if size else 0
