"""The score of mutmut's last run by module: ``python -m tests.mutants.score``, from the root of the repository.

A mutant that times out counts as killed, because it loops where the code does not. The exit status is 1 if more mutants of a
module are alive than SURVIVORS.md says. A module that it does not list may have 0.
"""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[2]
RESULTS: Final = ROOT / "mutants"
SURVIVORS: Final = Path(__file__).with_name("SURVIVORS.md")
ROW: Final = re.compile(r"^\| (\S+) \| (\d+) \| (\d+) \|", re.MULTILINE)
"""Module, mutants and killed."""

KILLED, SURVIVED, NO_TESTS = "killed", "survived", "no tests"
TIMED_OUT, NOT_RUN, OTHER = "timed out", "not run", "other"
STATUS: Final = {
    0: SURVIVED, 1: KILLED, 3: KILLED, 5: NO_TESTS, 33: NO_TESTS, 36: TIMED_OUT, -24: TIMED_OUT, 24: TIMED_OUT,
    152: TIMED_OUT, 255: TIMED_OUT, None: NOT_RUN,
}  # fmt: skip
"""By the exit code of pytest, as mutmut interprets it."""


def read_results() -> dict[str, str]:
    """Returns the status of each mutant, by its name without ``odb_ref.``."""
    found: dict[str, str] = {}
    for path in sorted(RESULTS.glob("odb_ref/**/*.meta")):
        for name, code in json.loads(path.read_text())["exit_code_by_key"].items():
            found[name.removeprefix("odb_ref.")] = STATUS.get(code, OTHER)
    return found


def count_alive(table: str) -> dict[str, int]:
    """Returns how many mutants of each module are alive, by the rows of a table."""
    return {module: int(mutants) - int(killed) for module, mutants, killed in ROW.findall(table)}


def get_module(name: str) -> str:
    """Returns the module of a mutant, below ``odb_ref``."""
    return name.rsplit(".", 1)[0]


def format_row(module: str, statuses: Iterable[str]) -> str:
    """Returns a row of the table: mutants, killed (including timeouts), survivors, without a test, and the share killed."""
    counts = Counter(statuses)
    total, killed = counts.total(), counts[KILLED] + counts[TIMED_OUT]
    cells = (total, killed, counts[TIMED_OUT], counts[SURVIVED] + counts[OTHER], counts[NO_TESTS], counts[NOT_RUN])
    return f"| {module} | {' | '.join(map(str, cells))} | {100 * killed / total:.1f} % |"


def main() -> int:
    """Prints the table, what is alive, and the modules of which more is alive than before. Returns 0 if there are none."""
    results, known = read_results(), count_alive(SURVIVORS.read_text())
    if not results:
        print("no results: run `mutmut run` first", file=sys.stderr)
        return 1
    print("| module | mutants | killed | of these by time | survived | no tests | not run | score |")
    print("|---|--:|--:|--:|--:|--:|--:|--:|")
    worse = []
    for module in sorted({get_module(name) for name in results}):
        row = format_row(module, (status for name, status in results.items() if get_module(name) == module))
        print(row)
        alive = count_alive(row)[module]
        if alive > known.get(module, 0):
            worse.append(f"{module}: {alive} alive, and SURVIVORS.md says {known.get(module, 0)}")
    print(format_row("**all**", results.values()))
    for name, status in results.items():
        if status not in (KILLED, TIMED_OUT):
            print(f"{status}: {name}")
    print(*worse, sep="\n")
    return int(bool(worse))


if __name__ == "__main__":
    sys.exit(main())
