"""The audit of the proofs refuses what is not a proof, and asks Coq about a copy that it compiled itself."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import pytest

from tests.helpers.capture import capture
from tests.proofs.conftest import PROOFS, Model, require_coq

PROPERTIES = PROOFS.parent / "spec" / "properties.md"


@pytest.fixture(scope="module")
def audit() -> ModuleType:
    """Returns the audit as a module."""
    require_coq()
    spec = spec_from_file_location("audit_of_the_proofs", PROOFS / "audit.py")
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _audit(folder: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return capture([folder / "audit.py", *arguments], env=os.environ | environment)


@pytest.fixture
def copy(model: Model, tmp_path: Path) -> Path:
    """Returns a checked copy of the proofs, which ``model`` has built."""
    shutil.copytree(PROOFS, tmp_path / "proofs")
    return tmp_path / "proofs"


@pytest.mark.deep
def test_the_audit_accepts_the_proofs(copy: Path) -> None:
    done = _audit(copy, "--here")
    assert done.returncode == 0, done.stderr
    assert "no axioms, no gaps" in done.stdout


def test_the_audit_refuses_a_file_that_is_not_built(copy: Path) -> None:
    (copy / "Extra.v").write_text("Lemma true : True. Proof. exact I. Qed.\n")
    done = _audit(copy, "--here")
    assert done.returncode == 1
    assert "Extra.v is not in _CoqProject" in done.stderr


def test_the_audit_refuses_a_file_that_was_changed_and_not_checked(copy: Path) -> None:
    text = (copy / "Rules.v").read_text()
    (copy / "Rules.v").write_text(text + "\n(* later *)\n")
    done = _audit(copy, "--here")
    assert done.returncode == 1
    assert "newer than what was checked" in done.stderr


def test_the_audit_refuses_a_theorem_that_is_not_there(copy: Path) -> None:
    readme = copy / "README.md"
    readme.write_text(readme.read_text() + "\n| ALIGN | more | `there_is_no_such_theorem` | Rules.v |\n")
    done = _audit(copy, "--here")
    assert done.returncode == 1
    assert "there_is_no_such_theorem" in done.stderr


@pytest.mark.deep
@pytest.mark.parametrize(
    ("file", "old", "new"),
    [
        ("extracted/main.ml", "let ", "let  "),
        ("Makefile", "model.mli model.ml main.ml", "model.mli other.ml main.ml"),
    ],
)
def test_the_audit_refuses_another_program_around_the_model(copy: Path, file: str, old: str, new: str) -> None:
    """The program compared with the Python consists of more than what Coq extracts."""
    text = (copy / file).read_text()
    assert old in text
    (copy / file).write_text(text.replace(old, new, 1))
    done = _audit(copy, "--here")
    assert done.returncode == 1
    assert file in done.stderr
    assert "where that is meant, run ./audit.py --accept" in done.stderr


def test_the_page_has_the_properties_by_their_names_and_in_their_order() -> None:
    """Each property that `spec/properties.md` calls proved has a theorem of its name in Main.v, and nothing else has."""
    text = PROPERTIES.read_text()
    listed = re.findall(r"^### ([A-Z]+)$", text, re.MULTILINE)
    proved = set(re.findall(r"^\| ([A-Z]+) \| proved", text, re.MULTILINE))
    named = re.findall(r"^Theorem (\w+)", (PROOFS / "Main.v").read_text(), re.MULTILINE)
    properties = dict.fromkeys(
        name.partition("_")[0] for name in named if name != "ASSUMPTIONS"
    )  # UPDATE_DEALT belongs to UPDATE
    assert list(properties) == [name for name in listed if name in proved]
    assert len(proved) > 15


# A copy of its own ---------------------------------------------------------------------------------------------------


def _break(copy: Path) -> None:
    """Makes the first file one that does not compile, or has a missing requirement, but looks checked since then."""
    (copy / "Types.v").write_text((copy / "Types.v").read_text() + "Lemma easy : False. Proof. exact hidden. Qed.\n")
    for path in copy.glob("*.vo"):
        path.touch()


@pytest.mark.deep
def test_what_was_compiled_before_does_not_count(copy: Path) -> None:
    """File times can be forged. Without its own copy, the audit would not notice."""
    _break(copy)
    assert _audit(copy, "--here").returncode == 0
    done = _audit(copy)
    assert done.returncode == 1
    assert "coqc Types.v ends with" in done.stderr and "hidden" in done.stderr


def _hide(folder: Path) -> None:
    (folder / "Hidden.v").write_text("Axiom hidden : False.\n")
    subprocess.run(["coqc", "-q", "-Q", ".", "ODB", "Hidden.v"], cwd=folder, check=True)
    (folder / "Hidden.v").unlink()


def test_a_compiled_file_without_its_source_is_not_there(copy: Path) -> None:
    (copy / "Types.v").write_text("From ODB Require Import Hidden.\n" + (copy / "Types.v").read_text())
    _hide(copy)
    _break(copy)
    done = _audit(copy)
    assert done.returncode == 1
    assert "needed, and not in _CoqProject" in done.stderr or "Cannot find a physical path" in done.stderr


@pytest.mark.deep
def test_a_file_that_the_surroundings_bring_is_not_there(copy: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    _hide(tmp_path / "elsewhere")
    (copy / "Types.v").write_text("Require Import Hidden.\n" + (copy / "Types.v").read_text())
    _break(copy)
    done = _audit(copy, COQPATH=str(tmp_path / "elsewhere"))
    assert done.returncode == 1
    assert "Cannot find a physical path" in done.stderr


# What Coq has read ---------------------------------------------------------------------------------------------------

TEXT = "Lemma a : True. (* x *)\nProof. exact I. Qed.\n"
TOLD = "Chars 0 - 15 [..] 0. secs\nChars 24 - 30 [..] 0. secs\nChars 31 - 39 [..] 0. secs\nChars 40 - 44 [..] 0. secs\n"


def test_sentences_are_those_that_coq_has_read(audit: ModuleType, tmp_path: Path) -> None:
    assert audit.list_parsed_sentences("T.v", TEXT, TOLD) == ["Lemma a : True.", "Proof.", "exact I.", "Qed."]
    (tmp_path / "T.v").write_text(TEXT)
    said = capture(["coqc", "-q", "-time", "T.v"], cwd=tmp_path, check=True)
    assert audit.list_parsed_sentences("T.v", TEXT, said.stdout) == audit.list_sentences(TEXT)


@pytest.mark.parametrize(
    "told",
    [
        TOLD.replace("Chars 24 - 30 [..] 0. secs\n", ""),  # a sentence is left out
        TOLD + "Chars 20 - 44 [..] 0. secs\n",  # a proof prints what Coq would
        TOLD.replace("Chars 0 - 15 [..] 0. secs\n", ""),
        "",
    ],
)
def test_what_coq_is_not_said_to_have_read_is_refused(audit: ModuleType, told: str) -> None:
    with pytest.raises(audit.Refused, match="is not the whole file"):
        audit.list_parsed_sentences("T.v", TEXT, told)


@pytest.mark.parametrize(
    "text",
    [
        "Axiom easy : False.",
        "Lemma easy : False. Proof. Admitted.",
        "Variable easy : False.",
        "Parameters (easy : False).",
        "Lemma true : True. Proof. exact I. Qed. (* *) Unset Guard Checking.",
        'Definition a := 0. (* "*)" *) Unset Guard Checking.',
        "Lemma true : True. Proof. Unset Guard Checking. exact I. Qed.",
        "Lemma true : True. exact I. Qed.",
        "Section S. End S. Hypothesis easy : False.",
        "Module M. Definition a := 0. End M.",
        "Time Definition a := 0.",
        "Local Set Universe Polymorphism.",
        "#[local] Definition a := 0.",
        "Instance easy : True := I.",
        "Coercion f : nat >-> bool.",
        "Opaque f.",
        "Include M.",
        'Cd "..".',
    ],
)
def test_a_text_with_a_gap_an_axiom_or_a_switch_is_refused(audit: ModuleType, text: str) -> None:
    with pytest.raises(audit.Refused, match=r"has no place|outside a section"):
        audit.check_sentences("T.v", audit.list_sentences(text))


# What Coq prints -----------------------------------------------------------------------------------------------------

PAIRS = {
    "an implicit argument": (
        "Definition even {{b : bool}} (n : nat) := if b then n = n else n = 0.\nTheorem stated : @even {0} 0.",
        ("true", "false"),
    ),
    "an implicit argument of a definition": (
        "Definition even {{b : bool}} (n : nat) := if b then n = n else n = 0.\n"
        "Definition said := @even {0} 0.\nTheorem stated : said.",
        ("true", "false"),
    ),
    "a coercion": (
        "Record box := {{ left :> nat; right : nat }}.\nDefinition said (x : box) := {0} x = {0} x.\n"
        "Theorem stated : forall x, said x.",
        ("left", "right"),
    ),
    "a notation": (
        'Definition f (n : nat) := n.\nDefinition g (n : nat) := n + 0.\nNotation "# n" := ({0} n) (at level 9).\n'
        "Definition said := # 0 = 0.\nTheorem stated : said.",
        ("f", "g"),
    ),
    "the order of fields": (
        "Record box := mkBox {{ {0} }}.\nDefinition said := left (mkBox 0 1) = left (mkBox 0 1).\nTheorem stated : said.",
        ("left : nat; right : nat", "right : nat; left : nat"),
    ),
    "a definition that a definition uses": (
        "Definition f (n : nat) := {0}.\nDefinition g (n : nat) := f n.\nTheorem stated : g 0 = g 0.",
        ("n", "n * 1"),
    ),
}


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """Yields a folder for a single file."""
    require_coq()
    yield tmp_path


@pytest.mark.slow
@pytest.mark.parametrize("name", PAIRS)
def test_statements_that_look_alike_have_other_digests(audit: ModuleType, small: Path, name: str) -> None:
    text, sides = PAIRS[name]
    seen = set()
    for side in sides:
        (small / "Small.v").write_text(f"{text.format(side)}\nProof. repeat intro. reflexivity. Qed.\n")
        subprocess.run(["coqc", "-q", "-Q", ".", "ODB", "Small.v"], cwd=small, check=True)
        statements = audit.ask(small, ["Small"], [("Small.stated", "Check Small.stated.")])
        definitions = audit.list_definitions(small, ["Small"], statements)
        seen.add(audit.compute_digest("".join([*statements.values(), *definitions.values()])))
    assert len(seen) == 2


def test_a_theorem_that_rests_on_an_axiom_is_refused(audit: ModuleType, small: Path) -> None:
    """Coq's library has axioms, which a text need not name."""
    (small / "Small.v").write_text(
        "Require Import Classical.\nTheorem fine : True.\nProof. exact I. Qed.\n"
        "Theorem either : forall P : Prop, P \\/ ~ P.\nProof. exact classic. Qed.\n"
    )
    subprocess.run(["coqc", "-q", "-Q", ".", "ODB", "Small.v"], cwd=small, check=True)
    audit.check_axioms(small, ["Small"], ["Small.fine"])
    with pytest.raises(audit.Refused, match="rests on an axiom"):
        audit.check_axioms(small, ["Small"], ["Small.fine", "Small.either"])


# What was compiled ---------------------------------------------------------------------------------------------------


@pytest.mark.deep
def test_the_checker_of_what_was_compiled_accepts_it_and_finds_an_axiom(small: Path) -> None:
    def check(text: str) -> subprocess.CompletedProcess[str]:
        (small / "Small.v").write_text(text)
        subprocess.run(["coqc", "-q", "-Q", ".", "ODB", "Small.v"], cwd=small, check=True)
        ask = f"import pathlib, audit; audit.check_compiled(pathlib.Path({str(small)!r}), ['Small'])"
        return capture([sys.executable, "-c", ask], cwd=PROOFS)

    assert check("Lemma easy : True. Proof. exact I. Qed.\n").returncode == 0
    assert "ODB.Small.easy" in check("Axiom easy : False.\n").stderr
    assert "unsafe" in check("Unset Guard Checking.\nFixpoint easy (n : nat) : False := easy n.\n").stderr
