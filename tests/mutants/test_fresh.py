"""The fresh defects can be planted, each in one place; what refutes them all is run by ``make soak``."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.mutants.fresh import BY_A_STRANGER, DEFECTS, Defect, plant


@pytest.mark.parametrize("defect", (*BY_A_STRANGER, *DEFECTS), ids=lambda defect: defect.name)
def test_a_defect_can_be_planted(defect: Defect, tmp_path: Path) -> None:
    core = plant(defect, tmp_path)
    ast.parse((core / f"{defect.module}.py").read_text(encoding="utf-8"))
