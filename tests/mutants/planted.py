"""Plants subtle defects in a copy of the repository, one by one: which test of the fast loop catches each, and how fast?

``python -m tests.mutants.planted`` prints the table, once the tests have passed without a defect. ``--only TEXT`` selects
defects by name.
``protocol.txt`` has defects of a protocol, and ``deep.txt`` defects that show only deep in a run. ``slips.txt`` has slips of
the hand: a sign, a bound, a wrong name in a message, a number cut to too few bits, one field of several forgotten.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from tests.helpers.capture import capture
from tests.mutants.defects import Defect, read_defects

ROOT = Path(__file__).parents[2]
COPIED = ("odb_ref", "simulator", "tests", "spec", "proofs", "docs", "examples", "pyproject.toml", "README.md")
UNCOPIED = shutil.ignore_patterns("__pycache__", ".hypothesis", "_build")
OF_THE_CORE = ("tests/core/test_wide_numbers.py", "tests/core", "tests/spec")
OF_THE_ADAPTER = tuple(f"tests/torch/test_{name}.py" for name in ("budget", "updates", "update_chains", "state"))
OF_THE_EXCHANGE = ("tests/torch/test_identity.py", "tests/torch/test_mesh.py")
OF_THE_SIMULATOR = ("tests/simulator/test_budgets.py",)
OF_THE_VERIFIER = ("tests/explore/test_verify.py",)
OF_THE_PLANNER = ("tests/plan", "tests/conformance")
OF_THE_TRACE = ("tests/trace/test_slips.py", "tests/spec/test_r15_budgets.py", "tests/core", "tests/trace")
"""The tests to run first for such slips."""
LIMIT_S = 900
PLANTED = tuple(defect for defect, _ in read_defects("slips.txt"))


def choose_tests(module: str) -> tuple[str, ...]:
    """Returns the tests of the fast loop of which one must fail."""
    for place, tests in (
        ("ref/plan/", OF_THE_PLANNER),
        ("/trace/", OF_THE_TRACE),
        ("/torch/exchange/", OF_THE_EXCHANGE),
        ("/torch/", OF_THE_ADAPTER),
        ("odb_sim/verify/", OF_THE_VERIFIER),
        ("odb_sim/", OF_THE_SIMULATOR),
    ):
        if place in module:
            return tests
    return OF_THE_CORE


def plant(planted: Defect | None, folder: Path) -> None:
    """Makes a copy of the repository that has the defect, if one is given.

    Raises: ValueError when the text to change is not there once.
    """
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, folder / name, ignore=UNCOPIED)
        else:
            shutil.copy(source, folder / name)
    if planted is not None:
        path = folder / planted.module
        path.write_text(planted.plant(path.read_text()))


def catch(planted: Defect | None, tests: Sequence[str]) -> tuple[str, float]:
    """Returns the first of the tests that fails, or an empty string if the defect survives, and the seconds until then."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        plant(planted, folder)
        began = time.perf_counter()
        path = os.pathsep.join([str(folder), str(folder / "simulator")])
        arguments = ["-x", "-rfE", "-p", "no:cacheprovider", "-m", "not slow", "--tb=no", *tests]
        done = capture(
            [sys.executable, "-m", "pytest", *arguments],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": path},
            timeout=LIMIT_S,
        )
        seconds = time.perf_counter() - began
    failed = re.search(r"^(?:FAILED|ERROR) (?:\S+/)?(\S+)", done.stdout, re.MULTILINE)
    if done.returncode == 1 and failed:
        return failed[1], seconds
    return "" if done.returncode == 0 else f"pytest ends with {done.returncode}", seconds


def main() -> int:
    """Prints the table. Returns 1 if a defect survives."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", default="", metavar="TEXT", help="defects whose name holds it")
    options = parser.parse_args()
    chosen = [planted for planted in PLANTED if options.only in planted.name]
    for tests in sorted({choose_tests(planted.module) for planted in chosen}):
        caught, _ = catch(None, tests)
        if caught:  # and would catch every defect
            sys.exit(f"{caught} fails without a defect")
    print("| defect | in | caught by | after |\n|---|---|---|--:|")
    survivors = 0
    for planted in chosen:
        caught, seconds = catch(planted, choose_tests(planted.module))
        survivors += not caught
        print(f"| {planted.name} | `{planted.module}` | {caught or 'SURVIVES'} | {seconds:.0f} s |", flush=True)
    return int(survivors > 0)


if __name__ == "__main__":
    sys.exit(main())
