"""The cost of a baseline: the same figures as for the protocol, computed from a plan of batches (see `plans`).

A plan is fixed before the run, and all ranks take the same number of steps. Its times follow from a recurrence over steps, with
a plain DataLoader for each rank, whose workers read and collate the batches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from odb_ref.core.types import Mode
from odb_sim.baselines.plans import RankBatches
from odb_sim.engine.batches import measure_batches
from odb_sim.engine.fill import Fill
from odb_sim.engine.loading import Workers
from odb_sim.engine.metrics import RunRecord, StepRow, count_steps, sum_moves
from odb_sim.engine.stage import Epoch
from odb_sim.engine.timeline import Timeline
from odb_sim.engine.updates import Accumulation, compute_mean
from odb_sim.inputs.costs import Seconds
from odb_sim.inputs.lengths import Integers
from odb_sim.inputs.workload import Workload


@dataclass(frozen=True, slots=True)
class _Batches:
    """Figures of every batch, in arrays of shape (ranks, steps). A rank without a batch in a step has zeros."""

    samples: Integers
    real: Integers
    padded: Integers
    row_pairs: Seconds


def _measure(workload: Workload, plans: list[RankBatches]) -> _Batches:
    steps = max(len(plan.starts) for plan in plans)
    samples = np.zeros((len(plans), steps), dtype=np.int64)
    for rank, plan in enumerate(plans):
        samples[rank, : len(plan.starts)] = np.diff(plan.starts, append=len(plan.order))
    figures = [
        measure_batches(workload.tokens[plan.order], counts, plan.layout)
        for plan, counts in zip(plans, samples, strict=True)
    ]
    return _Batches(samples, *map(np.stack, zip(*figures, strict=True)))


def _count_steps(batches: _Batches, mode: Mode, quota_samples: int | None) -> int:
    """Returns the number of steps taken. Join mode takes all; quota mode stops at the quota, or before a rank would idle."""
    steps = int(batches.samples.shape[1])
    if mode is Mode.JOIN:
        return steps
    steps = int((batches.samples > 0).all(axis=0).sum())
    if quota_samples is not None:
        emitted = np.cumsum(batches.samples.sum(axis=0))
        steps = min(steps, int(np.searchsorted(emitted, quota_samples)) + 1)
    return steps


def simulate_plan(
    epoch: Epoch,
    plans: list[RankBatches],
    *,
    timeline: Timeline | None = None,
    fill: Fill | None = None,
    on_progress: Callable[[int], None] | None = None,
) -> RunRecord:
    """Returns the record of a simulated plan.

    Each rank has a plain DataLoader, as described in `odb_sim.engine.loading`.
    """
    workload, costs, conditions, seed = epoch.workload, epoch.costs, epoch.conditions, epoch.seed
    batches = _measure(workload, plans)
    steps, ranks = _count_steps(batches, epoch.mode, epoch.quota_samples), len(plans)
    compute_s = costs.compute_steps_s(batches.padded, batches.row_pairs)
    compute_s = _stretch(compute_s, conditions.slow_ranks, conditions.jitter, seed)
    load_s = costs.loader.compute_plain_s(batches.samples, batches.real, batches.padded)
    load_s = _stretch(load_s, conditions.slow_loaders, conditions.jitter, seed + 1)
    loaders = [Workers(costs.loader) for _ in plans]
    sync_s = costs.collective.compute_s(ranks)
    loaded_s, taken_s = np.zeros((ranks, steps)), np.zeros((ranks, steps))
    taken = batches.samples[:, :steps].sum(axis=0), batches.real[:, :steps].sum(axis=0)
    ends_update = Accumulation(epoch.global_batch).find_ends(*taken)
    ends_update[-1:] = True
    begun_s, done_s = np.zeros((ranks, steps)), np.zeros((ranks, steps))
    ended_s = np.zeros((ranks, steps))
    free_s, emitted = np.zeros(ranks), 0
    for step in range(steps):
        begun_s[:, step] = free_s
        for rank, (seconds, asked_s) in enumerate(zip(load_s[:, step].tolist(), free_s.tolist(), strict=True)):
            # A rank that has run dry takes nothing from its loader.
            loader = loaders[rank]
            has_batch = batches.samples[rank, step] > 0
            taken_s[rank, step] = loader.take(seconds, asked_s) if has_batch else asked_s
            loaded_s[rank, step] = loader.done_s if has_batch else asked_s
        done_s[:, step] = free_s = taken_s[:, step] + compute_s[:, step]
        if ends_update[step] or costs.collective.each_step:
            free_s = np.full(ranks, float(free_s.max()) + sync_s * float(ends_update[step]))
        ended_s[:, step] = free_s
        emitted += int(batches.samples[:, step].sum())
        if on_progress is not None:
            on_progress(emitted)
    # A batch that is ready early still waits for those before it.
    loaded_s = np.maximum.accumulate(loaded_s, axis=1)
    if timeline is not None:
        is_idle = batches.samples[:, :steps] == 0
        moments_s = (begun_s, loaded_s, taken_s, done_s, ended_s)
        _add_spans(timeline, moments_s, np.where(ends_update, sync_s, 0.0), is_idle)
    if fill is not None:
        shown = (batches.samples[:, :steps], batches.real[:, :steps], batches.padded[:, :steps])
        ends = [plan.starts[steps] if steps < len(plan.starts) else len(plan.order) for plan in plans]
        orders = [plan.order[:end] for plan, end in zip(plans, ends, strict=True)]
        fill.add(0, *shown, workload.tokens[np.concatenate(orders)])
        fill.end(0, done_s, ends_update)
    queued = _count_queued(loaded_s, taken_s, costs.loader.workers * costs.loader.prefetch_factor)
    sums = count_steps(batches.samples, batches.real, batches.padded, epoch.budget_tokens)
    rows = []
    for step in range(steps):
        start_s, end_s = compute_mean(begun_s[:, step]), compute_mean(ended_s[:, step])
        data_wait_s = float((taken_s[:, step] - begun_s[:, step]).sum())
        computed_s, collective_s = float(compute_s[:, step].sum()), ranks * sync_s * float(ends_update[step])
        rows.append(
            StepRow(
                step=step,
                round=0,
                start_s=start_s,
                end_s=end_s,
                **sums.select(step),
                queued_steps=int(queued[step]),
                data_wait_s=data_wait_s,
                compute_s=computed_s,
                sync_wait_s=max(0.0, ranks * (end_s - start_s) - data_wait_s - computed_s - collective_s),
                collective_s=collective_s,
            )
        )
    return RunRecord(
        rows=rows,
        rank_tokens=batches.real[:, :steps].sum(axis=1),
        samples_unique=_count_unique(workload, plans, steps),
        moved_places=sum(_sum_moves(workload, plan, steps) for plan in plans),
        updates=int(ends_update.sum()),
    )


def _stretch(seconds: Seconds, slow: tuple[tuple[int, float], ...], jitter: float, seed: int) -> Seconds:
    """Returns ``seconds``, of shape (ranks, steps), with slow ranks and jitter applied."""
    factors = np.ones((len(seconds), 1))
    for rank, factor in slow:
        factors[rank] = factor
    if jitter:
        return seconds * factors * np.random.default_rng(seed).lognormal(0, jitter, seconds.shape)
    return seconds * factors


def _count_queued(loaded_s: Seconds, taken_s: Seconds, most: int) -> Integers:
    """Returns how many batches are loaded when each step is taken, itself included, summed over ranks."""
    queued: Integers = np.zeros(loaded_s.shape, dtype=np.int64)
    for rank, (loaded, taken) in enumerate(zip(loaded_s, taken_s, strict=True)):
        queued[rank] = np.searchsorted(loaded, taken, side="right") - np.arange(len(taken))
    # A batch that takes no time to load is there as soon as it has room, so the count may be one too many.
    sums: Integers = np.clip(queued, 1, min(most, queued.shape[1] + 1)).sum(axis=0)
    return sums


def _add_spans(
    timeline: Timeline, moments_s: Sequence[Seconds], collectives_s: Seconds, is_idle: NDArray[np.bool_]
) -> None:
    """Adds the spans of all steps. ``moments_s`` holds, in shape (ranks, steps), the times at which a rank wants a batch, the
    batch is loaded, taken and computed, and the rank continues.
    """
    before_s = np.zeros(len(is_idle))
    for step, collective_s in enumerate(collectives_s.tolist()):
        columns = [before_s.tolist(), *(moments[:, step].tolist() for moments in (*moments_s, is_idle))]
        for rank, (before, begun, loaded, taken, done, ended, idle) in enumerate(zip(*columns, strict=True)):
            if not idle:
                timeline.add(rank, "reader", "fill", before, loaded)
            timeline.add(rank, "trainer", "wait for data", begun, taken)
            timeline.add(rank, "trainer", "idle" if idle else "compute", taken, done)
            timeline.add(rank, "trainer", "wait for ranks", done, ended - collective_s)
            timeline.add(rank, "trainer", "collective", ended - collective_s, ended)
        before_s = moments_s[1][:, step]


def _sum_moves(workload: Workload, plan: RankBatches, steps: int) -> int:
    """Returns by how many places a rank's samples are moved in total, from their places in the shards they come from."""
    starts = np.append(plan.starts, len(plan.order))[: steps + 1]
    order = plan.order[: starts[-1]]
    shards = np.searchsorted(workload.offsets, order, side="right") - 1
    return sum_moves(starts[:-1], np.diff(starts), order - workload.offsets[shards])


def _count_unique(workload: Workload, plans: list[RankBatches], steps: int) -> int:
    seen = np.zeros(workload.samples_total, dtype=np.bool_)
    for plan in plans:
        stop = int(plan.starts[steps]) if steps < len(plan.starts) else len(plan.order)
        seen[plan.order[:stop]] = True
    return int(seen.sum())
