"""Micro-batches of samples whose lengths are known in advance, as in reinforcement learning and packed training. Spec: R13.

The lengths of an optimizer step's samples are known before the step. Every rank then needs the same number of micro-batches,
each within the budget and none empty without need, and no rank should wait long for another. There are three entry points to
one implementation:

====================  ====================================================================================================
`plan_all`            one process knows all lengths, and deals the samples out to the ranks
`plan_ranks`          one process knows all lengths, and the samples stay on their ranks
`plan_rank`           each rank knows its own lengths; the caller provides one all-gather of a few integers
====================  ====================================================================================================

The modules, bottom up: `terms` (the settings, and the wording of refusals), `units` (the measured samples), `packing`,
`padding` and `settling` (forming micro-batches), `division` (the fewest micro-batches, or a given number of equally costly
ones), `planning` and `exchanging` (the entry points), `outcome` (the results). Pure Python: the package imports only the
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
