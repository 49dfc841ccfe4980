"""The origin of a trace: the run it belongs to, and the samples there were to train on. Spec: R9.6."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from odb_ref.core.batching.order import mix
from odb_ref.core.errors import UsageError

DIGEST_BITS: Final = 56
"""The same as a fingerprint's, so that every integer of a trace fits into 64 bits with its sign."""

_DIGESTS: Final = 2**DIGEST_BITS


def digest_ids(ids: Iterable[int]) -> int:
    """Returns the digest of samples by their ids, in any order. The digests of two lots add up to the digest of both.

    It is the sum over all samples of `mix` of the id, modulo 2 to the `DIGEST_BITS`. Spec: R9.6.
    """
    return sum(map(mix, ids)) % _DIGESTS


@dataclass(frozen=True, slots=True)
class Lot:
    """A number of samples, and the digest of their ids. Lots add up and subtract."""

    samples: int = 0
    digest: int = 0

    def __add__(self, other: Lot) -> Lot:
        return Lot(self.samples + other.samples, (self.digest + other.digest) % _DIGESTS)

    def __sub__(self, other: Lot) -> Lot:
        return Lot(self.samples - other.samples, (self.digest - other.digest) % _DIGESTS)


def make_lot(ids: Iterable[int]) -> Lot:
    """Returns the lot of the samples with these ids."""
    listed = tuple(ids)
    return Lot(len(listed), digest_ids(listed))


def place_lot(ids: Iterable[int], first: int = 0) -> Lot:
    """Returns the lot of samples at consecutive places from ``first`` on. Its digest changes if two samples are exchanged.

    It is the sum over the samples of `mix` of the id combined with the hashed place, modulo as in `digest_ids`. Spec: R9.6.
    """
    hashed = [mix(mix(place) ^ id_ % 2**64) for place, id_ in enumerate(ids, first)]
    return Lot(len(hashed), sum(hashed) % _DIGESTS)


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnedLot:
    """The samples of one rank, or of all ranks together."""

    rank: int | None = None
    """None means all ranks together: they draw from one order, or another number of ranks began the epoch."""
    lot: Lot
    order: int | None = None
    """For samples to train on: the digest of the ids at their places (`place_lot`), or None if unknown."""
    steps: int = 0
    """For samples trained on before: the number of the first step that is not included."""
    run: str = ""
    """For samples trained on before: the run that did."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """What the writer of a trace knows before the first record. Fields it does not know are empty."""

    run: str = ""
    """A text shared by all epochs and ranks of one run, and by no other run."""
    inputs: tuple[OwnedLot, ...] = ()
    """The samples to train on in the epoch. If it was resumed by the same number of ranks, they include those trained on
    before."""
    before: tuple[OwnedLot, ...] = ()
    """The samples trained on before the epoch was resumed, by rank, or of all former ranks together. Spec: R10.3."""

    def to_json(self) -> dict[str, str | list[dict[str, int | str | None]]]:
        """Returns the origin as header fields, leaving out what is not known."""
        data: dict[str, str | list[dict[str, int | str | None]]] = {"run": self.run} if self.run else {}
        if self.inputs:
            data["inputs"] = [
                _encode(part) | ({} if part.order is None else {"order": part.order}) for part in self.inputs
            ]
        if self.before:
            data["before"] = [
                {**_encode(part), "steps": part.steps} | ({"run": part.run} if part.run else {}) for part in self.before
            ]
        return data


def _encode(part: OwnedLot) -> dict[str, int | str | None]:
    return {"rank": part.rank, "samples": part.lot.samples, "digest": part.lot.digest}


UNKNOWN: Final = Origin()
"""The origin of a trace of version 1, where nothing is known."""


def decode_origin(data: Mapping[str, object], world_size: int) -> Origin:
    """Returns the origin in a header. Raises: UsageError when it is malformed."""
    run = data.get("run", "")
    if not isinstance(run, str):
        raise UsageError(f"the header has the run {run!r:.80}")
    inputs, before = (_decode_parts(data, key, world_size) for key in ("inputs", "before"))
    return Origin(run=run, inputs=inputs, before=before)


def _decode_parts(data: Mapping[str, object], key: str, world_size: int) -> tuple[OwnedLot, ...]:
    listed = data.get(key, [])
    if not isinstance(listed, list):
        raise UsageError(f"the header has the {key} {listed!r:.80}")
    parts = tuple(_decode_part(item, key, world_size) for item in listed)
    is_twice = key == "inputs" and len(parts) > 1 and any(part.rank is None for part in parts)
    if len({part.rank for part in parts}) < len(parts) or is_twice:
        raise UsageError(f"the header has {key} whose ranks overlap")
    return parts


_NUMBERS: Final = {"inputs": {"samples", "digest", "order"}, "before": {"samples", "digest", "steps"}}


def _decode_part(item: object, key: str, world_size: int) -> OwnedLot:
    data = dict(item) if isinstance(item, dict) else {}
    rank = data.pop("rank", -1)
    run = data.pop("run", "") if key == "before" else ""
    numbers = {name: value for name, value in data.items() if type(value) is int and value >= 0}
    is_whole = _NUMBERS[key] - {"order"} <= numbers.keys() == data.keys() <= _NUMBERS[key]
    is_owned = rank is None or (type(rank) is int and 0 <= rank < world_size)
    is_small = max(numbers.get("digest", 0), numbers.get("order", 0)) < _DIGESTS
    if not (is_whole and is_owned and is_small and isinstance(run, str)):
        raise UsageError(f"the header has {key} with {item!r:.200}")
    return OwnedLot(
        rank=rank,
        lot=Lot(numbers["samples"], numbers["digest"]),
        order=numbers.get("order"),
        steps=numbers.get("steps", 0),
        run=run,
    )
