"""Fits the time of a step and of an update's collective: chooses which recorded steps to time, and whose batch to price."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Final

import numpy as np
from numpy.typing import NDArray

from odb_ref.core.errors import UsageError
from odb_sim.engine.updates import Accumulation, Booleans, GlobalBatch
from odb_sim.inputs.costs import NO_COLLECTIVE, CollectiveCost, GpuCost, StepTable
from odb_sim.recorded.fitting import (
    Fit,
    TimedSpans,
    compute_run_error,
    compute_scatter,
    fit_apart_from_zero,
    fit_component,
    fit_table,
    fit_with_floor,
    join_spans,
    judge,
    split_spans,
)
from odb_sim.recorded.runs import RankRecord, RecordedRun

_QUADRATIC_GAIN: Final = 0.95
_ALIKE: Final = 1.5
"""Nine of ten steps within this ratio are of about one size."""
READY_S: Final = 2e-3
READY_SHARE: Final = 0.05
"""A step was ready if it was delivered ``READY_S``, and this share of the previous step, before it was taken."""
_PARTS: Final = 4
NO_GPU: Final = GpuCost(fixed_s=0, per_token_s=0, per_token2_s=0)


class Meeting(Enum):
    """Where ranks wait for one another, which decides the steps to fit, and to whose batch."""

    EVERY_UPDATE = "updates of one step"
    EVERY_STEP = "steps inside an update, after which ranks meet"
    NONE_INSIDE = "steps inside an update, after which ranks do not meet"


@dataclass(frozen=True, slots=True)
class TimedRun:
    """A run whose steps are fitted."""

    run: RecordedRun
    ends: Booleans
    """Which steps end an update."""
    warm_up_steps: int

    def list_steps(self) -> range:
        """Returns the steps that can be timed: all but the last and those of the warm-up, which has at least one."""
        return range(max(1, self.warm_up_steps), self.run.steps - 1)

    def stack_sizes(self) -> NDArray[np.int64]:
        """Returns padded tokens and squared lengths, in shape (ranks, steps, 2)."""
        sizes = [rank.sizes[: self.run.steps] for rank in self.run.ranks]
        return np.array(sizes, dtype=np.int64).reshape(len(sizes), -1, 2)


def find_ends(run: RecordedRun, global_batch: GlobalBatch) -> Booleans:
    """Returns which steps end an update: with ``update_samples`` the last of every round."""
    rounds = run.ranks[0].rounds
    if run.config.update_samples is not None:
        return np.array([at == len(steps) - 1 for steps in rounds for at in range(len(steps))], dtype=np.bool_)
    counts = np.array([step.counts[:2] for steps in rounds for step in steps], dtype=np.int64).reshape(-1, 2)
    return Accumulation(global_batch).find_ends(counts[:, 0], counts[:, 1])


def check_alike(timed: Sequence[TimedRun]) -> None:
    """Checks that steps are accumulated to updates in all runs or in none. Only their kinds of steps can be fitted together.

    Raises: UsageError naming a run of each kind.
    """
    each = {bool(one.ends.all()): one.run.name for one in reversed(timed)}
    if len(each) > 1:
        raise UsageError(
            f"{each[False]}: accumulates steps to updates, and in {each[True]} each step is an update: calibrate them apart"
        )


def list_unused(timed: Sequence[TimedRun], meeting: Meeting) -> tuple[str, ...]:
    """Returns the names of the runs of which no step could be timed."""
    return tuple(one.run.name for one in timed if not len(_gather_steps(one, meeting, replace(NO_GPU, per_token_s=1))))


def fit_steps(timed: Sequence[TimedRun]) -> tuple[Fit, Meeting]:
    """Returns the fit of a step, and where ranks meet. With too few steps inside updates those that are one are fitted."""
    if not all(one.ends.all() for one in timed):
        found = [(_fit_where(timed, meeting), meeting) for meeting in (Meeting.NONE_INSIDE, Meeting.EVERY_STEP)]
        found = [(fit, meeting) for fit, meeting in found if not fit.reason]
        if found:
            return min(found, key=lambda pair: pair[0].median_error)
    return _fit_where(timed, Meeting.EVERY_UPDATE), Meeting.EVERY_UPDATE


def _fit_where(timed: Sequence[TimedRun], meeting: Meeting) -> Fit:
    why_few = "the others waited for data, or the run is short"
    by_token = replace(NO_GPU, per_token_s=1)
    linear_fitted, held = split_spans([_gather_steps(one, meeting, by_token) for one in timed])
    linear = fit_component("step", linear_fitted, held, why_few, fit_with_floor)
    if linear.reason:
        return linear
    # The rank with the costliest batch is known only once the numbers are.
    quadratic = linear
    for _ in range(2):
        gpu = replace(NO_GPU, **quadratic.values)
        parts = [_gather_steps(one, meeting, gpu, with_pairs=True) for one in timed]
        fitted, held = split_spans(parts)
        quadratic = fit_component("step", fitted, held, why_few, fit_with_floor)
    error = np.abs(fitted.compute_errors(quadratic.values)).sum()
    linear_error = np.abs(fitted.compute_errors(linear.values)).sum()
    is_quadratic = error < linear_error * _QUADRATIC_GAIN
    best = fit_apart_from_zero("step", fitted if is_quadratic else linear_fitted, held, why_few, fit_with_floor)
    low, high = np.quantile(np.concatenate([linear_fitted.columns[:, 1], held.columns[:, 1]]), (0.05, 0.95))
    if high < _ALIKE * low and {"fixed_s", "per_token_s"} & set(best.dropped):
        # Noise decided which. Counted as fixed, larger batches would seem to take no longer than these.
        by_tokens = linear_fitted.keep(["per_token_s"])
        best = fit_apart_from_zero("step", by_tokens, held, why_few)
        best = replace(best, values={"fixed_s": 0.0, **best.values}, dropped=("fixed_s",), is_alike=True)
    quarters = [held.select(part) for part in np.array_split(np.arange(len(held)), _PARTS)]
    error = compute_run_error(best.values, parts[1::2] if len(parts) > 1 else quarters)
    return replace(best, scatter=compute_scatter(join_spans(parts)), run_error=error)


def fit_step_table(timed: Sequence[TimedRun], meeting: Meeting) -> tuple[StepTable, Fit]:
    """Returns a table of step times, and its fit to the spans held back. Raises: UsageError with fewer than two sizes."""
    fitted, held = split_spans([_gather_steps(one, meeting, replace(NO_GPU, per_token_s=1)) for one in timed])
    at = fitted.names.index("per_token_s")
    rows = fit_table(fitted.columns[:, at], fitted.seconds)
    if len(rows) < 2:
        raise UsageError(
            f"{timed[0].run.name}: --table: too few steps whose data was there in time, or all of one size"
        )
    table = StepTable(rows=rows)
    predicted = np.array([table.compute_step_s(tokens) for tokens in held.columns[:, at].tolist()])
    return table, judge("step table", {"rows": len(table.rows)}, fitted, held, predicted - held.seconds)


def fit_collective(timed: Sequence[TimedRun], gpu: GpuCost, meeting: Meeting) -> CollectiveCost:
    """Returns the time of the end of an update beyond what ``gpu`` predicts for the rank that reaches it last.

    If updates of one step are fitted, this is part of their time.
    """
    if meeting is Meeting.EVERY_UPDATE:
        return NO_COLLECTIVE
    longer = []
    for one in timed:
        sizes, ranks = one.stack_sizes(), one.run.ranks
        predicted = gpu.compute_steps_s(sizes[:, :, 0], sizes[:, :, 1])
        for step in one.list_steps():
            if one.ends[step] and all(_is_ready(rank, step + 1) for rank in ranks):
                longer.append(min(_get_span(rank, step) - predicted[at, step] for at, rank in enumerate(ranks)))
    fixed_s = max(0.0, float(np.median(longer))) if longer else 0.0
    return replace(NO_COLLECTIVE, fixed_s=fixed_s, each_step=meeting is Meeting.EVERY_STEP)


def _gather_steps(one: TimedRun, meeting: Meeting, gpu: GpuCost, *, with_pairs: bool = False) -> TimedSpans:
    """Returns the steps to fit, in which no rank waited for data. If ranks meet, ``gpu`` decides whose batch is costliest."""
    names = ("fixed_s", "per_token_s", "per_token2_s")[: 3 if with_pairs else 2]
    ranks, ends, sizes = one.run.ranks, one.ends, one.stack_sizes()
    costliest = gpu.compute_steps_s(sizes[:, :, 0], sizes[:, :, 1]).argmax(axis=0)
    rows: list[tuple[int, int]] = []
    seconds: list[float] = []
    for step in one.list_steps():
        is_fitted = ends[step] and ends[step - 1] if meeting is Meeting.EVERY_UPDATE else not ends[step]
        if not is_fitted:
            continue
        ready = [at for at, rank in enumerate(ranks) if _is_ready(rank, step + 1)]
        spans = [_get_span(ranks[at], step) for at in ready]
        if meeting is Meeting.NONE_INSIDE:
            rows += [tuple(sizes[at, step].tolist()) for at in ready]
            seconds += spans
        elif spans and all(_is_ready(rank, step) for rank in ranks):
            rows.append(tuple(sizes[costliest[step], step].tolist()))
            seconds.append(min(spans))
    padded = np.array(rows, dtype=np.int64).reshape(-1, 2)
    columns = [replace(NO_GPU, **{name: 1}).compute_steps_s(padded[:, 0], padded[:, 1]) for name in names]
    stacked = np.stack([np.broadcast_to(column, len(rows)) for column in columns], axis=1)
    return TimedSpans(names, stacked.astype(np.float64), np.array(seconds))


def _get_span(rank: RankRecord, step: int) -> float:
    """Returns the seconds from when ``rank`` took a step until it took the next."""
    return rank.taken_s[step + 1] - rank.taken_s[step]


def _is_ready(rank: RankRecord, step: int) -> bool:
    """Returns True when the step lay in the queue before the trainer asked for it."""
    waited_s = rank.taken_s[step] - rank.delivered_s[step]
    return waited_s > READY_S and waited_s > READY_SHARE * (rank.taken_s[step] - rank.taken_s[step - 1])
