"""Every twin names the function whose answer it gives, and that function's rules, and a test compares the two.

The cases come from the twins: one without an original, with other rules, or without a comparison fails here.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from importlib import import_module

import pytest

from odb_ref.arrays import twins
from tests.arrays import test_twins

RULE = re.compile(r"\bR\d+(?:\.\d+)?\b")


def find_rules(doc: str | None) -> set[str]:
    text = re.search(r"Spec: ((?:R[\d.]+(?:, | to )?)+)", doc or "")
    return set(RULE.findall(text[1])) if text else set()


def list_twins() -> Iterator[tuple[str, str, set[str]]]:
    """Yields the name of each twin, of its original, and its rules."""
    kinds = [twins, twins.Runs]
    for name, what in (item for kind in kinds for item in inspect.getmembers(kind, inspect.isfunction)):
        if what.__module__ == twins.__name__:
            for original in re.findall(r"`(odb_ref\.core\.[\w.]+)`", what.__doc__ or ""):
                yield name, original, find_rules(what.__doc__)


def get_original(path: str) -> Callable[..., object]:  # type: ignore[explicit-any]
    parts = path.split(".")
    module = next(i for i in range(len(parts), 0, -1) if parts[i - 1].islower() and not _is_function(parts[:i]))
    found: object = import_module(".".join(parts[:module]))
    for part in parts[module:]:
        found = getattr(found, part)
    if not callable(found):
        pytest.fail(f"{path} is not a function")
    return found


def _is_function(parts: list[str]) -> bool:
    try:
        import_module(".".join(parts))
    except ImportError:
        return True
    return False


CASES = list(list_twins())


def test_there_are_twins() -> None:
    assert len(CASES) >= 11
    found = set().union(*(rules for _, _, rules in CASES))
    assert found >= {"R2.1", "R2.6", "R2.7", "R2.8", "R3.1", "R4.1", "R4.2", "R4.3"}


@pytest.mark.parametrize(("twin", "original", "rules"), CASES, ids=[f"{twin}-{name}" for twin, name, _ in CASES])
def test_a_twin_has_the_rules_of_its_original_and_is_compared_with_it(
    twin: str, original: str, rules: set[str]
) -> None:
    of_original = find_rules(get_original(original).__doc__)
    assert rules
    assert of_original - {"R3.4"} <= rules, "a rule of the original that the twin does not name"
    source = inspect.getsource(test_twins)
    assert re.search(rf"\b{twin}\(", source), "no test calls the twin"
    assert re.search(rf"\b{original.rpartition('.')[2]}\b", source), "no test calls the original"
