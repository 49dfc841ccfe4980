"""The core is pure: it can be imported with nothing but Python installed, and uses no clock and no random numbers."""

from __future__ import annotations

import ast
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import odb_ref.core
from odb_ref.core.batching.cost import make_own_cost
from odb_ref.core.peers import describe_held
from tests.helpers.capture import capture
from tests.helpers.world import make_configs, run_by_arrival

CORE = Path(odb_ref.core.__file__).parent
MODULES = sorted(CORE.rglob("*.py"))


def test_the_core_imports_neither_torch_nor_simpy_nor_numpy() -> None:
    names = [".".join(("odb_ref.core", *path.relative_to(CORE).with_suffix("").parts)) for path in MODULES]
    program = (
        "import importlib, sys\n"
        f"for name in {[name.removesuffix('.__init__') for name in names]!r}: importlib.import_module(name)\n"
        "print(*sorted({name.partition('.')[0] for name in sys.modules} - set(sys.stdlib_module_names)))"
    )
    done = capture([sys.executable, "-c", program], check=True)
    foreign = {name for name in done.stdout.split() if not name.startswith(("_", "sitecustomize"))}
    assert foreign == {"odb_ref"}


FORBIDDEN = {
    "time", "random", "threading", "asyncio", "socket", "os", "datetime", "secrets", "multiprocessing", "pathlib", "gzip",
    "io",
}  # fmt: skip


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(CORE)))
def test_the_core_has_no_clock_no_threads_no_randomness_and_no_files(path: Path) -> None:
    imported = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            imported |= {name.name.partition(".")[0] for name in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            imported.add(node.module.partition(".")[0])
    assert imported & FORBIDDEN == set()
    assert "open(" not in path.read_text()


def attend(tokens: int) -> int:
    return tokens + tokens**2 // 9


def tell_decisions() -> str:
    """Returns the decisions of two jobs, one with ranks that differ in every allowed way, and digests that peers compare."""
    lengths = [[(i * i + rank) % 13 + 1 for i in range(40)] for rank in range(3)]
    configs = make_configs(3, cost=make_own_cost(attend), limits=(9, 7), tag="{}")
    others: dict[str, Any] = {
        "budget_tokens": 9, "limits": (3,), "max_age_rounds": 9, "tag": '{"a": 1, "b": 2, "c": [3]}',
    }  # fmt: skip
    worlds = [run_by_arrival(lengths, these) for these in (configs, [*configs[:2], replace(configs[2], **others)])]
    digests = [describe_held(node.shard, is_ended=False) for node in worlds[0].nodes]
    return repr((digests, [(node.events, node.finish) for world in worlds for node in world.nodes]))


def test_every_process_decides_alike() -> None:
    """Spec: R3, R7.3, R17.3. Checks: ALIGN, ABORT, REPLAY. The hashes of strings differ between processes."""
    program = "from tests.core.test_imports import tell_decisions; print(tell_decisions())"
    told = {
        capture(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(sys.path)},
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(told) == 1
    assert {"MISMATCH", "COMPLETE"} <= set(told.pop().replace(":", ".").split("."))


def test_the_checker_is_independent_of_what_it_checks() -> None:
    """Only `replay` may drive the machine. The rest may share only types, the offer's reduction and the trace."""
    allowed = {"types", "offer", "effects", "errors"}
    checkers = sorted((CORE.parent / "trace" / "check").rglob("*.py"))
    assert len(checkers) > 5
    for path in checkers:
        imported = {
            node.module.split(".")[2]
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("odb_ref.core.")
        }
        if path.name != "replay.py":
            assert imported <= allowed, path
