"""A target rule without sense, for worlds that must keep the properties with every rule within its bounds."""

from __future__ import annotations

from dataclasses import dataclass

from odb_ref.core.batching.rules import compute_bounds
from odb_ref.core.offer import Offer


@dataclass(frozen=True, slots=True)
class ScatteredRule:
    """Mixes numbers of the agreement into a target, which may lie anywhere within the bounds."""

    name: str = "scattered"

    def compute_target(self, agreement: Offer) -> int:
        """Returns a target within `compute_bounds`."""
        low, high = compute_bounds(agreement)
        seen = (
            7 * agreement.round_min + 11 * agreement.samples_min + 13 * agreement.groups_min + 17 * agreement.groups_max
        )
        return low + seen % (high - low + 1)
