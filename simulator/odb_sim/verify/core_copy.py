"""The stages that verify a changed core: everything that ties the core to its spec, its proofs and its model.

The repository is copied to a temporary folder with the changed core in it. Each stage is a process there, two at a time. A
stage whose tool or files are missing is skipped, with the reason.
"""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Final

import odb_ref
from odb_ref.core.errors import UsageError
from odb_sim.verify.verdict import OF_THE_WORLD, Finding, Stage, decode_stage

LIMIT_S: Final = 570.0
"""The most seconds for all stages together."""
_TEST_S: Final = 120
"""The most seconds for one test."""
_WORLDS_S: Final = 150.0
"""The most seconds for one stage of worlds."""
NOT_OF_THE_CORE: Final = (
    "worlds beyond these ranges",
    "PLAN: plans of known lengths, which odb_ref/plan makes",
    "jobs of real processes: the torch adapter with this core, its speed, and traces of runs with the shipped one",
    "the Coq and TLA+ models themselves: a change that is meant needs its proof, `make proofs`",
)
"""The things about which the verdict on a core says nothing."""
_ROOT: Final = Path(odb_ref.__file__).parents[1]
_COPIED: Final = ("odb_ref", "simulator", "tests", "spec", "examples", "pyproject.toml")
_IGNORED: Final = shutil.ignore_patterns("__pycache__", "*.pyc", ".hypothesis")
_ID: Final = "[A-Z]{3,}(?:-[A-Z]+)*"
_VIOLATED: Final = re.compile(
    rf"(?:Violation\(property=<Property\.|InvariantError: (?:I\d+: )?|Breach: )({_ID})\b|\b({_ID}) rank \S+ round"
)
"""How the checker of traces, the core's invariants and an exploration name what is violated."""
_MODEL: Final = Path("proofs/extracted/model")

_PROVED: Final = (*OF_THE_WORLD, "RESUME")
"""What is known of the core that is specified, proved and modelled, and so not of one that differs from it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Suite:
    """A stage that runs tests. ``property`` is violated if one fails; ``judges`` lists the properties that only tests judge,
    ``doubts`` those not shown of this core if one fails, and ``needs`` is a file without which they cannot run.
    """

    name: str
    property: str
    says: str
    tests: tuple[str, ...]
    judges: tuple[str, ...] = ()
    doubts: tuple[str, ...] = ()
    needs: Path | None = None


_SUITES: Final = (
    _Suite(
        name="unit",
        property="AS-TESTED",
        says="the exact tests of the core, and those of the spec's rules and properties",
        tests=(
            "tests/core",
            "tests/properties",
            "tests/spec/test_r",
            "tests/spec/test_properties.py",
        ),
        judges=("RESUME", "PEERS"),
    ),
    _Suite(
        name="magnitudes",
        property="AS-JUDGED",
        says="the checker accepts worlds of all magnitudes and their rests: to 100 ranks, 12 limits, round 65,536",
        tests=("tests/spec/test_magnitudes.py",),
        judges=("RESUME", "PEERS"),
    ),
    _Suite(
        name="second",
        property="AS-SPECIFIED",
        says="a second implementation, written from the spec alone, makes the same batches in random worlds",
        tests=("tests/spec/test_second_implementation.py", "tests/spec/test_second_updates.py"),
        doubts=_PROVED,
    ),
    _Suite(
        name="differential",
        property="AS-PROVED",
        says="the extracted Coq model makes the same groups, alignments, draws and transitions in random worlds",
        tests=tuple(
            f"tests/proofs/test_{name}"
            for name in ("extraction", "rest", "shards", "shared_worlds", "sizes_and_wants", "loading", "same_graph")
        ),
        doubts=_PROVED,
        needs=_MODEL,
    ),
    _Suite(
        name="twins",
        property="AS-SIMULATED",
        says="the simulator's arrays, written apart, make the same groups and rounds, of epochs that go on too",
        tests=(
            "tests/arrays/test_rules.py",
            "tests/arrays/test_twins.py",
            "tests/simulator/test_resumed.py",
            "tests/simulator/test_rounds.py",
            "tests/trace/test_check.py",
            "tests/trace/test_updates.py",
        ),
    ),
    _Suite(
        name="TLC",
        property="AS-MODELLED",
        says="the TLA+ model's graph, as TLC walks it (spec/tla), is the core's; traces are behaviours of it",
        tests=("tests/tla/test_same_graph.py", "tests/tla/test_traces.py"),
        doubts=_PROVED,
    ),
)


@dataclass(frozen=True, slots=True)
class _Copy:
    """A copy of the repository with the changed core, and the processes that run in it until ``deadline``."""

    folder: Path
    deadline: float
    """In seconds of `time.monotonic`."""
    _processes: set[subprocess.Popen[str]] = field(default_factory=set)

    def run(self, arguments: list[str]) -> subprocess.CompletedProcess[str] | None:
        """Runs Python and returns the process when it is done, or None if time runs out first."""
        limit_s = self.deadline - time.monotonic()
        if limit_s <= 0:
            return None
        path = os.pathsep.join([str(self.folder), str(self.folder / "simulator")])
        environment = {**os.environ, "PYTHONPATH": path, "COLUMNS": "200", "PYTHONDONTWRITEBYTECODE": "1"}
        # In CI a missing tool fails a test, and examples are fixed. Here it should skip a stage, and examples may differ.
        environment.pop("CI", None)
        with subprocess.Popen(
            [sys.executable, *arguments],
            cwd=self.folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        ) as process:
            self._processes.add(process)
            try:
                printed, complained = process.communicate(timeout=limit_s)
            except subprocess.TimeoutExpired:
                process.kill()
                return None
            finally:
                self._processes.discard(process)
        return subprocess.CompletedProcess(arguments, process.returncode, printed, complained)

    def terminate(self) -> None:
        """Ends the processes that run."""
        for process in tuple(self._processes):
            process.terminate()


def verify_core(core: Path, *, seed: int = 0, limit_s: float = LIMIT_S) -> Iterator[Stage]:
    """Yields the stages in order, each as soon as it and all before it are done.

    Raises: UsageError when ``core`` is not a copy of the core.
    """
    shipped = _ROOT / "odb_ref" / "core"
    expected = sorted(str(path.relative_to(shipped)) for path in shipped.rglob("*.py"))
    missing = [name for name in expected if not (core / name).is_file()]
    if missing:
        raise UsageError(f"{core} is not a copy of odb_ref/core: it has no {missing[0]}")
    with tempfile.TemporaryDirectory() as folder:
        copy = _copy_repository(Path(folder), core, limit_s)
        lanes = ThreadPoolExecutor(2)
        futures = [lanes.submit(stage) for stage in _list_stages(copy, seed)]
        try:
            for future in futures:
                yield future.result()
        finally:  # if it is broken off, nothing more begins, and what runs ends
            lanes.shutdown(wait=False, cancel_futures=True)
            while not all(future.done() for future in futures):
                copy.terminate()
                time.sleep(0.05)


def _list_stages(copy: _Copy, seed: int) -> list[Callable[[], Stage]]:
    """Returns functions that run the stages, the short ones first."""
    worlds = [partial(_run_worlds, copy, name, seed) for name in ("large", "properties", "exploration")]
    return [*worlds, *(partial(_run_suite, copy, suite) for suite in _SUITES)]


def _copy_repository(folder: Path, core: Path, limit_s: float = LIMIT_S) -> _Copy:
    copy = _Copy(folder, time.monotonic() + limit_s)
    for name in _COPIED:
        source = _ROOT / name
        if source.is_dir():
            shutil.copytree(source, folder / name, ignore=_IGNORED)
        elif source.exists():
            shutil.copy(source, folder / name)
    shutil.rmtree(folder / "odb_ref" / "core")
    shutil.copytree(core, folder / "odb_ref" / "core", ignore=_IGNORED)
    if (_ROOT / "proofs").is_dir():
        (folder / "proofs").symlink_to(_ROOT / "proofs")
    return copy


def _run_suite(copy: _Copy, suite: _Suite) -> Stage:
    began = time.perf_counter()

    def end(
        covered: str = "",
        *,
        findings: tuple[Finding, ...] = (),
        doubted: Sequence[str] = (),
        skipped: str = "",
        remedy: str = "",
    ) -> Stage:
        return Stage(
            name=suite.name,
            covered=covered,
            ranges=suite.says,
            properties=(suite.property, *suite.judges),
            seconds=time.perf_counter() - began,
            findings=findings,
            doubted=tuple(doubted),
            skipped=skipped,
            remedy=remedy,
        )

    found = {test: sorted(copy.folder.glob(f"{test}*")) for test in suite.tests}
    if missing := [test for test, paths in found.items() if not paths]:
        return end(skipped=f"no {missing[0]} beside this installation: it needs the repository")
    if suite.needs is not None and not (copy.folder / suite.needs).exists():
        return end(skipped=f"{suite.needs} is not built (it needs Coq and OCaml)", remedy="make proofs")
    options = ["-x", "-rsfE", "-p", "no:cacheprovider", f"--timeout={_TEST_S}"]
    done = copy.run(["-m", "pytest", *options, *map(str, chain(*found.values()))])
    if done is None:
        return end(skipped="there was no time left")
    passed = re.search(r"(\d+) passed", done.stdout)
    covered = f"{passed[1] if passed else 0} tests"
    skipped = re.search(r"^SKIPPED .*?: (.*)$", done.stdout, re.MULTILINE)
    if done.returncode in (0, 5) and (skipped or not passed):
        return end(covered, skipped=skipped[1] if skipped else "there is no such test")
    if done.returncode == 0:
        return end(covered)
    if "No module named pytest" in done.stderr:
        return end(skipped="pytest is not installed")
    detail, case = _read_failure(done.stdout, done.stderr)
    if "Timeout (>" in detail:  # the machine is busy or the core is slow, neither of which is wrong
        return end(covered, skipped=f"{case} did not end in {_TEST_S} s")
    finding = Finding(property=suite.property, detail=detail, case=case)
    told = f"shown by what refutes {suite.property}"
    named = (replace(finding, property=name, detail=told) for name in _list_named(done.stdout))
    return end(covered, findings=(finding, *named), doubted=(*suite.doubts, *_list_checked(copy.folder, case)))


def _list_named(printed: str) -> list[str]:
    """Returns the properties of which a failing test prints that they are violated."""
    said = " ".join(line for line in printed.splitlines() if re.match(r"E\s", line))
    return list(dict.fromkeys(one or other for one, other in _VIOLATED.findall(said)))


def _list_checked(folder: Path, case: str) -> list[str]:
    """Returns the properties that a test checks. If it fails, nothing says which of them are violated, if any are."""
    path, _, test = case.partition("::")
    if not (folder / path).is_file():
        return []
    nodes = ast.walk(ast.parse((folder / path).read_text(encoding="utf-8")))
    tests = (node for node in nodes if isinstance(node, ast.FunctionDef) and node.name == test.partition("[")[0])
    checked = re.search(rf"Checks:\s+({_ID}(?:,\s+{_ID})*)", next(map(ast.get_docstring, tests), None) or "")
    return re.findall(_ID, checked[1]) if checked else []


def _read_failure(printed: str, errors: str) -> tuple[str, str]:
    """Returns the message of the first failing test, and its name."""
    failed = re.search(r"^(?:FAILED|ERROR) (\S+)", printed, re.MULTILINE)
    said = [line.removeprefix("E").strip() for line in printed.splitlines() if re.match(r"E\s+\S", line)]
    # An error in pytest itself ends it without naming a test.
    own = re.findall(r"^INTERNALERROR> (\S.*)$", printed, re.MULTILINE)
    last = (own or (errors.strip() or printed.strip() or "nothing was said").splitlines())[-1]
    return " ".join(said[:4])[:1000] or last, failed[1] if failed else "the collection of the tests"


def _run_worlds(copy: _Copy, name: str, seed: int) -> Stage:
    began = time.perf_counter()
    answer = copy.folder / f"{name}.json"
    left_s = copy.deadline - time.monotonic()
    limit_s = max(0.1, min(_WORLDS_S, left_s * 0.8))  # leaves time to report what it has seen
    done = copy.run(["-m", "odb_sim.verify.core_worlds", name, str(seed), str(limit_s), str(answer)])
    seconds = time.perf_counter() - began
    if done is None:
        return Stage(
            name=name, covered="", properties=(), seconds=seconds, findings=(), skipped="there was no time left"
        )
    if done.returncode:
        last = (done.stderr.strip() or "nothing was said").splitlines()[-1]
        finding = Finding(property="AS-TESTED", detail=last, case=f"the stage {name}, which the core brings down")
        return Stage(name=name, covered="", properties=(), seconds=seconds, findings=(finding,))
    return replace(decode_stage(answer.read_text(encoding="utf-8")), seconds=seconds)
