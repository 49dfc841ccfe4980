"""Starts the ranks of a job as a user would, each as a Python process, and collects their results."""

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
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from odb_ref.torch.exchange.process_table import find_children

ROOT = Path(__file__).resolve().parents[2]
ERROR_CHARACTERS = 300
NOISE = ("Warning", "warn", " ", "[W", "\tat ", "frame #")
RANK_MARK = re.compile(r"^\[rank\d+\]: ?")


@dataclass(frozen=True, slots=True)
class Rank:
    """The result of one rank. ``data`` is None if the rank did not get as far as reporting."""

    exit_status: int | None
    """None means that it was still running at the time limit and was killed."""
    data: dict[str, Any] | None
    error: str
    """Its last line on stderr that is not a warning."""
    seconds: float

    @property
    def is_hung(self) -> bool:
        """True if it was stopped by the time limit."""
        return self.exit_status is None

    @property
    def found(self) -> dict[str, Any]:
        """What it reported, or else the ``error`` that it ended with."""
        return {"error": self.error or "hung"} if self.data is None else self.data


def launch(
    job: str,
    spec: dict[str, Any],
    *,
    ranks: int = 1,
    limit_s: float = 60.0,
    environment: Mapping[str, str] | None = None,
) -> list[Rank]:
    """Runs ``job`` of `tests.bench.jobs` on ``ranks`` processes, and kills those left after ``limit_s``.

    ``environment`` is added to this process's environment.
    """
    with tempfile.TemporaryDirectory(prefix="odb-bench-") as name:
        folder = Path(name)
        (folder / "spec.json").write_text(json.dumps({**spec, "job": job, "ranks": ranks, "folder": name}))
        began = time.monotonic()
        processes = [_start(folder, rank, ranks, environment or {}) for rank in range(ranks)]
        ends: list[float | None] = [None] * ranks
        try:
            while None in ends and time.monotonic() - began < limit_s:
                time.sleep(0.02)
                for rank, process in enumerate(processes):
                    if ends[rank] is None and process.poll() is not None:
                        ends[rank] = time.monotonic() - began
        finally:
            for process in processes:
                _kill(process)
        return [
            _collect(folder, rank, None if ends[rank] is None else process.returncode, ends[rank] or limit_s)
            for rank, process in enumerate(processes)
        ]


def get_maker(name: str) -> int | None:
    """Returns the process that made a shared-memory file of torch (``torch_PID_...``)."""
    parts = name.split("_")
    return int(parts[1]) if len(parts) > 1 and parts[0] == "torch" and parts[1].isdigit() else None


def find_descendants(pid: int) -> Iterator[int]:
    """Yields children, their children, and so on."""
    for child in find_children(pid):
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
    # The whole session, because a rank that has ended may have left workers behind.
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
