"""The notebook runs from its first cell to its last, and is stored without outputs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("matplotlib")

from tests.helpers.programs import run_program

ROOT = Path(__file__).parents[2]
NOTEBOOK = ROOT / "examples" / "lengths.ipynb"


def read_cells() -> list[dict[str, object]]:
    notebook = json.loads(NOTEBOOK.read_text())
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def test_it_is_kept_without_outputs() -> None:
    for cell in read_cells():
        assert cell["outputs"] == []
        assert cell["execution_count"] is None


@pytest.mark.deep
def test_it_runs_from_its_first_cell_to_its_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Checks: COVER, ALIGN, BUDGET. It runs as one program, since its cells hold nothing that only a notebook understands."""
    program = tmp_path / "cells.py"
    program.write_text("\n\n".join("".join(cell["source"]) for cell in read_cells()))
    monkeypatch.setenv("MPLBACKEND", "Agg")
    out = run_program(program, folder=tmp_path, timeout_s=240)
    assert "samples trained on: 800 of 800" in out
    assert "exit status 0" in out
    steps = {line.split(": ")[1].split(" steps")[0] for line in out.splitlines() if line.startswith("rank ")}
    assert len(steps) == 1
    (fullest,) = [line for line in out.splitlines() if line.startswith("the fullest batch")]
    assert int(fullest.split(": ")[1].split()[0].replace(",", "")) <= 16_384
    assert (tmp_path / "notebook-run" / "steps.png").stat().st_size > 5000
