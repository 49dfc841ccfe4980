#!/usr/bin/env python3
"""Fails when a proof is not one, when a theorem says something else than what was reviewed, or when a part is missing.

Coq alone answers what a theorem says: its statement is printed with every hypothesis of its section, and so is every
definition that it rests on, down to Coq's library. All of it must be, word for word, what ``statements.golden`` holds.
``./audit.py --accept`` writes that file anew. Its diff is what a reviewer has to read.

- The text: no gap, no axiom, no switch that turns a check off, no command that would hide one.
- The parts: the files, ``_CoqProject`` and the theorem table of ``README.md`` name each other, and nothing else.
- The kernel: no theorem of the table rests on an axiom, and ``coqchk`` finds none in what was compiled.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from difflib import unified_diff
from pathlib import Path

HERE = Path(__file__).resolve().parent
GOLDEN = HERE / "statements.golden"
EXTRACTION = "Extract"
"""The file that proves nothing: it writes the model as a program."""
EXTRACTING = ("Extraction", "Extract")
"""What only that file may say."""
HEAD = """\
What the theorems of README.md say, with every hypothesis, and every definition that they rest on, as Coq prints them.
Written by `./audit.py --accept`. A change of this file is a change of what is claimed: review it as one.
"""
COMMANDS = re.compile(
    "From|Require|Import|Open|Arguments|Notation|Ltac|Section|End|Definition|Fixpoint|Record|Inductive|Lemma|Theorem|Proof"
)
"""What a file may say outside proofs. Nothing of it assumes, hides, or turns a check off."""
ASSUMING = re.compile("Variables?|Hypothes[ie]s|Context")
"""What a file may say inside a section, which closes it: the statement shows it as a hypothesis."""
GAPS = re.compile("Admitted|admit|give_up|Abort|Axiom|Parameter|bypass_check")
PROPERTIES = re.compile(
    "ALIGN|CONSERVE|COVER|ONCE|QUOTA|FREE|TERM|ABORT|RELEASE|STOP|BUDGET|SIZES|FEWEST|AGE|ORDER|WEIGHT|DEAL|REPLAY|RESUME"
)


class Refused(Exception):
    """Something that the audit does not let pass."""


def run(*command: str | Path) -> str:
    """What a command prints, on both streams: ``coqchk`` answers on the second.

    Raises: Refused when it fails.
    """
    done = subprocess.run(command, cwd=HERE, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        text = (done.stderr or done.stdout).strip()[-2000:]
        raise Refused(f"{command[0]} ends with {done.returncode}: {text}")
    return done.stdout + done.stderr


# The text ------------------------------------------------------------------------------------------------------------


def strip_comments(text: str) -> str:
    """The text without comments, which may be nested, and without what strings say."""
    kept: list[str] = []
    depth = 0
    for part in re.split(r'(\(\*|\*\)|"(?:[^"]|"")*")', text):
        if part == "(*":
            depth += 1
        elif part == "*)" and depth:
            depth -= 1
        elif depth:
            kept.append("\n" * part.count("\n"))
        elif not part.startswith('"'):
            kept.append(part)
    return "".join(kept)


def check_text(name: str, text: str) -> None:
    """Checks that a file has no gap and no axiom.

    Raises: Refused.
    """
    sections = 0
    is_proof = False
    for sentence in re.split(r"(?<=\.)\s+", strip_comments(text).strip()):
        words = re.findall(r"[A-Za-z_]\w*", sentence)
        line = " ".join(sentence.split())[:200]
        if gap := next(filter(GAPS.fullmatch, words), None):
            raise Refused(f"{name}: {gap} has no place here: {line}")
        start = sentence.lstrip("-+*{} \n")
        first = words[0] if words and start.startswith(words[0]) else start[:1]
        if is_proof:
            # Tactics are in small letters; a command inside a proof, or an end that is none, could hide the rest.
            is_proof = first != "Qed"
            if is_proof and first[:1].isupper() and first != "Ltac":
                raise Refused(f"{name}: {first} has no place in a proof: {line}")
        elif ASSUMING.fullmatch(first):
            if sections < 1:
                raise Refused(f"{name}: outside a section this is an axiom: {line}")
        elif not COMMANDS.fullmatch(first) and not (first in EXTRACTING and name == f"{EXTRACTION}.v"):
            raise Refused(f"{name}: {first} has no place here: {line}")
        else:
            is_proof = first == "Proof"
            sections += (first == "Section") - (first == "End")


# The parts -----------------------------------------------------------------------------------------------------------


class Row:
    """A row of the theorem table: its properties, theorems and files."""

    def __init__(self, line: str) -> None:
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if len(cells) != 4:
            raise Refused(f"README.md: a row has four cells: {line.strip()}")
        self.properties = cells[0].split(", ")
        self.claim = cells[1]
        self.theorems = re.findall(r"`(\w+)`", cells[2])
        self.modules = [file.removesuffix(".v") for file in cells[3].split(", ")]
        if not self.claim or not self.theorems or not all(map(PROPERTIES.fullmatch, self.properties)):
            raise Refused(f"README.md: a row names properties, a claim and theorems: {line.strip()}")


def read_modules() -> list[str]:
    """The modules in the order of ``_CoqProject``, which holds nothing but them.

    Raises: Refused when the files are others, or newer than what was checked.
    """
    first, *files = (HERE / "_CoqProject").read_text().split("\n")
    if first != "-Q . ODB" or files.pop() or not all(re.fullmatch(r"[A-Z]\w*\.v", file) for file in files):
        raise Refused("_CoqProject is one line of options, then one file a line")
    here = {path.name for path in HERE.glob("*.v")}
    for name in sorted(here - set(files)):
        raise Refused(f"{name} is not in _CoqProject, so nothing checks it")
    for name in files:
        source, checked = HERE / name, HERE / f"{name}o"
        if name not in here:
            raise Refused(f"{name} is in _CoqProject, but not here")
        check_text(name, source.read_text())
        if not checked.exists() or checked.stat().st_mtime < source.stat().st_mtime:
            raise Refused(f"{name} is newer than what was checked")
    return [name.removesuffix(".v") for name in files]


def read_table(modules: Sequence[str]) -> list[tuple[Row, list[str]]]:
    """The rows of the table, each with the full names of its theorems. They are all theorems, and all of them are there.

    Raises: Refused.
    """
    home: dict[str, str] = {}
    main: set[str] = set()
    for module in modules:
        text = strip_comments((HERE / f"{module}.v").read_text())
        for kind, name in re.findall(
            r"^ *(Theorem|Lemma|Corollary|Fact|Proposition|Remark|Property) (\w+)", text, re.M
        ):
            if kind != "Lemma" and name in home:
                raise Refused(f"two statements are called {name}")
            home[name] = module
            if kind != "Lemma":
                main.add(name)
    lines = (HERE / "README.md").read_text().splitlines()
    rows = [Row(line) for line in lines if line.startswith("|") and re.match(r"\| [A-Z]{3}", line)]
    table: list[tuple[Row, list[str]]] = []
    for row in rows:
        for name in row.theorems:
            if name not in main:
                raise Refused(f"README.md names {name}, and no theorem is called that")
        if {home[name] for name in row.theorems} != set(row.modules):
            raise Refused(f"README.md: {', '.join(row.theorems)} not in exactly {', '.join(row.modules)}")
        table.append((row, [f"{home[name]}.{name}" for name in row.theorems]))
    for name in sorted(main - {name for row in rows for name in row.theorems}):
        raise Refused(f"README.md does not name the theorem {name}")
    return table


# The kernel ----------------------------------------------------------------------------------------------------------


def ask(modules: Sequence[str], questions: Sequence[tuple[str, str]]) -> dict[str, str]:
    """Coq's answers to questions, by what they are about. Nothing of ours is imported: names say where they come from."""
    sentences = [
        f"From ODB Require {' '.join(module for module in modules if module != EXTRACTION)}.",
        "Require Import List Arith QArith Permutation Sorted.",
        "Import ListNotations.",
        "Open Scope nat_scope.",
        "Set Printing Width 118.",
        "Set Printing Depth 100000.",
    ]
    for subject, command in questions:
        sentences += [f'Goal True. idtac "=== {subject}". Abort.', command]
    with tempfile.TemporaryDirectory() as work:
        source = Path(work) / "question.v"
        source.write_text("\n".join(sentences) + "\n")
        answer = re.sub(r" +$", "", run("coqc", "-q", "-w", "none", "-Q", ".", "ODB", source), flags=re.M)
    _, *blocks = answer.split("=== ")
    return {subject: text.strip() for subject, text in (block.split("\n", 1) for block in blocks)}


def collect(modules: Sequence[str], theorems: Sequence[str]) -> tuple[dict[str, str], dict[str, str]]:
    """The statements of the theorems, and the definitions of all that they speak of."""
    statements = ask(modules, [(name, f"Check {name}.") for name in theorems])
    ours = re.compile(rf"\b(?:{'|'.join(modules)})\.[A-Za-z_][\w']*")
    printed: dict[str, str] = {}
    new = {name for text in statements.values() for name in ours.findall(text)} - set(theorems)
    while new:
        answers = ask(modules, [(name, f"Print {name}.") for name in sorted(new)])
        printed |= {name: re.split(r"\n\nArguments ", text)[0].strip() for name, text in answers.items()}
        new = {found for name in new for found in ours.findall(printed[name])} - printed.keys() - set(theorems)
    return statements, drop_parts(printed)


def drop_parts(printed: dict[str, str]) -> dict[str, str]:
    """The definitions by name, without the fields of records and the constructors of types, which their types show."""
    kept: dict[str, str] = {}
    fields: set[str] = set()
    for name, text in printed.items():
        module = name.partition(".")[0]
        if found := re.match(r"(?:Record|Inductive)\s+(\w+)", text):
            kept[f"{module}.{found[1]}"] = text
            if text.startswith("Record"):
                fields |= {f"{module}.{field}" for field in re.findall(r"^  [{ ] (\w+) :", text, re.M)}
        else:
            kept[name] = text
    return {name: kept[name] for name in sorted(kept) if name not in fields or "let (" not in kept[name]}


def check_axioms(modules: Sequence[str], theorems: Sequence[str]) -> None:
    """Checks that no theorem rests on an axiom. One question for all: what they share is walked through once.

    Raises: Refused.
    """
    asked = [
        ("everything", f"Definition everything := ({', '.join(theorems)})."),
        ("axioms", "Print Assumptions everything."),
    ]
    if (answer := ask(modules, asked)["axioms"]) != "Closed under the global context":
        raise Refused(f"a theorem rests on an axiom: {answer[:2000]}")


def check_compiled(modules: Sequence[str]) -> None:
    """Fails unless the independent checker accepts all that was compiled here, and finds no axiom in it.

    Coq's own library is taken as it is. Its parameters are listed among the axioms; no theorem rests on them (`check_axioms`).

    Raises: Refused.
    """
    chosen = [word for module in modules for word in ("-norec", f"ODB.{module}")]
    answer = run("coqchk", "-silent", "-o", "-Q", ".", "ODB", *chosen)
    for what in (
        "Constants/Inductives relying on type-in-type",
        "Constants/Inductives relying on unsafe (co)fixpoints",
        "Inductives whose positivity is assumed",
    ):
        if f"* {what}: <none>" not in answer:
            raise Refused(f"coqchk: {answer.strip()}")
    if "* Axioms:" not in answer or re.search(r"^\s+ODB\.", answer, re.MULTILINE):
        raise Refused(f"coqchk finds an axiom: {answer.strip()}")


def render(modules: Sequence[str], table: Sequence[tuple[Row, list[str]]]) -> str:
    """The text of ``statements.golden``."""
    theorems = list(dict.fromkeys(name for _, names in table for name in names))
    statements, definitions = collect(modules, theorems)
    parts = [HEAD, f"== Files\n\n{' '.join(modules)}\n", f"== Theorems: {len(theorems)}\n"]
    for row, names in table:
        parts.append(f"-- {', '.join(row.properties)}: {row.claim}\n")
        parts += [f"{statements[name]}\n" for name in names]
    parts.append(f"== Definitions: {len(definitions)}\n")
    parts += [f"-- {name}\n{text}\n" for name, text in definitions.items()]
    return "\n".join(parts)


def main(arguments: Sequence[str]) -> None:
    modules = read_modules()
    table = read_table(modules)
    found = render(modules, table)
    if "--accept" in arguments:
        GOLDEN.write_text(found)
    golden = GOLDEN.read_text() if GOLDEN.exists() else ""
    if found != golden:
        lines = list(unified_diff(golden.splitlines(), found.splitlines(), "reviewed", "found", n=2, lineterm=""))
        raise Refused("what is proved is not what was reviewed:\n" + "\n".join(lines[:60]))
    check_axioms(modules, [name for _, names in table for name in names])
    if "--quick" not in arguments:
        check_compiled(modules)
    count = len({name for _, names in table for name in names})
    sys.stdout.write(f"audit: {count} theorems say what was reviewed; no axioms, no gaps\n")


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except Refused as error:
        sys.exit(f"proofs/audit.py: {error}")
