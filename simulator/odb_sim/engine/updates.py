"""Gradient accumulation, the same for every policy: which steps end an optimizer update of several steps.

Without a global batch every step is an update. With one, steps are accumulated: update u ends with the first step, after the
end of update u - 1, by which all ranks together have trained on u times the global batch. So updates hold the global batch on
average, whatever a policy's steps hold, as long as no step holds more.

Inside an update ranks neither wait for one another nor send gradients, as in ``no_sync``. Each takes its next batch when it has
computed the last. A collective ends the update.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from odb_ref.core.errors import UsageError
from odb_sim.inputs.costs import Seconds
from odb_sim.inputs.lengths import Integers

Booleans = NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True)
class GlobalBatch:
    """The size of an optimizer update over all ranks, in samples or in tokens without padding. Without either, it is one step.

    Raises: UsageError when both are given, or the size is less than 1.
    """

    samples: int | None = None
    tokens: int | None = None

    def __post_init__(self) -> None:
        if self.samples is not None and self.tokens is not None:
            raise UsageError("a global batch is a number of samples or of tokens, not both")
        if self.goal is not None and self.goal < 1:
            raise UsageError(f"a global batch holds at least 1 sample or token, got {self.goal}")

    @property
    def goal(self) -> int | None:
        """The samples or tokens of an update, or None if every step is an update."""
        return self.tokens if self.samples is None else self.samples


EVERY_STEP: Final = GlobalBatch()
"""Every step is an update."""
TOLERATED: Final = 1.02
"""Updates may hold up to this many times the global batch on average without a caution."""


class Accumulation:
    """The updates of one epoch, found a few steps at a time."""

    __slots__ = ("_global_batch", "_trained", "updates")

    def __init__(self, global_batch: GlobalBatch) -> None:
        self._global_batch = global_batch
        self._trained = 0
        """The samples or tokens, whichever the global batch counts, of all steps so far."""
        self.updates = 0
        """The number of updates that have ended."""

    def find_ends(self, samples: Integers, tokens: Integers) -> Booleans:
        """Returns which of the next steps end an update. ``samples`` and ``tokens`` are those of each step over all ranks.

        The last step of an epoch always ends an update, which the caller has to handle.
        """
        ends = np.ones(len(samples), dtype=np.bool_)
        goal = self._global_batch.goal
        amounts = tokens if self._global_batch.samples is None else samples
        for step, amount in enumerate(amounts.tolist()):
            self._trained += amount
            ends[step] = goal is None or self._trained >= (self.updates + 1) * goal
            self.updates += bool(ends[step])
        return ends


def compute_mean(values: Seconds) -> float:
    """Returns the mean, which is exactly the common value if all are equal."""
    first = float(values[0])
    return first + float((values - first).mean()) if len(values) > 1 else first
