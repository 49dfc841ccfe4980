"""The documents: links work, commands and tests exist, the README is a page, and the picture is what its script draws."""

from __future__ import annotations

import argparse
import ast
import importlib
import importlib.util
import re
import shlex
import sys
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

import pytest
from odb_sim.cli.main import build_parser

from tests.helpers.capture import capture

ROOT = Path(__file__).parents[2]
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
BLOCK = re.compile(r"^```[a-z]*\n(.*?)^```", re.MULTILINE | re.DOTALL)


def list_pages() -> list[Path]:
    tracked = capture(["git", "ls-files", "*.md"], cwd=ROOT)
    found = [ROOT / name for name in tracked.stdout.splitlines()]
    return found or [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]


PAGES = sorted(path for path in list_pages() if path.exists() and "generated" not in path.parts)


def show(path: Path) -> str:
    return str(path.relative_to(ROOT))


def list_anchors(path: Path) -> set[str]:
    """Returns the anchors of a page's headings, as GitHub makes them."""
    heads = re.findall(r"^#+ (.*)$", path.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).strip().replace(" ", "-") for head in heads}


@pytest.mark.parametrize("page", PAGES, ids=show)
def test_every_link_leads_somewhere(page: Path) -> None:
    dead = []
    for link in LINK.findall(BLOCK.sub("", page.read_text())):
        if "://" in link or link.startswith("mailto:"):
            continue
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        if not target.exists() or (anchor and target.suffix == ".md" and anchor not in list_anchors(target)):
            dead.append(link)
    assert dead == []


def iterate_commands() -> Iterator[tuple[str, str]]:
    """Yields the page and line of every command in the documents."""
    for page in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        if "generated" in page.parts:
            continue
        text = page.read_text()
        lines = [line for block in BLOCK.findall(text) for line in block.splitlines()]
        lines += re.findall(r"`((?:odb-ref|make|python|pytest) [^`]*)`", text)
        for line in lines:
            command = line.partition("  #")[0].strip().removeprefix(".venv/bin/")
            if command.split(" ")[0] in ("odb-ref", "make", "python", "pytest", "torchrun"):
                yield show(page), command


def test_there_are_commands_to_check() -> None:
    assert len(list(iterate_commands())) > 30


@pytest.mark.parametrize(("page", "command"), sorted(set(iterate_commands())))
def test_a_command_of_the_documents_exists(page: str, command: str) -> None:
    """Options are checked too if the command is ours, but not its output."""
    program, *arguments = shlex.split(command)
    match program:
        case "odb-ref":
            parser = build_parser()
            (commands,) = (action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
            known = commands.choices[arguments[0]]._option_string_actions
            assert [item for item in arguments if item.startswith("--") and item.partition("=")[0] not in known] == []
        case "make":
            targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
            assert {item for item in arguments if "=" not in item and not item.startswith("-")} <= targets
        case "python" if arguments[0] == "-m":
            if not arguments[1].startswith("torch."):
                assert importlib.util.find_spec(arguments[1]) is not None
        case _:
            paths = [item.partition("::")[0] for item in arguments if re.match(r"(tests|docs|spec|examples)/", item)]
            assert paths
            assert [item for item in paths if not (ROOT / item).exists()] == []


def test_the_readme_fits_a_page() -> None:
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= 100
    assert len(re.findall(r"(?<!!)\[[^]]+\]\(", re.sub(r"!\[[^]]*\]\([^)]*\)", "", text))) == 6  # links


@pytest.mark.slow
def test_the_picture_is_what_its_script_draws() -> None:
    spec = importlib.util.spec_from_file_location("picture", ROOT / "docs" / "picture.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["picture"] = module
    spec.loader.exec_module(module)
    assert (ROOT / "docs" / "_static" / "steps.svg").read_text() == module.draw(), "python docs/picture.py"
    numbers = re.findall(r"[0-9.]+ (?:s|times as fast)", module.draw())
    for page in ("README.md", "docs/index.md"):
        alternative = re.search(r"!\[([^]]*)\]\([^)]*steps\.svg\)", (ROOT / page).read_text())
        assert sorted(re.findall(r"[0-9.]+ (?:s|times as fast)", alternative[1])) == sorted(numbers)
    (times,) = re.findall(r"[0-9.]+ times", " ".join(numbers))
    assert f"{times} the samples per second" in (ROOT / "README.md").read_text()


PLACE = re.compile(r"`((?:[\w./-]+/)[\w-]+\.py)(?:: (\w+))?`")


@pytest.mark.parametrize("page", [page for page in PAGES if page.parent.name != "decisions"], ids=show)
def test_the_places_that_a_page_names_exist(page: Path) -> None:
    """Modules are given by their path from the root, from `odb_ref` or from `odb_ref/torch`, with names in them."""
    lost = []
    for name, item in PLACE.findall(page.read_text()):
        found = [
            base / name for base in (ROOT, ROOT / "odb_ref", ROOT / "odb_ref/torch", ROOT / "simulator", page.parent)
        ]
        found = [path for path in found if path.exists()]
        if not found or (
            item and f"def {item}" not in found[0].read_text() and f"class {item}" not in found[0].read_text()
        ):
            lost.append(f"{name}: {item}")
    assert lost == []


@cache
def list_tests() -> dict[str, set[str]]:
    """Returns the tests that pytest collects in each file: functions and methods, by the file's path."""
    found = {}
    for path in (ROOT / "tests").rglob("test_*.py"):
        body = ast.parse(path.read_text()).body
        classes = [item.body for item in body if isinstance(item, ast.ClassDef) and item.name.startswith("Test")]
        functions = [item for items in (body, *classes) for item in items if isinstance(item, ast.FunctionDef)]
        found[show(path)] = {item.name for item in functions if item.name.startswith("test_")}
    return found


def join(sets: Iterable[set[str]]) -> set[str]:
    return set().union(*sets)


FILE = re.compile(r"\b((?:[\w-]+/)*test_\w+\.py)(?:::(\w+))?")
NAME = re.compile(r"`(test_\w+)`")


def find_lost_tests(text: str) -> list[str]:
    """Returns the tests that a page names but that do not exist: files without tests, and tests that their line's files lack.

    A test on a line without a file may be in any file.
    """
    lost, tests = [], list_tests()
    for line in text.splitlines():
        named = FILE.findall(line)
        held = {
            file: join(names for path, names in tests.items() if f"/{path}".endswith(f"/{file}")) for file, _ in named
        }
        lost += [file for file, names in held.items() if not names]
        lost += [name for file, name in named if name and name not in held[file]]
        lost += [name for name in NAME.findall(line) if name not in join(held.values() if held else tests.values())]
    return lost


def test_there_are_tests_to_find() -> None:
    """Also checks that names of missing tests are found."""
    assert sum(len(FILE.findall(page.read_text())) for page in PAGES) > 50
    assert sum(len(NAME.findall(page.read_text())) for page in PAGES) > 2
    here, there = "tests/repo/test_docs.py", "tests/repo/test_style.py"
    assert find_lost_tests(f"{here}, `test_there_are_tests_to_find`; {here}::test_there_are_tests_to_find") == []
    assert find_lost_tests(f"{there}, `test_there_are_tests_to_find`") == ["test_there_are_tests_to_find"]
    assert find_lost_tests(f"{there}::test_nothing, `test_nothing_else`") == ["test_nothing", "test_nothing_else"]
    assert find_lost_tests("tests/repo/test_nothing.py") == ["tests/repo/test_nothing.py"]


@pytest.mark.parametrize("page", PAGES, ids=show)
def test_the_tests_that_a_page_names_are_collected(page: Path) -> None:
    assert find_lost_tests(page.read_text()) == []


@pytest.mark.slow
def test_few_lines_change_where_somebody_moves() -> None:
    """The diffs on the pages about frameworks have at most five lines, and their imports exist."""
    pages = "".join(path.read_text() for path in sorted((ROOT / "docs" / "howto" / "frameworks").glob("*.md")))
    diffs = re.findall(r"^```diff\n(.*?)^```", pages, re.MULTILINE | re.DOTALL)
    assert len(diffs) >= 5
    for diff in diffs:
        added = [line[1:] for line in diff.splitlines() if line.startswith("+")]
        assert 0 < len(added) <= 5
        for line in added:
            found = re.match(r"from (\S+) import (.+)", line)
            if found is None or importlib.util.find_spec("torch") is None:
                continue
            if found[1] != "odb_ref" and importlib.util.find_spec("transformers") is None:
                continue
            module = importlib.import_module(found[1])
            assert [name for name in found[2].split(", ") if not hasattr(module, name)] == []
