"""One noun, one class: no two classes of the package and the simulator, which drives it, share a name."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[2]

_PUBLISHED = "odb_ref/compat/"
"""Its classes have the names that another package has published."""


def find_classes() -> dict[str, list[str]]:
    """Returns for each class name the modules that define it at their top level."""
    found: dict[str, list[str]] = defaultdict(list)
    for path in sorted(path for top in ("odb_ref", "simulator/odb_sim") for path in (ROOT / top).rglob("*.py")):
        module = str(path.relative_to(ROOT))
        if module.startswith(_PUBLISHED):
            continue
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef):
                found[node.name].append(module)
    return found


def test_no_two_classes_have_one_name() -> None:
    shared = {name: modules for name, modules in find_classes().items() if len(modules) > 1}
    assert shared == {}
