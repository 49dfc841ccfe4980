"""What is run: all tests, or one of two parts, which ``make test`` runs one after the other.

How much Hypothesis tries: its default, without deadlines; few examples, always the same, while mutmut runs the tests.
A deadline would measure how busy the machine is. Under mutmut (see tests/mutants/SURVIVORS.md) the suite runs some two
thousand times, a mutant must meet the examples that the unmutated code met, and nobody reads a shrunk example.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

import pytest
from hypothesis import Phase, settings

from tests.helpers.effort import IS_MUTATED

settings.register_profile("odb", deadline=None)
settings.register_profile(
    "mutants",
    deadline=None,
    max_examples=20,
    derandomize=True,
    database=None,
    phases=(Phase.explicit, Phase.generate),
)
settings.load_profile("mutants" if IS_MUTATED else "odb")


_ALONE_FOLDERS: Final = ("bench", "lab")
_ALONE_FILES: Final = (
    "test_backends.py",
    "test_collate_workers.py",
    "test_elsewhere.py",
    "test_failures.py",
    "test_gpu.py",
    "test_leaks.py",
    "test_links.py",
    "test_quarantine.py",
    "test_random_faults.py",
    "test_real_runs.py",
    "test_resources.py",
    "test_stuck.py",
)


def is_alone(path: Path) -> bool:
    """True for a file of tests that fork ranks by the dozen, measure time, or look for what is left on the machine."""
    return path.parent.name in _ALONE_FOLDERS or path.name in _ALONE_FILES


def pytest_addoption(parser: pytest.Parser) -> None:
    text = "Only the tests that may share the machine with each other (see `-n`), or only the others. Default: all."
    parser.addoption("--part", choices=["together", "alone"], help=text)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    part = config.getoption("part")
    if part is None or collection_path.is_dir():
        return None  # for other options to say
    return True if is_alone(collection_path) != (part == "alone") else None
