"""Defects for which `odb-ref verify --core` was not made: beyond 64 groups, on rank 33, at the end of a shared order.

``python -m tests.mutants.fresh`` plants each in a copy of the core, and prints the first stage that refutes it, and the time.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from odb_sim.verify import core_copy

import odb_ref.core
from tests.mutants.defects import Defect, read_defects

CORE = Path(odb_ref.core.__file__).parent


DEFECTS = tuple(defect for defect, _ in read_defects("fresh.txt"))


def plant(defect: Defect, folder: Path) -> Path:
    """Makes a copy of the core that has the defect.

    Raises: ValueError when the text is not there, or more than once.
    """
    core = Path(shutil.copytree(CORE, folder / "core", ignore=shutil.ignore_patterns("__pycache__")))
    path = core / f"{defect.module.replace('.', '/')}.py"
    path.write_text(defect.plant(path.read_text(encoding="utf-8")), encoding="utf-8")
    return core


def refute(defect: Defect) -> Iterator[tuple[str, str]]:
    """Yields the first stage that refutes the defect, after the stages that could not be judged."""
    with tempfile.TemporaryDirectory() as folder:
        copy = core_copy._copy_repository(Path(folder), plant(defect, Path(folder) / "planted"))
        for run_stage in core_copy._list_stages(copy, seed=0):
            stage = run_stage()
            if stage.findings:
                yield stage.name, f"{stage.findings[0].property}: {stage.findings[0].detail}"
                return
            if stage.skipped:
                yield stage.name, f"not judged: {stage.skipped}"


def main() -> int:
    """Prints the table. Returns 1 if a defect survives."""
    survivors = 0
    for defect in DEFECTS:
        if sys.argv[1:] and not any(word in defect.name for word in sys.argv[1:]):
            continue
        began = time.perf_counter()
        said = list(refute(defect))
        is_refuted = bool(said) and not said[-1][1].startswith("not judged")
        survivors += not is_refuted
        stage, what = said[-1] if said else ("", "")
        verdict = f"refuted by {stage}" if is_refuted else "SURVIVES"
        print(f"{verdict:<24} {time.perf_counter() - began:6.1f} s  {defect.name}: {what[:100]}", flush=True)
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
