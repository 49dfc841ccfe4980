"""Runs the command in this process."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from odb_sim.cli.main import main


def _run(command: str | Sequence[str], *more: str) -> None:
    assert main([*(command.split() if isinstance(command, str) else command), *more]) == 0


def get_figures(command: str | Sequence[str], *more: str) -> Any:
    """Returns the figures that the command writes, which must succeed. Where ``command`` is a string, spaces divide it."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "figures.json"
        _run(command, *more, "--json", str(path))
        return json.loads(path.read_text())


def hear(capsys: pytest.CaptureFixture[str]) -> str:
    """Returns what has been printed since it was last asked for, with one space between words wherever lines end."""
    return " ".join(capsys.readouterr().out.split())


def tell(capsys: pytest.CaptureFixture[str], command: str | Sequence[str], *more: str) -> str:
    """Returns what the command prints, as `hear` does. It must succeed."""
    hear(capsys)
    _run(command, *more)
    return hear(capsys)


def get_answer(capsys: pytest.CaptureFixture[str], command: str | Sequence[str], *more: str) -> tuple[Any, str]:
    """Returns the figures that the command writes, and what it prints."""
    hear(capsys)
    return get_figures(command, *more), hear(capsys)


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
