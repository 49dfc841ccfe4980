"""Defects that show only deep in a run: on rank 17, beyond 16 bits, when something is due, when a quota cuts a round.

``python -m tests.mutants.deep`` prints how the comparison with the extracted model finds each, and after how long.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict

from odb_sim.explore.bounds import Bounds

from tests.mutants.defects import read_defects
from tests.mutants.loader import Mutant, load
from tests.proofs.worlds import find_difference, run_world

AT_ONCE = 40
MOST_WORLDS = 600
_ANYWHERE = Bounds(lengths=((1,),))


DEEP = tuple(
    Mutant(**asdict(defect), property=broken, bounds=_ANYWHERE) for defect, (broken,) in read_defects("deep.txt")
)


def find(mutant: Mutant, model: Callable[[str], list[str]]) -> tuple[int, str] | None:
    """Returns the batch of worlds that caught the mutant, and how it differs, or None if it survives."""
    with load(mutant, has_invariants=False) as (core, bounds):
        for first in range(0, MOST_WORLDS, AT_ONCE):
            worlds = []
            for seed in range(first, first + AT_ONCE):
                try:
                    worlds.append(run_world(seed, core, type(bounds.layout)))
                except Exception as error:  # Anything that the mutant may raise.
                    return first, f"seed {seed}: {type(error).__name__}: {error}"
            difference = find_difference(model, worlds)
            if difference is not None:
                return first, difference
    return None


def main() -> None:
    from tests.proofs.conftest import ask_model

    print("| defect | breaks | caught in world | after |\n|---|---|--:|--:|")
    for mutant in DEEP:
        began = time.perf_counter()
        found = find(mutant, ask_model)
        where = "survives" if found is None else f"{found[0]} to {found[0] + AT_ONCE - 1}"
        print(f"| {mutant.name} | {mutant.property} | {where} | {time.perf_counter() - began:.1f} s |", flush=True)


if __name__ == "__main__":
    main()
