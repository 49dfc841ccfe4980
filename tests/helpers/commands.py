"""Runs the command in this process."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from odb_sim.cli.main import main


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
