"""The page about the tests names every folder and every tool once, and who runs each tool."""

from __future__ import annotations

import ast
import re
from pathlib import Path

TESTS = Path(__file__).parents[1]
PAGE = (TESTS / "README.md").read_text()
MAKEFILE = (TESTS.parent / "Makefile").read_text()


def read_table(section: str) -> dict[str, str]:
    """Returns the second cell of each row, by the first."""
    text = PAGE.split(f"## {section}\n")[1].split("\n## ")[0]
    rows = re.findall(r"^\| `([\w.]+)` \| (.*?) \|", text, re.MULTILINE)
    assert len(dict(rows)) == len(rows)
    return dict(rows)


def test_the_slowest_tests_are_there() -> None:
    names = re.findall(r"^\| `(test_\w+)` \| \d+ \| .+ \|$", PAGE, re.MULTILINE)
    text = "\n\n\n".join(path.read_text() for path in TESTS.rglob("test_*.py"))
    assert len(names) == 15
    decorators = {name: re.search(rf"\n\n((?:[@ )].*\n)*)(?:async )?def {name}\(", text) for name in names}
    assert [name for name, found in decorators.items() if found is None or "mark.deep" in found[1]] == []


def is_program(path: Path) -> bool:
    """Returns whether a file does something when it is run. A test may quote such a program."""
    tests = [ast.unparse(node.test) for node in ast.parse(path.read_text()).body if isinstance(node, ast.If)]
    return "__name__ == '__main__'" in tests


def test_the_page_names_every_folder() -> None:
    assert sorted(read_table("Folders")) == sorted({path.parent.name for path in TESTS.glob("*/*.py")})


def test_the_page_names_every_tool() -> None:
    found = [path for path in TESTS.rglob("*.py") if is_program(path)]
    names = {".".join(path.relative_to(TESTS.parent).with_suffix("").parts).removesuffix(".__main__") for path in found}
    assert sorted(read_table("Tools")) == sorted(names)


def test_a_tool_is_run_by_what_the_page_says() -> None:
    for module, by in read_table("Tools").items():
        if target := re.fullmatch(r"`make (\w+)`", by):
            recipe = MAKEFILE.split(f"\n{target[1]}:")[1].split("\n\n")[0]
            assert re.search(rf"-m {re.escape(module)}\b(?!\.)", recipe), module
        elif by.endswith(".py"):
            assert module.rpartition(".")[2] in (TESTS.parent / by).read_text(), module
        else:
            assert by.startswith(("hand, ", "its own test", "`tests.")), module
