"""The search of `tune` through the settings of one study, from a point or from a coarse grid.

It first tries every second window with every budget, since these two depend on each other. From the best of them it varies one
setting at a time over all its values, until none is faster. Among all settings tried within half of the tolerance it takes
the one with the least host memory, or one that needs at most a percent more and has the most of a loader's defaults. It then
tries the next smaller neighbours until none is good enough. The other half of the tolerance is for what the search may have
missed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from itertools import product
from typing import Final

from odb_ref.core.batching.cost import TOKENS
from odb_ref.core.batching.updates import PADDING_SHARE
from odb_ref.core.config import MAX_AGE_ROUNDS, choose_ramp
from odb_sim.studies.cells import CellAnswer, CellFailure, Point, split_failed

_KEPT_BACK: Final = 0.5
"""The share of the tolerance kept back for what the search may have missed."""
_ALIKE: Final = 1.01
"""Up to this many times the least host memory counts as equal, so that no default is given up for less."""
_GAIN: Final = 1e-3
"""The search ends after a pass with a smaller gain."""

Value = int | str
Dimensions = Mapping[str, tuple[Value, ...]]
"""The values to try for each field of a point, the smallest first."""
Simulate = Callable[[Sequence[Point]], Sequence[CellAnswer | CellFailure]]


class SettingSearch:
    """The settings tried so far, and the search for better ones."""

    def __init__(self, simulate: Simulate, dimensions: Dimensions, tolerance: float) -> None:
        self._simulate = simulate
        self._dimensions = dimensions
        self._tolerance = tolerance
        self.answers: dict[Point, CellAnswer] = {}
        self.failed: dict[Point, CellFailure] = {}

    @property
    def best(self) -> CellAnswer:
        """The answer with the highest throughput so far."""
        return max(self.answers.values(), key=lambda answer: answer.rate)

    def run(self, start: Point) -> CellAnswer:
        """Returns the cheapest good setting, from a grid around ``start``."""
        windows, budgets = (self._dimensions.get(name, ()) for name in ("window_samples", "budget_tokens"))
        pairs = product(windows[::-2] or (start.window_samples,), budgets)
        self._try([start, *(_change(_change(start, "window_samples", a), "budget_tokens", b) for a, b in pairs)])
        return self.improve(start)

    def improve(self, start: Point) -> CellAnswer:
        """Returns the cheapest good setting found from ``start``."""
        self._try([start])
        self._climb()
        return self._descend()

    def list_line(self, point: Point, name: str) -> list[CellAnswer]:
        """Returns the answers that differ from ``point`` at most in the setting ``name``, the smallest value first."""
        line = [self.answers.get(_change(point, name, value)) for value in self._dimensions[name]]
        return [answer for answer in line if answer is not None]

    def _try(self, points: Sequence[Point]) -> None:
        """Simulates those of ``points`` that have not been simulated."""
        known = self.answers.keys() | self.failed.keys()
        new = [point for point in dict.fromkeys(points) if point not in known]
        if new:
            found, failed = split_failed(self._simulate(new))
            self.answers |= {answer.point: answer for answer in found}
            self.failed |= {item.point: item for item in failed}

    def _list_points(self, point: Point, name: str) -> list[Point]:
        return [_change(point, name, value) for value in self._dimensions[name]]

    def is_good(self, answer: CellAnswer) -> bool:
        """Returns whether an answer is within the part of the tolerance that is not kept back."""
        return answer.rate >= self.best.rate * (1 - _KEPT_BACK * self._tolerance)

    def _climb(self) -> None:
        """Tries every value of each setting around the best point so far, until nothing is faster."""
        before = 0.0
        while (rate := self.best.rate) > before * (1 + _GAIN):
            before = rate
            for name in self._dimensions:
                self._try(self._list_points(self.best.point, name))

    def _descend(self) -> CellAnswer:
        """Returns the cheapest good setting, after trying until no step down from it is good and its lines are complete."""
        while True:
            chosen = _choose(list(filter(self.is_good, self.answers.values())))
            tried = len(self.answers) + len(self.failed)
            self._try([point for name in self._dimensions for point in self._list_points(chosen.point, name)])
            if len(self.answers) + len(self.failed) == tried:
                return chosen


def compute_host_tokens(answer: CellAnswer) -> int:
    """Returns the most tokens that a rank's loader holds, by the model at the top of `odb_sim.studies.tune`."""
    summary, point = answer.summary, answer.point
    shard = -(-summary.samples_total // point.ranks)
    held = min(point.window_samples, shard)
    if summary.global_batch is not None and summary.rounds:
        held = -(-summary.global_batch // point.ranks)  # the window is the rank's part of an update
    window = held * summary.real_tokens / max(1, summary.samples_emitted)
    return int(window + 2 * window / max(1e-9, 1 - summary.padding_ratio) + point.depth_steps * point.budget_tokens)


def _change(point: Point, name: str, value: Value) -> Point:
    return Point(**asdict(point) | {name: value})


def list_own(answer: CellAnswer) -> frozenset[str]:
    """Returns the settings that cost no memory and differ from a loader's defaults."""
    point = answer.point
    shard = -(-answer.summary.samples_total // point.ranks)
    defaults: dict[str, Value] = {
        "max_age_rounds": MAX_AGE_ROUNDS,
        "cost": TOKENS.name,
        "padding_share": PADDING_SHARE,
        "ramp_rounds": choose_ramp(point.window_samples, shard),
    }
    return frozenset(name for name, value in defaults.items() if getattr(point, name) not in (None, value))


def _choose(answers: Sequence[CellAnswer]) -> CellAnswer:
    """Returns the cheapest answer. Among those within a percent of the least memory it prefers the most of a loader's defaults,
    then the least memory, then the highest speed.
    """
    least = min(map(compute_host_tokens, answers))

    def rank(answer: CellAnswer) -> tuple[float, ...]:
        point = answer.point
        memory = (compute_host_tokens(answer), point.window_samples, point.budget_tokens, point.depth_steps)
        return (len(list_own(answer)), *memory, -answer.rate)

    return min([answer for answer in answers if compute_host_tokens(answer) <= _ALIKE * least], key=rank)
