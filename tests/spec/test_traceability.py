"""The tables of spec/: every rule has an implementer and a test, every id exists, nothing is stale, and the checks can fail."""

from __future__ import annotations

import copy
import importlib.util
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module", name="tool")
def _tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("traceability", ROOT / "spec" / "traceability.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["traceability"] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module", name="read")
def _read(tool: ModuleType) -> Any:
    return tool.read_sources()


@pytest.fixture
def sources(read: Any) -> Any:
    return copy.deepcopy(read)


def test_every_rule_has_an_implementer_and_a_test_and_every_id_exists(tool: ModuleType, sources: Any) -> None:
    """One line for each problem."""
    assert len(sources.rules) > 50
    assert len(sources.properties) == 22
    assert tool.find_problems(sources) == []


def test_the_tables_are_not_stale(tool: ModuleType, sources: Any) -> None:
    """To repair: python spec/traceability.py."""
    assert (ROOT / "spec" / "properties.md").read_text() == tool.render_rungs(sources)
    assert (ROOT / "README.md").read_text() == tool.render_readme(sources)


def test_the_readme_claims_what_the_spec_does_and_each_property_once(tool: ModuleType, read: Any, sources: Any) -> None:
    assert "DEAL" in sources.unproved
    text = (ROOT / "README.md").read_text()
    assert "| proved (except" in text
    del sources.unproved["DEAL"]
    assert tool.render_readme(sources) != text
    sources.theorems["ALIGN"].clear()
    with pytest.raises(ValueError, match="not established alike"):
        tool.render_readme(sources)
    sources = copy.deepcopy(read)
    sources.properties["WISH"] = ()
    with pytest.raises(ValueError, match="each property has one row"):
        tool.render_readme(sources)


def test_the_tables_can_be_read_as_text(tool: ModuleType, read: Any) -> None:
    """No line is wider than a screen."""
    assert [line for line in tool.render(read).splitlines() if len(line) > 200] == []


def test_each_kind_of_problem_is_found(tool: ModuleType, read: Any) -> None:
    """The checks must be able to fail."""

    def find(**changes: object) -> str:
        sources = copy.deepcopy(read)
        for name, change in changes.items():
            change(getattr(sources, name))  # type: ignore[operator]
        return "\n".join(tool.find_problems(sources))

    claim = tool.Claim("somewhere.test_x", frozenset({"R99.1"}), frozenset({"WISH"}), "")
    assert "R9.9 has no implementer" in find(rules=lambda rules: rules.update({"R9.9": ""}))
    assert "R9.9 has no test" in find(rules=lambda rules: rules.update({"R9.9": ""}))
    assert "somewhere.test_x: unknown rule R99.1" in find(tests=lambda tests: tests.append(claim))
    assert "somewhere.test_x: unknown property WISH" in find(code=lambda code: code.append(claim))
    assert "R5.9 has no test" in find(
        tests=lambda tests: tests.__setitem__(slice(None), [replace(c, rules=c.rules - {"R5.9"}) for c in tests])
    )
    assert "NP1 has no test" in find(tests=lambda tests: tests.clear())
    assert "COVER has no test" in find(tests=lambda tests: tests.clear())
    assert "not there: no_such_theorem" in find(missing_theorems=lambda names: names.append("no_such_theorem"))
    assert "unknown property: WISH" in find(models=lambda models: models.update({"WISH": ["x"]}))


@pytest.mark.parametrize("text", ["Spec: R5.3, R7.2 to R7.4.", "Spec: R5.3,\n    R7.2.", "Why. Spec:\n    R5.3."])
def test_what_a_search_for_a_rule_does_not_find_is_a_problem(tool: ModuleType, read: Any, text: str) -> None:
    """`CONTRIBUTING.md` names that search."""
    sources = copy.deepcopy(read)
    sources.code.append(tool._claim("somewhere.compute", text))
    assert "somewhere.compute: `Spec:` and each rule it names stand on one line" in tool.find_problems(sources)
