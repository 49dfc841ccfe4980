"""Less of everything random while mutmut runs the tests once for every mutant, and in a slice; all of it otherwise."""

from __future__ import annotations

import os
from typing import Final

from hypothesis import settings

IS_MUTATED: Final = "MUTANT_UNDER_TEST" in os.environ
"""True inside mutmut, which sets this variable for the tests it runs."""


def few(count: int) -> int:
    """How many of ``count`` random cases to run: all, or one in ten (at least one) inside mutmut."""
    return max(1, count // 10) if IS_MUTATED else count


def few_in_slice(count: int) -> int:
    """As `few`, and a quarter where ``make test`` runs a slice; for tests of Hypothesis, which ``make soak`` runs anew.

    Another test that calls this stands in ``SLICED`` of ``tests/conftest.py``, which loads the profile that is asked for here
    before any module of tests is imported.
    """
    return few(max(1, count // 4) if settings.get_current_profile_name() == "slice" else count)
