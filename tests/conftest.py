"""Selects what to run: all tests, or one of three parts. ``make test`` runs two of them side by side, and the third alone.

A slice, which ``make test`` runs, has fewer cases of slow or random tests: see `list_slice`, `few`. ``make soak`` and a plain
``pytest`` run all.

Hypothesis runs its default number of examples, without deadlines, which would measure how busy the machine is. A slice runs a
quarter. Under mutmut (see tests/mutants/SURVIVORS.md) it runs a few examples, always the same: the suite then runs some two
thousand times, a mutant must meet the examples that the original code met, and shrunk examples would not be read.
"""

from __future__ import annotations

import gc
import os
from importlib.util import find_spec
from pathlib import Path
from typing import Final

import pytest
from hypothesis import Phase, is_hypothesis_test, settings

from tests.helpers.effort import IS_MUTATED
from tests.helpers.gpus import hide_gpus

hide_gpus()

settings.register_profile("odb", deadline=None)
settings.register_profile(
    "mutants",
    deadline=None,
    max_examples=20,
    derandomize=True,
    database=None,
    phases=(Phase.explicit, Phase.generate),
)
settings.register_profile("slice", deadline=None, max_examples=25)


_NEED_TORCH: Final = ("bench", "compat", "integrations", "lab", "peer", "torch")
"""Folders that are left out if torch is not installed, except in CI, which fails there."""

_HAS_TORCH: Final = os.environ.get("CI") == "true" or find_spec("torch") is not None

_ALONE: Final = ("bench", "test_gpu.py", "test_leaks.py", "test_real_runs.py", "test_resources.py")
"""Folders and files of tests that measure time, or look for what is left on the machine."""

_WAITING: Final = (
    "lab",
    "test_collate_workers.py",
    "test_elsewhere.py",
    "test_failures.py",
    "test_identity.py",
    "test_links.py",
    "test_loader_process.py",
    "test_orphans.py",
    "test_quarantine.py",
    "test_random_faults.py",
    "test_stuck.py",
)
"""Tests that fork dozens of ranks and wait for limits of seconds, which a busy machine exceeds."""


def find_part(path: Path) -> str:
    """Returns the part that a test file belongs to."""
    names = {path.parent.name, path.name}
    return "alone" if names & {*_ALONE} else "waiting" if names & {*_WAITING} else "together"


def pytest_addoption(parser: pytest.Parser) -> None:
    text = "Only the tests that may share the machine with any, with a few of their kind, or with none. Default: all."
    parser.addoption("--part", choices=["together", "waiting", "alone"], help=text)
    parser.addoption(
        "--slice", action="store_true", help="Fewer cases of slow and of random tests, and none that are deep."
    )
    parser.addoption("--sliced", action="store_true", help="Only the tests that --slice cuts, with all their cases.")


def pytest_configure(config: pytest.Config) -> None:
    settings.load_profile("mutants" if IS_MUTATED else "slice" if config.getoption("slice") else "odb")


def pytest_collection_finish() -> None:
    """Excludes imported objects from garbage collections, which frameworks trigger in each rank of each test."""
    gc.collect()
    gc.freeze()


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    part = config.getoption("part")
    if collection_path.name in _NEED_TORCH and not _HAS_TORCH:
        return True
    if part is None or collection_path.is_dir():
        return None  # left to other options
    return True if find_part(collection_path) != part else None


def list_slice(items: list[pytest.Item]) -> list[pytest.Item]:
    """Returns the tests not marked deep. A test marked slow keeps about the fourth root of its cases, evenly spread."""
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("deep") is None:
            is_slow = item.get_closest_marker("slow") is not None
            cases.setdefault(item.nodeid.partition("[")[0] if is_slow else item.nodeid, []).append(item)
    # The stride is odd, so that both values of a last parameter with two values occur.
    kept = {item for same in cases.values() for item in same[:: len(same) // round(len(same) ** (1 / 4)) | 1]}
    return [item for item in items if item in kept]


def is_cut_by_a_slice(item: pytest.Item) -> bool:
    marks = {mark.name for mark in item.iter_markers()}
    return bool(marks & {"slow", "deep"}) or is_hypothesis_test(getattr(item, "obj", None))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    kept = items[:]
    if config.getoption("slice"):
        kept = list_slice(kept)
    if config.getoption("sliced"):
        kept = [item for item in kept if is_cut_by_a_slice(item)]
    left = set(items).difference(kept)
    config.hook.pytest_deselected(items=[item for item in items if item in left])
    items[:] = kept
