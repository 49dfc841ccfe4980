"""The audit of the proofs refuses what is not a proof."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.proofs.conftest import PROOFS, Model


def _audit(folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([folder / "audit.py", "--quick"], capture_output=True, text=True, check=False)


@pytest.fixture
def copy(model: Model, tmp_path: Path) -> Path:
    """A checked copy of the proofs: ``model`` has built them."""
    shutil.copytree(PROOFS, tmp_path / "proofs")
    return tmp_path / "proofs"


def test_the_audit_accepts_the_proofs(copy: Path) -> None:
    done = _audit(copy)
    assert done.returncode == 0, done.stderr
    assert "no axioms, no gaps" in done.stdout


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("Axiom easy : False.", "Axiom has no place"),
        ("Lemma easy : False. Proof. Admitted.", "Admitted has no place"),
        ("Variable easy : False.", "outside a section"),
        ("Parameter easy : False.", "Parameter has no place"),
    ],
)
def test_the_audit_refuses_an_axiom_and_a_gap(copy: Path, text: str, complaint: str) -> None:
    with (copy / "Rules.v").open("a") as file:
        file.write(text + "\n")
    done = _audit(copy)
    assert done.returncode == 1
    assert complaint in done.stdout + done.stderr


def test_the_audit_refuses_a_file_that_is_not_built(copy: Path) -> None:
    (copy / "Extra.v").write_text("Lemma true : True. Proof. exact I. Qed.\n")
    done = _audit(copy)
    assert done.returncode == 1
    assert "Extra.v is not in _CoqProject" in done.stderr


def test_the_audit_refuses_a_file_that_was_changed_and_not_checked(copy: Path) -> None:
    text = (copy / "Rules.v").read_text()
    (copy / "Rules.v").write_text(text + "\n(* later *)\n")
    done = _audit(copy)
    assert done.returncode == 1
    assert "newer than what was checked" in done.stderr


def test_the_audit_refuses_a_theorem_that_is_not_there(copy: Path) -> None:
    readme = copy / "README.md"
    readme.write_text(readme.read_text() + "\n| ALIGN | more | `there_is_no_such_theorem` | Rules.v |\n")
    done = _audit(copy)
    assert done.returncode == 1
    assert "there_is_no_such_theorem" in done.stderr


def test_the_checker_of_what_was_compiled_accepts_it_and_finds_an_axiom(copy: Path) -> None:
    def check() -> subprocess.CompletedProcess[str]:
        ask = "import audit; audit.check_compiled(['Rules', 'Weight'])"
        return subprocess.run([sys.executable, "-c", ask], cwd=copy, capture_output=True, text=True, check=False)

    assert check().returncode == 0
    with (copy / "Weight.v").open("a") as file:
        file.write("Axiom easy : False.\n")
    subprocess.run(["coqc", "-Q", ".", "ODB", "Weight.v"], cwd=copy, check=True)
    assert "ODB.Weight.easy" in check().stderr
