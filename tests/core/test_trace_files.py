"""Trace files: the bytes that are written, and the errors for files that are not traces."""

from __future__ import annotations

import gzip
import json
import locale
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from odb_ref.core.batching.rules import get_rule
from odb_ref.core.config import Config
from odb_ref.core.effects import Read
from odb_ref.core.events import Agreed, Collated, LocalFailed, PeerLost, Reported, SamplesRead, StepTaken
from odb_ref.core.offer import NONE, Offer
from odb_ref.core.resume import Resumed, RoundStart
from odb_ref.core.types import Mode, Sample
from odb_ref.trace.format import (
    Header,
    Record,
    TraceError,
    decode_config,
    decode_event,
    decode_resumed,
    encode_effect,
    encode_event,
)
from odb_ref.trace.reading import read_trace
from odb_ref.trace.writing import TraceWriter
from tests.helpers.errors import refused
from tests.helpers.world import make_offer

CONFIG = Config(rank=0, world_size=2, budget_tokens=9, window_samples=3, tag="é")
HEADER: dict[str, Any] = {
    "format": "odb-trace", "version": 2, "driver": "test", "epoch": 4, "world_size": 2,
    "config": json.loads(CONFIG.shared_json),
}  # fmt: skip
LINES = [
    '{"rank":0,"event":null,"effects":[{"kind":"read","count":3}]}',
    '{"rank":1,"time_s":1.234568,"event":{"kind":"step_taken"},"effects":[]}',
]


def write(path: Path) -> bytes:
    with TraceWriter(path, CONFIG, driver="test", epoch=4) as writer:
        writer.record(0, None, (Read(3),))
        writer.record(1, StepTaken(), (), time_s=1.23456789)
    return path.read_bytes()


def test_a_trace_is_a_header_and_a_line_for_each_record(tmp_path: Path) -> None:
    """Spec: R9. A time is written only when the driver passes one."""
    first, *lines = write(tmp_path / "t.ndjson").decode().splitlines()
    assert json.loads(first) == HEADER
    assert lines == LINES


def test_a_compressed_trace_holds_the_same_lines_and_no_name_or_time(tmp_path: Path) -> None:
    """Spec: R9. Checks: REPLAY. The same run gives the same bytes."""
    compressed = write(tmp_path / "a.ndjson.gz")
    assert gzip.decompress(compressed) == write(tmp_path / "t.ndjson")
    assert compressed[:8] == b"\x1f\x8b\x08\x00\x00\x00\x00\x00", "magic, method, no flags, no time"
    assert compressed == write(tmp_path / "b.ndjson.gz")


@pytest.mark.parametrize("name", ["t.ndjson", "t.ndjson.gz"])
def test_a_trace_is_read_back(name: str, tmp_path: Path) -> None:
    """Spec: R9."""
    write(tmp_path / name)
    header, records = read_trace(str(tmp_path / name))
    assert header == Header(2, HEADER["config"], "test", 4)
    assert list(records) == [
        Record(0, None, ({"kind": "read", "count": 3},)),
        Record(1, {"kind": "step_taken"}, (), 1.234568),
    ]


def test_what_is_flushed_can_be_read_while_the_job_runs(tmp_path: Path) -> None:
    path = tmp_path / "t.ndjson"
    writer = TraceWriter(path, CONFIG, driver="test")
    try:
        assert read_trace(path)[0] == Header(2, HEADER["config"], "test", 0)
        writer.record(0, StepTaken(), ())
        writer.flush()
        assert len(list(read_trace(path)[1])) == 1
    finally:
        writer.close()
    with pytest.raises(ValueError, match="closed file"):
        writer.record(0, StepTaken(), ())


RECORD = {"rank": 0, "event": None, "effects": []}


def write_lines(path: Path, *lines: object) -> Path:
    path.write_text("".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines))
    return path


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(TraceError) as caught:
        read_trace(tmp_path / "none")
    assert str(caught.value).startswith(f"{tmp_path / 'none'}: No such file or directory")
    (tmp_path / "bytes").write_bytes(b"\xff\xfe")
    with pytest.raises(TraceError, match="bytes:1: 'utf-8' codec can't decode byte 0xff"):
        read_trace(tmp_path / "bytes")
    (tmp_path / "cut.gz").write_bytes(write(tmp_path / "whole.gz")[:-12])
    with pytest.raises(TraceError, match=r"cut\.gz:3: cut off"):
        list(read_trace(tmp_path / "cut.gz")[1])


@pytest.fixture(name="c_locale")
def _c_locale() -> Iterator[None]:
    """Sets a locale whose encoding is not UTF-8."""
    before = locale.setlocale(locale.LC_CTYPE)
    locale.setlocale(locale.LC_CTYPE, "C")
    yield
    locale.setlocale(locale.LC_CTYPE, before)


@pytest.mark.parametrize("name", ["t.ndjson", "t.ndjson.gz"])
def test_a_trace_is_utf_8_whatever_the_locale(name: str, tmp_path: Path, c_locale: None) -> None:
    """Spec: R9. This writer escapes everything but ASCII. Another need not."""
    data = json.dumps({**HEADER, "driver": "é"}, ensure_ascii=False).encode() + b"\n"
    (tmp_path / name).write_bytes(gzip.compress(data) if name.endswith("gz") else data)
    assert read_trace(tmp_path / name)[0].driver == "é"


def test_what_is_no_event_or_effect_is_not_written() -> None:
    with pytest.raises(AssertionError, match="'nothing'"):
        encode_event("nothing")  # type: ignore[arg-type]
    with pytest.raises(AssertionError, match="'nothing'"):
        encode_effect("nothing")  # type: ignore[arg-type]


@pytest.mark.parametrize("other", [{"time_s": "now"}, {"time_s": None}, {"time_s": -1}, {"time_s": True}, {"time": 1}])
def test_what_is_not_a_time_is_refused(other: dict[str, object], tmp_path: Path) -> None:
    """Spec: R9."""
    _, records = read_trace(write_lines(tmp_path / "t", HEADER, {**RECORD, **other}))
    with pytest.raises(TraceError, match="a record has rank, event and effects, and may have a time"):
        next(records)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({}, "unknown event kind None"),
        ({"kind": "nonsense"}, "unknown event kind 'nonsense'"),
        ({"kind": "collated"}, "expected a list of integers, got [None]"),
        ({"kind": "collated", "round": True}, "expected a list of integers, got [True]"),
        ({"kind": "samples_read", "samples": 5}, "expected a list, got 5"),
        ({"kind": "samples_read", "samples": [5]}, "expected a list of integers, got 5"),
        ({"kind": "samples_read", "samples": [[1, 2, 3, "4"]]}, "expected a list of integers, got [1, 2, 3, '4']"),
        ({"kind": "samples_read", "samples": [[1, 2, 3]]}, "expected at least 4 integers, got [1, 2, 3]"),
        ({"kind": "counted", "counts": [[1, 2]]}, "expected at least 3 integers, got [1, 2]"),
        ({"kind": "agreed"}, "expected an object, got None"),
        ({"kind": "agreed", "agreement": {}}, "expected a list of integers, got [None]"),
        ({"kind": "local_failed"}, "expected text in 'cause', got None"),
        ({"kind": "peer_lost", "rank": 1, "cause": 5}, "expected text in 'cause', got 5"),
        ({"kind": "reported", "reports": [5]}, "expected an object, got 5"),
        ({"kind": "reported", "reports": [{"rank": 0}]}, "expected text in 'cause', got None"),
    ],
)
def test_a_malformed_event_is_told_from_what_was_expected(data: dict[str, Any], message: str) -> None:
    """Spec: R9.2."""
    with refused(TraceError, message):
        decode_event(data)


def test_what_may_be_absent_has_a_meaning() -> None:
    """Spec: R9.2."""
    assert decode_event({"kind": "samples_read", "samples": []}) == SamplesRead((), False)
    assert decode_event({"kind": "samples_read", "samples": [], "is_ended": 1}) == SamplesRead((), False)
    assert decode_event({"kind": "reported"}) == Reported(())
    assert decode_event({"kind": "peer_lost", "cause": "x"}) == PeerLost(None, "x")
    assert decode_event({"kind": "local_failed", "cause": ""}) == LocalFailed("")
    assert decode_event({"kind": "collated", "round": 0}) == Collated(0)


RESUMED = Resumed(
    RoundStart(
        round=2, read_samples=9, is_ended=True, carried=(3, 5), marks=(4, 9), planned_steps=7, global_samples=11
    ),
    (Sample(30, 3, 6, 1), Sample(50, 5, 2, 2)),
)


def test_a_start_is_read_back() -> None:
    """Spec: R9.4."""
    data = json.loads(json.dumps(encode_event(RESUMED)))
    assert data == {
        "kind": "resumed",
        "start": {
            "round": 2, "read_samples": 9, "is_ended": True, "carried": [3, 5], "marks": [4, 9], "planned_steps": 7,
            "global_samples": 11,
        },
        "samples": [[30, 3, 6, 1], [50, 5, 2, 2]],
    }  # fmt: skip
    assert decode_resumed(data) == RESUMED


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ("is_ended", "expected true or false in 'is_ended', got None"),
        ("round read_samples planned_steps global_samples", "expected a list of integers, got [None]"),
        ("carried marks", "expected a list of integers, got None"),
    ],
)
def test_a_start_that_lacks_a_field_is_refused(keys: str, message: str) -> None:
    """Spec: R9.4."""
    for key in keys.split():
        data = json.loads(json.dumps(encode_event(RESUMED)))
        del data["start"][key]
        with refused(TraceError, message):
            decode_resumed(data)
    with pytest.raises(TraceError):
        decode_resumed({"kind": "resumed"})


SHARED = Config(
    rank=3, world_size=4, budget_tokens=9, limits=(8, 6), window_samples=5, depth_steps=7, mode=Mode.QUOTA,
    quota_samples=11, max_age_rounds=12, ramp_rounds=13, rule=get_rule("paper"), tag="seed 1",
)  # fmt: skip


def test_a_configuration_is_read_back_for_any_rank() -> None:
    """Spec: R9."""
    shared = json.loads(SHARED.shared_json)
    assert decode_config(shared, rank=3, depth_steps=7) == SHARED
    bare = decode_config(json.loads(CONFIG.shared_json), rank=1, depth_steps=2)
    assert bare == replace(CONFIG, rank=1, depth_steps=2)
    assert (bare.limits, bare.quota_samples) == ((), None)


@pytest.mark.parametrize(
    ("names", "value", "message"),
    [
        ("mode", "other", "expected one of join, quota in '{}', got 'other'"),
        ("mode rule tag", None, "expected text in '{}', got None"),
        ("world_size window_samples max_age_rounds ramp_rounds", None, "expected a list of integers, got [None]"),
        ("budget_tokens quota_samples", "9", "expected a list of integers, got ['9']"),
        ("limits", None, "expected a list of integers, got None"),
    ],
)
def test_a_malformed_configuration_is_refused(names: str, value: object, message: str) -> None:
    """Spec: R9."""
    for name in names.split():
        with refused(TraceError, message.format(name)):
            decode_config(json.loads(SHARED.shared_json) | {name: value}, rank=0, depth_steps=1)


@dataclass(frozen=True)
class OwnRule:
    """A rule that does not ship, needed only for its name."""

    name: str = "paper"

    def compute_target(self, agreement: Offer) -> int:
        return 1


def test_a_rule_of_ones_own_goes_before_a_shipped_one_of_its_name() -> None:
    own = OwnRule()
    shared = json.loads(SHARED.shared_json)
    assert decode_config(shared, rank=3, depth_steps=7, rules={"paper": own}).rule is own
    assert decode_config(shared, rank=3, depth_steps=7, rules={"other": own}).rule is get_rule("paper")


AGREED = Agreed(make_offer(0, samples=0, groups=0, groups_min=NONE))


@pytest.mark.parametrize("name", ["t.ndjson", "t.gz"])
def test_a_plain_trace_can_be_followed_round_by_round_and_a_packed_one_is_small(name: str, tmp_path: Path) -> None:
    """Each agreement is on disk at once, with everything before it. A flush of a compressed stream would cost size."""
    path = tmp_path / name
    with TraceWriter(path, CONFIG, driver="test") as writer:
        header = path.stat().st_size
        assert header > 0, "the header is there at once"
        writer.record(0, StepTaken(), ())
        assert path.stat().st_size == header
        writer.record(0, AGREED, ())
        assert (path.stat().st_size > header) is (name == "t.ndjson")
        written = path.stat().st_size
        writer.record(0, StepTaken(), ())
        assert path.stat().st_size == written
    assert len(list(read_trace(path)[1])) == 3
