"""The checker's output, word for word, for true traces and for each lie of `test_tampered` and `test_resumed`.

``said.json`` keeps digests of it, which test every message and count. ``python -m tests.trace.said`` prints the full text and
rewrites the digests.
"""

from __future__ import annotations

import hashlib
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from odb_ref.core.batching.cost import Cost, get_cost
from odb_ref.core.types import Mode
from odb_ref.trace.check import check_traces
from odb_ref.trace.check.verdict import JobVerdict
from tests.helpers.world import Fault, make_configs, run_by_arrival

KEPT = Path(__file__).with_name("said.json")
SHARDS = [[(i * i + 5 * rank) % 23 + 1 for i in range(30 - 9 * rank)] for rank in range(3)]
TRUTHS: dict[str, tuple[dict[str, Any], tuple[Fault, ...]]] = {
    "join": ({}, ()),
    "join with limits": ({"limits": (20, 5)}, ()),
    "attention": ({"cost": get_cost("attention/9")}, ()),
    "a user's cost": ({"cost": Cost("squares", lambda tokens: tokens**2)}, ()),
    "shared shards": ({"shared_samples": sum(map(len, SHARDS)), "max_age_rounds": 2}, ()),
    "quota": ({"mode": Mode.QUOTA, "quota_samples": 30}, ()),
    "quota without a number": ({"mode": Mode.QUOTA}, ()),
    "a failure": ({}, (Fault("fail", 1, 60),)),
    "a consumer that leaves": ({"depth_steps": 1}, (Fault("stop", 2, 60),)),
    "a rank that is killed": ({}, (Fault("kill", 0, 60),)),
}


def write(path: Path, *, faults: tuple[Fault, ...] = (), **settings: Any) -> list[Path]:
    """Writes a true trace of these settings, and returns its file, or the file of each rank."""
    options = {name: settings.pop(name) for name in ("is_one_file", "driver") if name in settings}
    return run_by_arrival(SHARDS, make_configs(3, **settings), seed=5, faults=faults, trace=path, **options).paths


def tell_truth(name: str, path: Path) -> list[str]:
    """Writes the true trace called ``name`` to ``path``, and returns the checker's output."""
    settings, faults = TRUTHS[name]
    run_by_arrival(SHARDS, make_configs(len(SHARDS), **settings), seed=3, faults=faults, trace=path)
    (job,) = check_traces([path], is_replayed=True).jobs
    return show(job)


def show(job: JobVerdict) -> list[str]:
    """Returns a verdict, line by line."""
    head = f"{job.driver}, epoch {job.epoch}: {job.ranks} ranks, {job.rounds} rounds, {job.steps} steps, {job.samples} samples"
    return [
        f"{head}, {job.outcome}",
        *(f"{item.property}: {item.status}, {item.reason or item.checked}" for item in job.properties),
        *(f"{item}" for item in job.violations),
    ]


def compute_digest(lines: list[str]) -> str:
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def check_said(name: str, lines: list[str]) -> None:
    """Checks that the output for the trace or lie called ``name`` has not changed."""
    text = "\n".join(lines)
    assert json.loads(KEPT.read_text())[name] == compute_digest(lines), (
        f"now: {text}\nIf wanted: python -m tests.trace.said"
    )


def main() -> None:
    """Prints the full text, and rewrites its digests."""
    from tests.trace.test_resumed import TAMPERED, find_carrying, tamper_start
    from tests.trace.test_tampered import lie

    said: dict[str, list[str]] = {}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "t"
        for name in TRUTHS:
            said[name] = tell_truth(name, path)
        (job,) = check_traces(find_carrying(Path(folder)), is_replayed=True).jobs
        said["resumed"] = show(job)
        for name in TAMPERED:
            said[f"a start: {name}"] = [str(item) for item in tamper_start(name, Path(folder))]
        for told in lie:
            said[told.name] = told.check(path)
    for name, lines in said.items():
        print(f"{name}:", *lines, sep="\n    ")
    KEPT.write_text(json.dumps({name: compute_digest(lines) for name, lines in said.items()}, indent=0) + "\n")


if __name__ == "__main__":
    sys.exit(main())
