"""A data-parallel rank of several processes, its *peers*. They hold parts of one model and train on the same batches.

Each peer runs the rank's machine on the same samples. If one peer fails, stops, is not ready or accepts only a smaller budget,
that holds for the whole rank. The samples they hold must be the same, which a digest checks. So all peers follow one agreement
and form the same steps from it. Spec: R17.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Final

from odb_ref.core.effects import PostOffer
from odb_ref.core.offer import WIRE_SIZE, list_wire_fields
from odb_ref.core.types import Group

POST_SIZE: Final = WIRE_SIZE + 2
"""The size of an offer on the wire: its fields, then the least and the greatest digest of the rank's peers."""

_NONE: Final = -(2**62)
"""Stands for the digest of a peer that takes no part in the comparison; neutral under max."""
_DIFFERENT: Final = -1
"""The least fingerprint of a rank whose peers hold different samples. It differs from every real one, which is at least 0."""
_FINGERPRINT_MIN: Final = list_wire_fields().index("fingerprint_min")


def compute_digest(window: Group, *, is_ended: bool) -> int:
    """Returns a 56-bit hash of everything, beside the agreement, that a peer's next steps depend on. Spec: R17.3."""
    rows = [f",{item.id},{item.position},{item.length},{item.supervised}" for item in window]
    if window and window[0].costs:
        rows = [row + "".join(f",{cost}" for cost in item.costs) for row, item in zip(rows, window, strict=True)]
    text = f"{int(is_ended)}{''.join(rows)}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "big")


def describe_held(window: Group, *, is_ended: bool) -> str:
    """Returns the description of a peer's window for a report. Two are equal exactly when their digests are."""
    tokens = sum(sample.length for sample in window)
    ids = f", from sample {window[0].id} to sample {window[-1].id}" if window else ""
    end = ", the last" if is_ended else ""
    return (
        f"{len(window)} samples of {tokens} tokens{ids}{end} (digest {compute_digest(window, is_ended=is_ended):014x})"
    )


def to_wire(post: PostOffer) -> tuple[int, ...]:
    """Returns `POST_SIZE` integers. Those of all peers are reduced by an elementwise maximum, then passed to `settle`."""
    digests = (_NONE, _NONE) if post.digest is None else (-post.digest, post.digest)
    return *post.offer.to_wire(), *digests


def settle(wire: Sequence[int]) -> tuple[int, ...]:
    """Returns what a rank posts, given the reduction over its peers.

    If the peers hold different samples, the result has a fingerprint that no rank has, so the epoch ends with MISMATCH on all
    ranks. Integers after the digests are left unchanged. Spec: R17.3.
    """
    settled = list(wire)
    low, high = wire[WIRE_SIZE:POST_SIZE]
    if low > _NONE and -low != high:
        settled[_FINGERPRINT_MIN] = -_DIFFERENT
    settled[WIRE_SIZE:POST_SIZE] = _NONE, _NONE
    return tuple(settled)
