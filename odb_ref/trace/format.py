"""The trace: one NDJSON format for the simulator, the torch adapter and the tests. Spec: R9.

The first line of a file is a header. Each further line is a record: the event a rank handled, and the effects that followed,
in order. A job may write one file for all ranks or one for each; `odb-ref check` reads both. A file whose name ends in
``.gz`` is compressed. The values in a record are integers, booleans and strings, so the same run gives the same bytes
(REPLAY). Wall-clock times are the one exception, and are only written if a driver passes them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from enum import StrEnum
from types import MappingProxyType
from typing import Final, TypeAlias, TypeVar, assert_never, get_type_hints

from odb_ref.core.batching.cost import Cost, get_cost
from odb_ref.core.batching.layouts import Layout
from odb_ref.core.batching.order import StepOrder
from odb_ref.core.batching.rules import TargetRule, get_rule
from odb_ref.core.batching.shards import Draw
from odb_ref.core.batching.sizes import Sizes
from odb_ref.core.config import Config, Terms
from odb_ref.core.effects import Collate, Deliver, Effect, Finish, PostCounts, PostOffer, PostReport, Read
from odb_ref.core.errors import UsageError
from odb_ref.core.events import (
    Agreed,
    BudgetAccepted,
    Collated,
    ConsumerStopped,
    Counted,
    Event,
    LocalFailed,
    PeerLost,
    Report,
    Reported,
    SamplesRead,
    StepTaken,
    Urged,
)
from odb_ref.core.offer import Offer
from odb_ref.core.resume import Resumed, RoundStart
from odb_ref.core.types import Mode, Sample, Step, StepCounts
from odb_ref.trace.origin import UNKNOWN, Origin

FORMAT: Final = "odb-trace"
VERSION: Final = 2
VERSIONS: Final = (1, VERSION)  # the versions that can be read; version 1 has no origin (R9.6)
RESUMED: Final = "resumed"
SET_ASIDE: Final = "set_aside"
"""The kind of the record for a sample that was set aside, which is not an event of the machine."""

Json = None | bool | int | float | str | Sequence["Json"] | Mapping[str, "Json"]
JsonObject = Mapping[str, Json]

TracedStart: TypeAlias = RoundStart
"""The start of a resumed epoch."""

_Made = TypeVar("_Made", bound=Offer | RoundStart | Report | Terms)


class TraceError(UsageError):
    """A trace file cannot be read. The message names the file and the line."""


def _encode_samples(samples: Sequence[Sample]) -> Json:
    return [[sample.id, sample.position, sample.length, sample.supervised, *sample.costs] for sample in samples]


def _encode_counts(counts: Sequence[StepCounts]) -> Json:
    return [count.to_row() for count in counts]


def _encode_step(step: Step) -> Json:
    return {
        "number": step.number,
        "positions": [sample.position for sample in step.group],
        "counts": step.global_counts.to_row(),
    }


def encode_fields(value: Offer | RoundStart | Report) -> dict[str, Json]:
    """Returns a dataclass as JSON, leaving out each field whose value is the ``absent`` one of its metadata."""
    absent = [
        item.name
        for item in fields(value)
        if "absent" in item.metadata and getattr(value, item.name) == item.metadata["absent"]
    ]
    return {
        key: list(item) if isinstance(item, tuple) else item for key, item in asdict(value).items() if key not in absent
    }


def encode_event(event: Event | Resumed) -> JsonObject:
    """Returns the event as JSON. Spec: R9.2, R9.4."""
    match event:
        case Resumed():
            return {"kind": RESUMED, "start": encode_fields(event.start), "samples": _encode_samples(event.samples)}
        case SamplesRead():
            samples = _encode_samples(event.samples)
            full = {"is_full": True} if event.is_full else {}  # left out if false, as in older traces
            return {"kind": "samples_read", "samples": samples, "is_ended": event.is_ended, **full}
        case Collated():
            return {"kind": "collated", "round": event.round}
        case Agreed():
            return {"kind": "agreed", "agreement": encode_fields(event.agreement)}
        case Counted():
            counted: JsonObject = {"kind": "counted", "counts": _encode_counts(event.counts)}
            return {**counted, "wants": event.wants} if event.wants else counted
        case Reported():
            return {"kind": "reported", "reports": [encode_fields(report) for report in event.reports]}
        case StepTaken():
            return {"kind": "step_taken"}
        case ConsumerStopped():
            return {"kind": "consumer_stopped"}
        case LocalFailed():
            return {"kind": "local_failed", "cause": event.cause}
        case Urged():
            return {"kind": "urged"}
        case PeerLost():
            return {"kind": "peer_lost", "rank": event.rank, "cause": event.cause}
        case BudgetAccepted():
            return {"kind": "budget_accepted", "tokens": event.tokens}
        case _:
            assert_never(event)


def encode_effect(effect: Effect) -> JsonObject:
    """Returns the effect as JSON.

    A step's samples are named by position; the event that brought them has the rest. Spec: R9.3.
    """
    match effect:
        case Read():
            read: JsonObject = {"kind": "read", "count": effect.count}
            return read if effect.first is None else {**read, "first": effect.first}
        case PostOffer():
            return {"kind": "post_offer", "offer": encode_fields(effect.offer)}
        case PostCounts():
            posted: JsonObject = {"kind": "post_counts", "counts": _encode_counts(effect.counts)}
            return posted if effect.wanted is None else {**posted, "wanted": effect.wanted}
        case PostReport():
            return {"kind": "post_report", "report": encode_fields(effect.report)}
        case Collate():
            return {"kind": "collate", "round": effect.round, "steps": [_encode_step(step) for step in effect.steps]}
        case Deliver():
            return {"kind": "deliver", "number": effect.step.number}
        case Finish():
            return {"kind": "finish", "outcome": asdict(effect.outcome), "step_limit": effect.step_limit}
        case _:
            assert_never(effect)


def _integers(value: Json) -> tuple[int, ...]:
    if isinstance(value, Sequence) and all(type(item) is int for item in value):
        return tuple(item for item in value if isinstance(item, int))
    raise TraceError(f"expected a list of integers, got {value!r}")


def _rows(value: Json) -> Iterator[tuple[int, ...]]:
    if not isinstance(value, Sequence):
        raise TraceError(f"expected a list, got {value!r}")
    yield from map(_integers, value)


def _object(value: Json) -> JsonObject:
    if isinstance(value, Mapping):
        return value
    raise TraceError(f"expected an object, got {value!r}")


def _integer(data: JsonObject, key: str) -> int:
    (value,) = _integers([data.get(key)])
    return value


def _text(data: JsonObject, key: str) -> str:
    value = data.get(key)
    if isinstance(value, str):
        return value
    raise TraceError(f"expected text in {key!r}, got {value!r}")


def decode_counts(value: Json) -> tuple[StepCounts, ...]:
    """Returns the counts by step. Raises: TraceError when the value is malformed."""
    return tuple(map(_decode_step_counts, _rows(value)))


def _flag(data: JsonObject, key: str) -> bool:
    value = data.get(key)
    if isinstance(value, bool):
        return value
    raise TraceError(f"expected true or false in {key!r}, got {value!r}")


def _choice(kind: type[StrEnum]) -> Callable[[JsonObject, str], StrEnum]:
    def decode(data: JsonObject, key: str) -> StrEnum:
        value = _text(data, key)
        if value in tuple(kind):
            return kind(value)
        raise TraceError(f"expected one of {', '.join(kind)} in {key!r}, got {value!r}")

    return decode


_DECODERS: Final[Mapping[object, Callable[[JsonObject, str], object]]] = {
    bool: _flag,
    int: _integer,
    int | None: lambda data, key: None if data.get(key) is None else _integer(data, key),
    str: _text,
    tuple[int, ...]: lambda data, key: _integers(data.get(key)),
    Mode: _choice(Mode),
    Cost: lambda data, key: get_cost(_text(data, key)),
    Layout: _choice(Layout),
    Draw: lambda data, key: decode_draw(data.get(key)),
    StepOrder: _choice(StepOrder),
    Sizes: _choice(Sizes),
}
"""How a field is decoded, by its declared type. A new field needs an entry only if its type is new."""


def decode_draw(value: Json) -> Draw:
    """Returns a draw. Raises: TraceError when the value is malformed."""
    data = _object(value)
    return Draw(_integer(data, "first"), _integer(data, "count"), _integer(data, "end"))


def decode_fields(kind: type[_Made], data: JsonObject, **given: object) -> _Made:
    """Returns a dataclass with the fields in ``given``, and all others decoded from ``data`` by name.

    A field with ``absent`` in its metadata may be missing; it then has that value.

    Raises: TraceError when a field is missing or malformed, UsageError when a value is not valid.
    """
    types = get_type_hints(kind)
    for item in fields(kind):
        if not item.init or item.name in given:
            continue
        if "absent" in item.metadata and item.name not in data:
            given[item.name] = item.metadata["absent"]
        else:
            given[item.name] = _DECODERS[types[item.name]](data, item.name)
    return kind(**given)  # type: ignore[arg-type]  # each value is of its field's type: that is what it was read as


def _decode_step_counts(row: tuple[int, ...]) -> StepCounts:
    if len(row) < 3:
        raise TraceError(f"expected at least 3 integers, got {list(row)}")
    return StepCounts.from_row(row)


def decode_sample(row: Sequence[int]) -> Sample:
    """Returns the sample in ``row``: four integers, then its costs.

    Raises: TraceError when there are fewer than four. Spec: R9.2.
    """
    if len(row) < 4:
        raise TraceError(f"expected at least 4 integers, got {list(row)}")
    id_, position, length, supervised, *costs = row
    return Sample(id_, position, length, supervised, tuple(costs))


def decode_offer(value: Json) -> Offer:
    """Returns an offer or an agreement. Raises: TraceError when the value is malformed."""
    data = _object(value)
    return decode_fields(Offer, data)


def decode_event(data: JsonObject) -> Event:
    """Returns the event that `encode_event` wrote. Raises: TraceError when the data is not an event."""
    match data.get("kind"):
        case "samples_read":
            samples = tuple(map(decode_sample, _rows(data.get("samples"))))
            return SamplesRead(samples, data.get("is_ended") is True, data.get("is_full") is True)
        case "collated":
            return Collated(_integer(data, "round"))
        case "agreed":
            return Agreed(decode_offer(data.get("agreement")))
        case "counted":
            return Counted(decode_counts(data.get("counts")), _integers(data.get("wants", ())))
        case "reported":
            reports = data.get("reports")
            given = map(_object, reports if isinstance(reports, list) else ())
            return Reported(tuple(decode_fields(Report, report) for report in given))
        case "step_taken":
            return StepTaken()
        case "consumer_stopped":
            return ConsumerStopped()
        case "local_failed":
            return LocalFailed(_text(data, "cause"))
        case "urged":
            return Urged()
        case "peer_lost":
            return PeerLost(None if data.get("rank") is None else _integer(data, "rank"), _text(data, "cause"))
        case "budget_accepted":
            return BudgetAccepted(_integer(data, "tokens"))
        case kind:
            raise TraceError(f"unknown event kind {kind!r}")


def decode_resumed(data: JsonObject) -> Resumed:
    """Returns the `Resumed` that `encode_event` wrote. Raises: TraceError when the data is malformed. Spec: R9.4."""
    start = decode_fields(RoundStart, _object(data.get("start")))
    return Resumed(start, tuple(map(decode_sample, _rows(data.get("samples")))))


def decode_config(
    data: JsonObject,
    *,
    rank: int,
    depth_steps: int,
    peer: int = 0,
    rules: Mapping[str, TargetRule] = MappingProxyType({}),
) -> Config:
    """Returns the configuration of ``rank``: the shared settings are in a header, its depth and peer are not.

    ``rules`` holds target rules beside the shipped ones, by name.

    Raises: TraceError when a field is malformed, UsageError when a value is not valid.
    """
    rule = _text(data, "rule")
    return decode_fields(
        Config,
        data,
        rank=rank,
        depth_steps=depth_steps,
        peer=peer,
        rule=rules[rule] if rule in rules else get_rule(rule),
    )


@dataclass(frozen=True, slots=True)
class Record:
    """One line of a trace. ``event`` is None for the start of an epoch. ``time_s`` is from the driver's clock, in seconds."""

    rank: int
    event: JsonObject | None
    effects: tuple[JsonObject, ...]
    time_s: float | None = None


@dataclass(frozen=True, slots=True)
class Header:
    """The header of a trace: the shared configuration, the epoch, the driver that wrote it, and more about the run."""

    world_size: int
    config: JsonObject
    driver: str
    epoch: int = 0
    peer: int = 0
    """The number of the process of each rank that wrote the trace. Spec: R17.5."""
    origin: Origin = UNKNOWN
    workers: int | None = None
    """The reader processes of each rank (0 if the training thread reads), or None if the trace does not say."""
    version: int = VERSION
