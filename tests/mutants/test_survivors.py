"""The list of survivors names existing functions, each mutant once, with its change and a reason why it may survive."""

from __future__ import annotations

import ast
import re
import tomllib
from pathlib import Path

import pytest

from tests.mutants.score import SURVIVORS, format_row, get_module, read_explained

PACKAGE = Path(__file__).parents[2] / "odb_ref"
NAME = re.compile(r"x(?:_|ǁ(?P<owner>\w+)ǁ)(?P<function>\w+)__mutmut_\d+")


def list_functions(module: str) -> set[tuple[str | None, str]]:
    """Returns the functions and methods of a module, each after its class."""
    body = ast.parse((PACKAGE / f"{module.replace('.', '/')}.py").read_text()).body
    classes = [item for item in body if isinstance(item, ast.ClassDef)]
    return {(None, item.name) for item in body if isinstance(item, ast.FunctionDef)} | {
        (owner.name, item.name) for owner in classes for item in owner.body if isinstance(item, ast.FunctionDef)
    }


def test_every_survivor_is_of_a_function_that_exists() -> None:
    explained = read_explained()
    assert explained
    assert len(set(explained)) == len(explained)
    for name in explained:
        found = NAME.fullmatch(name.rsplit(".", 1)[1])
        assert found, name
        assert (found["owner"], found["function"]) in list_functions(get_module(name)), name


def test_what_is_mutated_is_what_the_survivors_are_of() -> None:
    """A folder that moves must not leave the list, or the mutants, behind."""
    settings = tomllib.loads((PACKAGE.parent / "pyproject.toml").read_text())["tool"]["mutmut"]
    rooms = {Path(path).name for path in settings["source_paths"]}
    assert {get_module(name).partition(".")[0] for name in read_explained()} <= rooms
    for path in settings["source_paths"]:
        assert list((PACKAGE.parent / path).glob("*.py")), path
    for pattern in settings["do_not_mutate"]:
        assert list(PACKAGE.parent.glob(pattern)), pattern


def test_every_survivor_has_a_change_and_a_reason() -> None:
    rows = [line for line in SURVIVORS.read_text().splitlines() if "__mutmut_" in line and line.startswith("|")]
    assert len(rows) == len(read_explained())
    for row in rows:
        _, _, change, reason, _ = re.split(r"(?<!\\)\|", row)
        assert change.strip() and len(reason.split()) >= 3, row


@pytest.mark.parametrize(
    ("statuses", "row"),
    [
        (["killed"] * 3 + ["survived"], "| x | 4 | 3 | 0 | 1 | 0 | 0 | 75.0 % |"),
        (["killed", "timed out", "no tests", "not run"], "| x | 4 | 2 | 1 | 0 | 1 | 1 | 50.0 % |"),
    ],
)
def test_the_score_counts_what_timed_out_as_killed_and_what_was_not_run_as_alive(statuses: list[str], row: str) -> None:
    assert format_row("x", statuses) == row
