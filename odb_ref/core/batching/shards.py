"""Shared shards: all ranks draw the samples of their windows from one common order. Spec: R14.

Once a round, every rank posts how many samples its window has room for. These numbers, and how much of the order is already
drawn, determine what each rank draws. So all ranks know every draw, and only indices ever move. A rank that emits more samples
(because they are short, or fit well) draws more. So the ranks stay equally far from the end of the epoch and reach it in the
same round.

This module knows nothing of samples, windows or phases. A rank reads what it has drawn as it would read its own shard.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class Draw:
    """What a rank draws for a window: ``count`` places of the common order from ``first`` on.

    ``end`` is the number of places that all ranks have drawn so far, this draw included; it is the same on every rank.
    """

    first: int
    count: int
    end: int


NOTHING_DRAWN: Final = Draw(0, 0, 0)


def compute_want(size: int, *, samples: int, tokens: int, carried_tokens: int) -> int:
    """Returns how many samples a rank wants for a window of ``size``, if its last window held ``samples`` with ``tokens``.

    Carried samples count by their tokens, converted to samples of average length. So of two ranks that carry the same number
    of samples, the one with longer samples draws fewer. That evens out the tokens of the ranks, which make the steps, rather
    than their samples, and so lets an epoch end evenly.

    Spec: R14.2.
    """
    held = -(-samples * carried_tokens // tokens) if carried_tokens else 0
    return max(0, size - held)


def compute_shares(wants: Sequence[int], left: int) -> tuple[int, ...]:
    """Returns how many places each rank draws when ``left`` are left: what it wants, if there are enough for all.

    Otherwise the last places are shared out so that the unmet want of ranks that draw differs by at most one. Lower ranks
    come first among equals.

    Spec: R14.3. Preserves: DEAL.
    """
    if sum(wants) <= left:
        return tuple(wants)
    low, high = 0, max(wants)  # bisects for the least unmet want for which the places suffice
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
    """Returns what ``rank`` draws from an order of ``total`` places, the first ``drawn`` of which are drawn. Its places follow
    those of the lower ranks.

    Spec: R14.3. Preserves: DEAL.
    """
    shares = compute_shares(wants, total - drawn)
    return Draw(drawn + sum(shares[:rank]), shares[rank], drawn + sum(shares))
