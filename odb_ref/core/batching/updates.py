"""Updates of a fixed number of samples: which places of the common order an update holds, and which rank reads which.

Update u holds the places from u x N on, N of them, or what is left. It has a few rounds. In the first nothing is read: its
agreement releases the update before. Ranks with a source of their own then read every W-th place at once, so what a rank
gives to an update follows from its number alone. Ranks that share one order (R14) draw an update in a few *portions*, a round
each: the first in equal parts, each later one so that the ranks come to hold equally many tokens. A portion leaves a third of
what was left, so that the last ones, which even out, are small. The last round forms the steps.

Nothing here knows of samples, windows or phases. Spec: R16.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from odb_ref.core.batching.shards import Draw, compute_shares

KEPT_SHARE: Final = 3
"""A portion leaves this part of what was left, one in three, for the portions behind it."""

MOST_PORTIONS: Final = 5
"""In how many portions an update is drawn, at most: what is left uneven then is about a long sample."""

PADDING_SHARE: Final = 16
"""A group of an update holds no more padding than this part of the budget: about what a step costs by itself. In the free mode
a group may be carried to be filled; an update emits all of its groups, and what they hold beside their samples is only worth a
step that it saves (``spec/decisions/021``).
"""


def count_portions(update_samples: int, world_size: int) -> int:
    """Returns in how many portions ranks that share an order draw an update: the last ones are a sample a rank. Spec: R16.4."""
    return sum(world_size * KEPT_SHARE**before <= update_samples for before in range(MOST_PORTIONS))


def count_rounds(update_samples: int, world_size: int, *, is_shared: bool) -> int:
    """Returns how many rounds an update has: one that releases the update before, and one for each part of it. Spec: R16.3."""
    return 1 + (count_portions(update_samples, world_size) if is_shared else 1)


def compute_first_place(update: int, *, update_samples: int, rank: int, world_size: int) -> int:
    """Returns how many places of a rank's own source, every W-th of the order, lie before ``update``. Spec: R16.2."""
    return -(-(update * update_samples - rank) // world_size)


def compute_portion_shares(loads: Sequence[int], places: int, portion: int) -> tuple[int, ...]:
    """Returns how many of the ``portion`` places of an update each rank draws, which have drawn ``places`` of it and hold
    ``loads`` tokens.

    The lightest ranks are filled to one level, where a place to come counts the mean tokens of those drawn. Of
    ranks that are alike the lower ones draw more, by one.
    Spec: R16.4. Preserves: DEAL.
    """
    tokens = sum(loads)
    held = [load * places // tokens for load in loads] if tokens else [0] * len(loads)
    most = max(held) + portion  # so that the wants are at least as many as there are places
    return compute_shares([most - own for own in held], portion)


def compute_portion(rank: int, loads: Sequence[int], drawn: int, *, begin: int, end: int, is_last: bool) -> Draw:
    """Returns what ``rank`` draws of the update from place ``begin`` to ``end``, of which all below ``drawn`` is drawn.

    Spec: R16.4. Preserves: DEAL, UPDATE.
    """
    left = end - drawn
    portion = left if is_last else left - left // KEPT_SHARE
    shares = compute_portion_shares(loads, drawn - begin, portion)
    return Draw(drawn + sum(shares[:rank]), shares[rank], drawn + portion)
