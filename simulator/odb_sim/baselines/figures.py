"""The cost of a baseline: the same figures as for the protocol, computed from a plan of batches (see `plans`).

A plan is fixed before the run, and all ranks take the same number of steps. Its times follow from a recurrence over steps, with
a plain DataLoader for each rank, whose workers read and collate the batches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

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
from odb_sim.inputs.conditions import list_factors
from odb_sim.inputs.costs import Seconds
from odb_sim.inputs.lengths import Integers


def _count_samples(plans: Sequence[RankBatches], mode: Mode, quota_samples: int | None) -> Integers:
    """Returns the samples of each batch of the steps taken, in shape (ranks, steps). A rank without a batch in a step has 0.

    Join mode takes all steps; quota mode stops at the quota, or before a rank would idle.
    """
    samples: Integers = np.zeros((len(plans), max(len(plan.starts) for plan in plans)), dtype=np.int64)
    for rank, plan in enumerate(plans):
        samples[rank, : len(plan.starts)] = np.diff(plan.starts, append=len(plan.order))
    if mode is Mode.QUOTA:
        samples = samples[:, : int((samples > 0).all(axis=0).sum())]
        if quota_samples is not None:
            samples = samples[:, : int(np.searchsorted(np.cumsum(samples.sum(axis=0)), quota_samples)) + 1]
    return samples


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
    samples = _count_samples(plans, epoch.mode, epoch.quota_samples)
    ranks, steps = samples.shape
    orders = [plan.order[: own.sum()] for plan, own in zip(plans, samples, strict=True)]
    measured = [
        measure_batches(workload.tokens[order], own, plan.layout)
        for plan, order, own in zip(plans, orders, samples, strict=True)
    ]
    real, padded, row_pairs = map(np.stack, zip(*measured, strict=True))
    compute_s = _stretch(costs.compute_steps_s(padded, row_pairs), conditions.slow_ranks, conditions.jitter, seed)
    load_s = costs.loader.compute_plain_s(samples, real, padded)
    load_s = _stretch(load_s, conditions.slow_loaders, conditions.jitter, seed + 1)
    loaders = [Workers(costs.loader) for _ in plans]
    ends_update = Accumulation(epoch.global_batch).find_ends(samples.sum(axis=0), real.sum(axis=0))
    ends_update[-1:] = True
    begun_s, loaded_s, taken_s, done_s, ended_s = (np.zeros((ranks, steps)) for _ in range(5))
    sync_s = np.zeros(steps)
    free_s, emitted = np.zeros(ranks), 0
    for step in range(steps):
        begun_s[:, step] = free_s
        for rank, (seconds, asked_s) in enumerate(zip(load_s[:, step].tolist(), free_s.tolist(), strict=True)):
            # A rank that has run dry takes nothing from its loader.
            loader = loaders[rank]
            has_batch = samples[rank, step] > 0
            taken_s[rank, step] = loader.take(seconds, asked_s) if has_batch else asked_s
            loaded_s[rank, step] = loader.done_s if has_batch else asked_s
        done_s[:, step] = free_s = taken_s[:, step] + compute_s[:, step]
        if ends_update[step] or costs.collective.each_step:
            slowest_s = end_s = float(free_s.max())
            if ends_update[step]:
                end_s = costs.collective.compute_end_s(free_s, compute_s[:, step], ranks)
            sync_s[step], free_s = end_s - slowest_s, np.full(ranks, end_s)
        ended_s[:, step] = free_s
        emitted += int(samples[:, step].sum())
        if on_progress is not None:
            on_progress(emitted)
    # A batch that is ready early still waits for those before it.
    loaded_s = np.maximum.accumulate(loaded_s, axis=1)
    if timeline is not None:
        moments_s = (begun_s, loaded_s, taken_s, done_s, ended_s)
        _add_spans(timeline, moments_s, sync_s, samples == 0)
    trained = np.concatenate(orders)
    if fill is not None:
        fill.add(0, samples, real, padded, workload.tokens[trained])
        fill.end(0, done_s, ends_update)
    # A sample is moved from its place in the shard it comes from.
    positions = trained - workload.offsets[np.searchsorted(workload.offsets, trained, side="right") - 1]
    before = np.cumsum(samples, axis=1) - samples
    queued = _count_queued(loaded_s, taken_s, costs.loader.workers * costs.loader.prefetch_factor)
    sums = count_steps(samples, real, padded, epoch.budget_tokens)
    rows = []
    for step in range(steps):
        start_s, end_s = compute_mean(begun_s[:, step]), compute_mean(ended_s[:, step])
        data_wait_s = float((taken_s[:, step] - begun_s[:, step]).sum())
        computed_s, collective_s = float(compute_s[:, step].sum()), ranks * float(sync_s[step])
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
        rank_tokens=real.sum(axis=1),
        samples_unique=len(np.unique(trained)),
        moved_places=sum_moves(before.reshape(-1), samples.reshape(-1), positions),
        updates=int(ends_update.sum()),
    )


def _stretch(seconds: Seconds, slow: tuple[tuple[int, float], ...], jitter: float, seed: int) -> Seconds:
    """Returns ``seconds``, of shape (ranks, steps), with slow ranks and jitter applied."""
    slower = seconds * list_factors(slow, range(len(seconds)))[:, None]
    return slower * np.random.default_rng(seed).lognormal(0, jitter, seconds.shape) if jitter else slower


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
