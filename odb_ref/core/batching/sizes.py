"""How many samples a group may have: any number, or only numbers that suit the hardware. Spec: R2.8.

Kernels are tuned for sizes like 8, 12 or 16, and compiled code is specialised to them. A group of such a size holds fewer
samples than would fit, so there are more batches; `docs/howto/shapes.md` has the cost.
"""

from __future__ import annotations

from enum import StrEnum


class Sizes(StrEnum):
    """Which numbers of samples are friendly. Its name enters the fingerprint, so ranks with different ones refuse to start.

    One is always friendly, so any number of samples can be divided into friendly groups, and every group can be split.
    """

    ANY = "any"
    """Every number."""
    EVEN = "even"
    """One and the even numbers."""
    THREES = "threes"
    """Powers of two and three times these."""
    POWERS = "powers"
    """Powers of two."""

    def round_down(self, size: int) -> int:
        """Returns the largest friendly number up to ``size``, which must be at least 1. It is more than half of ``size``."""
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
        """Returns True when a group may have ``size`` samples; 0 is the size of an idle step."""
        return not size or self.round_down(size) == size

    def find_middle(self, size: int) -> int:
        """Returns the size of the first half of a group of ``size`` samples, two or more and friendly: the smallest friendly
        number that is at least half and leaves a friendly rest. Spec: R4.2.
        """
        middle = (size + 1) // 2
        while not (self.is_friendly(middle) and self.is_friendly(size - middle)):
            middle += 1
        return middle


def _floor_power(size: int) -> int:
    """Returns the largest power of two up to ``size``, or 0 for a size of 0."""
    return 1 << size.bit_length() - 1 if size else 0
