"""Fits the cost models to recorded runs whose traces carry times, and measures their error on a held-back half.

Every cost model is linear in its numbers, apart from the least time of a step. So each component is a regression of the time
of a span on what the span would cost if one number were 1 and the others 0. The models themselves compute those columns, so no
formula is written twice.

==========  ============================================================================================================
`step`      from one step taken to the next, if no rank waited for data in either: the model's time for the costliest
            batch of the step. The collective that ends a step takes every rank the same time and becomes part of
            ``gpu.fixed_s``. Attention's quadratic part is kept only if it lowers the error by at least a twentieth, and a
            least time of a step (``gpu.floor_s``) only if it lowers it by a fifth. If steps were accumulated, those that do
            not end an update are fitted: to each rank's own batch, or to the costliest if ranks meet after every step
            (FSDP). A trace does not tell which, so the variant with the smaller held-back error is kept. The extra time of
            steps that end an update becomes ``collective.fixed_s``.
`table`     the same times on request, as a table of padded tokens and median seconds, for a device whose step time is not
            a straight line. It stands beside the formula, and a simulation uses it.
`read`      from one answer of the reader to the next, if the answer was waited for: the loader model's time for the
            samples and tokens read in between
`collate`   from a collation to its answer, by steps, padded tokens, and samples of the next window, received meanwhile
`exchange`  from a post to its answer on the rank that waited least (the last to post), by messages and bytes
==========  ============================================================================================================

A number whose range begins at 0 is left out: it would add next to nothing here, but seconds at a thousand times the size.
The cost model records the sizes that it was fitted to, and a simulation of larger ones cautions.

Every span is measured on one rank's clock, so the clocks of the ranks need not agree. With several runs every second run is
held back; with a single run, the second half of each component's spans.

The report also shows how much steps of equal size differ among themselves. If the speed of the machine changes, no model can
be more accurate than that.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import zip_longest
from typing import Final

import numpy as np

from odb_ref.core.errors import UsageError
from odb_sim.engine.loading import WindowReader
from odb_sim.engine.updates import EVERY_STEP, GlobalBatch
from odb_sim.inputs.costs import (
    ERROR,
    INLINE_LOADER,
    Costs,
    FittedTo,
    LoaderCost,
    NetworkCost,
    PricedTransport,
    Ranges,
)
from odb_sim.recorded.fitting import Fit, TimedSpans, fit_apart_from_zero, fit_component, split_spans
from odb_sim.recorded.runs import RankRecord, RecordedRun, Span
from odb_sim.recorded.steps import (
    NO_GPU,
    READY_S,
    READY_SHARE,
    Meeting,
    TimedRun,
    check_alike,
    find_ends,
    fit_collective,
    fit_step_table,
    fit_steps,
    list_unused,
)

_READ_FITS: Final = 3
_LEAST_ERROR: Final = 0.02
"""The smallest error of a run's time to claim, however well the held-back runs are predicted."""
_SECTIONS: Final = {"step": "gpu", "read": "loader", "collate": "loader", "exchange": "network"}
_FEW_READS: Final = "the others were read ahead, or the run is short"
_INLINE: Final = "the thread that trains reads and collates, as part of a step"
_SMALLEST_S: Final = 1e-6


@dataclass(frozen=True, slots=True)
class Calibration:
    """The fitted cost models. A component that could not be fitted keeps its defaults, and its fit gives the reason."""

    costs: Costs
    fits: tuple[Fit, ...]
    held_back: str
    """Which half was held back."""
    warm_up_steps: int = 0
    """Steps at the start of each run that were neither fitted nor judged."""
    meeting: Meeting = Meeting.EVERY_UPDATE
    """Which steps were fitted."""
    unused: tuple[str, ...] = ()
    """The runs of which no step could be timed."""

    def to_json(self) -> dict[str, object]:
        """Returns the section of the cost-model file that describes the fit."""
        components = [asdict(fit) for fit in self.fits]
        return {
            "held_back": self.held_back,
            "warm_up_steps": self.warm_up_steps,
            "unused": self.unused,
            "components": components,
        }


def calibrate(
    runs: Sequence[RecordedRun],
    *,
    workers: int = 1,
    transport: PricedTransport = PricedTransport.REDUCE,
    has_table: bool = False,
    warm_up_steps: int = 0,
    global_batch: GlobalBatch = EVERY_STEP,
) -> Calibration:
    """Returns the cost models that fit ``runs`` best. With ``has_table`` they include a measured table of step times.

    The first ``warm_up_steps`` steps of every run are left out of the fit and its error, because allocators and kernels warm
    up in them. ``global_batch`` is the global batch to which the job accumulated its steps, if the traces do not record one
    (``update_samples``).

    ``workers`` is the number of worker processes of each rank. With 1 the numbers describe the loader as a whole. With 0 the
    training thread read and collated when it asked for a step. That time is then part of the step, and the spans of reading
    and collating carry no information. Traces do not record how the ranks exchanged, so the caller passes ``transport``.

    Raises: UsageError when a run has no times, lacks a collation, or has too few steps whose data was there in time, or all of
    one size (a table), or only some runs accumulate steps.
    """
    for run in runs:
        if not run.has_times:
            raise UsageError(f"{run.name}: the trace has no times, so there is nothing to fit a cost model to")
        for rank in run.ranks:
            if rank.taken_steps > len(rank.sizes):
                raise UsageError(f"{run.name}: rank {rank.rank} takes a step that it has not collated")
    timed = [TimedRun(run, find_ends(run, global_batch), warm_up_steps) for run in runs]
    check_alike(timed)
    step, meeting = fit_steps(timed)
    if step.reason:
        raise UsageError(f"{runs[0].name}: the time of a step cannot be fitted: {step.reason}")
    loader = replace(INLINE_LOADER, workers=max(1, workers))
    network = NetworkCost(alpha_s=0, beta_s=0, transport=transport)
    read, collate = (Fit(component, {}, 0, 0, reason=_INLINE) for component in ("read", "collate"))
    if workers:
        read = _fit_reads(runs, loader)
        collate = _fit("collate", runs, lambda run: _gather_collations(run, loader), "a run needs more rounds")
    exchange = _fit("exchange", runs, lambda run: _gather_exchanges(run, network), "a run needs more rounds")
    costs = Costs(
        gpu=replace(NO_GPU, **step.values),
        collective=fit_collective(timed, replace(NO_GPU, **step.values), meeting),
        network=NetworkCost(transport=transport, **exchange.values),
        fitted=FittedTo(
            ranks=max(len(run.ranks) for run in runs),
            padded_tokens=max(tokens for run in runs for rank in run.ranks for tokens, _ in rank.sizes),
            longest=max(rank.longest for run in runs for rank in run.ranks),
        ),
        loader=LoaderCost(workers=workers, prefetch_factor=loader.prefetch_factor, **read.values, **collate.values)
        if workers
        else loader,
    )
    fits = [step, read, collate, exchange]
    costs = replace(costs, ranges=list_ranges(fits))
    if has_table:
        table, fit = fit_step_table(timed, meeting)
        costs = replace(costs, step_table=table)
        fits.insert(1, fit)
    held_back = "every second run" if len(runs) > 1 else "the second half of the run"
    return Calibration(costs, tuple(fits), held_back, warm_up_steps, meeting, list_unused(timed, meeting))


def list_ranges(fits: Sequence[Fit]) -> Ranges:
    """Returns the uncertainty of each number of a cost model, and of the whole model by its error on held-back runs."""
    rows = [(f"{_SECTIONS[fit.component]}.{item.name}", item.low, item.high) for fit in fits for item in fit.ranges]
    error = max(_LEAST_ERROR, *(fit.run_error for fit in fits))
    return Ranges(rows=(*rows, (ERROR, 1 / (1 + error), 1 + error)))


def widen_error(costs: Costs, total_errors: Sequence[float]) -> Costs:
    """Returns ``costs`` with an error at least that of ``total_errors``: predicted over measured time of a run, minus 1."""
    found = [max(1 + error, 1 / (1 + error)) for error in total_errors if error > -1]
    rows = tuple(
        (name, min(low, 1 / max(high, *found)), max(high, *found)) if name == ERROR and found else (name, low, high)
        for name, low, high in costs.ranges.rows
    )
    return replace(costs, ranges=Ranges(rows=rows))


def is_held_back(number: int, runs: int) -> bool:
    """Returns True if the fit used no part of run ``number``, one of ``runs`` runs."""
    return runs > 1 and number % 2 == 1


def _fit(component: str, runs: Sequence[RecordedRun], gather: Callable[[RecordedRun], TimedSpans], why_few: str) -> Fit:
    fitted, held = split_spans([gather(run) for run in runs])
    return fit_apart_from_zero(component, fitted, held, why_few)


# Loader and exchange -----------------------------------------------------------------------------------------------


def _fit_reads(runs: Sequence[RecordedRun], loader: LoaderCost) -> Fit:
    """Fits the numbers repeatedly, each time with those found before, because they decide what an answer waits for.

    The first fit assumes a reader that is always busy, which is true wherever reading is slow enough to matter.
    """
    about = replace(loader, sample_s=1.0)
    for _ in range(_READ_FITS):
        fit = fit_component("read", *split_spans([_gather_reads(run, about) for run in runs]), _FEW_READS)
        if fit.reason:
            break
        about = replace(loader, sample_s=fit.values["sample_s"], per_token_s=fit.values["per_token_s"])
    return _fit("read", runs, lambda run: _gather_reads(run, about), _FEW_READS)


def _gather_reads(run: RecordedRun, loader: LoaderCost) -> TimedSpans:
    """Returns the times between answers that were waited for, with the columns of the model linearised around ``loader``."""
    by_rank = [_list_reads(run, rank, loader) for rank in run.ranks]
    found = [read for reads in zip_longest(*by_rank) for read in reads if read is not None]
    rows = np.array(found, dtype=np.float64).reshape(-1, 3)
    return TimedSpans(("sample_s", "per_token_s"), rows[:, :2], rows[:, 2])


def _list_reads(run: RecordedRun, rank: RankRecord, loader: LoaderCost) -> list[tuple[float, float, float]]:
    step = 1e-6 * max(loader.sample_s, _SMALLEST_S)
    moved = replace(loader, sample_s=loader.sample_s + step), replace(loader, per_token_s=loader.per_token_s + step)
    lengths = np.array([sample.length for sample in rank.samples[rank.start.read_samples :]], dtype=np.int64)
    readers = [WindowReader(model, lengths, run.config.window_samples) for model in (loader, *moved)]
    before_s, before = 0.0, np.zeros(len(readers))
    found = []
    for read in rank.reads:
        answers = np.array([reader.read(read.items, read.asked_s) for reader in readers])
        since = answers - before
        slopes = (since[1:] - since[0]) / step
        answered_s = read.asked_s + read.seconds
        if read.seconds > READY_S and read.seconds > READY_SHARE * (answered_s - before_s) and slopes.min() > 0:
            fixed_s = since[0] - slopes[0] * loader.sample_s - slopes[1] * loader.per_token_s
            found.append((*slopes.tolist(), answered_s - before_s - fixed_s))
        before_s, before = answered_s, answers
    return found


def _gather_collations(run: RecordedRun, loader: LoaderCost) -> TimedSpans:
    names = ("collate_step_s", "collate_per_token_s", "receive_sample_s")
    units = [replace(loader, **{name: 1}) for name in names]
    rows = []
    for collations in zip_longest(*(_list_collations(rank) for rank in run.ranks)):
        rows += [(span, received) for span, received in filter(None, collations) if span.items]
    columns = [[unit.compute_collate_s(span.items, span.tokens, received) for unit in units] for span, received in rows]
    return TimedSpans(names, np.array(columns, dtype=np.float64).reshape(-1, 3), np.array([s.seconds for s, _ in rows]))


def _list_collations(rank: RankRecord) -> list[tuple[Span, int]]:
    """Returns each collation, with the number of samples of the next window, which were requested since the one before."""
    reads = rank.reads[1:]  # the first window is received before anything is collated
    asked = [read.asked_s for read in reads]
    ends = [bisect_right(asked, span.asked_s) for span in rank.collations]
    return [
        (span, sum(read.items for read in reads[begin:end]))
        for span, begin, end in zip(rank.collations, [0, *ends], ends, strict=False)
    ]


def _gather_exchanges(run: RecordedRun, network: NetworkCost) -> TimedSpans:
    """Returns the shortest wait of any rank in each exchange: the last rank to post waited for the network only."""
    ranks, resources = len(run.ranks), len(run.config.limits)
    wants = 0 if run.config.shared_samples is None else ranks

    def compute_s(model: NetworkCost, steps: int | None) -> float:
        if steps is None:
            return model.compute_offer_s(ranks)
        return model.compute_counts_s(ranks, steps, resources=resources, wants=wants)

    by_message, by_byte = replace(network, alpha_s=1), replace(network, beta_s=1)
    exchanges = list(zip(*(rank.exchanges for rank in run.ranks), strict=False))
    columns = np.array(
        [[compute_s(by_message, first.steps), compute_s(by_byte, first.steps)] for first, *_ in exchanges],
        dtype=np.float64,
    )
    seconds = [min(answered.seconds for answered in exchange) for exchange in exchanges]
    return TimedSpans(("alpha_s", "beta_s"), columns.reshape(-1, 2), np.array(seconds))
