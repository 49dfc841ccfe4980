"""Less of everything random while mutmut runs the tests once for every mutant, and in a slice; otherwise all of it."""

from __future__ import annotations

import os
from typing import Final

from hypothesis import settings

IS_MUTATED: Final = "MUTANT_UNDER_TEST" in os.environ
"""True inside mutmut, which sets this variable for the tests it runs."""


def few(count: int) -> int:
    """Returns how many of ``count`` random cases to run: all; a quarter in a slice; one in ten, at least one, inside mutmut."""
    # conftest.py loads the profile before any test module is imported.
    is_slice = settings.get_current_profile_name() == "slice"
    return max(1, count // (10 if IS_MUTATED else 4 if is_slice else 1))
