"""The extracted Coq model as a program: built once, skipped with a clear line if Coq is missing, never skipped in CI."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

PROOFS = Path(__file__).parents[2] / "proofs"
TOOLS = ("coqc", "coq_makefile", "ocamlopt")

Model = Callable[[str], list[str]]


def require_coq() -> None:
    """Skips the test if a tool is missing, and fails it in CI."""
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if not missing:
        return
    text = f"needs {', '.join(missing)}: run .ci/install-coq.sh (Debian: apt-get install coq libcoq-stdlib ocaml-nox)"
    if os.environ.get("CI") == "true":
        pytest.fail(text)
    pytest.skip(text)


@pytest.fixture(scope="session")
def model() -> Model:
    """Answers a case, given as words, with the lines that the extracted model prints."""
    require_coq()
    import fcntl

    with (PROOFS / "_CoqProject").open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # another process of pytest-xdist may want the same
        done = subprocess.run(["make", "-C", str(PROOFS), "extraction"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]

    return ask_model


def ask_model(case: str) -> list[str]:
    """Returns the lines that the extracted model, once built, prints for a case."""
    run = subprocess.run([PROOFS / "extracted/model"], input=case, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    return run.stdout.splitlines()
