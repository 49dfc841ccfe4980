"""Makes `traceability.md`, which is not committed, the table of rungs in `properties.md`, and README.md's summary of each
property's evidence: `python spec/traceability.py`.

Nothing in the tables is kept by hand. Rules come from `protocol.md`, properties from `properties.md`. Docstrings name the rules
that code implements and the properties that it keeps (`Spec: R4.2`, `Preserves: ALIGN`), and docstrings of tests name what they
test (`Spec: R4.2`, `Checks: ALIGN`). Models come from `tla/configurations.toml`, and theorems from the table of
`proofs/README.md`, if a `.v` file holds a theorem of that name. Tests under `tests/explore` walk through every state of the
code within bounds, so they count as model checking.

``--check`` writes nothing. It prints every problem, and exits with 1 if there is one.
"""

from __future__ import annotations

import ast
import re
import sys
import textwrap
import tomllib
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
_ID = r"(?:R\d+(?:\.\d+)?|I\d+)"
_NAME = r"[A-Z]{3,}(?:-[A-Z]+)?"
_RULES = re.compile(rf"Spec: ({_ID}(?:(?:, | and ){_ID})*)")
_HIDDEN = re.compile(rf"Spec:\s*\n\s*{_ID}|Spec: [^\n]*{_ID}(?:,\s*\n\s*|\s+to\s+){_ID}")
"""What one search for a rule's id behind ``Spec:`` does not find: another line, or a range."""
_KEPT = re.compile(rf"(?:Preserves|Checks):\s+({_NAME}(?:(?:,\s*|\s+and\s+){_NAME})*)")
_RUNGS = ("<!-- rungs -->", "<!-- end of rungs -->")


@dataclass(frozen=True)
class Claim:
    """A docstring that names rules or properties, and its owner."""

    owner: str
    rules: frozenset[str]
    properties: frozenset[str]
    text: str


@dataclass
class Sources:
    """Everything that the tables are made from."""

    rules: dict[str, str] = field(default_factory=dict)
    properties: dict[str, tuple[str, ...]] = field(default_factory=dict)
    unproved: dict[str, str] = field(default_factory=dict)
    """What each property's proof leaves out, according to ``Not proved:`` in its section."""
    invariants: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    non_properties: tuple[str, ...] = ()
    code: list[Claim] = field(default_factory=list)
    tests: list[Claim] = field(default_factory=list)
    models: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    theorems: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    missing_theorems: list[str] = field(default_factory=list)


def _order(rule: str) -> tuple[str, list[int]]:
    return rule[0], [int(part) for part in rule[1:].split(".")]


def _claim(owner: str, text: str) -> Claim | None:
    rules = frozenset(rule for match in _RULES.findall(text) for rule in re.findall(_ID, match))
    names = frozenset(name for match in _KEPT.findall(text) for name in re.findall(_NAME, match))
    return Claim(owner, rules, names, text) if rules or names or _HIDDEN.search(text) else None


def _read_docstrings(path: Path) -> Iterator[tuple[str, str]]:
    """Yields the owner and text of each docstring of a module, including those under attributes."""
    module = path.relative_to(ROOT).with_suffix("").as_posix()

    def visit(node: ast.AST, owner: str) -> Iterator[tuple[str, str]]:
        body: list[ast.stmt] = getattr(node, "body", [])
        before: ast.stmt | None = None
        for item in body:
            if (
                isinstance(item, ast.Expr)
                and isinstance(item.value, ast.Constant)
                and isinstance(item.value.value, str)
            ):
                name = owner
                if isinstance(before, ast.AnnAssign) and isinstance(before.target, ast.Name):
                    name = f"{owner}.{before.target.id}"
                elif isinstance(before, ast.Assign) and isinstance(before.targets[0], ast.Name):
                    name = f"{owner}.{before.targets[0].id}"
                yield name, item.value.value
            if isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                yield from visit(item, f"{owner}.{item.name}")
            before = item

    yield from visit(ast.parse(path.read_text(encoding="utf-8")), module)


def _read_claims(folder: Path) -> list[Claim]:
    claims = []
    for path in sorted(folder.rglob("*.py")):
        for owner, text in _read_docstrings(path):
            claim = _claim(owner, text)
            if claim is not None:
                claims.append(claim)
    return claims


def read_sources() -> Sources:
    """Reads the sources of the tables."""
    sources = Sources()
    for match in re.finditer(rf"^(?:\*\*({_ID})\.?\*\*|\| (I\d+) \|) ?(.*)$", _read("spec/protocol.md"), re.MULTILINE):
        sources.rules[match[1] or match[2]] = match[3]
    for invariant, name in re.findall(r"^\| (I\d+) \| (\w+) \|", _read("spec/protocol.md"), re.MULTILINE):
        sources.invariants[name].append(f"{invariant} (`odb_ref/core/invariants`)")
    text = _read("spec/properties.md")
    for chapter in re.split(r"^### ", text, flags=re.MULTILINE)[1:]:
        section = chapter.split("\n## ", 1)[0]
        name = section.split("\n", 1)[0].strip()
        rests = re.search(r"^Rests on: ([^#]*?)(?:\n\n|\Z)", section, re.MULTILINE)
        ids = re.findall(_ID, rests[1]) if rests else []
        sources.properties[name] = tuple(sorted(set(ids), key=_order))
        if missing := re.search(r"^Not proved: (.*?)\.$", section, re.MULTILINE | re.DOTALL):
            sources.unproved[name] = " ".join(missing[1].split())
    sources.non_properties = tuple(re.findall(r"^\| (NP\d+) \|", text, re.MULTILINE))
    for package in ("odb_ref", "simulator"):
        sources.code += _read_claims(ROOT / package)
    sources.tests = _read_claims(ROOT / "tests")
    models = tomllib.loads(_read("spec/tla/configurations.toml"))
    for section in ("holds", "ends"):
        for name, row in models[section].items():
            if isinstance(row, dict):
                bounds = ", ".join(f"{constant}={value}" for constant, value in row["constants"].items())
                for kept in re.findall(_NAME, row.get("checks", models[section].get("checks", ""))):
                    sources.models[kept].append(f"`{name}` ({bounds})")
    _read_theorems(sources)
    return sources


def _read_theorems(sources: Sources) -> None:
    readme = ROOT / "proofs" / "README.md"
    if not readme.exists():
        return
    files = sorted((ROOT / "proofs").rglob("*.v"))
    proofs = "\n".join(path.read_text(encoding="utf-8") for path in files)
    proved = set(re.findall(r"^\s*(?:Theorem|Lemma|Corollary|Proposition)\s+(\w+)", proofs, re.MULTILINE))
    for row in re.findall(r"^\|.*\|$", readme.read_text(encoding="utf-8"), re.MULTILINE):
        names = [name for name in re.findall(_NAME, row.split("|")[1]) if name in sources.properties]
        for theorem in re.findall(r"`(\w+)`", row):
            if not names or theorem not in proved:
                if names and "_" in theorem:
                    sources.missing_theorems.append(theorem)
                continue
            for name in names:
                if theorem not in sources.theorems[name]:
                    sources.theorems[name].append(theorem)


def _read(path: str) -> str:
    return (ROOT / path).read_text(encoding="utf-8")


# Tables --------------------------------------------------------------------------------------------------------------


def _is_exploration(claim: Claim) -> bool:
    return claim.owner.startswith("tests/explore/")


def _is_evidence(claim: Claim, name: str) -> bool:
    """Returns True for a test of the property itself. A counterexample to something stronger does not count."""
    return name in claim.properties and not re.match(r"NP\d", claim.text)


def _is_test(claim: Claim) -> bool:
    return claim.owner.rpartition(".")[2].startswith("test")


def compute_rung(sources: Sources, name: str) -> str:
    """Returns how well a property is established, according to the existing evidence."""
    rungs = []
    if sources.theorems[name]:
        rungs.append(f"proved{' in part' * (name in sources.unproved)}")
    tools = ["TLC"] if sources.models[name] else []
    claims = [claim for claim in sources.tests if _is_evidence(claim, name) and _is_test(claim)]
    tools += ["explore"] if any(map(_is_exploration, claims)) else []
    if tools:
        rungs.append(f"model-checked ({', '.join(tools)})")
    if any(not _is_exploration(claim) for claim in claims):
        rungs.append("tested")
    return ", ".join(rungs) or "assumed"


def _list(title: str, items: list[str], otherwise: str) -> list[str]:
    """Returns a heading and a line for each item, wrapped so that the page can be read as plain text."""
    if not items:
        return [f"- {title}: {otherwise}"]
    wrapped = [textwrap.fill(item, 116, initial_indent="  - ", subsequent_indent="    ") for item in items]
    return [f"- {title}:", *wrapped]


def _owners(claims: list[Claim]) -> list[str]:
    """Returns the names in short form: one line for each module, as ``module: a, b``."""
    grouped: dict[str, list[str]] = defaultdict(list)
    for claim in claims:
        module, _, name = claim.owner.partition(".")
        grouped[module].append(name or "(module)")
    return [f"`{module}`: {', '.join(dict.fromkeys(names))}" for module, names in sorted(grouped.items())]


def render(sources: Sources) -> str:
    """Returns the text of `traceability.md`."""
    lines = [
        "# Traceability",
        "",
        "Made by `python spec/traceability.py`; do not edit. A test fails when this page is stale, when a rule has no",
        "implementer or no test, and when a docstring names an id that does not exist.",
        "",
        "## Properties",
    ]
    for name, rules in sources.properties.items():
        code = sources.invariants[name] + _owners([claim for claim in sources.code if name in claim.properties])
        tests = _owners([claim for claim in sources.tests if _is_evidence(claim, name)])
        theorems = [", ".join(f"`{theorem}`" for theorem in sources.theorems[name])]
        lines += ["", f"### {name}", "", f"{compute_rung(sources, name)[:1].upper()}{compute_rung(sources, name)[1:]}."]
        lines += [textwrap.fill(f"Rests on {', '.join(rules)}.", 116), ""]
        lines += _list("Kept by", code, "the rules")
        lines += _list("Tests", tests, "none")
        lines += _list("Models", sources.models[name], "none")
        lines += _list("Theorems", [item for item in theorems if item], "none")
    lines += ["", "## Rules"]
    for rule in sorted(sources.rules, key=_order):
        code = _owners([claim for claim in sources.code if rule in claim.rules])
        tests = _owners([claim for claim in sources.tests if rule in claim.rules])
        lines += ["", f"### {rule}", ""]
        lines += _list("Implemented by", code, "none")
        lines += _list("Tests", tests, "none")
    return "\n".join(lines) + "\n"


def render_rungs(sources: Sources) -> str:
    """Returns `properties.md` with its table of rungs updated."""
    text = _read("spec/properties.md")
    head, rest = text.split(_RUNGS[0])
    tail = rest.split(_RUNGS[1])[1]
    rows = [
        f"| {name} | {compute_rung(sources, name)} | {sources.unproved.get(name, '')} |" for name in sources.properties
    ]
    table = ["| property | rung | not proved |", "|---|---|---|", *rows]
    return "\n".join([f"{head}{_RUNGS[0]}", *table, f"{_RUNGS[1]}{tail}"])


def render_readme(sources: Sources) -> str:
    """Returns `README.md` with the evidence in its table of properties updated.

    Raises: ValueError when properties of one row are not established alike, or one has no row, or two.
    """
    named: list[str] = []

    def fill(row: re.Match[str]) -> str:
        names = row[1].split(", ")
        named.extend(names)
        cells = {
            compute_rung(sources, name).replace("in part", f"(except {sources.unproved.get(name)})") for name in names
        }
        if len(cells) > 1:
            raise ValueError(f"README.md: {row[1]} are not established alike")
        return f"| {row[1]} | {row[2]} | {cells.pop()} |"

    known = "|".join(sources.properties)
    text = re.sub(
        rf"^\| ((?:{known})(?:, (?:{known}))*) \| (.*?) \| .* \|$", fill, _read("README.md"), flags=re.MULTILINE
    )
    if sorted(named) != sorted(sources.properties):
        raise ValueError("README.md: each property has one row")
    return text


def find_problems(sources: Sources) -> list[str]:
    """Returns the problems of the tree, a line each."""
    problems = []
    for rule in sorted(sources.rules, key=_order):
        if not any(rule in claim.rules for claim in sources.code):
            problems.append(f"{rule} has no implementer")
        if not any(rule in claim.rules for claim in sources.tests if _is_test(claim)):
            problems.append(f"{rule} has no test")
    for claim in (*sources.code, *sources.tests):
        problems += [f"{claim.owner}: unknown rule {rule}" for rule in sorted(claim.rules - set(sources.rules))]
        unknown = sorted(claim.properties - set(sources.properties))
        problems += [f"{claim.owner}: unknown property {name}" for name in unknown]
        if _HIDDEN.search(claim.text):
            problems.append(f"{claim.owner}: `Spec:` and each rule it names stand on one line")
    for name, rules in sources.properties.items():
        problems += [f"{name} rests on unknown rule {rule}" for rule in rules if rule not in sources.rules]
        if not rules:
            problems.append(f"{name} rests on no rule")
        if not any(_is_evidence(claim, name) for claim in sources.tests if _is_test(claim)):
            problems.append(f"{name} has no test")
    for name in sources.non_properties:
        if not any(re.match(rf"{name}\b", claim.text) for claim in sources.tests):
            problems.append(f"{name} has no test")
    problems += [f"proofs/README.md names a theorem that is not there: {name}" for name in sources.missing_theorems]
    problems += [
        f"models name an unknown property: {name}" for name in sources.models if name not in sources.properties
    ]
    return problems


def main(arguments: list[str]) -> int:
    """Writes the tables, or checks them."""
    sources = read_sources()
    problems = find_problems(sources)
    pages = {"spec/properties.md": render_rungs(sources), "README.md": render_readme(sources)}
    if "--check" not in arguments:
        for name, text in (pages | {"spec/traceability.md": render(sources)}).items():
            (ROOT / name).write_text(text, encoding="utf-8")
    problems += [
        f"{name} is stale: run python spec/traceability.py" for name, text in pages.items() if _read(name) != text
    ]
    sys.stdout.write("".join(f"{problem}\n" for problem in problems))
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
