"""Shared shards: all ranks draw the samples of their windows from one common order. Spec: R14.

Once a round every rank says how many samples its window has room for. What each draws follows from these numbers and from how
much of the order is drawn already, so that all ranks know the same, and only indices ever move. A rank that emits more (its
samples are short, or fit well) draws more: the ranks stay equally far from the end of the epoch, and meet it in one round.

Nothing here knows of samples, windows or phases; a rank that has drawn reads what it has drawn as it reads a shard of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class Draw:
    """What a rank draws for a window: ``count`` places of the common order from ``first`` on.

    ``end`` is how many places all ranks have drawn together, this draw included: the same on every rank.
    """

    first: int
    count: int
    end: int


NOTHING_DRAWN: Final = Draw(0, 0, 0)


def compute_want(size: int, *, samples: int, tokens: int, carried_tokens: int) -> int:
    """Returns how many samples a rank wants for a window of ``size``, when its last one held ``samples`` of so many ``tokens``.

    What it carries counts by its tokens, as so many samples of average length: of two ranks that carry equally many samples,
    the one whose are longer draws fewer. So it is not the numbers of samples that the ranks come to have in common but what
    makes steps, and that decides how evenly an epoch ends.

    Spec: R14.2.
    """
    held = -(-samples * carried_tokens // tokens) if carried_tokens else 0
    return max(0, size - held)


def compute_shares(wants: Sequence[int], left: int) -> tuple[int, ...]:
    """Returns how many places each rank draws when ``left`` are left: what it wants, while that can be.

    The last places are shared out so that the want left is the same on all ranks, but for one sample. Lower ranks come first
    where that is alike.

    Spec: R14.3. Preserves: DEAL.
    """
    if sum(wants) <= left:
        return tuple(wants)
    low, high = 0, max(wants)  # the least room for which the places are enough
    while low < high:
        room = (low + high) // 2
        if sum(max(0, want - room) for want in wants) <= left:
            high = room
        else:
            low = room + 1
    spare = left - sum(max(0, want - low) for want in wants)
    shares = []
    for want in wants:
        more = int(want >= low and spare > 0)
        spare -= more
        shares.append(max(0, want - low) + more)
    return tuple(shares)


def compute_draw(rank: int, wants: Sequence[int], drawn: int, total: int) -> Draw:
    """Returns what ``rank`` draws of an order of ``total`` places, of which ``drawn`` are drawn: what follows on those of the
    ranks before it.

    Spec: R14.3. Preserves: DEAL.
    """
    shares = compute_shares(wants, total - drawn)
    return Draw(drawn + sum(shares[:rank]), shares[rank], drawn + sum(shares))
