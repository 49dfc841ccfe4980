"""Fast decoding of trace lines into typed values, for the checker; `replay` uses `trace.format` instead. Spec: R9.2, R9.3."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, fields
from itertools import chain
from reprlib import Repr
from typing import Final, NamedTuple, TypeGuard

from odb_ref.core.offer import Offer
from odb_ref.core.types import Mode
from odb_ref.trace.format import Header, Json, JsonObject, TraceError

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


_REPR: Final = Repr()
_REPR.maxlevel, _REPR.maxdict, _REPR.maxlist, _REPR.maxstring, _REPR.maxother = 3, 6, 8, 80, 80


def shorten(value: Json) -> str:
    """Returns ``value`` as one short line, however long or deep it is."""
    return _REPR.repr(value)


def get_integer(data: JsonObject, key: str) -> int:
    """Returns the integer at ``key``. Raises: TraceError when there is none."""
    value = data.get(key)
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    raise TraceError(f"expected an integer in {key!r}, got {shorten(value)}")


def get_optional(data: JsonObject, key: str) -> int | None:
    """Returns the integer at ``key``, or None if there is nothing. Raises: TraceError when it is something else."""
    return get_integer(data, key) if key in data else None


def get_set_aside(data: JsonObject) -> tuple[int, int | None]:
    """Returns the id and the place of a sample that is set aside; None if the trace does not tell the place.

    Raises: TraceError when malformed.
    """
    place = get_optional(data, "place")
    if place is not None and place < 0:
        raise TraceError(f"a sample is set aside at place {place}")
    return get_integer(data, "id"), place


def get_flag(data: JsonObject, key: str) -> bool:
    """Returns the truth value at ``key``. Raises: TraceError when there is none."""
    value = data.get(key)
    if isinstance(value, bool):
        return value
    raise TraceError(f"expected true or false in {key!r}, got {shorten(value)}")


def get_text(data: JsonObject, key: str) -> str:
    """Returns the text at ``key``. Raises: TraceError when there is none."""
    value = data.get(key)
    if isinstance(value, str):
        return value
    raise TraceError(f"expected text in {key!r}, got {shorten(value)}")


def get_rank(data: JsonObject) -> int | None:
    """Returns the rank in ``data``, or None if it is null. Raises: TraceError when it is something else."""
    return None if "rank" in data and data["rank"] is None else get_integer(data, "rank")


def get_object(data: JsonObject, key: str) -> JsonObject:
    """Returns the object at ``key``. Raises: TraceError when there is none."""
    value = data.get(key)
    if isinstance(value, dict):
        return value
    raise TraceError(f"expected an object in {key!r}, got {shorten(value)}")


def get_kind(data: Json) -> str:
    """Returns the kind of an event or effect. Raises: TraceError when there is none."""
    value = data.get("kind") if isinstance(data, dict) else None
    if isinstance(value, str):
        return value
    raise TraceError(f"expected a kind, got {shorten(value)}")


def get_counts(data: JsonObject, width: int = 3) -> Rows:
    """Returns the counts by step, ``width`` integers each: samples, tokens, supervised tokens, costs.

    Raises: TraceError when malformed.
    """
    value = data.get("counts")
    if _is_rows(value) and set(map(len, value)) <= {width}:
        return value
    raise TraceError(f"expected counts, lists of {width} integers")


def get_wants(data: JsonObject) -> list[int]:
    """Returns what the ranks want, by rank; empty if they have their own sources. Spec: R14.2.

    Raises: TraceError when malformed.
    """
    value = data.get("wants", [])
    if _is_integers(value):
        return value
    raise TraceError(f"expected wants, a list of integers, got {shorten(value)}")


def get_samples(data: JsonObject) -> Rows:
    """Returns the samples as rows: id, position, length, supervised tokens, and the cost of each further resource.

    Raises: TraceError when malformed.
    """
    value = data.get("samples")
    if not _is_rows(value) or min(map(len, value), default=4) < 4:
        raise TraceError("expected samples, lists of four integers or more")
    for row in value:
        if row[1] < 0 or not 0 <= row[3] <= row[2] or row[2] < 1 or (len(row) > 4 and min(row[4:]) < 0):
            raise TraceError(f"expected id, position, length, supervised tokens and costs, got {shorten(row)}")
    return value


_OFFER_FIELDS: Final = {item.name: item.metadata.get("absent") for item in fields(Offer)}


def get_offer(data: JsonObject, key: str) -> Offer:
    """Returns the offer or agreement at ``key``. Raises: TraceError when malformed."""
    value = data.get(key)
    if isinstance(value, dict) and value.keys() <= _OFFER_FIELDS.keys():
        values = {name: item for name, absent in _OFFER_FIELDS.items() if type(item := value.get(name, absent)) is int}
        if len(values) == len(_OFFER_FIELDS):
            return Offer(**values)
    raise TraceError(f"expected an offer in {key!r}, with {', '.join(_OFFER_FIELDS)}")


class TracedReport(NamedTuple):
    """A report as a trace holds it."""

    rank: int
    cause: str
    round: int
    config: str
    peer: int = 0
    held: str = ""


def get_report(value: Json) -> TracedReport:
    """Returns the report in ``value``. Raises: TraceError when malformed."""
    match value:
        case {"rank": int(rank), "cause": str(cause), "round": int(round_), "config": str(config), **rest}:
            if not rest:
                return TracedReport(rank, cause, round_, config)
            peer, held = rest.get("peer", 0), rest.get("held")
            if isinstance(held, str) and type(peer) is int and rest.keys() <= {"held", "peer"}:
                return TracedReport(rank, cause, round_, config, peer, held)
    raise TraceError(f"expected a report, got {shorten(value)}")


def get_reports(data: JsonObject) -> list[TracedReport]:
    """Returns the reports of a ``reported``. Raises: TraceError when malformed."""
    value = data.get("reports")
    if isinstance(value, list):
        return [get_report(item) for item in value]
    raise TraceError(f"expected reports, got {shorten(value)}")


@dataclass(frozen=True, slots=True)
class TracedStep:
    """A step as a trace holds it, with its samples named by position."""

    number: int
    positions: list[int]
    counts: list[int]


def iterate_steps(data: JsonObject, width: int = 3) -> Iterator[TracedStep]:
    """Yields the steps of a ``collate``, with ``width`` counts each. Raises: TraceError when malformed."""
    steps = data.get("steps")
    if not isinstance(steps, list):
        raise TraceError("expected steps, a list")
    for step in steps:
        if not isinstance(step, dict) or len(step) > 3:  # number, positions and counts, each of them required
            raise TraceError(f"expected a step, got {shorten(step)}")
        positions, counts = step.get("positions"), step.get("counts")
        if not _is_integers(positions) or not _is_integers(counts) or len(counts) != width:
            raise TraceError(f"expected positions and {width} counts in step {shorten(step)}")
        yield TracedStep(get_integer(step, "number"), positions, counts)


@dataclass(frozen=True, slots=True)
class TracedFinish:
    """A ``finish``."""

    kind: str
    rank: int | None
    cause: str
    step_limit: int

    @property
    def outcome(self) -> str:
        """The outcome as a text, which must be the same on every rank."""
        place = "" if self.rank is None else f" by rank {self.rank}"
        return f"{self.kind}{place}: {self.cause}" if self.cause else f"{self.kind}{place}"


def decode_finish(data: JsonObject) -> TracedFinish:
    """Returns the contents of a ``finish``. Raises: TraceError when malformed."""
    outcome = get_object(data, "outcome")
    match outcome.get("kind"), outcome.get("rank"), outcome.get("cause"):
        case str(kind), (int() | None) as rank, str(cause) if len(outcome) == 3 and not isinstance(rank, bool):
            return TracedFinish(kind, rank, cause, get_integer(data, "step_limit"))
        case _:
            raise TraceError(f"expected an outcome, got {shorten(outcome)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The settings the checker needs from a header's configuration."""

    budget_tokens: int
    is_packed: bool
    """True for the packed layout. Spec: R2.4."""
    order: str
    sizes: str = "any"
    """Which numbers of samples a group may have. Spec: R2.8."""
    order_seed: int
    cost: str
    attention_tokens: int | None
    """The Q of an attention cost; 0 if the cost is the tokens, None if it is a user's own. Spec: R2.7."""
    limits: tuple[int, ...]
    world_size: int
    peers: int = 1
    """The number of processes of each rank. Spec: R17.1."""
    shared_samples: int | None
    """The number of samples the ranks share, or None if each has its own source. Spec: R14.1."""
    window_samples: int
    ramp_rounds: int
    ramp_share: int = 4
    """A round of the ramp forms one step in this many; in a trace of version 1 it forms all. Spec: R3.3, R9."""
    is_quota: bool
    quota_samples: int | None
    max_age_rounds: int
    rule: str
    """The name of the target rule. Spec: R3.3."""
    update_samples: int | None = None
    """The number of samples of an optimizer update, or None without updates. Spec: R16."""
    padding_share: int = 16
    """A group of an update may hold one part in this many of the budget in padding. Spec: R16.3."""
    fingerprint: int
    """The fingerprint that every rank with this configuration must offer."""

    @property
    def rounds(self) -> int:
        """The number of rounds of an update: one that reads nothing, then one for each portion. If each rank has its own
        source, there is only one portion. Without updates the number is 1. Spec: R16.3, R16.4.
        """
        if self.update_samples is None:
            return 1
        if self.shared_samples is None:
            return 2
        own = self.update_samples // self.world_size
        return 2 + sum(own >= least for least in (3, 9, 27, 81))

    @property
    def most_padding(self) -> int:
        """The most tokens of padding in a group. Spec: R16.3."""
        return self.budget_tokens if self.update_samples is None else self.budget_tokens // self.padding_share

    @property
    def counts_width(self) -> int:
        """The number of integers in the counts of a step. Spec: R4.5."""
        return 3 + len(self.limits)

    def compute_tokens(self, rows: Rows) -> int:
        """Returns the tokens of a batch of these samples. Spec: R2.4."""
        lengths = [row[2] for row in rows]
        return sum(lengths) if self.is_packed else len(lengths) * max(lengths, default=0)

    def compute_cost(self, rows: Rows) -> int:
        """Returns the cost of a batch of these samples, by a built-in cost. Spec: R2.7."""
        quotient = self.attention_tokens
        costs = [row[2] + (row[2] * row[2] // quotient if quotient else 0) for row in rows]
        return sum(costs) if self.is_packed else len(costs) * max(costs, default=0)

    def compute_window_samples(self, round_: int) -> int:
        """Returns the size of the window of ``round_``. Spec: R2.3."""
        halvings = max(0, self.ramp_rounds - round_)
        return max(1, self.window_samples // 2**halvings) if halvings < self.window_samples.bit_length() else 1


def compute_fingerprint(config_json: str) -> int:
    """Returns the fingerprint of a configuration's JSON text. Spec: R1.4."""
    return int.from_bytes(hashlib.blake2b(config_json.encode(errors="backslashreplace"), digest_size=7).digest(), "big")


_LONGEST_NUMBER: Final = 18
"""The most digits of a number in a name, because Python refuses to convert thousands of digits."""


def _get_attention(cost: str) -> int | None:
    kind, _, number = cost.partition("/")
    if kind == "attention" and number.isdecimal() and len(number) <= _LONGEST_NUMBER and int(number):
        return int(number)
    return 0 if cost == "tokens" else None


def decode_settings(header: Header) -> Settings:
    """Returns the settings of a header. Raises: TraceError when one is missing or not valid."""
    config = header.config
    for key, value in config.items():
        if not isinstance(value, str | int | float | None) and not _is_integers(value):
            raise TraceError(f"the header's config has the {key} {shorten(value)}")
    mode = config.get("mode")
    if mode not in tuple(Mode):
        raise TraceError(f"the header's config has the mode {mode!r:.80}")
    layout = config.get("layout", "padded")
    if layout not in ("padded", "packed"):
        raise TraceError(f"the header's config has the layout {layout!r:.80}")
    order = config.get("order", "fullest")
    if order not in ("shuffled", "sampler", "fullest"):
        raise TraceError(f"the header's config has the order {order!r:.80}")
    sizes = config.get("sizes", "any")
    if sizes not in ("any", "even", "threes", "powers"):
        raise TraceError(f"the header's config has the sizes {sizes!r:.80}")
    cost = config.get("cost", "tokens")
    if not isinstance(cost, str):
        raise TraceError(f"the header's config has the cost {shorten(cost)}")
    limits = config.get("limits", [])
    if not _is_integers(limits) or min(limits, default=1) < 1:
        raise TraceError(f"the header's config has the limits {shorten(limits)}")
    if get_integer(config, "world_size") != header.world_size:
        raise TraceError(f"the header's config is of {config['world_size']} ranks, the header of {header.world_size}")
    return Settings(
        budget_tokens=_get_setting(config, "budget_tokens"),
        is_packed=layout == "packed",
        order=str(order),
        sizes=str(sizes),
        order_seed=_get_setting(config, "order_seed", least=0) if "order_seed" in config else 0,
        cost=cost,
        attention_tokens=_get_attention(cost),
        limits=tuple(limits),
        world_size=header.world_size,
        peers=_get_setting(config, "peers") if "peers" in config else 1,
        shared_samples=None
        if config.get("shared_samples") is None
        else _get_setting(config, "shared_samples", least=0),
        window_samples=_get_setting(config, "window_samples"),
        ramp_rounds=_get_setting(config, "ramp_rounds", least=0),
        ramp_share=1 if header.version == 1 else 4,
        is_quota=mode == Mode.QUOTA,
        quota_samples=None if config.get("quota_samples") is None else _get_setting(config, "quota_samples"),
        max_age_rounds=_get_setting(config, "max_age_rounds"),
        rule=get_text(config, "rule"),
        update_samples=None if config.get("update_samples") is None else _get_setting(config, "update_samples"),
        padding_share=_get_setting(config, "padding_share") if "padding_share" in config else 16,
        fingerprint=compute_fingerprint(json.dumps(config, sort_keys=True)),
    )


def _get_setting(config: JsonObject, key: str, least: int = 1) -> int:
    value = get_integer(config, key)
    if value < least:
        raise TraceError(f"the header's config has the {key} {value}")
    return value
