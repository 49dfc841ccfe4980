"""The extracted Coq model as a program: built once, skipped with a clear line if Coq is missing, never skipped in CI."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, settings

from tests.helpers.capture import capture

PROOFS = Path(__file__).parents[2] / "proofs"
TOOLS = ("coqc", "coq_makefile", "ocamlopt")

Model = Callable[[str], list[str]]

UNSHRUNK = settings(
    deadline=None,
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
"""A difference is reported by its line, so shrinking a batch of cases would only take time."""


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
        done = capture(["make", "-C", str(PROOFS), "extraction"])
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]

    return ask_model


def ask_model(case: str) -> list[str]:
    """Returns the lines that the extracted model, once built, prints for a case."""
    run = capture([PROOFS / "extracted/model"], input=case)
    assert run.returncode == 0, run.stderr
    return run.stdout.splitlines()
