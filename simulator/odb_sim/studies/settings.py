"""Which settings of a run cost it more than a planner would like: each is changed by itself, and the epoch simulated again."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from odb_sim.engine.cautions import About, Caution
from odb_sim.engine.metrics import COMPLETE, Summary
from odb_sim.studies.runs import Driver, Run, run

COSTLY: Final = 0.02
LARGEST_TRIED: Final = 200_000
"""Samples of an epoch, at most: a larger one would take too long to be simulated again."""


def list_costly(what: Run, summary: Summary) -> tuple[Caution, ...]:
    """Returns a caution for each of window, depth, ramp and age that makes the epoch more than 2 % slower than another would.

    None for a baseline, a large epoch, or one that only events can simulate.
    """
    is_tried = what.is_protocol and what.workload.samples_total <= LARGEST_TRIED and not what.find_obstacle()
    if not is_tried or summary.outcome != COMPLETE.kind or what.starts or what.budget_schedule is not None:
        return ()
    window, depth, age = 2 * what.window_samples, 2 * what.depth_steps, 2 * what.max_age_rounds
    others = {
        f"--window {what.window_samples} (with {window}": replace(what, window_samples=window),
        f"--depth {what.depth_steps} (with {depth}": replace(what, depth_steps=depth),
        f"--max-age {what.max_age_rounds} (with {age}": replace(what, max_age_rounds=age),
    }
    if what.ramp_rounds:
        others[f"--ramp {what.ramp_rounds} (with 0"] = replace(what, ramp_rounds=0)
    found = []
    for said, changed in others.items():
        other = run(replace(changed, driver=Driver.ROUNDS)).summary
        if other.outcome == COMPLETE.kind and summary.tokens_per_s < (1 - COSTLY) * other.tokens_per_s:
            cost = 1 - summary.tokens_per_s / other.tokens_per_s
            found.append(
                Caution(About.SETTING, f"{said}: {other.tokens_per_s:,.0f} tokens/s) costs {cost:.1%} of this epoch")
            )
    return tuple(found)
