"""Attacks on the proofs and their guard are refused. `python -m tests.proofs.mutants` runs all of them."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from tests.proofs.conftest import PROOFS, Model
from tests.proofs.mutants import MUTANTS, Mutant, apply_edits, try_mutant


@pytest.mark.deep
@pytest.mark.parametrize("mutant", [m for m in MUTANTS if m.is_quick], ids=lambda m: m.name.replace(" ", "-"))
def test_an_attack_is_refused(model: Model, mutant: Mutant) -> None:
    """Checks: ALIGN, COVER, WEIGHT (that what is proved is what was reviewed). ``model`` has built the proofs."""
    refusal = try_mutant(mutant)
    assert refusal is not None, "nothing refuses it"
    assert re.search(mutant.by, refusal), refusal


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda m: m.name.replace(" ", "-"))
def test_an_attack_can_be_made(mutant: Mutant, tmp_path: Path) -> None:
    """The text to change exists, so that the slow attacks do not become outdated."""
    folder = tmp_path / "proofs"
    shutil.copytree(PROOFS, folder, ignore=shutil.ignore_patterns("*.vo*", "*.glob", ".*", "__*", "extracted"))
    before = {path.name: path.read_text() for path in folder.iterdir()}
    apply_edits(mutant, folder)
    assert {path.name: path.read_text() for path in folder.iterdir()} != before


def test_there_are_enough_attacks_and_each_has_its_name() -> None:
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS) >= 40
