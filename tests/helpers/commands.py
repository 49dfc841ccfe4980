"""Runs the command in this process."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from odb_sim.cli.main import main


def get_figures(command: str | Sequence[str], *more: str) -> Any:
    """Returns the figures that the command writes, which must succeed. Where ``command`` is a string, spaces divide it."""
    arguments = command.split() if isinstance(command, str) else command
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "figures.json"
        assert main([*arguments, *more, "--json", str(path)]) == 0
        return json.loads(path.read_text())


def refuse(capsys: pytest.CaptureFixture[str], arguments: Sequence[str]) -> str:
    """Returns the message with which the command refuses its arguments: one line, with exit status 2 and without output."""
    try:
        status: object = main(list(arguments))
    except SystemExit as exit_:
        status = exit_.code
    assert status == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    return err
