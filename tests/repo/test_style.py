"""What a linter does not check: lengths of modules, ids of rules, and that nothing private to a workplace is shipped."""

from __future__ import annotations

import ast
import re
import subprocess
from pathlib import Path

import pytest

from odb_ref.core.check import Property

ROOT = Path(__file__).parents[2]
SHIPPED = sorted([*ROOT.glob("odb_ref/**/*.py"), *ROOT.glob("simulator/**/*.py")])
SOURCES = sorted([*SHIPPED, *ROOT.glob("tests/**/*.py"), *ROOT.glob("examples/**/*.py")])
LINES = 420

SPEC = re.compile(r"Spec: ([^\n\"]*)")
RULE = re.compile(r"\b[RI]\d+(?:\.\d+)?\b")


def show(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", SHIPPED, ids=show)
def test_a_module_is_short_enough_to_read(path: Path) -> None:
    lines = len(path.read_text().splitlines())
    assert lines <= LINES


@pytest.mark.parametrize("path", SHIPPED, ids=show)
def test_no_bare_assert_is_shipped(path: Path) -> None:
    lines = [node.lineno for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Assert)]
    assert lines == []


@pytest.mark.parametrize("path", SHIPPED, ids=show)
def test_a_module_says_what_it_is_for(path: Path) -> None:
    tree = ast.parse(path.read_text())
    if tree.body:
        assert ast.get_docstring(tree), "no docstring"


def list_public(node: ast.Module | ast.ClassDef) -> list[ast.FunctionDef | ast.ClassDef]:
    """Functions and classes that a user can reach by public names, methods included."""
    found: list[ast.FunctionDef | ast.ClassDef] = []
    for item in node.body:
        if isinstance(item, ast.FunctionDef | ast.ClassDef) and not item.name.startswith("_"):
            found += [item, *(list_public(item) if isinstance(item, ast.ClassDef) else ())]
    return found


@pytest.mark.parametrize("path", SHIPPED, ids=show)
def test_what_is_public_has_a_docstring(path: Path) -> None:
    public = list_public(ast.parse(path.read_text()))
    assert [f"{node.name}, line {node.lineno}" for node in public if ast.get_docstring(node) is None] == []


@pytest.mark.parametrize("path", SOURCES, ids=show)
def test_a_spec_reference_names_a_rule_that_exists(path: Path) -> None:
    text = (ROOT / "spec" / "protocol.md").read_text()
    known = set(re.findall(r"\*\*(R\d+(?:\.\d+)?)\.?\*\*", text)) | set(
        re.findall(r"^\| (I\d+) \|", text, re.MULTILINE)
    )
    assert len(known) > 20
    for reference in SPEC.findall(path.read_text()):
        ids = RULE.findall(reference)
        if path in SHIPPED:
            assert ids or set(re.findall(r"[A-Z]{3,}", reference)) & set(Property), f"no rule in 'Spec: {reference}'"
        assert set(ids) <= known, reference


def list_tracked() -> list[Path]:
    done = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False)
    return [ROOT / name for name in done.stdout.splitlines()]


def test_no_path_of_a_workplace_is_shipped() -> None:
    tracked = list_tracked()
    if not tracked:
        pytest.skip("not a git checkout")
    # Put together here, so that this file does not hold them.
    forbidden = [
        "".join(parts)
        for parts in (("/wo", "rk/"), ("/tmp/", "brief"), (".lib", "rary/"), ("/ro", "ot/"), ("/ho", "me/"))
    ]
    for path in tracked:
        if path.suffix in (".gz", ".png", ".npy") or not path.is_file():
            continue
        text = path.read_text(errors="replace")
        for item in forbidden:
            assert item not in text, f"{show(path)} mentions {item}"
