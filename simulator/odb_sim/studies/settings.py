"""Finds settings that make a run notably slower, by changing each separately and simulating the epoch again."""

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
"""The most samples of an epoch, which has to be simulated again some fifteen times."""
LARGEST_EVENTS: Final = 10_000
"""The most samples of an epoch that only events can simulate, which is simulated again twice."""
_LARGEST_WINDOW: Final = 4096
_FACTORS: Final = (1 / 4, 1 / 2, 2, 4, 16, 64)
_RAMPS: Final = range(5)


def list_costly(what: Run, summary: Summary) -> tuple[Caution, ...]:
    """Returns a caution for each of window, depth, ramp and age that makes the epoch more than 2 % slower than another value,
    and names the best of the smaller and larger values tried.

    There are none for a baseline, or for a run that did not end complete or was resumed. If the epoch is too large, the only
    caution says so.
    """
    is_asked = what.is_protocol and summary.outcome == COMPLETE.kind
    if not is_asked or what.starts or what.full_reads or what.budget_schedule is not None:
        return ()
    is_update = what.update_samples is not None
    if what.conditions.faults or what.conditions.jitter or (what.find_obstacle() and not is_update):
        return ()
    if what.workload.samples_total > (LARGEST_EVENTS if is_update else LARGEST_TRIED):
        text = f"--depth {what.depth_steps}" if is_update else "another window, depth, ramp or age"
        return (
            Caution(
                About.UNTRIED, f"in an epoch of this length the cost of {text} was not tried; odb-ref tune tries it"
            ),
        )
    found = []
    for option, given, others in _list_others(what):
        tried = [(value, run(other).summary) for value, other in others]
        best, other = max(tried, key=lambda pair: pair[1].tokens_per_s, default=(given, summary))
        if other.outcome == COMPLETE.kind and summary.tokens_per_s < (1 - COSTLY) * other.tokens_per_s:
            cost = 1 - summary.tokens_per_s / other.tokens_per_s
            said = f"{option} {best} instead of {given} would save {cost:.1%} of this epoch"
            found.append(Caution(About.SETTING, f"{said} ({other.tokens_per_s:,.0f} tokens/s)"))
    return tuple(found)


def _list_others(what: Run) -> Iterator[tuple[str, int, list[tuple[int, Run]]]]:
    """Yields each setting that has an effect: its option, its value, and the runs with other values."""
    depth = what.depth_steps
    yield "--depth", depth, [(other, replace(what, depth_steps=other)) for other in (2 * depth, 4 * depth)]
    if what.update_samples is not None:
        return  # window, ramp and age have no effect (R16)
    shard = int(np.diff(what.workload.offsets).max())
    window = min(what.window_samples, shard)  # a larger window acts like a shard
    windows = {int(window * factor) for factor in _FACTORS} | {min(shard, _LARGEST_WINDOW)}
    tried = sorted(other for other in windows - {window} if 1 <= other <= shard)
    yield "--window", what.window_samples, [(other, replace(what, window_samples=other)) for other in tried]
    ramp = what.build_config().ramp_rounds
    yield "--ramp", ramp, [(other, replace(what, ramp_rounds=other)) for other in _RAMPS if other != ramp]
    age = what.max_age_rounds
    ages = sorted({1, 2 * age, 4 * age} - {age})
    yield "--max-age", age, [(other, replace(what, max_age_rounds=other)) for other in ages]
