"""The comparison with the extracted model catches defects that show only deep in a run, within seconds."""

from __future__ import annotations

import time

import pytest

from tests.mutants.deep import DEEP, find
from tests.mutants.loader import Mutant
from tests.proofs.conftest import Model

LIMIT_S = 60
"""A few seconds, with a margin for a busy machine."""


@pytest.mark.slow
@pytest.mark.parametrize("mutant", DEEP, ids=lambda mutant: mutant.name)
def test_a_deep_defect_is_caught(model: Model, mutant: Mutant) -> None:
    began = time.monotonic()
    assert find(mutant, model) is not None, "survives"
    assert time.monotonic() - began < LIMIT_S


def test_there_are_many_of_them() -> None:
    names = [mutant.name for mutant in DEEP]
    assert len(names) == len(set(names)) >= 30
