"""Arrows point one way: simulator -> core, torch -> core, integrations -> torch; nothing points at the simulator."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = sorted([*ROOT.glob("odb_ref/**/*.py"), *ROOT.glob("simulator/**/*.py")])

LAYERS = {
    "odb_ref/core": ("odb_ref.core",),
    "odb_ref/torch": ("odb_ref.core", "odb_ref.torch"),
    "odb_ref/integrations": ("odb_ref.core", "odb_ref.torch", "odb_ref.integrations"),
    "simulator": ("odb_ref.core", "simulator"),
}
"""What each folder may import of this project."""

FRAMEWORKS = {"transformers", "lightning", "accelerate"}
"""What only the integrations may import: torch users and planners need none of them."""

TORCH_USERS: dict[str, str] = {}
"""Modules of the simulator that may import the adapter, and why. None: it is started as a program of its own."""


def get_imports(path: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {item.name for item in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names |= {f"{node.module}.{item.name}" for item in node.names}
    return names


def test_there_is_something_to_check() -> None:
    assert len(SOURCES) > 20


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_point_one_way(path: Path) -> None:
    name = str(path.relative_to(ROOT))
    layer = next((layer for layer in LAYERS if name.startswith(f"{layer}/")), None)
    ours = {item for item in get_imports(path) if item.split(".")[0] in ("odb_ref", "simulator")}
    if layer is None:
        assert name == "odb_ref/__init__.py"
        assert ours == set()
        return
    allowed = LAYERS[layer]
    if name in TORCH_USERS:
        allowed += ("odb_ref.torch",)
    wrong = {item for item in ours if not item.startswith(tuple(f"{prefix}." for prefix in allowed))}
    assert wrong - set(allowed) == set()


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_only_the_integrations_know_frameworks(path: Path) -> None:
    if not path.is_relative_to(ROOT / "odb_ref" / "integrations"):
        assert not {item for item in get_imports(path) if item.split(".")[0] in FRAMEWORKS}


def test_no_example_needs_the_simulator_to_train() -> None:
    for path in sorted((ROOT / "examples").glob("train*.py")):
        assert not {item for item in get_imports(path) if item.startswith("simulator")}, path
