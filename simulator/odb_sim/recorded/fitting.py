"""Regression of times on the parts of their cost, with few numbers, none negative, and pauses ignored."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import chain, combinations
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

Matrix = NDArray[np.float64]
Fitter: TypeAlias = "Callable[[TimedSpans], dict[str, float]]"
"""Returns the numbers by name that describe spans best."""

FLOOR: Final = "floor_s"
"""The number that no prediction undercuts."""
FEWEST_SPANS: Final = 4
"""The fewest spans in either half for a fit."""
_ROUNDS: Final = 60
_MOST_ROWS: Final = 12
_SMALLEST: Final = 1e-9
_FLOOR_GAIN: Final = 0.8
_FLOORS_TRIED: Final = 12
_SETTLED: Final = 1e-6
_DRAWS: Final = 40
_MOST_DRAWN: Final = 1000
_FEWEST_EQUAL: Final = 3
_FEWEST_COMPARED: Final = 12
_NINE_OF_TEN: Final = 1.645
"""The standard deviations within which nine tenths of a normal distribution lie."""
_AROUND: Final = 3
"""The number of spans on either side of a span that show the pace of the machine."""


@dataclass(frozen=True, slots=True)
class TimedSpans:
    """The times of one component. ``columns`` holds what each would be if one number were 1 and the others 0."""

    names: tuple[str, ...]
    columns: Matrix
    """Has shape (spans, numbers)."""
    seconds: Matrix

    def __len__(self) -> int:
        return len(self.seconds)

    def select(self, rows: slice[int, int, None] | NDArray[np.int64]) -> TimedSpans:
        """Returns some of the spans."""
        return TimedSpans(self.names, self.columns[rows], self.seconds[rows])

    def keep(self, names: Sequence[str]) -> TimedSpans:
        """Returns the same spans with fewer numbers to fit."""
        return TimedSpans(tuple(names), self.columns[:, [self.names.index(name) for name in names]], self.seconds)

    def compute_errors(self, values: dict[str, float]) -> Matrix:
        """Returns the predicted minus the measured seconds. A number missing in ``values`` counts as 0."""
        predicted: Matrix = self.columns @ np.array([values.get(name, 0.0) for name in self.names])
        return np.maximum(values.get(FLOOR, 0.0), predicted) - self.seconds


def join_spans(parts: Sequence[TimedSpans]) -> TimedSpans:
    """Returns the spans of all parts, which have the same numbers."""
    return TimedSpans(
        parts[0].names,
        np.concatenate([part.columns for part in parts]),
        np.concatenate([part.seconds for part in parts]),
    )


def split_spans(parts: Sequence[TimedSpans]) -> tuple[TimedSpans, TimedSpans]:
    """Returns the spans to fit and those held back, from the spans of each run."""
    if len(parts) > 1:
        return join_spans(parts[::2]), join_spans(parts[1::2])
    (part,) = parts
    middle = (len(part) + 1) // 2
    return part.select(slice(0, middle, None)), part.select(slice(middle, len(part), None))


@dataclass(frozen=True, slots=True)
class Range:
    """The range in which nine of ten fits to other draws of the same spans put the number ``name``."""

    name: str
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Scatter:
    """How much spans of one size differ. No model of the size alone can have a smaller error."""

    spans: int
    median: float
    """The median over spans of the relative difference to the median of the others of their size."""
    p90: float
    """The difference that nine of ten spans stay below."""


@dataclass(frozen=True, slots=True)
class Fit:
    """A component's numbers, and their errors on spans to which they were not fitted."""

    component: str
    values: dict[str, float]
    """The numbers by name; empty if the component is not fitted."""
    spans_fitted: int
    spans_held: int
    median_error: float = 0.0
    """The median relative error of a span in the half held back."""
    p90_error: float = 0.0
    """Nine spans of ten have a smaller relative error."""
    total_error: float = 0.0
    """The relative error of the sum of all spans, positive if the prediction is too long."""
    paced_error: float = 0.0
    """The median relative error after each prediction is set to the pace of the spans around it (`compute_paced_errors`)."""
    run_error: float = 0.0
    """Relative error of the sum of a run, or of a quarter of the only one, that nine of ten of those held back lie within."""
    reason: str = ""
    """Why the component is not fitted; empty if it is."""
    ranges: tuple[Range, ...] = ()
    """The range of each number."""
    scatter: Scatter | None = None
    """How much spans of equal size differ, or None if too few have equal sizes."""
    is_alike: bool = False
    """True if all steps are of about one size, so that what a step takes is counted as what its tokens take."""
    dropped: tuple[str, ...] = ()
    """Numbers set to 0 since they cannot be told from it: what little they would do here grows with every size above these."""


def fit_values(spans: TimedSpans) -> dict[str, float]:
    """Returns the numbers, none negative, that minimise the sum of absolute errors.

    Least absolute deviations follow the median, so an evaluation or a checkpoint between two steps has no effect. There are
    only a handful of numbers, so every set of numbers that are not 0 is tried, the largest first. If one has a solution
    without a negative number, none of its subsets has a better one.
    """
    best: dict[str, float] = dict.fromkeys(spans.names, 0.0)
    least = float(np.abs(spans.seconds).sum())
    solved: list[set[str]] = []
    for names in chain.from_iterable(combinations(spans.names, size) for size in range(len(spans.names), 0, -1)):
        kept = spans.keep(names)
        if any(found.issuperset(names) for found in solved) or not kept.columns.any(axis=0).all():
            continue
        solution = _solve_least_deviations(kept.columns, kept.seconds)
        solution[np.abs(solution) * kept.columns.mean(axis=0) <= _SMALLEST * kept.seconds.mean()] = (
            0.0  # an error of rounding
        )
        if (solution < 0).any():
            continue
        solved.append(set(names))
        values = dict(zip(names, solution.tolist(), strict=True))
        error = float(np.abs(spans.compute_errors(values)).sum())
        if error < least * (1 - _SMALLEST):
            best, least = {**dict.fromkeys(spans.names, 0.0), **values}, error
    return best


def fit_with_floor(spans: TimedSpans) -> dict[str, float]:
    """Returns the numbers as `fit_values` does, with a ``floor_s`` if that lowers the sum of errors by at least a fifth.

    The smallest sizes then all take the floor: launching the kernels takes a small batch as long as a smaller one. Two sizes or
    more lie on either side.
    """
    best = fit_values(spans)
    least = _FLOOR_GAIN * float(np.abs(spans.compute_errors(best)).sum()) - _SMALLEST * float(spans.seconds.sum())
    if "per_token_s" not in spans.names:
        return best
    tokens = spans.columns[:, spans.names.index("per_token_s")]
    sizes = np.unique(tokens)[1:-2]
    for largest in sizes[:: max(1, len(sizes) // _FLOORS_TRIED)]:
        is_floor = tokens <= largest
        values = fit_values(spans.select(np.flatnonzero(~is_floor)))
        values[FLOOR] = float(np.median(spans.seconds[is_floor]))
        error = float(np.abs(spans.compute_errors(values)).sum())
        if error < least:
            best, least = values, error
    return best


def _solve_least_deviations(columns: Matrix, seconds: Matrix) -> Matrix:
    scale = np.abs(columns).max(axis=0)
    scaled = columns / scale
    weights = np.ones(len(seconds))
    floor = max(float(np.median(seconds)) * 1e-4, _SMALLEST)
    solution: Matrix = np.zeros(columns.shape[1])
    for _ in range(_ROUNDS):
        root = np.sqrt(weights)
        found = np.linalg.lstsq(scaled * root[:, None], seconds * root, rcond=None)[0]
        # As `np.allclose` says of finite numbers, whose checks of all others take as long as the solution.
        has_settled = bool((np.abs(found - solution) <= _SETTLED * np.abs(solution)).all())
        solution = found
        if has_settled:
            break
        weights = 1 / np.maximum(np.abs(scaled @ solution - seconds), floor)
    settled: Matrix = solution / scale
    return settled


def compute_ranges(spans: TimedSpans, fit: Fitter = fit_values) -> tuple[Range, ...]:
    """Returns for each number the range in which nine of ten fits to spans drawn from ``spans`` lie.

    A number whose range begins at 0 cannot be distinguished from 0. At most 1,000 spans are drawn at a time, so the ranges of
    longer records are rather wide.
    """
    random = np.random.default_rng(0)
    size = min(len(spans), _MOST_DRAWN)
    found = [fit(spans.select(random.integers(0, len(spans), size))) for _ in range(_DRAWS)]
    names = (*spans.names, *([FLOOR] if any(FLOOR in one for one in found) else []))
    bounds = {name: np.quantile([one.get(name, 0.0) for one in found], (0.05, 0.95)).tolist() for name in names}
    return tuple(Range(name, low, high) for name, (low, high) in bounds.items())


def compute_scatter(spans: TimedSpans) -> Scatter | None:
    """Returns how much spans with equal columns differ, or None if fewer than 12 have at least two others like them."""
    _, places = np.unique(spans.columns, axis=0, return_inverse=True)
    order = np.argsort(places.ravel(), kind="stable")
    bounds = np.flatnonzero(np.diff(places.ravel()[order])) + 1
    differences = [
        abs(float(np.median(np.delete(equal, at))) / max(float(equal[at]), _SMALLEST) - 1)
        for equal in np.split(spans.seconds[order], bounds)
        if len(equal) >= _FEWEST_EQUAL
        for at in range(len(equal))
    ]
    if len(differences) < _FEWEST_COMPARED:
        return None
    median, p90 = np.quantile(differences, (0.5, 0.9)).tolist()
    return Scatter(len(differences), median, p90)


def compute_paced_errors(predicted: Matrix, seconds: Matrix) -> Matrix:
    """Returns the relative errors corrected for the speed of the machine at the time, which leaves the model's own error.

    They have shape (spans,), in order of time. The pace is the median of measured divided by predicted seconds, over the three
    spans before and the three after, without the span itself. A shared machine may run at two thirds of its speed for seconds
    at a time, which no model of the work can foresee.
    """
    paces = seconds / np.maximum(predicted, _SMALLEST)
    around = [
        np.median(np.concatenate([paces[max(0, at - _AROUND) : at], paces[at + 1 : at + 1 + _AROUND]]))
        for at in range(len(paces))
    ]
    errors: Matrix = np.abs(predicted * np.array(around) / np.maximum(seconds, _SMALLEST) - 1)
    return errors


def compute_run_error(values: dict[str, float], parts: Sequence[TimedSpans]) -> float:
    """Returns the bound of nine of ten relative errors of the sums of ``parts``."""
    return bound_errors(
        [
            float(part.compute_errors(values).sum()) / max(_SMALLEST, float(part.seconds.sum()))
            for part in parts
            if len(part)
        ]
    )


def bound_errors(errors: Sequence[float]) -> float:
    """Returns the bound of nine of ten of such errors, assuming a normal distribution around 0; 0 if there are none."""
    return _NINE_OF_TEN * float(np.sqrt(np.mean(np.square(errors)))) if len(errors) else 0.0


def judge(component: str, values: dict[str, float], fitted: TimedSpans, held: TimedSpans, errors: Matrix) -> Fit:
    """Returns the fit, given its ``errors`` on the held-back spans (predicted minus measured)."""
    relative = np.abs(errors) / np.maximum(held.seconds, _SMALLEST)
    return Fit(
        component,
        values,
        len(fitted),
        len(held),
        median_error=float(np.median(relative)),
        p90_error=float(np.quantile(relative, 0.9)),
        total_error=float(errors.sum() / max(held.seconds.sum(), _SMALLEST)),
        paced_error=float(np.median(compute_paced_errors(held.seconds + errors, held.seconds))),
    )


def fit_table(tokens: Matrix, seconds: Matrix) -> tuple[tuple[float, float], ...]:
    """Returns rows of (tokens, seconds) with ascending tokens: the medians of bins with equal numbers of spans."""
    order = np.argsort(tokens, kind="stable")
    rows: dict[float, float] = {}
    for part in np.array_split(order, max(1, min(_MOST_ROWS, len(order) // FEWEST_SPANS))):
        rows[float(np.median(tokens[part]))] = float(np.median(seconds[part]))
    return tuple(sorted(rows.items()))


def fit_apart_from_zero(
    component: str, fitted: TimedSpans, held: TimedSpans, why_few: str, fitter: Fitter = fit_values
) -> Fit:
    """Fits as `fit_component` does, with ranges, and leaves out, one by one, the numbers whose range begins at 0."""
    fit = fit_component(component, fitted, held, why_few, fitter)
    if fit.reason:
        return fit
    kept, ranges = fitted, compute_ranges(fitted, fitter)
    while len(kept.names) > 1 and (weak := [item for item in ranges if item.low <= 0 and item.name in kept.names]):
        # The weakest first, because without it another may become distinguishable.
        columns = dict(zip(kept.names, kept.columns.mean(axis=0).tolist(), strict=True))
        least = min(weak, key=lambda item: item.high * columns[item.name])
        kept = kept.keep([name for name in kept.names if name != least.name])
        ranges = compute_ranges(kept, fitter)
    dropped = tuple(name for name in fitted.names if name not in kept.names)
    if dropped:
        values = dict.fromkeys(dropped, 0.0) | fitter(kept)
        fit = judge(component, values, fitted, held, held.compute_errors(values))
    # A least time that only some draws show is not in the fit.
    return replace(fit, ranges=tuple([item for item in ranges if item.name in fit.values]), dropped=dropped)


def fit_component(
    component: str, fitted: TimedSpans, held: TimedSpans, why_few: str, fitter: Fitter = fit_values
) -> Fit:
    """Fits to ``fitted`` and judges on ``held``. With too few spans the fit has no values, and ``why_few`` as its reason."""
    if min(len(fitted), len(held)) < FEWEST_SPANS:
        halves = f"{len(fitted)} spans to fit to and {len(held)} held back, needs {FEWEST_SPANS} of each"
        reason = f"{halves}: {why_few}"
        return Fit(component, {}, len(fitted), len(held), reason=reason)
    if not fitted.columns.any():
        return Fit(
            component, {}, len(fitted), len(held), reason="the model says it costs nothing, whatever the numbers"
        )
    values = fitter(fitted)
    return judge(component, values, fitted, held, held.compute_errors(values))
