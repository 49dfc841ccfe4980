"""What a linter does not check: lengths of modules, ids of rules, and that nothing private to a workplace is shipped."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

import pytest

from odb_ref.trace.check import Property
from tests.helpers.capture import capture
from tests.repo import prose

ROOT = Path(__file__).parents[2]
SHIPPED = sorted([*ROOT.glob("odb_ref/**/*.py"), *ROOT.glob("simulator/**/*.py")])
SOURCES = sorted([*SHIPPED, *ROOT.glob("tests/**/*.py"), *ROOT.glob("examples/**/*.py")])
LINES = 420

SPEC = re.compile(r"Spec: ([^\n\"]*)")
RULE = re.compile(r"\b[RI]\d+(?:\.\d+)?\b")


def show(path: Path) -> str:
    return str(path.relative_to(ROOT))


@functools.cache
def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def test_a_module_is_short_enough_to_read() -> None:
    lengths = {show(path): len(path.read_text().splitlines()) for path in SHIPPED}
    assert {path: lines for path, lines in lengths.items() if lines > LINES} == {}


def test_no_bare_assert_is_shipped() -> None:
    found = [(path, node) for path in SHIPPED for node in ast.walk(parse(path)) if isinstance(node, ast.Assert)]
    assert [f"{show(path)}:{node.lineno}" for path, node in found] == []


def test_a_module_says_what_it_is_for() -> None:
    assert [show(path) for path in SHIPPED if parse(path).body and not ast.get_docstring(parse(path))] == []


def list_public(node: ast.Module | ast.ClassDef) -> list[ast.FunctionDef | ast.ClassDef]:
    """Returns functions and classes that a user can reach by public names, including methods."""
    found: list[ast.FunctionDef | ast.ClassDef] = []
    for item in node.body:
        if isinstance(item, ast.FunctionDef | ast.ClassDef) and not item.name.startswith("_"):
            found += [item, *(list_public(item) if isinstance(item, ast.ClassDef) else ())]
    return found


def test_what_is_public_has_a_docstring() -> None:
    public = [(path, node) for path in SHIPPED for node in list_public(parse(path))]
    assert [f"{show(path)}:{node.lineno}" for path, node in public if ast.get_docstring(node) is None] == []


def test_a_spec_reference_names_a_rule_that_exists() -> None:
    text = (ROOT / "spec" / "protocol.md").read_text()
    known = set(re.findall(r"\*\*(R\d+(?:\.\d+)?)\.?\*\*", text)) | set(
        re.findall(r"^\| (I\d+) \|", text, re.MULTILINE)
    )
    assert len(known) > 20
    for path, reference in [(file, item) for file in SOURCES for item in SPEC.findall(file.read_text())]:
        ids = RULE.findall(reference)
        if path in SHIPPED:
            assert ids or set(re.findall(r"[A-Z]{3,}", reference)) & set(Property), f"{path}: no rule in '{reference}'"
        assert set(ids) <= known, f"{path}: {reference}"


def find_unlisted(text: str) -> set[str]:
    """Returns numbers that a group of rules skips without listing them as retired, and retired numbers that are used again."""
    ids = [re.match(r"(R\d+)\.(\d+)", item) for item in re.findall(r"\*\*(R\d+\.\d+)\.?\*\*", text)]
    numbers: dict[str, set[int]] = {}
    for found in ids:
        if found:
            numbers.setdefault(found[1], set()).add(int(found[2]))
    retired = set(RULE.findall("".join(re.findall(r"^Retired, .*$", text, re.MULTILINE))))
    left_out = {f"{group}.{n}" for group, used in numbers.items() for n in range(1, max(used)) if n not in used}
    used_again = {
        item for item in retired if int(item.partition(".")[2] or 0) in numbers.get(item.partition(".")[0], set())
    }
    return (left_out - retired) | used_again


def test_a_rule_that_is_gone_is_listed_as_retired() -> None:
    text = (ROOT / "spec" / "protocol.md").read_text()
    assert find_unlisted(text) == set()
    assert find_unlisted(text.replace("R4.4", "")) == {"R4.4"}
    assert find_unlisted(f"{text}\n**R7.6** Again.") == {"R7.6"}
    assert find_unlisted(text.replace("**R5.3**", "").replace("**R5.3.**", "")) == {"R5.3"}


def list_functions(path: Path) -> list[tuple[ast.FunctionDef, str]]:
    """Returns functions with their docstrings, without properties, which are values."""
    found = []
    for node in ast.walk(parse(path)):
        if isinstance(node, ast.FunctionDef) and (text := ast.get_docstring(node)):
            names = {ast.unparse(item) for item in node.decorator_list}
            if not any("property" in name or name.endswith(".setter") for name in names):
                found.append((node, text))
    return found


NO_VERBS = {
    "A", "An", "The", "True", "False", "Nothing", "None", "How", "What", "Why", "Where", "Whether", "Which",
    "Exactly",
}  # fmt: skip


def test_the_docstring_of_a_function_that_answers_begins_with_a_verb() -> None:
    """ "Returns the groups", not "The groups". A function that returns nothing may say what happens."""
    wrong = []
    for path, (node, text) in [(file, item) for file in SHIPPED for item in list_functions(file)]:
        is_silent = isinstance(node.returns, ast.Constant) and node.returns.value is None
        if not is_silent and text.split()[0].rstrip(".,:;") in NO_VERBS:
            wrong.append(f"{show(path)}:{node.lineno}: {text.splitlines()[0]}")
    assert wrong == []


TEXTS = (".py", ".md", ".v", ".tla")


# Assembled here, so that this file does not contain them.
FOUND = ("this " + "is " + "no state", "an epoch gone " + "on with", '"""' + 'None."""', "they take " + "note")
FOUND += ("He" + "ars it", "Sa" + "ys which", "for who" + "ever asks", "of one" + "'s own", "where it is " + "none")
FOUND += (
    '    """Ha' + 's the rank end."""',
    "as many " + "rows as it has",
    "It ends. Of " + "it all",
    "it says, " + "that",
)
FINE = (
    "there is no such file",
    "it is no longer so",
    "is no more than a header",
    "There are no files",
    "R8, that is so",
)
FINE += (
    "None where there are none",
    "at least as many as",
    "Of course",
    "one of the ranks",
    "he has the rank",
    "none is left",
)


@pytest.mark.parametrize("line", FOUND)
def test_what_is_translated_is_found(line: str) -> None:
    assert [number for number, _, _ in prose.find(f"Fine.\n{line}\n")] == [2]


def test_english_is_not_found() -> None:
    assert list(prose.find("\n".join(FINE))) == []


# The number of ranks is W everywhere. N is free for other counts in texts, but in a proof any N would be read as that number.
OTHER_WORLD = re.compile(r"(?<!\w)`?N`? (?:the )?(?:" + r"ranks|processes)\b")
OTHER_WORLD_IN_PROOFS = re.compile(r"(?<![\w'.])N(?![\w']|\.\w)")


def find_other_worlds(path: Path, text: str) -> list[str]:
    pattern = OTHER_WORLD_IN_PROOFS if path.suffix in (".v", ".golden") else OTHER_WORLD
    return [f"{show(path)}:{n}: {line.strip()}" for n, line in enumerate(text.splitlines(), 1) if pattern.search(line)]


def test_the_number_of_ranks_has_one_name() -> None:
    tracked = [path for path in list_tracked() if path.suffix in (*TEXTS, ".golden") and path.is_file()]
    if not tracked:
        pytest.skip("not a git checkout")
    assert [found for path in tracked for found in find_other_worlds(path, path.read_text())] == []
    proof = ROOT / "proofs" / "System.v"
    assert len(find_other_worlds(proof, "Variable N : nat.\nseq 0 N\nN.add NoDup N' None\nforall r, r < N ->")) == 3
    assert find_other_worlds(ROOT / "README.md", "of N" + " ranks, of N samples") != []


def list_tracked() -> list[Path]:
    done = capture(["git", "ls-files"], cwd=ROOT)
    return [ROOT / name for name in done.stdout.splitlines()]


def test_no_path_of_a_workplace_is_shipped() -> None:
    tracked = list_tracked()
    if not tracked:
        pytest.skip("not a git checkout")
    # Assembled here, so that this file does not contain them.
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
