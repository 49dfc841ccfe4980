"""Runs a script of this folder on several ranks in an environment that a variable names."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.capture import capture

ROOT = Path(__file__).parents[3]
HERE = Path(__file__).parent
ABORTED = "terminate called without an active exception"
"""What torch may print at the end of a process that has just taken part in a collective of gloo: pytorch issue 190489."""


def run_script(variable: str, packages: str, script: str, folder: Path, ranks: int, **environment: str) -> list[Any]:
    """Returns what each rank reports. Skips the test if the variable is not set."""
    python = os.environ.get(variable)
    if not python:
        install = f"python -m venv peers && peers/bin/pip install {packages}"
        pytest.skip(f"needs {variable}, the Python of an environment of its own: {install}")
    command = [
        python,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        str(ranks),
        str(HERE / script),
    ]
    for _ in range(3):
        done = capture(
            [*command, str(folder)],
            cwd=folder,
            env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"} | environment,
        )
        if ABORTED not in done.stderr:
            break
    assert done.returncode == 0, done.stderr[-12000:]
    return [json.loads((folder / f"found-{rank}.json").read_text()) for rank in range(ranks)]
