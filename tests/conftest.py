"""How much Hypothesis tries: its default, without deadlines; few examples, always the same, while mutmut runs the tests.

A deadline would measure how busy the machine is. Under mutmut (see tests/mutants/SURVIVORS.md) the suite runs some two
thousand times, a mutant must meet the examples that the unmutated code met, and nobody reads a shrunk example.
"""

from __future__ import annotations

from hypothesis import Phase, settings

from tests.helpers.effort import IS_MUTATED

settings.register_profile("odb", deadline=None)
settings.register_profile(
    "mutants",
    deadline=None,
    max_examples=20,
    derandomize=True,
    database=None,
    phases=(Phase.explicit, Phase.generate),
)
settings.load_profile("mutants" if IS_MUTATED else "odb")
