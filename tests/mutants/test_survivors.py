"""The scores of mutmut: what is mutated exists, and each of its modules has a score."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from tests.mutants.score import format_row, read_scores

PACKAGE = Path(__file__).parents[2] / "odb_ref"


def test_every_module_that_is_mutated_has_a_score() -> None:
    """A folder that moves must not leave the scores, or the mutants, behind."""
    settings = tomllib.loads((PACKAGE.parent / "pyproject.toml").read_text())["tool"]["mutmut"]
    paths = [path for source in settings["source_paths"] for path in (PACKAGE.parent / source).rglob("*.py")]
    for pattern in settings["do_not_mutate"]:
        assert list(PACKAGE.parent.glob(pattern)), pattern
    modules = {".".join(path.relative_to(PACKAGE).with_suffix("").parts) for path in paths}
    scores = read_scores()
    assert len(scores) > 20
    assert scores.keys() - {"**all**"} <= modules


@pytest.mark.parametrize(
    ("statuses", "row"),
    [
        (["killed"] * 3 + ["survived"], "| x | 4 | 3 | 0 | 1 | 0 | 0 | 75.0 % |"),
        (["killed", "timed out", "no tests", "not run"], "| x | 4 | 2 | 1 | 0 | 1 | 1 | 50.0 % |"),
    ],
)
def test_the_score_counts_what_timed_out_as_killed_and_what_was_not_run_as_alive(statuses: list[str], row: str) -> None:
    assert format_row("x", statuses) == row
