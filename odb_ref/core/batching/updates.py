"""Updates of a fixed number of samples: which places of the common order an update holds, and which rank reads them.

With N samples per update, update u holds the N places from u x N on, or what is left of them. It takes a few rounds. The first
reads nothing; its agreement releases the previous update. Ranks with their own source then read their share, every W-th place,
at once, so a rank's share follows from its number alone. Ranks that share one order (R14) draw an update in a few *portions*,
one per round: the first in equal parts, each later one so that the ranks come to hold equal numbers of tokens. Each portion
leaves a third of the places left, so the last ones, which even out the rest, are small. The last round forms the steps.

This module knows nothing of samples, windows or phases. Spec: R16.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from odb_ref.core.batching.shards import Draw, compute_shares

KEPT_SHARE: Final = 3
"""A portion leaves one place in this many of those left, for the portions after it."""

MOST_PORTIONS: Final = 5
"""The greatest number of portions of an update. After five, ranks differ by about one long sample."""

PADDING_SHARE: Final = 16
"""By default, a group of an update holds at most a sixteenth of the budget in padding, about the fixed cost of a step. Without
updates, a group may be carried until it is full. An update emits all of its groups, so padding is worth having only if it
saves a step (``spec/decisions/021``).
"""


def count_portions(update_samples: int, world_size: int) -> int:
    """Returns the number of portions of an update with shared shards: each finds at least a sample per rank. Spec: R16.4."""
    return sum(world_size * KEPT_SHARE**before <= update_samples for before in range(MOST_PORTIONS))


def count_rounds(update_samples: int, world_size: int, *, is_shared: bool) -> int:
    """Returns the rounds of an update: one that releases the previous update, then one per portion. Spec: R16.3."""
    return 1 + (count_portions(update_samples, world_size) if is_shared else 1)


def compute_first_place(update: int, *, update_samples: int, rank: int, world_size: int) -> int:
    """Returns how many places of a rank's own source (every W-th of the order) lie before ``update``. Spec: R16.2."""
    return -(-(update * update_samples - rank) // world_size)


def compute_portion_shares(loads: Sequence[int], places: int, portion: int) -> tuple[int, ...]:
    """Returns how many of the next ``portion`` places each rank draws. Together the ranks have drawn ``places`` of the update,
    and they hold ``loads`` tokens, by rank.

    The lightest ranks are filled up to one level; each place to come counts as the mean tokens of those drawn. Among equally
    loaded ranks the lower ones may draw one more.
    Spec: R16.4. Preserves: DEAL.
    """
    tokens = sum(loads)
    held = [load * places // tokens for load in loads] if tokens else [0] * len(loads)
    most = max(held) + portion  # so that the ranks want at least all places
    return compute_shares([most - own for own in held], portion)


def compute_portion(rank: int, loads: Sequence[int], drawn: int, *, begin: int, end: int, is_last: bool) -> Draw:
    """Returns what ``rank`` draws next of the update from place ``begin`` to ``end``, all of which below ``drawn`` is drawn.

    Spec: R16.4. Preserves: DEAL, UPDATE.
    """
    left = end - drawn
    portion = left if is_last else left - left // KEPT_SHARE
    shares = compute_portion_shares(loads, drawn - begin, portion)
    return Draw(drawn + sum(shares[:rank]), shares[rank], drawn + portion)
