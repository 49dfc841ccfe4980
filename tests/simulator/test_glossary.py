"""The glossary names every figure that the simulator writes, and no other."""

from __future__ import annotations

import json
import re
from importlib import resources
from pathlib import Path

import pytest

from simulator.cli import main
from simulator.metrics import list_step_columns


def read_names(heading: str) -> list[str]:
    text = (resources.files("simulator") / "GLOSSARY.md").read_text(encoding="utf-8")
    section = text.split(f"## {heading}\n")[1].split("\n## ")[0]
    return re.findall(r"^\| `(\w+)` \|", section, flags=re.MULTILINE)


@pytest.mark.parametrize("policy", ["odb", "standard", "packing"])
def test_every_figure_has_a_formula(policy: str, tmp_path: Path) -> None:
    path = tmp_path / "figures.json"
    arguments = ["simulate", "gsm8k", "--ranks", "2", "--token-budget", "2048", "--samples", "50", "--policy", policy]
    assert main([*arguments, "--json", str(path)]) == 0
    assert read_names("Figures of a run") == list(json.loads(path.read_text()))


def test_every_column_has_a_formula() -> None:
    assert read_names("Columns of the steps") == list_step_columns()
