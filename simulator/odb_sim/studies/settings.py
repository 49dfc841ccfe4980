"""Which settings of a run cost it more than a planner would like: each is changed by itself, and the epoch simulated again."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Final

import numpy as np

from odb_sim.engine.cautions import About, Caution
from odb_sim.engine.metrics import COMPLETE, Summary
from odb_sim.studies.runs import Run, run

COSTLY: Final = 0.02
LARGEST_TRIED: Final = 100_000
"""Samples of an epoch, at most: a larger one would take too long to be simulated again, some fifteen times."""
LARGEST_EVENTS: Final = 10_000
"""Likewise of one that only events can simulate, twice."""
_LARGEST_WINDOW: Final = 4096
_FACTORS: Final = (1 / 4, 1 / 2, 2, 4, 16, 64)
_RAMPS: Final = range(5)


def list_costly(what: Run, summary: Summary) -> tuple[Caution, ...]:
    """Returns a caution for each of window, depth, ramp and age that makes the epoch more than 2 % slower than another would,
    with the best of those tried: some smaller, some larger.

    None for a baseline, and for a run that did not end complete or was resumed. Of an epoch too large to be tried it says that.
    """
    is_asked = what.is_protocol and summary.outcome == COMPLETE.kind
    if not is_asked or what.starts or what.full_reads or what.budget_schedule is not None:
        return ()
    is_update = what.update_samples is not None
    if what.conditions.faults or what.conditions.jitter or (what.find_obstacle() and not is_update):
        return ()
    if what.workload.samples_total > (LARGEST_EVENTS if is_update else LARGEST_TRIED):
        text = f"--depth {what.depth_steps}" if is_update else "another window, depth, ramp or age"
        return (Caution(About.UNTRIED, f"in so long an epoch it was not tried what {text} costs; odb-ref tune does"),)
    found = []
    for option, value, changed in _list_others(what):
        tried = [(one, run(replace(what, **{changed: one})).summary) for one in value]
        best, other = max(tried, key=lambda pair: pair[1].tokens_per_s, default=(0, summary))
        if other.outcome == COMPLETE.kind and summary.tokens_per_s < (1 - COSTLY) * other.tokens_per_s:
            cost = 1 - summary.tokens_per_s / other.tokens_per_s
            said = f"{option} {getattr(what, changed)} (with {best}: {other.tokens_per_s:,.0f} tokens/s)"
            found.append(Caution(About.SETTING, f"{said} costs {cost:.1%} of this epoch"))
    return tuple(found)


def _list_others(what: Run) -> Iterator[tuple[str, list[int], str]]:
    """Yields the option of each setting that has a say, the other values to try, and its field."""
    yield "--depth", [2 * what.depth_steps, 4 * what.depth_steps], "depth_steps"
    if what.update_samples is not None:
        return  # windows, ramp and age have no say (R16)
    shard = int(np.diff(what.workload.offsets).max())
    window = min(what.window_samples, shard)  # a larger one acts as a shard
    others = {int(window * factor) for factor in _FACTORS} | {min(shard, _LARGEST_WINDOW)}
    yield "--window", sorted(other for other in others - {window} if 1 <= other <= shard), "window_samples"
    yield "--ramp", [ramp for ramp in _RAMPS if ramp != what.ramp_rounds], "ramp_rounds"
    age = what.max_age_rounds
    yield "--max-age", sorted({1, 2 * age, 4 * age} - {age}), "max_age_rounds"
