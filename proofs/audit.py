#!/usr/bin/env python3
"""Fails if a proof has a gap, if a theorem states something other than what was reviewed, or if a part is missing.

``statements.golden`` records what is claimed: the theorems of ``Main.v`` as Coq prints them, for people to read; digests of
every theorem in the tables of ``README.md``, of all our definitions on which they rest, of the tables' rows, and of how the
model becomes a program; and the file that extracts it. ``./audit.py --accept`` rewrites it, and its diff shows a reviewer what
changed. ``./audit.py --here --show Machine. Loss.lossy_step`` prints the texts behind digests, selected by the beginnings of
their names.

- The copy: every question goes to a copy of the sources that `coqc` alone compiled from scratch. Files compiled here earlier do
  not matter. ``--here`` asks the files compiled here instead, which is faster.
- The text: ASCII, without gaps, axioms, switches that turn off a check, or commands that hide one. Its sentences are those
  that Coq itself reports to have read.
- The statements: digests cover what Coq prints with nothing left out: no notation, no coercion, no implicit argument.
- The parts: the files, ``_CoqProject`` and the theorem table name the same things.
- The kernel: no theorem of the table rests on an axiom. ``./audit.py --whole`` also lets `coqchk`, an independent checker,
  judge everything that was compiled, including Coq's library.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from difflib import unified_diff
from hashlib import sha256
from pathlib import Path

HERE = Path(__file__).resolve().parent
GOLDEN = HERE / "statements.golden"
CORES = len(os.sched_getaffinity(0))
HEAP = "s=16M,o=400"
"""OCaml's memory settings for Coq: a young heap of half Coq's own size, which takes time to touch, and fewer collections."""
PAGE = "Main"
"""The file whose theorems are meant to be read."""
EXTRACTION = "Extract"
"""The file without proofs, which writes the model as a program."""
EXTRACTING = ("Extraction", "Extract")
"""Commands that only `EXTRACTION` may use."""
MADE = ("extracted/model.ml", "extracted/model.mli")
BUILT_BY = ("extracted/main.ml", "Makefile")
"""Other files that shape the program with which the Python is compared: the code around the model, and its linking."""
HEAD = """\
What is proved: the theorems of Main.v, with every hypothesis, as Coq prints them; and digests of all else that README.md lists.
Written by `./audit.py --accept`. A change of this file is a change of what is claimed: review it as one.
"""
COMMANDS = re.compile(
    "From|Require|Import|Open|Arguments|Notation|Ltac|Section|End|Definition|Fixpoint|Record|Inductive|Lemma|Theorem|Proof"
)
"""Commands that a file may use outside proofs. None of them assumes anything, hides anything, or turns off a check."""
ASSUMING = re.compile("Variables?|Hypothes[ie]s|Context")
"""Commands that a file may use inside a section. After its end, statements show them as hypotheses."""
GAPS = re.compile("Admitted|admit|give_up|Abort|Axiom|Parameter|bypass_check")
PROPERTIES = re.compile(
    "ALIGN|CONSERVE|COVER|ONCE|QUOTA|FREE|TERM|ABORT|RELEASE|STOP|BUDGET|SIZES|FEWEST|AGE|ORDER|WEIGHT|DEAL|UPDATE|REPLAY|RESUME|PLAN"
)


class Refused(Exception):
    """The audit refuses something."""


def run(folder: Path, *command: str | Path) -> str:
    """Returns what a command prints on both streams (``coqchk`` answers on stderr). It runs in a minimal environment.

    Raises: Refused when it fails.
    """
    surroundings = {"PATH": os.environ.get("PATH", ""), "HOME": str(folder), "LC_ALL": "C.UTF-8", "OCAMLRUNPARAM": HEAP}
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, env=surroundings)
    if done.returncode != 0:
        text = (done.stderr or done.stdout).strip()[-2000:]
        raise Refused(f"{' '.join(map(str, command[:1] + command[-1:]))} ends with {done.returncode}: {text}")
    return done.stdout + done.stderr


# The text ------------------------------------------------------------------------------------------------------------


def strip_comments(text: str) -> str:
    """Returns the text without comments, which may be nested, and without strings."""
    kept: list[str] = []
    depth = 0
    for part in re.split(r'(\(\*|\*\)|"(?:[^"]|"")*")', text):
        if part == "(*":
            depth += 1
        elif part == "*)" and depth:
            depth -= 1
            kept.append(" ")
        elif not depth and not part.startswith('"'):
            kept.append(part)
    return "".join(kept)


def list_sentences(text: str) -> list[str]:
    """Returns the sentences of a file, without comments and strings."""
    return re.split(r"(?<=\.)\s+", strip_comments(text).strip())


def list_parsed_sentences(name: str, text: str, timing: str) -> list[str]:
    """Returns the sentences that `coqc -time` reports to have read, without comments and strings.

    Raises: Refused when they do not cover the whole file, or Coq did not print them.
    """
    # Coq reports a tactic that a proof defines for itself again at the end of the proof.
    places = sorted({(int(first), int(end)) for first, end in re.findall(r"^Chars (\d+) - (\d+) \[", timing, re.M)})
    edges = [0, *(edge for place in places for edge in place), len(text)]
    gaps = (strip_comments(text[first:end]) for first, end in zip(edges[::2], edges[1::2], strict=True))
    if edges != sorted(edges) or any(gap.strip() for gap in gaps):
        raise Refused(f"{name}: what Coq says it has read is not the whole file, part by part")
    return [strip_comments(text[first:end]) for first, end in places]


def check_sentences(name: str, sentences: Iterable[str]) -> None:
    """Checks that a file has no gap and no axiom.

    Raises: Refused.
    """
    sections = 0
    is_proof = False
    for sentence in sentences:
        words = re.findall(r"[A-Za-z_]\w*", sentence)
        line = " ".join(sentence.split())[:200]
        if gap := next(filter(GAPS.fullmatch, words), None):
            raise Refused(f"{name}: {gap} has no place here: {line}")
        start = sentence.lstrip("-+*{} \n")
        first = words[0] if words and start.startswith(words[0]) else start[:1]
        if is_proof:
            # Tactics begin with a small letter. A command inside a proof, or a false end, could hide the rest.
            is_proof = first != "Qed"
            if is_proof and first[:1].isupper() and first != "Ltac":
                raise Refused(f"{name}: {first} has no place in a proof: {line}")
        elif ASSUMING.fullmatch(first):
            if sections < 1:
                raise Refused(f"{name}: outside a section this is an axiom: {line}")
        elif not COMMANDS.fullmatch(first) and not (first in EXTRACTING and name == f"{EXTRACTION}.v"):
            raise Refused(f"{name}: {first} has no place here: {line}")
        elif first == "From" and words[1] != "ODB":
            raise Refused(f"{name}: files are asked for From ODB, or from Coq's library: {line}")
        else:
            is_proof = first == "Proof"
            sections += (first == "Section") - (first == "End")


# The parts -----------------------------------------------------------------------------------------------------------


class Row:
    """A row of the theorem table: properties, theorems and files."""

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
    """Returns the modules in the order of ``_CoqProject``, which must hold nothing else.

    Raises: Refused when the files are others, or hold what they must not.
    """
    first, *files = (HERE / "_CoqProject").read_text().split("\n")
    if first != "-Q . ODB" or files.pop() or not all(re.fullmatch(r"[A-Z]\w*\.v", file) for file in files):
        raise Refused("_CoqProject is one line of options, then one file a line")
    here = {path.name for path in HERE.glob("*.v")}
    for name in sorted(here - set(files)):
        raise Refused(f"{name} is not in _CoqProject, so nothing checks it")
    for name in files:
        if name not in here:
            raise Refused(f"{name} is in _CoqProject, but not here")
        text = (HERE / name).read_text(encoding="utf-8")
        if not text.isascii():
            odd = next(line for line in text.splitlines() if not line.isascii())
            raise Refused(f"{name}: a sign that is not ASCII may look like another: {odd.strip()!a}")
        check_sentences(name, list_sentences(text))
    return [name.removesuffix(".v") for name in files]


def read_table(modules: Sequence[str]) -> list[tuple[Row, list[str]]]:
    """Returns the rows of the table with the full names of their theorems. Each must be a theorem, and none may be missing.

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


# The copy ------------------------------------------------------------------------------------------------------------


@contextmanager
def compile_copy(modules: Sequence[str]) -> Iterator[Path]:
    """Yields a folder that holds the compiled sources. The compiled files are copied back here unless something is refused.

    Raises: Refused.
    """
    with tempfile.TemporaryDirectory() as work:
        folder = Path(work)
        (folder / "extracted").mkdir()
        names = [f"{module}.v" for module in modules]
        for name in names:
            shutil.copyfile(HERE / name, folder / name)
        dependencies = run(folder, "coqdep", "-Q", ".", "ODB", *names)
        needs = {
            module: set(re.findall(r"(\w+)\.vo\b", needed))
            for module, needed in re.findall(r"^(\w+)\.vo[^:]*: (.*)$", dependencies, re.M)
        }

        def compile_one(module: str) -> str:
            said = run(folder, "coqc", "-q", "-time", "-Q", ".", "ODB", f"{module}.v")
            text = (folder / f"{module}.v").read_text()
            check_sentences(f"{module}.v", list_parsed_sentences(f"{module}.v", text, said))
            return module

        chain: dict[str, int] = {}  # the length of the chain of modules that wait for it: longest first
        for module in reversed(modules):
            chain[module] = 1 + max((chain.get(user, 0) for user in modules if module in needs[user]), default=0)
        todo, compiled, running = sorted(modules, key=chain.__getitem__, reverse=True), set[str](), set[Future[str]]()
        with ThreadPoolExecutor(CORES) as pool:
            while todo or running:
                ready = [module for module in todo if needs[module] <= compiled][: CORES - len(running)]
                todo = [module for module in todo if module not in ready]
                running |= {pool.submit(compile_one, module) for module in ready}
                if not running:
                    raise Refused(f"needed, and not in _CoqProject: by {', '.join(sorted(todo))}")
                done, running = wait(running, return_when=FIRST_COMPLETED)
                compiled |= {each.result() for each in done}
        yield folder
        for made in (*(f"{module}.vo" for module in modules), *MADE):
            if (folder / made).exists():
                shutil.copy2(folder / made, HERE / made)


@contextmanager
def take_compiled(modules: Sequence[str]) -> Iterator[Path]:
    """Yields this folder as compiled, which is fast, but only as trustworthy as the person who compiled it.

    Raises: Refused.
    """
    for module in modules:
        source, compiled = HERE / f"{module}.v", HERE / f"{module}.vo"
        if not compiled.exists() or compiled.stat().st_mtime < source.stat().st_mtime:
            raise Refused(f"{module}.v is newer than what was checked")
    yield HERE


# The kernel ----------------------------------------------------------------------------------------------------------

READABLY = ("Require Import List Arith QArith Permutation Sorted.", "Import ListNotations.", "Open Scope nat_scope.")
WHOLLY = ("Set Printing All.",)


def ask(
    folder: Path, modules: Sequence[str], questions: Sequence[tuple[str, str]], manner: Sequence[str] = WHOLLY
) -> dict[str, str]:
    """Returns Coq's answers to questions, by subject. Our files are not imported, so full names show where they come from."""
    sentences = [
        f"From ODB Require {' '.join(module for module in modules if module != EXTRACTION)}.",
        *manner,
        "Set Printing Width 118.",
        "Set Printing Depth 100000.",
    ]
    for subject, command in questions:
        sentences += [f'Goal True. idtac "=== {subject}". Abort.', command]
    with tempfile.TemporaryDirectory() as work:
        source = Path(work) / "question.v"
        source.write_text("\n".join(sentences) + "\n")
        answer = re.sub(r" +$", "", run(folder, "coqc", "-q", "-w", "none", "-Q", ".", "ODB", source), flags=re.M)
    _, *blocks = answer.split("=== ")
    return {subject: text.strip() for subject, text in (block.split("\n", 1) for block in blocks)}


def list_definitions(folder: Path, modules: Sequence[str], statements: dict[str, str]) -> dict[str, str]:
    """Returns all our definitions that statements rest on, directly or through other definitions, by name."""
    ours = re.compile(rf"\b(?:{'|'.join(modules)})\.[A-Za-z_][\w']*")
    printed: dict[str, str] = {}
    new = {name for text in statements.values() for name in ours.findall(text)} - statements.keys()
    while new:
        answers = ask(folder, modules, [(name, f"Print {name}.") for name in sorted(new)])
        printed |= {name: re.split(r"\n\nArguments ", text)[0].strip() for name, text in answers.items()}
        new = {found for name in new for found in ours.findall(printed[name])} - printed.keys() - statements.keys()
    kept: dict[str, str] = {}
    for name, text in printed.items():
        found = re.match(r"(?:Variant|Inductive)\s+(\w+)", text)  # also when reached through the name of a constructor
        kept[f"{name.partition('.')[0]}.{found[1]}" if found else name] = text
    return {name: kept[name] for name in sorted(kept)}


def check_names(folder: Path, modules: Sequence[str]) -> None:
    """Checks that none of our files has the name of a file in Coq's library, since answers would not distinguish them.

    Raises: Refused.
    """
    libraries = re.findall(r"^ +(\S+)$", ask(folder, modules, [("libraries", "Print Libraries.")])["libraries"], re.M)
    theirs = {library.rpartition(".")[2] for library in libraries if not library.startswith("ODB.")}
    if twice := sorted(theirs & set(modules)):
        raise Refused(f"Coq's library has a file of that name: {', '.join(twice)}")


def check_axioms(folder: Path, modules: Sequence[str], theorems: Sequence[str]) -> None:
    """Checks that no theorem rests on an axiom. Coq walks through what many theorems share only once if it is asked together.

    Raises: Refused.
    """
    asked = [
        ("everything", f"Definition everything := ({', '.join(theorems)})."),
        ("axioms", "Print Assumptions everything."),
    ]
    if (answer := ask(folder, modules, asked, READABLY)["axioms"]) != "Closed under the global context":
        raise Refused(f"a theorem rests on an axiom: {answer[:2000]}")


def check_compiled(folder: Path, modules: Sequence[str]) -> None:
    """Checks that the independent checker accepts everything compiled, including Coq's library, and finds no axiom in it.

    Raises: Refused.
    """
    answer = run(folder, "coqchk", "-silent", "-o", "-Q", ".", "ODB", *(f"ODB.{module}" for module in modules))
    for what in (
        "Axioms",
        "Constants/Inductives relying on type-in-type",
        "Constants/Inductives relying on unsafe (co)fixpoints",
        "Inductives whose positivity is assumed",
    ):
        if f"* {what}: <none>" not in answer:
            raise Refused(f"coqchk: {answer.strip()}")


# What was reviewed ---------------------------------------------------------------------------------------------------


def compute_digest(text: str) -> str:
    """Returns 128 bits of SHA-256, in hexadecimal."""
    return sha256(" ".join(text.split()).encode()).hexdigest()[:32]


def list_libraries(modules: Sequence[str]) -> list[str]:
    """Returns the files of Coq's library that our files require."""
    texts = [(HERE / f"{module}.v").read_text() for module in modules]
    asked = [words.split() for text in texts for words in list_sentences(text) if words.startswith("Require")]
    return sorted({word.removesuffix(".") for words in asked for word in words} - {"Require", "Import"})


def render(folder: Path, modules: Sequence[str], table: Sequence[tuple[Row, list[str]]]) -> tuple[str, dict[str, str]]:
    """Returns the text of ``statements.golden``, and the texts behind its digests, by name."""
    theorems = list(dict.fromkeys(name for _, names in table for name in names))
    on_page = [name for name in theorems if name.startswith(f"{PAGE}.")]
    readable = ask(folder, modules, [(name, f"Check {name}.") for name in on_page], READABLY)
    statements = ask(folder, modules, [(name, f"Check {name}.") for name in theorems])
    definitions = list_definitions(folder, modules, statements)
    extraction = (HERE / f"{EXTRACTION}.v").read_text()
    parts = [
        HEAD,
        f"== Files\n\n{' '.join(modules)}\n\nof Coq's library: {' '.join(list_libraries(modules))}\n",
        f"== {EXTRACTION}.v\n\n{extraction}",
        f"== {PAGE}.v: {len(on_page)} theorems\n",
    ]
    for row, names in table:
        parts += [
            f"-- {', '.join(row.properties)}: {row.claim}\n\n{readable[name]}\n" for name in names if name in readable
        ]
    digests = "".join(f"{compute_digest(text)} {name}\n" for name, text in statements.items())
    parts.append(f"== Theorems: {len(statements)}\n\n{digests}")
    parts.append(f"== Definitions that they rest on, file by file: {len(definitions)}\n")
    for module in modules:
        own = [f"{name}\n{text}" for name, text in definitions.items() if name.startswith(f"{module}.")]
        parts += [f"{compute_digest(chr(10).join(own))} {module}.v: {len(own)}"] if own else []
    rows = "\n".join(f"{', '.join(row.properties)} | {row.claim} | {', '.join(names)}" for row, names in table)
    parts.append(f"\n== Rows of README.md\n\n{compute_digest(rows)} {len(table)} rows\n")
    built_by = "".join(f"{sha256((HERE / name).read_bytes()).hexdigest()[:32]} {name}\n" for name in BUILT_BY)
    parts.append(f"== The program around the model\n\n{built_by}")
    return "\n".join(parts), statements | definitions


def main(arguments: Sequence[str]) -> None:
    modules = read_modules()
    table = read_table(modules)
    theorems = list(dict.fromkeys(name for _, names in table for name in names))
    with (take_compiled if "--here" in arguments else compile_copy)(modules) as folder:
        check_names(folder, modules)
        with ThreadPoolExecutor() as pool:
            parts = [pool.submit(check_axioms, folder, modules, theorems[core::CORES]) for core in range(CORES)]
            found, behind = render(folder, modules, table)
        if "--show" in arguments:
            asked = tuple(arguments[arguments.index("--show") + 1 :])
            sys.stdout.writelines(f"{text}\n\n" for name, text in behind.items() if name.startswith(asked))
            return
        if "--accept" in arguments:
            GOLDEN.write_text(found)
        golden = GOLDEN.read_text() if GOLDEN.exists() else ""
        if found != golden:
            lines = list(unified_diff(golden.splitlines(), found.splitlines(), "reviewed", "found", n=0, lineterm=""))
            advice = "where that is meant, run ./audit.py --accept, and have the diff reviewed"
            raise Refused("\n".join([f"what is proved is not what was reviewed; {advice}:", *lines[:60]]))
        for part in parts:
            part.result()
        if "--whole" in arguments:
            check_compiled(folder, modules)
    sys.stdout.write(f"audit: {len(theorems)} theorems say what was reviewed; no axioms, no gaps\n")


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except Refused as error:
        sys.exit(f"proofs/audit.py: {error}")
