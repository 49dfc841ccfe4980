"""REPLAY: given the events of a trace, the machine must return the same effects. The only check that drives the core."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from odb_ref.core.batching.rules import TargetRule
from odb_ref.core.effects import Effect
from odb_ref.core.errors import OdbError, UsageError
from odb_ref.core.machine import Machine
from odb_ref.trace.check.stream import Stream
from odb_ref.trace.check.verdict import Findings, Property
from odb_ref.trace.format import (
    RESUMED,
    SET_ASIDE,
    Json,
    JsonObject,
    Record,
    TraceError,
    decode_config,
    decode_event,
    decode_resumed,
    encode_effect,
)

Rules = Sequence[TargetRule]
"""Target rules beside the shipped ones, which a trace may name."""

Depths = Mapping[int, int]
"""The queue's depth by rank, in steps. A trace does not record it, but the fullest queue shows all that can matter."""


def replay(paths: Sequence[str | Path], depths: Depths, findings: Findings, rules: Rules) -> str:
    """Returns why a job cannot be replayed, or an empty text if it was. Notes the first difference of each rank.

    Raises: TraceError when a record is malformed. Spec: R9.
    """
    named = {rule.name: rule for rule in rules}
    for path in paths:
        stream = Stream(path)
        if stream.header.version == 1 and stream.settings.ramp_rounds:
            return "a trace of version 1 forms all steps of the ramp, this version a quarter of them"
        try:
            configs = {
                rank: decode_config(
                    stream.header.config, rank=rank, depth_steps=depth, peer=stream.header.peer, rules=named
                )
                for rank, depth in depths.items()
            }
        except UsageError as error:
            return f"the machine cannot be set up as the header says: {error}"
        for config in configs.values():
            if json.loads(config.shared_json) != stream.header.config:
                return "the header's configuration does not belong to this version"
        machines: dict[int, Machine] = {}
        differing: set[int] = set()
        for record in _iterate(stream):
            if record.rank in differing or (record.event or {}).get("kind") == SET_ASIDE:
                continue
            machine = machines.setdefault(record.rank, Machine(configs[record.rank]))
            try:
                difference = _compare(machine, record)
            except TraceError as error:
                raise stream.locate(error) from error
            findings.checked[Property.REPLAY] += 1
            if difference:
                differing.add(record.rank)
                state = machine.state
                findings.violate(
                    Property.REPLAY, difference, rank=record.rank, round_=state.round, step=state.taken_steps
                )
    return ""


def _iterate(stream: Stream) -> Iterator[Record]:
    while stream.next is not None:
        yield stream.next
        stream.advance()


def _perform(machine: Machine, event: JsonObject | None) -> tuple[Effect, ...]:
    if event is None:
        return machine.begin()
    if event.get("kind") == RESUMED:
        resumed = decode_resumed(event)
        return machine.begin(resumed.start, resumed.samples)
    return machine.handle(decode_event(event))


def _compare(machine: Machine, record: Record) -> str:
    """Returns how the machine's effects differ from the recorded ones, or an empty text if they do not."""
    try:
        effects = _perform(machine, record.event)
    except TraceError:
        raise
    except OdbError as error:
        return f"the machine refuses the event {_shorten(record.event)}: {error}"
    expected = [encode_effect(effect) for effect in effects]
    if expected == list(record.effects):
        return ""
    for index in range(max(len(expected), len(record.effects))):
        ours = expected[index] if index < len(expected) else None
        theirs = record.effects[index] if index < len(record.effects) else None
        if ours != theirs:
            return f"effect {index} of {_shorten(record.event)} is {_shorten(theirs)}, the machine's {_shorten(ours)}"
    return ""


def _shorten(value: Json) -> str:
    if not isinstance(value, dict):
        return "missing" if value is None else str(value)
    text = ", ".join(f"{key}={item}" for key, item in value.items() if key != "kind")
    return f"{value.get('kind')}({text if len(text) <= 100 else text[:97] + '...'})"
