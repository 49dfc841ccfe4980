"""A data-parallel rank that is several processes, its *peers*: parts of one model, which train on the same batches.

Each peer runs the machine of its rank, on the same samples. What one of them alone knows (that it fails, has stopped, is not
ready, accepts a smaller budget) holds for the rank; what they must have alike, the samples they hold, is compared by a digest.
So all peers follow one agreement, and form the same steps of it. Spec: R17.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Final

from odb_ref.core.effects import PostOffer
from odb_ref.core.offer import WIRE_SIZE, list_wire_fields
from odb_ref.core.types import Group

POST_SIZE: Final = WIRE_SIZE + 2
"""An offer on its way to the other ranks: its fields, and the least and the greatest digest of the rank's peers."""

_NONE: Final = -(2**62)
"""The digest of a peer that is compared with nobody: neutral under max."""
_DIFFERENT: Final = -1
"""The least fingerprint of a rank whose peers hold other samples: no rank's own fingerprint is negative."""
_FINGERPRINT_MIN: Final = list_wire_fields().index("fingerprint_min")


def compute_digest(window: Group, *, is_ended: bool) -> int:
    """Returns 56 bits of a hash of all that a peer's next steps follow from, but for what is agreed on. Spec: R17.3."""
    rows = [f",{item.id},{item.position},{item.length},{item.supervised}" for item in window]
    if window and window[0].costs:
        rows = [row + "".join(f",{cost}" for cost in item.costs) for row, item in zip(rows, window, strict=True)]
    text = f"{int(is_ended)}{''.join(rows)}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "big")


def describe_held(window: Group, *, is_ended: bool) -> str:
    """Returns what a peer says of its window in a report: the same text where the digests are equal, and only there."""
    tokens = sum(sample.length for sample in window)
    ids = f", from sample {window[0].id} to sample {window[-1].id}" if window else ""
    end = ", the last" if is_ended else ""
    return (
        f"{len(window)} samples of {tokens} tokens{ids}{end} (digest {compute_digest(window, is_ended=is_ended):014x})"
    )


def to_wire(post: PostOffer) -> tuple[int, ...]:
    """Returns `POST_SIZE` integers, of which those of all peers are reduced by an elementwise maximum, then settled."""
    digests = (_NONE, _NONE) if post.digest is None else (-post.digest, post.digest)
    return *post.offer.to_wire(), *digests


def settle(wire: Sequence[int]) -> tuple[int, ...]:
    """Returns what a rank posts, of what its peers have in common: if they hold other samples, a fingerprint that nobody has.

    So the epoch ends with MISMATCH on all ranks. What follows the digests is left as it is. Spec: R17.3.
    """
    settled = list(wire)
    low, high = wire[WIRE_SIZE:POST_SIZE]
    if low > _NONE and -low != high:
        settled[_FINGERPRINT_MIN] = -_DIFFERENT
    settled[WIRE_SIZE:POST_SIZE] = _NONE, _NONE
    return tuple(settled)
