"""The uncertainty of a predicted time or speed-up, its main cause, and what to measure to reduce it.

A band holds nine of ten outcomes, if each input lies in its own range nine times out of ten. Three kinds of input move a
figure: the lengths that happened to be drawn (the epoch is simulated again with samples drawn from itself), the numbers of the
cost model (each is set to either end of its range), and what the model leaves out (another range, on all step times). Errors
of inputs are assumed to be independent, and to act linearly on the logarithm of a figure, so their effects add as squares. If
other samples make an epoch shorter, yet others are taken to make it longer by as much time, not by the same factor. A
speed-up has its own band, narrower than those of the two times, because an input that slows both does not change it.

A long epoch is judged by a part of it. The effect of other lengths on the whole is that on the part, reduced by the square root
of the ratio of samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

import numpy as np
from numpy.typing import NDArray

from odb_sim.engine.metrics import COMPLETE, Summary
from odb_sim.inputs.costs import ERROR, RANGED, Costs, StepTable
from odb_sim.inputs.workload import Workload
from odb_sim.studies.cells import Runner
from odb_sim.studies.runs import Run, run

Vector = NDArray[np.float64]

LARGEST_BANDED: Final = 20_000
"""The samples by which a long epoch is judged."""
LARGEST_EVENTS: Final = 6_000
"""The same, if only events can simulate the epoch."""
LEAST_SAMPLES: Final = 32
"""The fewest samples per rank."""
LENGTHS: Final = "which lengths were drawn"
LEFT_OUT: Final = "what the cost model leaves out"
_LARGEST_QUICK: Final = 100_000
_LARGEST_QUICK_EVENTS: Final = 2_000
_DRAWS: Final = 8
_TWO_SIDED: Final = 1.645
"""The standard deviations within which nine tenths of a normal distribution lie."""
_OF_DRAWS: Final = 1.86
"""The same if the deviation is estimated from these few draws."""
_CALIBRATE: Final = "odb-ref calibrate, on a run of your own"
_RECORD: Final = "more runs, for odb-ref calibrate to be judged by"


@dataclass(frozen=True, slots=True)
class Uncertain:
    """An input that is not known exactly: the costs at either end of its range, and how to narrow it."""

    name: str
    low: Costs
    high: Costs
    remedy: str


@dataclass(frozen=True, slots=True)
class Band:
    """The range of a figure, which lies between ``low`` and ``high`` times its value nine times out of ten."""

    low: float
    high: float
    shares: tuple[tuple[str, float], ...]
    """The share of each input in the squared width, the largest first."""
    remedy: str
    """What to measure to narrow the main cause."""

    def describe(self, value: float, form: str = ",.2f") -> str:
        """Returns the range of a figure of ``value``."""
        return f"{value * self.low:{form}} to {value * self.high:{form}}"

    def widen(self, name: str, low: float, high: float, remedy: str) -> Band:
        """Returns the band with one more input, which alone multiplies the figure by ``low`` to ``high``."""
        down, up = np.log(low), np.log(high)
        own = float(down**2 + up**2)
        before = float(np.log(self.low) ** 2 + np.log(self.high) ** 2)
        if not own:
            return self
        parts = {item: share * before / (before + own) for item, share in self.shares} | {name: own / (before + own)}
        return Band(
            low=float(np.exp(-np.hypot(np.log(self.low), down))),
            high=float(np.exp(np.hypot(np.log(self.high), up))),
            shares=tuple(sorted(parts.items(), key=lambda part: -part[1])),
            remedy=remedy if own > before * max((share for _, share in self.shares), default=0) else self.remedy,
        )

    def to_json(self, **values: float) -> dict[str, object]:
        """Returns the ends of each of ``values``, and the share of each input in the squared width."""
        ends = {name: {"low": value * self.low, "high": value * self.high} for name, value in values.items()}
        return {**ends, "because": dict(self.shares)}

    def explain(self, width: str = "that width") -> str:
        """Returns a sentence that names the main cause of the width, or an empty text if there is no width."""
        if not self.shares:
            return ""
        name, share = self.shares[0]
        return f"{share:.0%} of {width} is {name}; to narrow it: {self.remedy}"


CERTAIN: Final = Band(1.0, 1.0, (), "")
"""The band of a figure without uncertain inputs."""


@dataclass(frozen=True, slots=True)
class Bands:
    """The effect of each input on the logarithms of some times."""

    inputs: tuple[tuple[str, str], ...]
    """The name of each input, and how to narrow it. Several draws share one name."""
    lows: Vector
    """Has shape (inputs, times)."""
    highs: Vector

    def combine(self, *weights: float) -> Band:
        """Returns the band of the product of the times, each to the power of its weight: (1,) for a time, (-1, 1) a ratio."""
        ends = np.stack([self.lows @ np.array(weights), self.highs @ np.array(weights)])
        down, up = np.minimum(ends.min(axis=0), 0.0), np.maximum(ends.max(axis=0), 0.0)
        squares = down**2 + up**2
        parts = dict.fromkeys(self.inputs, 0.0)
        for item, square in zip(self.inputs, squares.tolist(), strict=True):
            parts[item] += square / max(1e-300, float(squares.sum()))
        order = sorted((item for item in parts if parts[item] > 0), key=lambda item: -parts[item])
        return Band(
            low=float(np.exp(-np.sqrt((down**2).sum()))),
            high=float(np.exp(np.sqrt((up**2).sum()))),
            shares=tuple((item[0], parts[item]) for item in order),
            remedy=order[0][1] if order else "",
        )


def list_uncertain(costs: Costs) -> list[Uncertain]:
    """Returns the numbers of a cost model that have a range."""
    found = []
    for name, low, high in costs.ranges.rows:
        if name == ERROR:
            found.append(Uncertain(LEFT_OUT, scale_steps(costs, low), scale_steps(costs, high), _RECORD))
        else:
            found.append(Uncertain(name, _replace(costs, name, low), _replace(costs, name, high), _CALIBRATE))
    return found


def _replace(costs: Costs, name: str, value: float) -> Costs:
    section, _, number = name.partition(".")
    return replace(costs, **{section: replace(getattr(costs, section), **{number: value})})


def scale_steps(costs: Costs, factor: float) -> Costs:
    """Returns the costs with steps, including their collectives, that take ``factor`` times as long."""
    rows = tuple([(tokens, seconds * factor) for tokens, seconds in costs.step_table.rows])
    costs = replace(costs, step_table=StepTable(rows=rows))
    for name in RANGED:
        section, _, number = name.partition(".")
        if section in ("gpu", "collective"):
            costs = _replace(costs, name, factor * float(getattr(getattr(costs, section), number)))
    return costs


def is_quick(what: Run) -> bool:
    """Returns True when the bands of a run are quick to compute. A part of the run is simulated some twenty times for them."""
    samples, ranks = what.workload.samples_total, what.workload.ranks
    if _needs_events(what):
        return samples <= _LARGEST_QUICK_EVENTS
    return max(samples, LEAST_SAMPLES * ranks) <= _LARGEST_QUICK


def estimate(what: Run, summary: Summary) -> Band | None:
    """Returns the band of the time of a run, or None without one: for a run that did not complete, had faults or full
    reads, or whose band would have no width.
    """
    if summary.outcome != COMPLETE.kind or what.conditions.faults or what.full_reads:
        return None
    band = compute_bands([what], list_uncertain(what.costs)).combine(1.0)
    return band if band.shares else None


def _needs_events(what: Run) -> bool:
    return what.is_protocol and bool(what.find_obstacle())


def compute_bands(
    runs: Sequence[Run],
    inputs: Sequence[Uncertain],
    *,
    draws: int = _DRAWS,
    most: int | None = None,
    is_whole: bool = False,
    runner: Runner | None = None,
) -> Bands:
    """Returns the bands of the times of ``runs``, which must have the same samples and costs.

    An epoch of more samples than ``most``, or than can be simulated in seconds, is judged by that number of them, unless
    ``is_whole``.
    """
    runner = runner or Runner()
    total = runs[0].workload.samples_total
    least = LEAST_SAMPLES * runs[0].workload.ranks
    quick = LARGEST_EVENTS if any(map(_needs_events, runs)) else LARGEST_BANDED
    most = max(least, min(quick, most or quick))
    is_whole = is_whole or total <= most or bool(runs[0].starts)
    cut = [what if is_whole else replace(what, workload=redraw(what.workload, most, 0)) for what in runs]
    count = cut[0].workload.samples_total
    varied = [
        [replace(what, workload=redraw(what.workload, count, seed)) for what in cut] for seed in range(1, draws + 1)
    ]
    if runs[0].starts:  # a resumed epoch has fixed samples
        varied = []
    ends = [[replace(what, costs=costs) for what in cut] for item in inputs for costs in (item.low, item.high)]
    todo = [what for group in (cut, *varied, *ends) for what in group]
    seconds = []
    for future in [runner.executor.submit(partial(_measure, what)) for what in todo]:
        seconds.append(future.result())
        runner.note()
    logs = np.log(np.array(seconds)).reshape(-1, len(runs))
    drawn, rest = logs[1 : 1 + len(varied)], logs[1 + len(varied) :] - logs[0]
    names = [(item.name, item.remedy) for item in inputs]
    lows, highs = rest[::2], rest[1::2]
    if varied:
        # The main effect is the number of tokens drawn, whose spread is known. How they fit together is measured, as a distance
        # from the epoch itself and not from the mean, because the epoch is one draw of many as well.
        tokens = runs[0].workload.tokens
        means = np.log([group[0].workload.tokens.mean() / cut[0].workload.tokens.mean() for group in varied])
        seen, scale = drawn - logs[0] - means[:, None], np.sqrt(count / total / len(varied)) * _OF_DRAWS
        known = np.full((1, len(runs)), _TWO_SIDED * float(tokens.std() / tokens.mean()) / np.sqrt(total))
        lows = np.concatenate([lows, scale * seen, -known])
        highs = np.concatenate([highs, scale * _mirror(seen), np.log1p(known)])
        names += [(LENGTHS, "the lengths of more samples, if these are only a part, or several seeds")] * (
            len(varied) + 1
        )
    return Bands(tuple(names), lows, highs)


def _mirror(logs: Vector) -> Vector:
    """Returns the logarithms of times that deviate as far to the other side.

    One that falls by nine tenths, because no very long sample was drawn, shows that it may rise by nine tenths, not tenfold.
    """
    return np.where(logs < 0, np.log(2 - np.exp(np.minimum(logs, 0.0))), -logs)


def redraw(workload: Workload, samples: int, seed: int) -> Workload:
    """Returns ``samples`` samples drawn from a workload with replacement, in shards of the same proportions."""
    rows = np.random.default_rng((seed, workload.samples_total)).integers(0, workload.samples_total, samples)
    bounds = np.round(workload.offsets * (samples / workload.samples_total)).astype(np.int64)
    bounds = np.maximum(bounds, np.arange(len(bounds)))
    bounds = np.minimum(bounds, samples - np.arange(len(bounds))[::-1])
    return replace(
        workload,
        ids=np.arange(samples),
        tokens=workload.tokens[rows],
        supervised_tokens=workload.supervised_tokens[rows],
        resources=workload.resources[rows],
        offsets=bounds,
    )


def _measure(what: Run) -> float:
    """Returns the mean seconds per sample of an epoch."""
    summary = run(what).summary
    return max(1e-12, summary.sim_time_s) / max(1, summary.samples_emitted)
