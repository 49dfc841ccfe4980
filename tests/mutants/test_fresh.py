"""The fresh defects can be planted, each in one place. ``make soak`` runs what refutes them."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.mutants.defects import Defect
from tests.mutants.fresh import DEFECTS, plant


@pytest.mark.parametrize("defect", DEFECTS, ids=lambda defect: defect.name)
def test_a_defect_can_be_planted(defect: Defect, tmp_path: Path) -> None:
    core = plant(defect, tmp_path)
    ast.parse((core / f"{defect.module.replace('.', '/')}.py").read_text(encoding="utf-8"))
