"""Where batches that are not full lose what they lose, and what no rule could save: beside each missed goal of `quality`.

Efficiency has no bound below 1 that would excuse a rule: it counts what steps waste, not how many there are, and small batches
waste little, single samples, the longest of every rank together, hardly anything. So what stands beside it is how many steps an
epoch cannot do without, and the efficiency of so many full ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from odb_sim.engine.metrics import StepRow
from odb_sim.inputs.lengths import Integers


@dataclass(frozen=True, slots=True, kw_only=True)
class Losses:
    """What is lost, in shares of ranks times critical tokens: ``ramp + middle + ending``, or ``padding + waiting``, and the
    efficiency are 1.
    """

    ramp: float
    """In the rounds whose windows are small."""
    middle: float
    """In the rounds of whole windows."""
    ending: float
    """In the last round, which emits all that is left."""
    padding: float
    """Inside batches."""
    waiting: float
    """For a rank whose batch is larger."""


def compute_losses(rows: Sequence[StepRow], *, ranks: int, ramp_rounds: int) -> Losses:
    """The losses of an epoch of one step or more."""
    whole = ranks * sum(row.critical_tokens for row in rows)
    last = rows[-1].round
    ending = [row for row in rows if row.round == last]
    ramp = [row for row in rows if row.round < min(ramp_rounds, last)]
    middle = [row for row in rows if ramp_rounds <= row.round < last]
    ramp_lost, middle_lost, ending_lost = (
        sum(ranks * row.critical_tokens - row.real_tokens for row in part) / whole for part in (ramp, middle, ending)
    )
    return Losses(
        ramp=ramp_lost,
        middle=middle_lost,
        ending=ending_lost,
        padding=sum(row.padded_tokens - row.real_tokens for row in rows) / whole,
        waiting=sum(ranks * row.critical_tokens - row.padded_tokens for row in rows) / whole,
    )


def count_fewest_steps(tokens: Integers, *, ranks: int, budget_tokens: int) -> int:
    """A number of steps that no epoch of these samples is shorter than, by any way of forming batches, in either layout.

    A sample over the budget is a batch by itself, and no other batch holds more than the budget; no step has more batches than
    there are ranks.
    """
    is_over = tokens > budget_tokens
    batches = int(np.count_nonzero(is_over)) - (-int(tokens[~is_over].sum()) // budget_tokens)
    return -(-batches // ranks)


def compute_full_efficiency(tokens: Integers, *, ranks: int, budget_tokens: int) -> float:
    """The efficiency of the fewest steps when each, the last too, takes as long as a full batch: whole steps cost no more.

    Without meaning where a sample exceeds the budget.
    """
    steps = count_fewest_steps(tokens, ranks=ranks, budget_tokens=budget_tokens)
    return int(tokens.sum()) / (ranks * budget_tokens * steps)
