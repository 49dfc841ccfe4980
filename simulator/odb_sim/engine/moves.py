"""How far training strays from what the sampler chose: places that samples are moved by, and length from step to step.

Every figure has its formula in GLOSSARY.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from odb_sim.engine.windows import compute_ragged
from odb_sim.inputs.lengths import Integers

_POSITION_BITS: Final = 32


def sum_moves(emitted: Integers, counts: Integers, positions: Integers) -> int:
    """Returns by how many places the samples of some batches are moved, all together.

    Before batch b its rank has emitted ``emitted[b]`` samples; it holds ``counts[b]`` of ``positions``, which are those of all
    batches, one after the other. Inside a batch samples have no order, so they count as in the sampler's.
    """
    batches = np.repeat(np.arange(len(counts)), counts)
    ordered = np.sort(batches << _POSITION_BITS | positions) & ((1 << _POSITION_BITS) - 1)
    return int(np.abs(ordered - compute_ragged(emitted, counts)).sum())


def compute_autocorrelation(values: Sequence[float]) -> float:
    """Returns how much a value is like the one before: 1 where they run on, 0 where they are mixed; 0 of fewer than two, and of
    equal ones.
    """
    deviations = np.array(values) - np.mean(values) if values else np.zeros(0)
    square = float((deviations**2).sum())
    return float((deviations[1:] * deviations[:-1]).sum()) / square if square else 0.0
