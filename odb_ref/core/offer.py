"""The offer that a rank posts in a round, and the agreement that all ranks make of their offers.

An offer is an element of a join-semilattice: each field declares its reduction, and `combine` is associative,
commutative and idempotent. So the reduced offer, the *agreement*, has the same type as an offer, depends on neither the
order nor the shape of the reduction, and has the same size for 2 ranks and for 20,000. A target rule sees only the
agreement, so no decision can depend on which rank posted what. Spec: R3.1, R3.2.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields
from enum import Enum
from typing import Final

from odb_ref.core.errors import PeerError, UsageError

NONE: Final = 2**62
"""The neutral element of a MIN field, meaning "no value"."""


class Reduction(Enum):
    """How a field of an offer is combined over ranks. OR is MAX over 0 and 1."""

    MIN = -1
    MAX = 1


def _min() -> int:
    value: int = field(metadata={"reduction": Reduction.MIN})
    return value


def _max() -> int:
    value: int = field(metadata={"reduction": Reduction.MAX})
    return value


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """One rank's offer, or the agreement of all ranks (their combination). Spec: R3.1."""

    round_min: int = _min()
    round_max: int = _max()
    fingerprint_min: int = _min()
    fingerprint_max: int = _max()
    ready_min: int = _min()
    """1 when the previous round is collated and ready to train on (commit before release), else 0."""
    failed_rank: int = _min()
    """The lowest rank that failed, or NONE."""
    stop_step: int = _min()
    """The fewest steps any stopped consumer has taken, or NONE when no consumer has stopped."""
    stop_rank: int = _min()
    """The lowest rank whose consumer has stopped, or NONE."""
    samples_min: int = _min()
    samples_max: int = _max()
    groups_min: int = _min()
    """The fewest groups that any rank whose source has not ended would emit; NONE if all sources have ended, and in updates."""
    groups_max: int = _max()
    """The most groups any rank has formed from its window."""
    due_max: int = _max()
    """The greatest number of groups, on any rank, that hold a sample due by age."""
    budget_min: int = field(default=NONE, metadata={"reduction": Reduction.MIN, "absent": NONE})
    """The least token budget that any rank accepts for the next round; NONE if all ranks accept the configuration's."""

    def to_wire(self) -> tuple[int, ...]:
        """Returns the offer as integers whose reduction is an elementwise maximum (MIN fields are negated). Spec: R3.2."""
        return tuple(sign * getattr(self, name) for name, sign in _WIRE)

    @classmethod
    def from_wire(cls, values: Sequence[int]) -> Offer:
        """Returns the offer of ``values``, `WIRE_SIZE` integers. Raises: PeerError when the size is wrong."""
        if len(values) != WIRE_SIZE:
            raise PeerError(f"offer: expected {WIRE_SIZE} integers, got {len(values)}")
        return cls(**{name: sign * value for (name, sign), value in zip(_WIRE, values, strict=True)})


_WIRE: Final = tuple((item.name, item.metadata["reduction"].value) for item in fields(Offer))
WIRE_SIZE: Final = len(_WIRE)


def list_wire_fields() -> list[str]:
    """Returns the names of an offer's fields in wire order."""
    return [name for name, _ in _WIRE]


def combine(left: Offer, right: Offer) -> Offer:
    """Returns the combination of two offers: associative, commutative, idempotent."""
    return Offer.from_wire(tuple(map(max, left.to_wire(), right.to_wire())))


def reduce_offers(offers: Iterable[Offer]) -> Offer:
    """Returns the agreement of ``offers``, which every rank of a round learns, whatever the transport.

    Raises: UsageError when there are no offers.
    """
    wires = [offer.to_wire() for offer in offers]
    if not wires:
        raise UsageError("reduce_offers needs at least one offer")
    return Offer.from_wire(tuple(map(max, *wires)) if len(wires) > 1 else wires[0])
