"""Micro-batches of samples whose lengths are known, as reinforcement learning and packed training have them. Spec: R13.

Before an optimizer step the lengths of its samples are there. Every rank then needs the same number of micro-batches,
each within the budget, none empty that need not be, and such that no rank waits long for another. Three ways in, one
implementation:

====================  ====================================================================================================
`plan_all`            one place knows all lengths, and deals the samples out to the ranks
`plan_ranks`          one place knows all lengths, and the samples stay where they are
`plan_rank`           each rank knows its own, and one all-gather of a few integers, which the caller gives
====================  ====================================================================================================

What they share, bottom up: `terms` (what is asked for, and how a refusal is worded), `units` (samples, measured),
`packing` and `padding` (the two layouts), `division` (the fewest micro-batches, or so many and none costlier than need
be), `planning` and `exchanging` (the ways in), `outcome` (what comes back). Pure Python: it imports nothing but the
core.
"""

from odb_ref.plan.exchanging import MESSAGE_SIZE, Exchange, plan_rank
from odb_ref.plan.outcome import Mean, Plan, PlanReport, RankPlan, Totals, Weights
from odb_ref.plan.planning import plan_all, plan_ranks
from odb_ref.plan.terms import BatchOrder, Options, Oversize, PlanTerms, Short, Within, attention

__all__ = [
    "MESSAGE_SIZE",
    "BatchOrder",
    "Exchange",
    "Mean",
    "Options",
    "Oversize",
    "Plan",
    "PlanReport",
    "PlanTerms",
    "RankPlan",
    "Short",
    "Totals",
    "Weights",
    "Within",
    "attention",
    "plan_all",
    "plan_rank",
    "plan_ranks",
]
