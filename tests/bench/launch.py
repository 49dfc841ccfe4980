"""Starts the ranks of a job as a user would, each a Python process of its own, and collects what they found."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
ERROR_CHARACTERS = 300
LINGER_S = 8.0
"""How long what a rank has started may outlive it: torch's workers look every five seconds whether their parent is there."""
NOISE = ("Warning", "warn", " ", "[W", "\tat ", "frame #")
RANK_MARK = re.compile(r"^\[rank\d+\]: ?")


@dataclass(frozen=True, slots=True)
class Rank:
    """What came of one rank. ``data`` is None when it did not get as far as to report."""

    exit_status: int | None
    """None: it still ran at the time limit and was killed."""
    data: dict[str, Any] | None
    error: str
    """The last line it wrote to stderr that is not a warning."""
    seconds: float
    left_processes: int = 0
    """What it had started and was still there ``LINGER_S`` after the last rank had ended; only where that is watched."""
    left_files: int = 0
    """Shared-memory files of its processes that were."""
    kept: dict[str, str] = field(default_factory=dict)
    """The text of the files asked for, as far as they are there: those of the job, the same for every rank."""

    @property
    def is_hung(self) -> bool:
        """True when the time limit ended it."""
        return self.exit_status is None


def launch(
    job: str,
    spec: dict[str, Any],
    *,
    ranks: int = 1,
    limit_s: float = 60.0,
    is_watched: bool = False,
    kept: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
) -> list[Rank]:
    """Runs ``job`` of `tests.bench.jobs` on ``ranks`` processes; whatever is left after ``limit_s`` is killed.

    With ``is_watched`` it is noted what the ranks leave behind. ``kept`` names files that the job may write to its folder,
    ``environment`` what the ranks are to have beside this process's.
    """
    with tempfile.TemporaryDirectory(prefix="odb-bench-") as name:
        folder = Path(name)
        (folder / "spec.json").write_text(json.dumps({**spec, "job": job, "ranks": ranks, "folder": name}))
        began = time.monotonic()
        processes = [_start(folder, rank, ranks, environment or {}) for rank in range(ranks)]
        watches = [_Watch(process.pid) for process in processes] if is_watched else []
        ends: list[float | None] = [None] * ranks
        try:
            while None in ends and time.monotonic() - began < limit_s:
                time.sleep(0.02)
                for watch in watches:
                    watch.look()
                for rank, process in enumerate(processes):
                    if ends[rank] is None and process.poll() is not None:
                        ends[rank] = time.monotonic() - began
            deadline = time.monotonic() + LINGER_S
            while any(not watch.is_clean() for watch in watches) and time.monotonic() < deadline:
                time.sleep(0.05)
            left = [(watch.count_processes(), watch.count_files()) for watch in watches] or [(0, 0)] * ranks
        finally:
            for process in processes:
                _kill(process)
        texts = {key: (folder / key).read_text() for key in kept if (folder / key).exists()}
        return [
            replace(
                _collect(folder, rank, None if ends[rank] is None else process.returncode, ends[rank] or limit_s),
                left_processes=left[rank][0],
                left_files=left[rank][1],
                kept=texts,
            )
            for rank, process in enumerate(processes)
        ]


class _Watch:
    """The processes of one rank's session, by looking every now and then."""

    def __init__(self, leader: int) -> None:
        self._leader = leader
        self._born = {leader}
        self._next = 0.0

    def look(self) -> None:
        """Remembers who is there; at most five times a second, since it reads all of /proc."""
        if time.monotonic() >= self._next:
            self._next = time.monotonic() + 0.2
            self._born |= set(self._find())

    def _find(self) -> list[int]:
        return [pid for pid, fields in read_processes() if int(fields[3]) == self._leader and fields[0] not in "ZX"]

    def count_processes(self) -> int:
        """How many are there."""
        return len(self._find())

    def count_files(self) -> int:
        """How many shared-memory files they have made are there."""
        return sum(get_maker(name) in self._born for name in os.listdir("/dev/shm"))

    def is_clean(self) -> bool:
        """True when nothing is left of them."""
        return not self.count_processes() and not self.count_files()


def read_processes() -> Iterator[tuple[int, list[str]]]:
    """Every process, with the fields of its stat file from the state on."""
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            yield int(path.parent.name), path.read_text().rpartition(")")[2].split()


def get_maker(name: str) -> int | None:
    """The process that made a shared-memory file of torch (``torch_PID_...``)."""
    parts = name.split("_")
    return int(parts[1]) if len(parts) > 1 and parts[0] == "torch" and parts[1].isdigit() else None


def find_descendants(pid: int) -> Iterator[int]:
    """Children, their children, and so on."""
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            children = path.read_text().split()
        except OSError:
            continue
        for child in map(int, children):
            yield child
            yield from find_descendants(child)


def _start(folder: Path, rank: int, ranks: int, given: Mapping[str, str]) -> subprocess.Popen[bytes]:
    environment = {**os.environ, **given, "RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_RANK": str(rank)}
    environment |= {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", "PYTHONPATH": str(ROOT / "examples" / "demo")}
    with (folder / f"log-{rank}").open("wb") as log:
        command = [sys.executable, "-m", "tests.bench.rank", str(folder)]
        return subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )


def _kill(process: subprocess.Popen[bytes]) -> None:
    # The whole session: a rank that has ended may have left workers behind.
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _collect(folder: Path, rank: int, exit_status: int | None, seconds: float) -> Rank:
    found = folder / f"result-{rank}.json"
    log = (folder / f"log-{rank}").read_text(errors="replace").splitlines()
    lines = [text for line in log if (text := RANK_MARK.sub("", line)).strip() and not text.startswith(NOISE)]
    return Rank(
        exit_status=exit_status,
        data=json.loads(found.read_text()) if found.exists() else None,
        error=lines[-1].strip()[:ERROR_CHARACTERS] if lines else "",
        seconds=seconds,
    )
