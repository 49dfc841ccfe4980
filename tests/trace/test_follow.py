"""A job judged while it runs: errors in growing traces are reported at once, and correct traces at the end."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest
from odb_sim.cli.main import main

from odb_ref.core.errors import UsageError
from odb_ref.trace.check import Follower, Violation, check_traces
from odb_ref.trace.format import TraceError
from tests.helpers.commands import refuse
from tests.helpers.tamper import Tampered
from tests.helpers.world import Fault
from tests.trace.said import write


def record(folder: Path, **options: Any) -> list[Path]:
    """Records the traces of a finished job elsewhere. The followed files are written from them bit by bit."""
    folder.mkdir(exist_ok=True)
    return write(folder / "t.ndjson", **options)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Returns the trace of a finished job, in one file."""
    (path,) = record(tmp_path / "whole")
    return path


@pytest.fixture
def lines(source: Path) -> list[bytes]:
    return source.read_bytes().splitlines(keepends=True)


def append(path: Path, *pieces: bytes) -> None:
    with path.open("ab") as file:
        file.writelines(pieces)


class Growing:
    """Files that grow into copies of others, some bytes at a time, in turn."""

    def __init__(self, sources: list[Path], folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        self.paths = [folder / source.name for source in sources]
        self._rest = [source.read_bytes() for source in sources]

    def grow(self, size: int) -> bool:
        for place, path in enumerate(self.paths):
            piece, self._rest[place] = self._rest[place][:size], self._rest[place][size:]
            if piece:
                append(path, piece)
        return any(self._rest)


@pytest.mark.parametrize("is_one_file", [True, False])
@pytest.mark.parametrize("size", [37, 500, 10**6])
@pytest.mark.parametrize("kind", ["fail", "kill", "stop", None])
def test_a_followed_job_gets_the_verdict_of_its_files(
    kind: str | None, size: int, is_one_file: bool, tmp_path: Path
) -> None:
    faults = () if kind is None else (Fault(kind, 1, 60),)
    sources = record(tmp_path / "whole", is_one_file=is_one_file, faults=faults)
    growing = Growing(sources, tmp_path / "grown")
    told: list[Violation] = []
    follower = Follower(growing.paths, told.append)
    assert not follower.advance()
    while growing.grow(size):
        follower.advance()
    for _ in range(len(sources)):
        follower.advance()
    # As far as the files show, a rank that was killed may still come back.
    assert follower.is_done == (kind != "kill")
    verdict = follower.end(is_replayed=True)
    assert told == []
    expected = check_traces(sources, is_replayed=True).jobs[0]
    assert verdict.jobs[0].properties == expected.properties
    assert verdict.is_ok


def test_what_is_wrong_is_told_when_it_is_written_and_once(source: Path, tmp_path: Path) -> None:
    trace = Tampered(source)
    event = trace.events("counted", 1)[1]
    event["counts"][0][2] += 1
    place = next(number for number, item in enumerate(trace.records) if item["event"] is event)
    trace.write(source)
    lines = source.read_bytes().splitlines(keepends=True)
    path = tmp_path / "t.ndjson"
    told: list[Violation] = []
    follower = Follower([path], told.append)
    path.write_bytes(b"".join(lines[: place + 1]))
    assert follower.advance()
    assert told == []
    append(path, lines[place + 1])
    assert follower.advance()
    assert str(told[0]).startswith("WEIGHT rank 1 round 1 step -: is told other counts")
    assert {item.rank for item in told} == {1}
    append(path, *lines[place + 2 :])
    follower.advance()
    assert follower.is_done
    assert len(told) == len({str(item) for item in told})
    assert set(told) <= set(follower.end().violations)


def test_a_malformed_line_is_told_at_once(lines: list[bytes], tmp_path: Path) -> None:
    path = tmp_path / "t.ndjson"
    path.write_bytes(b"".join(lines[:5]) + b'{"rank":')
    follower = Follower([path], lambda violation: None)
    follower.advance()  # half a line is not malformed
    append(path, b"}\n")
    with pytest.raises(TraceError, match=":6: not JSON"):
        follower.advance()


def test_a_folder_is_followed_epoch_by_epoch(tmp_path: Path) -> None:
    folder = tmp_path / "traces"
    folder.mkdir()
    follower = Follower([folder], lambda violation: None)
    assert not follower.advance()
    for epoch in range(2):
        for source in record(tmp_path / f"epoch{epoch}", is_one_file=False):
            trace = Tampered(source)
            trace.header["epoch"] = epoch
            trace.write(folder / f"{source.name}-epoch{epoch}.ndjson")
        follower.advance()
    verdict = follower.end()
    assert [(job.epoch, len(job.paths), job.is_ok) for job in verdict.jobs] == [(0, 3, True), (1, 3, True)]


def test_a_file_that_is_written_anew_by_its_own_process_is_followed(lines: list[bytes], tmp_path: Path) -> None:
    """The loader makes the file, and its process makes it again, with the same header."""
    path = tmp_path / "t.ndjson"
    path.write_bytes(lines[0])
    follower = Follower([path], lambda violation: None)
    follower.advance()
    path.write_bytes(b"")
    follower.advance()
    path.write_bytes(b"".join(lines))
    follower.advance()
    assert follower.is_done
    assert follower.end().is_ok


def test_what_cannot_be_followed_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="a compressed trace cannot be followed"):
        Follower([tmp_path / "t.gz"], lambda violation: None)
    with pytest.raises(UsageError, match="no trace was written"):
        Follower([tmp_path / "none"], lambda violation: None).end()
    with pytest.raises(UsageError, match="no trace to check"):
        Follower([tmp_path], lambda violation: None).end()


def test_the_command_follows_a_job_to_its_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    growing = Growing(record(tmp_path / "whole", is_one_file=False), tmp_path / "grown")

    def grow() -> None:
        while growing.grow(2000):
            time.sleep(0.02)

    thread = threading.Thread(target=grow)
    thread.start()
    assert main(["check", "--follow", "--replay", *map(str, growing.paths)]) == 0
    thread.join()
    out = capsys.readouterr().out
    assert "outcome complete" in out.splitlines()[0]
    assert "REPLAY    holds" in out


def test_the_command_gives_up_waiting_and_says_so(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "t.ndjson"
    path.write_bytes(source.read_bytes()[:5000])
    started_s = time.monotonic()
    assert main(["check", "--follow", "--patience", "0.5", str(path)]) == 1
    assert time.monotonic() - started_s < 20
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines if "deadlocked or cut off" in line] == ["FREE"] * 3
    assert "no trace was written" in refuse(capsys, ["check", "--follow", "--patience", "0", str(tmp_path / "none")])


def test_a_file_that_is_written_anew_is_not_read_on(lines: list[bytes], tmp_path: Path) -> None:
    path = tmp_path / "t.ndjson"

    def follow(rest: list[bytes], *, is_replaced: bool) -> None:
        path.unlink(missing_ok=True)
        path.write_bytes(b"".join(lines[:40]))
        follower = Follower([path], lambda _: None)
        assert follower.advance()
        if is_replaced:
            path.rename(tmp_path / "t.1")
        path.write_bytes(b"".join(rest))
        follower.advance()

    for is_replaced in (False, True):
        with pytest.raises(TraceError, match=r"t\.ndjson:40: .*rewritten while it was followed"):
            follow(lines[:20], is_replaced=is_replaced)
    with pytest.raises(TraceError, match="rewritten"):
        follow(lines, is_replaced=True)
    follow(lines, is_replaced=False)  # as if it had grown


def test_a_file_that_is_deleted_is_judged_as_far_as_it_goes(lines: list[bytes], tmp_path: Path) -> None:
    path = tmp_path / "t.ndjson"
    with path.open("wb") as file:
        file.write(b"".join(lines[:40]))
        file.flush()
        follower = Follower([path], lambda _: None)
        follower.advance()
        path.unlink()
        file.write(b"".join(lines[40:]))
    follower.advance()
    assert follower.is_done
    assert follower.end().is_ok


def test_what_to_follow_is_asked_for_sensibly(source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "given twice" in refuse(capsys, ["check", "--follow", str(source), str(source)])
    for patience in ("-1", "nan"):
        assert f"--patience must be at least 0, got {patience}" in refuse(
            capsys, ["check", "--follow", "--patience", patience, str(source)]
        )
