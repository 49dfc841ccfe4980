"""Less of everything random while mutmut runs the tests once for every mutant; all of it otherwise."""

from __future__ import annotations

import os
from typing import Final

IS_MUTATED: Final = "MUTANT_UNDER_TEST" in os.environ
"""True inside mutmut, which sets this variable for the tests it runs."""


def few(count: int) -> int:
    """How many of ``count`` random cases to run: all, or one in ten (at least one) inside mutmut."""
    return max(1, count // 10) if IS_MUTATED else count
