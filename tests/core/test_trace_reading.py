"""The reader of traces, line by line: how much it asks of the file, its errors for bad lines, and growing files."""

from __future__ import annotations

import gzip
import json
import zlib
from pathlib import Path
from typing import Any

import pytest

from odb_ref.trace.format import Record, TraceError
from odb_ref.trace.reading import INTEGER_DIGITS, WORLD_SIZE, TraceReader, compute_line_bytes
from tests.helpers.errors import refused

HEADER: dict[str, Any] = {
    "format": "odb-trace", "version": 1, "driver": "test", "epoch": 0, "world_size": 3, "config": {},
}  # fmt: skip
RECORD = b'{"rank": 2, "event": null, "effects": []}\n'


class Served:
    """A file that returns one piece after another, or raises it, and records how much was asked for."""

    def __init__(self, *pieces: bytes | Exception, **changes: object) -> None:
        self.pieces: list[bytes | Exception] = [json.dumps(HEADER | changes).encode() + b"\n", *pieces]
        self.asked: list[int] = []
        self.is_closed = False

    def readline(self, size: int, /) -> bytes:
        self.asked.append(size)
        piece = self.pieces.pop(0) if self.pieces else b""
        if isinstance(piece, Exception):
            raise piece
        return piece

    def close(self) -> None:
        self.is_closed = True


def open_served(*pieces: bytes | Exception, is_growing: bool = False, **changes: object) -> tuple[TraceReader, Served]:
    file = Served(*pieces, **changes)
    return TraceReader("t", file, is_growing=is_growing), file


def refuse(*pieces: bytes | Exception) -> str:
    """Returns the error for the first of ``pieces`` that is refused."""
    reader, _ = open_served(*pieces)
    with pytest.raises(TraceError) as caught:
        for _ in pieces:
            reader.read()
    return str(caught.value)


def test_a_line_may_be_as_long_as_is_stated() -> None:
    assert compute_line_bytes(1) == 2**24 + 2**12
    assert compute_line_bytes(100) == 2**24 + 409_600


def test_one_byte_more_than_the_longest_line_is_asked_for_and_no_more() -> None:
    reader, file = open_served(RECORD, RECORD)
    assert reader.read() == reader.read() == Record(2, None, (), None)
    assert reader.read() is None
    assert file.asked == [compute_line_bytes(1) + 1] + [compute_line_bytes(3) + 1] * 3
    assert reader.line == 3


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the longest line one of 200 bytes."""
    monkeypatch.setattr("odb_ref.trace.reading.compute_line_bytes", lambda world_size: 200)


@pytest.mark.usefixtures("short")
@pytest.mark.parametrize("is_growing", [False, True])
def test_a_line_that_is_longer_is_refused(is_growing: bool) -> None:
    reader, _ = open_served(RECORD[:-1] + b" " * (199 - len(RECORD)) + b"\n", b" " * 201, is_growing=is_growing)
    assert reader.read() is not None
    with refused(TraceError, "t:3: a line of more than 200 bytes"):
        reader.read()


@pytest.mark.usefixtures("short")
def test_a_line_of_the_greatest_length_is_read() -> None:
    line = RECORD[:-1] + b" " * (200 - len(RECORD)) + b"\n"
    assert len(line) == 200
    assert open_served(line)[0].read() == Record(2, None, (), None)


@pytest.mark.usefixtures("short")
def test_a_growing_line_is_read_when_it_is_whole() -> None:
    reader, file = open_served(b"", RECORD[:9], RECORD[9:20], RECORD[20:], b"", RECORD[:5], is_growing=True)
    assert [reader.read() for _ in range(3)] == [None] * 3
    assert reader.line == 1
    assert reader.read() == Record(2, None, (), None)
    assert (reader.line, reader.is_cut) == (2, False)
    assert [reader.read() for _ in range(2)] == [None] * 2
    assert file.asked == [201, 201, 201, 201 - 9, 201 - 20, 201, 201]
    reader.end()
    assert reader.is_growing is False
    assert reader.read() is None
    assert (reader.line, reader.is_cut) == (3, True)


@pytest.mark.usefixtures("short")
def test_a_growing_line_that_fills_all_that_is_allowed_waits_for_its_end() -> None:
    reader, _ = open_served(b" " * 200, is_growing=True)
    assert reader.read() is None
    assert reader.line == 1


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (b'{"rank": NaN}\n', "t:2: NaN is not JSON"),
        (b'{"rank": -Infinity}\n', "t:2: -Infinity is not JSON"),
        (b'{"rank": NaN, "a": 12345678901234567890}\n', "t:2: NaN is not JSON"),
        (b'{"a": 12345678901234567890}\n', "t:2: an integer has more than 19 digits"),
        (b'{"a": -10000000000000000000}\n', "t:2: an integer has more than 19 digits"),
        (b'{"a": 1 2}\n', "t:2: not JSON, or cut off: Expecting ',' delimiter: column 9"),
        (b'{"a": "\xff"}\n', "t:2: 'utf-8' codec can't decode byte 0xff in position 7: invalid start byte"),
        (b"[" * 100_000 + b"\n", "t:2: lists and objects are nested too deeply"),
        (b"[1]\n", "t:2: not a JSON object"),
        (b"\n", "t:2: not JSON, or cut off: Expecting value: column 1"),
        (b"{}\n", "t:2: a record needs rank, event and effects"),
        (b'{"rank": "0", "event": null, "effects": []}\n', "t:2: a record needs rank, event and effects"),
        (b'{"rank": 0, "event": 5, "effects": []}\n', "t:2: a record needs rank, event and effects"),
        (b'{"rank": 0, "event": null, "effects": {}}\n', "t:2: a record needs rank, event and effects"),
        (b'{"rank": true, "event": null, "effects": []}\n', "t:2: a record needs rank, event and effects"),
        (b'{"rank": 3, "event": null, "effects": []}\n', "t:2: rank 3 in a world of 3"),
        (b'{"rank": -1, "event": null, "effects": []}\n', "t:2: rank -1 in a world of 3"),
    ],
)
def test_what_is_not_a_record_is_refused_with_its_line(line: bytes, said: str) -> None:
    assert refuse(line) == said


def test_what_is_said_is_never_long() -> None:
    reader, _ = open_served()
    assert str(reader.locate("x" * 500)) == "t:1: " + "x" * 400


@pytest.mark.parametrize("error", [OSError("broken"), zlib.error("broken")])
def test_a_file_that_cannot_be_read_on_is_refused_with_the_line_that_would_come(error: Exception) -> None:
    assert refuse(RECORD, error) == "t:3: broken"


def test_a_compressed_file_that_ends_early_is_cut() -> None:
    reader, _ = open_served(EOFError())
    assert reader.read() is None and reader.is_cut is True


@pytest.mark.parametrize("digits", ["9" * INTEGER_DIGITS, "-" + "9" * INTEGER_DIGITS, "1" + "0" * 18])
def test_an_integer_may_have_nineteen_digits_among_longer_texts(digits: str) -> None:
    line = json.dumps({"rank": 2, "event": {"a": "0" * 30}, "effects": []}).encode()
    reader, _ = open_served(line.replace(b'"effects": []', b'"effects": [%s]' % digits.encode()) + b"\n")
    record = reader.read()
    assert record is not None and record.effects == (int(digits),)


@pytest.mark.parametrize("line", [b'{"rank": 1', b'{"a": "\xff'])
def test_a_last_line_without_an_end_is_cut_off_not_wrong(line: bytes) -> None:
    reader, _ = open_served(line)
    assert reader.is_cut is False
    assert reader.read() is None and reader.is_cut is True


def test_a_last_line_without_an_end_whose_numbers_are_too_long_is_wrong() -> None:
    assert refuse(b'{"rank": ' + b"1" * 20 + b"}") == "t:2: an integer has more than 19 digits"


def test_a_whole_line_is_not_cut_off(tmp_path: Path) -> None:
    """A line of a compressed file, which itself marks its end, is not either."""
    assert refuse(b'{"rank": 1\n').startswith("t:2: not JSON")
    path = tmp_path / "t.gz"
    with gzip.open(path, "wb") as file:
        file.write(json.dumps(HEADER).encode() + b'\n{"rank": 1')
    reader = TraceReader(path)
    with pytest.raises(TraceError, match=r"t\.gz:2: not JSON, or cut off"):
        reader.read()
    reader.close()


def test_a_time_is_kept() -> None:
    for time_s in (1.5, 2, 0):
        reader, _ = open_served(json.dumps({"rank": 0, "event": {}, "effects": [], "time_s": time_s}).encode() + b"\n")
        assert reader.read() == Record(0, {}, (), time_s)
    reader, _ = open_served(b'{"rank": 0, "event": {}, "effects": [], "time_s": 1e999}\n')
    with pytest.raises(TraceError):
        reader.read()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"format": "x"}, "t:1: no odb-trace header"),
        ({"version": 3}, "t:1: version 3, but this program reads 1 and 2"),
        ({"version": True}, "t:1: version True, but this program reads 1 and 2"),
        ({"version": "v" * 200}, f"t:1: version '{'v' * 79}, but this program reads 1 and 2"),
        ({"world_size": 0}, f"t:1: epoch 0 of a world of 0 ranks; this program reads 1 to {WORLD_SIZE}"),
        ({"world_size": 2**20 + 1}, f"t:1: epoch 0 of a world of {2**20 + 1} ranks; this program reads 1 to 1048576"),
        ({"world_size": True}, "t:1: epoch 0 of a world of True ranks; this program reads 1 to 1048576"),
        ({"epoch": -1}, "t:1: epoch -1 of a world of 3 ranks; this program reads 1 to 1048576"),
        ({"epoch": True}, "t:1: epoch True of a world of 3 ranks; this program reads 1 to 1048576"),
        *(
            ({name: wrong}, "t:1: the header lacks world_size, config, driver or epoch")
            for name, wrong in {"driver": 1, "world_size": None, "config": None, "epoch": "x"}.items()
        ),
    ],
)
def test_a_header_of_another_kind_is_refused(changes: dict[str, object], said: str) -> None:
    with refused(TraceError, said):
        open_served(**changes)


def test_the_least_and_the_greatest_world_are_read() -> None:
    for world_size in (1, WORLD_SIZE):
        assert open_served(world_size=world_size, epoch=0)[0].header.world_size == world_size


@pytest.mark.parametrize(
    ("pieces", "said"),
    [
        ([b""], "t: empty file, expected an odb-trace header"),
        ([EOFError()], "t:1: the header is cut off"),
        ([b'{"format"'], "t:1: not JSON, or cut off: Expecting ':' delimiter: column 10"),
        ([b"[]\n"], "t:1: not a JSON object"),
        ([b"{}\n"], "t:1: no odb-trace header"),
    ],
)
def test_a_file_without_a_header_is_refused(pieces: list[bytes | Exception], said: str) -> None:
    file = Served()
    file.pieces = list(pieces)
    with refused(TraceError, said):
        TraceReader("t", file)


def test_a_file_that_is_not_there_is_refused_and_one_that_is_is_closed(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"none: .*No such file"):
        TraceReader(tmp_path / "none")
    reader, file = open_served()
    assert not file.is_closed
    reader.close()
    assert file.is_closed
