"""Where batches that are not full lose efficiency, and what no rule could save, beside each missed goal of `quality`.

Efficiency has no bound below 1 that would excuse a rule. It counts what steps waste, not how many steps there are, and small
batches waste little. Single samples, with the longest of every rank together, waste hardly anything. So the tables also show
the fewest steps that an epoch needs, and its efficiency if all of them were full.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from odb_sim.engine.metrics import StepRow
from odb_sim.inputs.lengths import Integers


@dataclass(frozen=True, slots=True, kw_only=True)
class Losses:
    """Lost shares of ranks times critical tokens. Both ``ramp + middle + ending`` and ``padding + waiting`` add up to 1
    with the efficiency.
    """

    ramp: float
    """Lost in the rounds with small windows."""
    middle: float
    """Lost in the rounds with whole windows."""
    ending: float
    """Lost in the last round, which emits everything left."""
    padding: float
    """Lost inside batches."""
    waiting: float
    """Lost by ranks that wait for one with a larger batch."""


def compute_losses(rows: Sequence[StepRow], *, ranks: int, ramp_rounds: int) -> Losses:
    """Returns the losses of an epoch of at least one step."""
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
    """Returns a lower bound on the steps of an epoch of these samples, for any way of forming batches, in either layout.

    A sample over the budget is a batch by itself, no other batch exceeds the budget, and no step has more batches than
    there are ranks.
    """
    is_over = tokens > budget_tokens
    batches = int(np.count_nonzero(is_over)) - (-int(tokens[~is_over].sum()) // budget_tokens)
    return -(-batches // ranks)


def compute_full_efficiency(tokens: Integers, *, ranks: int, budget_tokens: int) -> float:
    """Returns the efficiency of the fewest steps if each, including the last, takes as long as a full batch.

    It is meaningless if a sample exceeds the budget.
    """
    steps = count_fewest_steps(tokens, ranks=ranks, budget_tokens=budget_tokens)
    return int(tokens.sum()) / (ranks * budget_tokens * steps)
