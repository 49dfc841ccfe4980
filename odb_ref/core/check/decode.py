"""Trace lines as typed values, fast: what `trace` leaves as JSON because replaying needs no more. Spec: R9.2, R9.3."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from itertools import chain
from typing import Final, TypeGuard

from odb_ref.core.offer import Offer
from odb_ref.core.trace import Json, JsonObject, TraceError
from odb_ref.core.types import Mode

Rows = list[list[int]]


def _is_rows(value: Json) -> TypeGuard[Rows]:
    # map and set run in C: this is the checker's innermost loop.
    return (
        isinstance(value, list)
        and set(map(type, value)) <= {list}
        and set(map(type, chain.from_iterable(value))) <= {int}
    )


def _is_integers(value: Json) -> TypeGuard[list[int]]:
    return isinstance(value, list) and set(map(type, value)) <= {int}


def get_integer(data: JsonObject, key: str) -> int:
    """The integer at ``key``.

    Raises: TraceError when there is none.
    """
    value = data.get(key)
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    raise TraceError(f"expected an integer in {key!r}, got {value!r}")


def get_object(data: JsonObject, key: str) -> JsonObject:
    """The object at ``key``.

    Raises: TraceError when there is none.
    """
    value = data.get(key)
    if isinstance(value, dict):
        return value
    raise TraceError(f"expected an object in {key!r}, got {value!r}")


def get_kind(data: Json) -> str:
    """The kind of an event or effect.

    Raises: TraceError when there is none.
    """
    value = data.get("kind") if isinstance(data, dict) else None
    if isinstance(value, str):
        return value
    raise TraceError(f"expected a kind, got {value!r}")


def get_counts(data: JsonObject) -> Rows:
    """Per step: samples, tokens, supervised tokens.

    Raises: TraceError when malformed.
    """
    value = data.get("counts")
    if _is_rows(value) and set(map(len, value)) <= {3}:
        return value
    raise TraceError("expected counts, lists of three integers")


def get_samples(data: JsonObject) -> Rows:
    """Per sample: id, position, length, supervised tokens, and what it uses of each further resource.

    Raises: TraceError when malformed.
    """
    value = data.get("samples")
    if _is_rows(value) and min(map(len, value), default=4) >= 4:
        return value
    raise TraceError("expected samples, lists of four integers or more")


_OFFER_FIELDS: Final = tuple(item.name for item in fields(Offer))


def get_offer(data: JsonObject, key: str) -> Offer:
    """The offer or agreement at ``key``.

    Raises: TraceError when malformed.
    """
    value = data.get(key)
    if isinstance(value, dict):
        values = {name: item for name in _OFFER_FIELDS if type(item := value.get(name)) is int}
        if len(values) == len(_OFFER_FIELDS):
            return Offer(**values)
    raise TraceError(f"expected an offer in {key!r}, with {', '.join(_OFFER_FIELDS)}")


@dataclass(frozen=True, slots=True)
class TracedStep:
    """A step as a trace names it: its samples by position."""

    number: int
    positions: list[int]
    counts: list[int]


def iterate_steps(data: JsonObject) -> Iterator[TracedStep]:
    """The steps of a ``collate``.

    Raises: TraceError when malformed.
    """
    steps = data.get("steps")
    if not isinstance(steps, list):
        raise TraceError("expected steps, a list")
    for step in steps:
        if not isinstance(step, dict):
            raise TraceError(f"expected a step, got {step!r}")
        positions, counts = step.get("positions"), step.get("counts")
        if not _is_integers(positions) or not _is_integers(counts) or len(counts) != 3:
            raise TraceError(f"expected positions and three counts in step {step!r}")
        yield TracedStep(get_integer(step, "number"), positions, counts)


@dataclass(frozen=True, slots=True)
class Ending:
    """A ``finish``."""

    kind: str
    rank: int | None
    cause: str
    step_limit: int

    @property
    def outcome(self) -> str:
        """What must be the same on every rank, in words."""
        place = "" if self.rank is None else f" by rank {self.rank}"
        return f"{self.kind}{place}: {self.cause}" if self.cause else f"{self.kind}{place}"


def decode_ending(data: JsonObject) -> Ending:
    """The ending of a ``finish``.

    Raises: TraceError when malformed.
    """
    outcome = get_object(data, "outcome")
    match outcome.get("kind"), outcome.get("rank"), outcome.get("cause"):
        case str(kind), (int() | None) as rank, str(cause):
            return Ending(kind, rank, cause, get_integer(data, "step_limit"))
        case _:
            raise TraceError(f"expected an outcome, got {outcome!r}")


@dataclass(frozen=True, slots=True)
class Settings:
    """What the checker needs of a header's configuration."""

    budget_tokens: int
    limits: tuple[int, ...]
    is_quota: bool
    quota_samples: int | None
    max_age_rounds: int


def decode_settings(config: JsonObject) -> Settings:
    """The settings of a header.

    Raises: TraceError when one is missing.
    """
    mode = config.get("mode")
    if mode not in tuple(Mode):
        raise TraceError(f"the header's config has the mode {mode!r}")
    limits = config.get("limits", [])
    if not _is_integers(limits):
        raise TraceError(f"the header's config has the limits {limits!r}")
    return Settings(
        budget_tokens=get_integer(config, "budget_tokens"),
        limits=tuple(limits),
        is_quota=mode == Mode.QUOTA,
        quota_samples=None if config.get("quota_samples") is None else get_integer(config, "quota_samples"),
        max_age_rounds=get_integer(config, "max_age_rounds"),
    )
