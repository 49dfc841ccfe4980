"""Fits the cost models to recorded runs whose traces carry times, and says how far off they are on a held-back half.

Every cost model is linear in its numbers, so each component is a regression of the time of a span on what the span would
cost if one number were 1 and the others 0. Those columns come from the models themselves: no formula is written twice.

==========  ============================================================================================================
`step`      from one step taken to the next, where no rank waited for data in either: the model's time for the costliest
            batch of the step. The collective that ends a step is the same for all and becomes part of ``gpu.fixed_s``.
            Attention's quadratic part is kept only where it lowers the error by a twentieth.
`table`     likewise, as a table of padded tokens and median seconds, when it is asked for: for a device whose step time is
            no straight line. It stands beside the formula, and a simulation uses it.
`read`      from one answer of the reader to the next, where it was waited for, by what the model of a loader says of the
            samples and tokens that were then read
`collate`   from a collation to its answer, by steps and padded tokens
`exchange`  from a post to its answer on the rank that waited least (the last to post), by messages and bytes
==========  ============================================================================================================

A number whose range begins at 0 is not written: it would add next to nothing here, and seconds at a thousand times the size.
What the numbers were fitted to stands in the cost model, and a simulation of more says so.

Every span is measured on one rank's clock, so the clocks of the ranks need not agree. Of several runs every second one is
held back, of a single run the second half of each component's spans.

Beside the error of a step stands how much steps of equal size differ among themselves: a machine whose speed changes puts
an end to what any model can reach.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import zip_longest
from typing import Final

import numpy as np

from odb_ref.core.errors import UsageError
from odb_sim.engine.loading import WindowReader
from odb_sim.inputs.costs import (
    ERROR,
    INLINE_LOADER,
    NO_COLLECTIVE,
    Costs,
    FittedTo,
    GpuCost,
    LoaderCost,
    NetworkCost,
    PricedTransport,
    Ranges,
    StepTable,
)
from odb_sim.recorded.fitting import (
    Fit,
    TimedSpans,
    compute_run_error,
    compute_scatter,
    fit_apart_from_zero,
    fit_component,
    fit_table,
    join_spans,
    judge,
)
from odb_sim.recorded.runs import RankRecord, RecordedRun, Span

_QUADRATIC_GAIN: Final = 0.95
_READY_S: Final = 2e-3
_READY_SHARE: Final = 0.05
"""A step lay ready when it was delivered this long, and this share of the step before it, ahead of being taken."""
_READ_FITS: Final = 3
_PARTS: Final = 4
_LEAST_ERROR: Final = 0.02
"""Of a run's time, however well those held back are met."""
_SECTIONS: Final = {"step": "gpu", "read": "loader", "collate": "loader", "exchange": "network"}
_FEW_READS: Final = "the others were read ahead, or the run is short"
_INLINE: Final = "the thread that trains reads and collates, as part of a step"
_SMALLEST_S: Final = 1e-6
_NO_GPU: Final = GpuCost(fixed_s=0, per_token_s=0, per_token2_s=0)


@dataclass(frozen=True, slots=True)
class Calibration:
    """The fitted cost models. What could not be fitted keeps its default, and its fit says why."""

    costs: Costs
    fits: tuple[Fit, ...]
    held_back: str
    """Which half was held back."""
    warm_up_steps: int = 0
    """Steps at the start of each run that were neither fitted nor judged."""

    def to_json(self) -> dict[str, object]:
        """Returns what the cost-model file says of its numbers."""
        components = [asdict(fit) for fit in self.fits]
        return {"held_back": self.held_back, "warm_up_steps": self.warm_up_steps, "components": components}


def calibrate(
    runs: Sequence[RecordedRun],
    *,
    workers: int = 1,
    transport: PricedTransport = PricedTransport.REDUCE,
    has_table: bool = False,
    warm_up_steps: int = 0,
) -> Calibration:
    """Returns the cost models that fit ``runs`` best; with ``has_table`` a measured table of step times beside the formula.

    The first ``warm_up_steps`` steps of every run count for nothing, neither in the fit nor in its error: allocators and
    kernels get ready in them.

    ``workers`` is how many worker processes a rank had: with 1 the numbers describe the loader as a whole. With 0 the thread
    that trains read and collated when it asked for a step: that is part of the time of a step, and the spans of reading and
    collating, which wait for it, say nothing. A trace does not say how the ranks exchanged: ``transport`` does.

    Raises: UsageError when a run has no times, or too few steps whose data was there in time, or all of one size (a table).
    """
    for run in runs:
        if not run.has_times:
            raise UsageError(f"{run.name}: the trace has no times, so there is nothing to fit a cost model to")
    step = _fit_steps(runs, warm_up_steps)
    if step.reason:
        raise UsageError(f"{runs[0].name}: the time of a step cannot be fitted: {step.reason}")
    loader = replace(INLINE_LOADER, workers=max(1, workers))
    network = NetworkCost(alpha_s=0, beta_s=0, transport=transport)
    read, collate = (Fit(component, {}, 0, 0, reason=_INLINE) for component in ("read", "collate"))
    if workers:
        read = _fit_reads(runs, loader)
        collate = _fit("collate", runs, lambda run: _gather_collations(run, loader), "a run needs more rounds")
    exchange = _fit("exchange", runs, lambda run: _gather_exchanges(run, network), "a run needs more rounds")
    default = NetworkCost()
    costs = Costs(
        gpu=replace(_NO_GPU, **step.values),
        collective=NO_COLLECTIVE,
        network=NetworkCost(
            alpha_s=exchange.values.get("alpha_s", default.alpha_s),
            beta_s=exchange.values.get("beta_s", default.beta_s),
            transport=transport,
        ),
        fitted=FittedTo(
            ranks=max(len(run.ranks) for run in runs),
            padded_tokens=max(tokens for run in runs for rank in run.ranks for tokens, _ in rank.sizes),
        ),
        loader=_set_loader(workers, {**read.values, **collate.values}) if workers else loader,
    )
    fits = [step, read, collate, exchange]
    costs = replace(costs, ranges=list_ranges(fits))
    if has_table:
        table, fit = _fit_table(runs, warm_up_steps)
        costs = replace(costs, step_table=table)
        fits.insert(1, fit)
    held_back = "every second run" if len(runs) > 1 else "the second half of the run"
    return Calibration(costs, tuple(fits), held_back, warm_up_steps)


def list_ranges(fits: Sequence[Fit]) -> Ranges:
    """Returns how sure the numbers of a cost model are, and the model: what runs held back are off by."""
    rows = [(f"{_SECTIONS[fit.component]}.{item.name}", item.low, item.high) for fit in fits for item in fit.ranges]
    error = max(_LEAST_ERROR, *(fit.run_error for fit in fits))
    return Ranges(rows=(*rows, (ERROR, 1 / (1 + error), 1 + error)))


def _set_loader(workers: int, values: dict[str, float]) -> LoaderCost:
    default = LoaderCost()
    return LoaderCost(
        workers=workers,
        sample_s=values.get("sample_s", default.sample_s),
        per_token_s=values.get("per_token_s", default.per_token_s),
        collate_step_s=values.get("collate_step_s", default.collate_step_s),
        collate_per_token_s=values.get("collate_per_token_s", default.collate_per_token_s),
        # What receiving a sample takes cannot be told from collating: it is part of that.
        receive_sample_s=0.0,
    )


def is_held_back(number: int, runs: int) -> bool:
    """Returns True when nothing of run ``number``, of so many ``runs``, was fitted to."""
    return runs > 1 and number % 2 == 1


def _split(parts: Sequence[TimedSpans]) -> tuple[TimedSpans, TimedSpans]:
    """Returns the spans to fit and those held back, of the spans of each run."""
    if len(parts) > 1:
        return join_spans(parts[::2]), join_spans(parts[1::2])
    (part,) = parts
    middle = (len(part) + 1) // 2
    return part.select(slice(0, middle, None)), part.select(slice(middle, len(part), None))


def _fit(component: str, runs: Sequence[RecordedRun], gather: Callable[[RecordedRun], TimedSpans], why_few: str) -> Fit:
    fitted, held = _split([gather(run) for run in runs])
    return fit_apart_from_zero(component, fitted, held, why_few)


# Steps -------------------------------------------------------------------------------------------------------------


def _fit_steps(runs: Sequence[RecordedRun], warm_up_steps: int) -> Fit:
    why_few = "the others waited for data, or the run is short"
    by_token = replace(_NO_GPU, per_token_s=1)
    linear_fitted, held = _split([_gather_steps(run, by_token, warm_up_steps) for run in runs])
    linear = fit_component("step", linear_fitted, held, why_few)
    if linear.reason:
        return linear
    # Which rank's batch is the costliest is known once the numbers are.
    quadratic = linear
    for _ in range(2):
        gpu = replace(_NO_GPU, **quadratic.values)
        parts = [_gather_steps(run, gpu, warm_up_steps, with_pairs=True) for run in runs]
        fitted, held = _split(parts)
        quadratic = fit_component("step", fitted, held, why_few)
    error = np.abs(fitted.compute_errors(quadratic.values)).sum()
    linear_error = np.abs(fitted.compute_errors(linear.values)).sum()
    is_quadratic = error < linear_error * _QUADRATIC_GAIN
    best = fit_apart_from_zero("step", fitted if is_quadratic else linear_fitted, held, why_few)
    quarters = [held.select(part) for part in np.array_split(np.arange(len(held)), _PARTS)]
    error = compute_run_error(best.values, parts[1::2] if len(parts) > 1 else quarters)
    return replace(best, scatter=compute_scatter(join_spans(parts)), run_error=error)


def _fit_table(runs: Sequence[RecordedRun], warm_up_steps: int) -> tuple[StepTable, Fit]:
    fitted, held = _split([_gather_steps(run, replace(_NO_GPU, per_token_s=1), warm_up_steps) for run in runs])
    at = fitted.names.index("per_token_s")
    table = StepTable(rows=fit_table(fitted.columns[:, at], fitted.seconds))
    predicted = np.array([table.compute_step_s(tokens) for tokens in held.columns[:, at].tolist()])
    return table, judge("step table", {"rows": len(table.rows)}, fitted, held, predicted - held.seconds)


def _gather_steps(run: RecordedRun, gpu: GpuCost, warm_up_steps: int, *, with_pairs: bool = False) -> TimedSpans:
    """Returns the steps in which no rank waited for data; ``gpu`` says which rank's batch is the costliest."""
    names = ("fixed_s", "per_token_s", "per_token2_s")[: 3 if with_pairs else 2]
    sizes = np.array([rank.sizes[: run.steps] for rank in run.ranks], dtype=np.int64).reshape(len(run.ranks), -1, 2)
    costliest = gpu.compute_steps_s(sizes[:, :, 0], sizes[:, :, 1]).argmax(axis=0)
    rows: list[tuple[int, int]] = []
    seconds: list[float] = []
    for step in range(max(1, warm_up_steps), run.steps - 1):
        if not all(_is_ready(rank, step) for rank in run.ranks):
            continue
        spans = [rank.taken_s[step + 1] - rank.taken_s[step] for rank in run.ranks if _is_ready(rank, step + 1)]
        if spans:
            tokens, pairs = sizes[costliest[step], step].tolist()
            rows.append((tokens, pairs))
            seconds.append(min(spans))
    padded = np.array(rows, dtype=np.int64).reshape(-1, 2)
    columns = [replace(_NO_GPU, **{name: 1}).compute_steps_s(padded[:, 0], padded[:, 1]) for name in names]
    stacked = np.stack([np.broadcast_to(column, len(rows)) for column in columns], axis=1)
    return TimedSpans(names, stacked.astype(np.float64), np.array(seconds))


def _is_ready(rank: RankRecord, step: int) -> bool:
    """Returns True when the step lay in the queue before the trainer asked for it."""
    waited_s = rank.taken_s[step] - rank.delivered_s[step]
    return waited_s > _READY_S and waited_s > _READY_SHARE * (rank.taken_s[step] - rank.taken_s[step - 1])


# Loader and exchange -----------------------------------------------------------------------------------------------


def _in_time(by_rank: Sequence[Sequence[Span]]) -> list[Span]:
    """Returns the spans of all ranks, the first of each, then the second ..., without those of nothing."""
    return [span for spans in zip_longest(*by_rank) for span in spans if span is not None and span.items]


def _build_spans(names: Sequence[str], prices: Sequence[Callable[[Span], float]], spans: Sequence[Span]) -> TimedSpans:
    columns = np.array([[price(span) for price in prices] for span in spans], dtype=np.float64)
    return TimedSpans(tuple(names), columns.reshape(-1, len(names)), np.array([span.seconds for span in spans]))


def _fit_reads(runs: Sequence[RecordedRun], loader: LoaderCost) -> Fit:
    """Fits the numbers again with what was found: what an answer waits for depends on the numbers themselves.

    First the reader is taken to be at work all the time: it is where reading is slow, and there it shows.
    """
    about = replace(loader, sample_s=1.0)
    for _ in range(_READ_FITS):
        fit = fit_component("read", *_split([_gather_reads(run, about) for run in runs]), _FEW_READS)
        if fit.reason:
            break
        about = replace(loader, sample_s=fit.values["sample_s"], per_token_s=fit.values["per_token_s"])
    return _fit("read", runs, lambda run: _gather_reads(run, about), _FEW_READS)


def _gather_reads(run: RecordedRun, loader: LoaderCost) -> TimedSpans:
    """Returns, for each answer that was waited for, the time since the one before, as the model about ``loader`` has it:
    linear.
    """
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
        if read.seconds > _READY_S and read.seconds > _READY_SHARE * (answered_s - before_s) and slopes.min() > 0:
            fixed_s = since[0] - slopes[0] * loader.sample_s - slopes[1] * loader.per_token_s
            found.append((*slopes.tolist(), answered_s - before_s - fixed_s))
        before_s, before = answered_s, answers
    return found


def _gather_collations(run: RecordedRun, loader: LoaderCost) -> TimedSpans:
    by_step, by_token = replace(loader, collate_step_s=1), replace(loader, collate_per_token_s=1)
    spans = _in_time([rank.collations for rank in run.ranks])
    return _build_spans(
        ("collate_step_s", "collate_per_token_s"),
        (
            lambda span: by_step.compute_collate_s(span.items, span.tokens, 0),
            lambda span: by_token.compute_collate_s(span.items, span.tokens, 0),
        ),
        spans,
    )


def _gather_exchanges(run: RecordedRun, network: NetworkCost) -> TimedSpans:
    """Returns the shortest wait of any rank in every exchange: that of the last to post, which waited for the network alone."""
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
