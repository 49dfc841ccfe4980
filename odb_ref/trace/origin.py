"""What a trace is held to beside its own records: of which run it is, and what there was to train on. Spec: R9.6."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from odb_ref.core.batching.order import mix
from odb_ref.core.errors import UsageError

DIGEST_BITS: Final = 56
"""As a fingerprint's: an integer of a trace fits into 64 bits with its sign."""

_DIGESTS: Final = 2**DIGEST_BITS


def digest_ids(ids: Iterable[int]) -> int:
    """Returns the digest of samples by their ids, whatever their order: the digests of two lots add up to that of both.

    The sum over all samples of `mix` of the id, to `DIGEST_BITS` bits. Spec: R9.6.
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
    """Returns the lot of samples at places from ``first`` on, in the order of their ids: its digest tells two that are
    exchanged.

    The sum over the samples of `mix` of the id and the hashed place, as `digest_ids` has it of the ids. Spec: R9.6.
    """
    hashed = [mix(mix(place) ^ id_ % 2**64) for place, id_ in enumerate(ids, first)]
    return Lot(len(hashed), sum(hashed) % _DIGESTS)


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnedLot:
    """The samples of one rank, or of all ranks together."""

    rank: int | None = None
    """None: of all ranks together, as where they draw from one order, or where another number of ranks had begun."""
    lot: Lot
    order: int | None = None
    """What there is to train on: the digest of the ids at their places (`place_lot`), where that is known."""
    steps: int = 0
    """What had been trained on before: the number of the first step that is not among it."""
    run: str = ""
    """The run that had trained on that."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """What the writer of a trace knows before the first record; empty where it does not."""

    run: str = ""
    """One text for all epochs and ranks of a run, and for no other run."""
    inputs: tuple[OwnedLot, ...] = ()
    """What there is to train on in the epoch, those of a resumed one that had been trained on before included."""
    before: tuple[OwnedLot, ...] = ()
    """What had been trained on of the epoch before it was resumed, of these ranks, or of all of then together. Spec: R10.3."""

    def to_json(self) -> dict[str, str | list[dict[str, int | str | None]]]:
        """Returns what stands in a header; nothing for what is not known."""
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
"""Nothing is known, as in a trace of version 1."""


def decode_origin(data: Mapping[str, object], world_size: int) -> Origin:
    """Returns what a header says of its origin.

    Raises: UsageError when it is malformed.
    """
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
