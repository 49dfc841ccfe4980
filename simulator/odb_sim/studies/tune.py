"""Finds token budget, window and depth: the cheapest setting whose throughput is within a tolerance of the best.

What the settings cost
----------------------
The **budget** bounds the padded tokens of a batch, which is what a GPU must hold: at most the memory, given in tokens. A
single sample longer than that travels alone, so no setting makes it fit.

**Window** and **depth** cost host memory. Before a round is released a rank holds, at most, the window being filled, the
window before it, collated, and what is released of the one before that, collated as well; then ``depth`` batches in the
queue. With K samples of mean length L, padding ratio p and budget B these are ``K L + 2 K L / (1 - p) + D B`` tokens: an
upper estimate. A larger window also delays the first step, and a larger budget makes fewer optimizer steps of an epoch;
both are shown, since no throughput says what they are worth.

What it judges by
-----------------
The steady state of a long run: every simulation draws as many samples as it takes for its windows to come up `WINDOWS` times
and for `STEPS` steps, and the ends of the epoch are left out. So a setting is not chosen for how the last window of a short
sample happens to end. Where the epoch asked about holds few windows its ends do count: then every setting tried is simulated
over that epoch too, and the answer says what it comes to there.

Another draw moves a throughput by some tenths of a percent, so half of the tolerance is kept back for that.

How it searches
---------------
Coarse to fine, one dimension at a time: windows at full budget, in steps of four, then between the smallest that is good
enough and the next smaller; then every budget at that window, and every depth. Of everything tried, the setting with the least
host memory within the tolerance is taken, and its next smaller neighbour in each dimension is tried until none is good
enough. So the answer is deterministic, and no single step down from it is within the tolerance.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from odb_ref.core.errors import UsageError
from odb_sim.inputs.workload import Sharding
from odb_sim.studies.sweep import Answer, Grid, Point, Study, run_grid

LARGEST_WINDOW: Final = 4096
WINDOWS: Final = 16
"""Windows of a rank in a simulation, at least."""
STEPS: Final = 400
"""Steps of a simulation, at least, or about."""
SHORT_WINDOWS: Final = 16
"""An epoch of fewer windows a rank is short: its ends show."""
_KEPT_BACK: Final = 0.5
"""This share of the tolerance is for what another draw would say."""
DEPTHS: Final = (1, 2, 4, 8, 16)
START_DEPTH: Final = 8
_FEW: Final = 8
"""So few values are all tried: a budget may group a data set better than a larger one does."""
_COARSE: Final = 4
"""A coarse step is this many fine ones: windows and budgets differ by 1.33 or 1.5 in a fine step, by 4 in a coarse one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What is to be tuned. ``tolerance`` is the share of the best throughput that may be given up for a cheaper setting.

    Raises: UsageError when a value makes no sense.
    """

    study: Study
    ranks: int
    memory_tokens: int
    policy: str = "odb"
    window_max: int = LARGEST_WINDOW
    tolerance: float = 0.01

    def __post_init__(self) -> None:
        if self.ranks < 1:
            raise UsageError(f"ranks must be at least 1, got {self.ranks}")
        if self.memory_tokens < 1:
            raise UsageError(f"memory_tokens must be at least 1, got {self.memory_tokens}")
        if self.window_max < 1:
            raise UsageError(f"window_max must be at least 1, got {self.window_max}")
        if not 0 <= self.tolerance < 1:
            raise UsageError(f"tolerance must lie in 0..1, got {self.tolerance}")

    @property
    def epoch_samples(self) -> int:
        """Samples of the epoch asked about."""
        return len(self.study.lengths) if self.study.samples is None else self.study.samples

    def choose_samples(self, point: Point) -> int | None:
        """Returns how many samples to draw to see the steady state of ``point``; None where uneven shards leave none to see."""
        if self.study.sharding is Sharding.UNEVEN:
            return None
        groups = STEPS * point.budget_tokens / float(self.study.lengths.tokens.mean())
        return point.ranks * max(WINDOWS * point.window_samples, int(groups))

    def build_grid(self, points: Sequence[Point]) -> Grid:
        """Returns the simulations of ``points``.

        Raises: UsageError when one makes no sense.
        """
        return Grid(study=self.study, points=tuple(points))


@dataclass(frozen=True, slots=True)
class Tuning:
    """The answer: what to set, and everything that was tried."""

    recommended: Answer
    best: Answer
    """The highest throughput of all that were tried."""
    windows: tuple[Answer, ...]
    """The trade-off over windows, at the recommended budget and depth; ascending. The next two likewise."""
    budgets: tuple[Answer, ...]
    depths: tuple[Answer, ...]
    tried: tuple[Answer, ...]
    reasons: tuple[str, ...]
    """Why each setting, a sentence each."""
    samples_over_memory: int
    windows_held: float
    """How many windows of the recommendation a rank's share of the epoch holds."""
    epoch: Answer
    """The recommendation over the epoch asked about, ends and all."""
    best_epoch: Answer | None
    """The best of those tried over that epoch; None where it is long."""
    cautions: tuple[str, ...]


def compute_host_tokens(answer: Answer) -> int:
    """Returns the tokens that a rank's loader holds at most, by the model at the top of this module."""
    summary, point = answer.summary, answer.point
    largest_shard = -(-summary.samples_total // point.ranks)
    window = min(point.window_samples, largest_shard) * summary.real_tokens / max(1, summary.samples_emitted)
    return int(window + 2 * window / max(1e-9, 1 - summary.padding_ratio) + point.depth_steps * point.budget_tokens)


def compute_ladder(largest: int, smallest: int) -> list[int]:
    """Values from at least ``smallest`` up to ``largest``: powers of two, three halves of them, and the ends; ascending."""
    steps = {largest, min(smallest, largest)}
    power = 1
    while power <= largest:
        steps |= {value for value in (power, power * 3 // 2) if smallest <= value <= largest}
        power *= 2
    return sorted(steps)


def compute_budget_ladder(memory_tokens: int) -> list[int]:
    """Budgets to try, ascending: from a quarter of the memory to all of it, by eighths."""
    return sorted({max(1, memory_tokens * eighths // 8) for eighths in range(2, 9)})


def tune(question: Question, executor: Executor, on_done: Callable[[int], None] | None = None) -> Tuning:
    """Returns the cheapest setting within the tolerance, and the curves it was chosen from. ``on_done`` hears of each
    simulation.

    Raises: UsageError when the question makes no sense.
    """
    return _Search(question, executor, on_done).run()


class _Search:
    """What was tried, and what is tried next."""

    def __init__(self, question: Question, executor: Executor, on_done: Callable[[int], None] | None) -> None:
        self._question = question
        self._executor = executor
        self._on_done = on_done
        self._answers: dict[Point, Answer] = {}
        self._shard = shard = -(-question.epoch_samples // question.ranks)
        self._ladders: dict[str, list[int]] = {
            "window_samples": compute_ladder(min(question.window_max, shard), 8),
            "budget_tokens": compute_budget_ladder(question.memory_tokens),
            "depth_steps": list(DEPTHS),
        }

    def run(self) -> Tuning:
        window = self._ladders["window_samples"][-1]
        point = Point(
            policy=self._question.policy,
            ranks=self._question.ranks,
            budget_tokens=self._question.memory_tokens,
            window_samples=window,
            depth_steps=START_DEPTH,
        )
        for dimension in ("window_samples", "budget_tokens", "depth_steps"):
            point = self._narrow(point, dimension)
        chosen = self._descend()
        return self._conclude(chosen)

    def _try(self, points: Sequence[Point]) -> list[Answer]:
        new = [point for point in dict.fromkeys(points) if point not in self._answers]
        if new:
            drawn = [replace(point, samples=self._question.choose_samples(point)) for point in new]
            answers = self._run(drawn)
            self._answers |= {point: replace(answer, point=point) for point, answer in zip(new, answers, strict=True)}
        return [self._answers[point] for point in points]

    def _run(self, points: Sequence[Point]) -> list[Answer]:
        """Returns the answers of simulations that follow those of all that were tried."""
        before, report = len(self._answers), self._on_done
        count = None if report is None else (lambda done: report(before + done))
        return run_grid(self._question.build_grid(points), self._executor, count)

    def _get_best(self) -> Answer:
        return max(self._answers.values(), key=lambda answer: answer.rate)

    def _is_good(self, answer: Answer) -> bool:
        return answer.rate >= self._get_best().rate * (1 - _KEPT_BACK * self._question.tolerance)

    def _narrow(self, point: Point, dimension: str) -> Point:
        """Returns the smallest good value of one dimension: coarse steps from the top, then halving the gap below it."""
        ladder = self._ladders[dimension]
        coarse = _list_coarse_steps(ladder)
        answers = self._try(self._list_coarse(point, dimension))
        good = next((at for at, answer in enumerate(answers) if self._is_good(answer)), len(coarse) - 1)
        high = coarse[good]
        low = coarse[good - 1] if good else high
        while high - low > 1:
            middle = (low + high) // 2
            (answer,) = self._try([_change(point, dimension, ladder[middle])])
            low, high = (low, middle) if self._is_good(answer) else (middle, high)
        return _change(point, dimension, ladder[high])

    def _descend(self) -> Answer:
        """Returns the cheapest good setting tried, once no single step down from it is good and its curves are complete."""
        while True:
            chosen = min(filter(self._is_good, self._answers.values()), key=_rank_cost)
            tried = len(self._answers)
            self._try(self._list_neighbours(chosen.point))
            for dimension in self._ladders:
                self._try(self._list_coarse(chosen.point, dimension))
            if len(self._answers) == tried:
                return chosen

    def _list_coarse(self, point: Point, dimension: str) -> list[Point]:
        ladder = self._ladders[dimension]
        return [_change(point, dimension, ladder[index]) for index in _list_coarse_steps(ladder)]

    def _list_neighbours(self, point: Point) -> list[Point]:
        neighbours = []
        for dimension, ladder in self._ladders.items():
            index = int(np.searchsorted(ladder, getattr(point, dimension)))
            if index > 0:
                neighbours.append(_change(point, dimension, ladder[index - 1]))
        return neighbours

    def _conclude(self, chosen: Answer) -> Tuning:
        question = self._question
        lengths = question.study.build_workload(question.ranks).tokens
        point = chosen.point
        curves = {dimension: self._get_curve(point, dimension) for dimension in self._ladders}
        windows_held = self._shard / point.window_samples
        epochs = self._simulate_epochs(point, is_short=windows_held < SHORT_WINDOWS)
        best_epoch = max(epochs, key=lambda answer: answer.summary.tokens_per_s)
        return Tuning(
            recommended=chosen,
            best=self._get_best(),
            windows=curves["window_samples"],
            budgets=curves["budget_tokens"],
            depths=curves["depth_steps"],
            tried=tuple(self._answers.values()),
            reasons=self._explain(chosen, curves),
            samples_over_memory=int((lengths > question.memory_tokens).sum()),
            windows_held=windows_held,
            epoch=epochs[0],
            best_epoch=best_epoch if len(epochs) > 1 else None,
            cautions=self._list_cautions(chosen, epochs[0], best_epoch, windows_held),
        )

    def _simulate_epochs(self, chosen: Point, *, is_short: bool) -> list[Answer]:
        """Returns the epoch as it was asked about: with the recommendation, and where it is short with all that was tried."""
        points = dict.fromkeys([chosen, *(self._answers if is_short else ())])
        return self._run(list(points))

    def _list_cautions(self, chosen: Answer, epoch: Answer, best: Answer, windows_held: float) -> tuple[str, ...]:
        question, found = self._question, []
        if windows_held < SHORT_WINDOWS:
            point, ahead = best.point, best.summary.tokens_per_s / epoch.summary.tokens_per_s - 1
            slower = 1 - epoch.summary.tokens_per_s / chosen.rate
            text = (
                f"an epoch of {question.epoch_samples:,} samples is short: it holds {windows_held:.1f} windows of "
                f"{chosen.point.window_samples:,} a rank, and its ends make it {slower:.1%} "
                f"slower ({epoch.summary.tokens_per_s:,.0f} tokens/s) than the steady state that is judged here"
            )
            if ahead > question.tolerance:
                text += (
                    f"; over such an epoch budget {point.budget_tokens:,}, window {point.window_samples:,}, depth "
                    f"{point.depth_steps} is {ahead:.1%} faster"
                )
            found.append(text)
        largest = self._ladders["window_samples"][-1]
        if largest == self._shard < question.window_max:
            found.append(
                f"no window above the {self._shard:,} samples of a rank was tried: for a longer data set, give its "
                "--samples"
            )
        return tuple(found)

    def _get_curve(self, point: Point, dimension: str) -> tuple[Answer, ...]:
        """Returns the answers that differ from ``point`` in one dimension at most, ascending."""
        line = [
            answer
            for other, answer in self._answers.items()
            if _change(other, dimension, getattr(point, dimension)) == point
        ]
        return tuple(sorted(line, key=lambda answer: int(getattr(answer.point, dimension))))

    def _explain(self, chosen: Answer, curves: dict[str, tuple[Answer, ...]]) -> tuple[str, ...]:
        best, question = self._get_best(), self._question
        share = chosen.rate / best.rate
        memory = compute_host_tokens(chosen) / max(1, compute_host_tokens(best))
        reasons = [
            f"{share:.2%} of the best throughput tried ({best.rate:,.0f} tokens/s at budget "
            f"{best.point.budget_tokens:,}, window {best.point.window_samples:,}, depth {best.point.depth_steps}), "
            f"with {memory:.0%} of its host memory; the tolerance is {question.tolerance:.2%}, half of it kept back"
        ]
        for name, dimension in _NAMES.items():
            value = getattr(chosen.point, dimension)
            smaller = [answer for answer in curves[dimension] if getattr(answer.point, dimension) < value]
            if not smaller:
                reasons.append(f"{name} {value:,}: the smallest tried is good enough")
                continue
            below = smaller[-1]
            loss = 1 - below.rate / best.rate
            reasons.append(
                f"{name} {value:,}: the next smaller, {getattr(below.point, dimension):,}, is {loss:.2%} below the best"
            )
        return tuple(reasons)


_NAMES: Final = {"window": "window_samples", "token budget": "budget_tokens", "depth": "depth_steps"}


def _list_coarse_steps(ladder: Sequence[int]) -> list[int]:
    if len(ladder) <= _FEW:
        return list(range(len(ladder)))
    return sorted({*range(len(ladder) - 1, -1, -_COARSE), 0})


def _change(point: Point, dimension: str, value: int) -> Point:
    match dimension:
        case "window_samples":
            return replace(point, window_samples=value)
        case "budget_tokens":
            return replace(point, budget_tokens=value)
        case _:
            return replace(point, depth_steps=value)


def _rank_cost(answer: Answer) -> tuple[int, int, int, int]:
    point = answer.point
    return compute_host_tokens(answer), point.window_samples, point.budget_tokens, point.depth_steps
