"""The scores of mutmut are of modules that exist and are mutated."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from tests.mutants.score import SURVIVORS, count_alive, format_row

PACKAGE = Path(__file__).parents[2] / "odb_ref"


def test_every_score_is_of_a_module_that_is_mutated() -> None:
    """A folder that moves must not leave scores or mutants behind. A module without a row may have none alive."""
    settings = tomllib.loads((PACKAGE.parent / "pyproject.toml").read_text())["tool"]["mutmut"]
    paths = [path for source in settings["source_paths"] for path in (PACKAGE.parent / source).rglob("*.py")]
    for pattern in settings["do_not_mutate"]:
        assert list(PACKAGE.parent.glob(pattern)), pattern
    modules = {".".join(path.relative_to(PACKAGE).with_suffix("").parts) for path in paths}
    alive = count_alive(SURVIVORS.read_text())
    total = alive.pop("**all**")
    assert len(alive) > 20
    assert alive.keys() <= modules
    assert sum(alive.values()) == total


@pytest.mark.parametrize(
    ("statuses", "row"),
    [
        (["killed"] * 3 + ["survived"], "| x | 4 | 3 | 0 | 1 | 0 | 0 | 75.0 % |"),
        (["killed", "timed out", "no tests", "not run"], "| x | 4 | 2 | 1 | 0 | 1 | 1 | 50.0 % |"),
    ],
)
def test_the_score_counts_what_timed_out_as_killed_and_what_was_not_run_as_alive(statuses: list[str], row: str) -> None:
    assert format_row("x", statuses) == row
    assert count_alive(row) == {"x": len(statuses) - sum(status in ("killed", "timed out") for status in statuses)}
