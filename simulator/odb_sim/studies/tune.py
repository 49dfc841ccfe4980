"""Finds token budget, window, depth and ramp: the cheapest setting whose epoch is within a tolerance of the fastest.

What the settings cost
----------------------
The **budget** bounds the padded tokens of a batch, which is what a GPU must hold: at most the memory, given in tokens. A
single sample longer than that travels alone, so no setting makes it fit.

**Window** and **depth** cost host memory. Before a round is released a rank holds, at most, the window being filled, the
window before it, collated, and what is released of the one before that, collated as well; then ``depth`` batches in the
queue. With K samples of mean length L, padding ratio p and budget B these are ``K L + 2 K L / (1 - p) + D B`` tokens: an
upper estimate. The **ramp** costs nothing: the first windows of an epoch are smaller by it, so that the first step comes
sooner, and are grouped worse.

What it judges by
-----------------
The epoch asked about, ends and all: its tokens a second, in simulations of that very epoch. Of an epoch of more than
`LARGEST_JUDGED` samples, one of so many is judged, drawn from the same lengths.

How it searches
---------------
Every second window with every budget first, since these two go together; from the best of them, one dimension at a time, every
value, until none is faster. Of everything tried, the setting with the least host memory within half of the tolerance is taken,
and its next smaller neighbours are tried until none is good enough: the other half is for what the search may have missed.

What else would be faster needs a choice of the user's, since it changes the batches, their order or what the model must know:
packed rows, shared shards, the fullest first. Each is simulated at the recommendation, and shown beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from itertools import count as count_from
from itertools import product
from typing import Final

from odb_ref.core.batching.layouts import Layout
from odb_ref.core.batching.order import StepOrder
from odb_ref.core.config import RAMP_ROUNDS
from odb_ref.core.errors import UsageError
from odb_sim.inputs.workload import Sharding
from odb_sim.studies.cells import CellAnswer, FailedCell, Point, Store, split_failed
from odb_sim.studies.sweep import Grid, Study, run_grid

LARGEST_WINDOW: Final = 4096
LARGEST_JUDGED: Final = 1_000_000
_KEPT_BACK: Final = 0.5
"""This share of the tolerance is for what the search may have missed."""
DEPTHS: Final = (2, 4, 8, 16)
"""Not 1: the simulator hands a step over in no time, a real queue does not."""
RAMPS: Final = tuple(range(RAMP_ROUNDS + 2))
START_DEPTH: Final = 8
_GAIN: Final = 1e-3
"""A pass that gains less ends the search."""

Dimensions = dict[str, tuple[int, ...]]
DIMENSIONS: Final = {
    "window": "window_samples",
    "token budget": "budget_tokens",
    "depth": "depth_steps",
    "ramp": "ramp_rounds",
}


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

    @property
    def shard_samples(self) -> int:
        """Those of a rank."""
        return -(-self.epoch_samples // self.ranks)

    @property
    def judged_samples(self) -> int | None:
        """How many samples are drawn for each simulation; None: the epoch's own."""
        return LARGEST_JUDGED if self.epoch_samples > LARGEST_JUDGED else None

    def build_dimensions(self) -> Dimensions:
        """Returns every value that is tried of each setting, ascending."""
        return {
            "window_samples": tuple(compute_ladder(min(self.window_max, self.shard_samples), 8)),
            "budget_tokens": tuple(compute_budget_ladder(self.memory_tokens)),
            "depth_steps": DEPTHS,
            "ramp_rounds": RAMPS,
        }

    def build_point(self) -> Point:
        """Returns where the search begins."""
        return Point(
            policy=self.policy,
            ranks=self.ranks,
            budget_tokens=self.memory_tokens,
            window_samples=self.build_dimensions()["window_samples"][-1],
            depth_steps=START_DEPTH,
            ramp_rounds=self.study.terms.ramp_rounds,
            samples=self.judged_samples,
        )

    def build_grid(self, points: Sequence[Point]) -> Grid:
        """Returns the simulations of ``points``.

        Raises: UsageError when one makes no sense.
        """
        return Grid(study=self.study, points=tuple(points))


@dataclass(frozen=True, slots=True)
class Beside:
    """What needs a choice of the user's: its options, what the choice is, and the recommendation with it."""

    options: str
    needs: str
    answer: CellAnswer


@dataclass(frozen=True, slots=True)
class Tuning:
    """The answer: what to set, and everything that was tried."""

    recommended: CellAnswer
    best: CellAnswer
    """The highest throughput of all that were tried."""
    windows: tuple[CellAnswer, ...]
    """The trade-off over windows, at the recommended other settings; ascending. The next three likewise."""
    budgets: tuple[CellAnswer, ...]
    depths: tuple[CellAnswer, ...]
    ramps: tuple[CellAnswer, ...]
    tried: tuple[CellAnswer, ...]
    reasons: tuple[str, ...]
    """Why each setting, a sentence each."""
    beside: tuple[Beside, ...]
    failed: tuple[FailedCell, ...]
    samples_over_memory: int
    cautions: tuple[str, ...]


def compute_host_tokens(answer: CellAnswer) -> int:
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


def tune(
    question: Question,
    executor: Executor,
    on_done: Callable[[int], None] | None = None,
    *,
    store: Store | None = None,
) -> Tuning:
    """Returns the cheapest setting within the tolerance, and the curves it was chosen from. ``on_done`` hears of each
    simulation.

    Raises: UsageError when the question makes no sense.
    """
    return _Search(question, executor, on_done, store).run()


class _Search:
    """What was tried, and what is tried next."""

    def __init__(
        self, question: Question, executor: Executor, on_done: Callable[[int], None] | None, store: Store | None
    ) -> None:
        self._question = question
        self._executor = executor
        self._on_done = on_done
        self._count = count_from(1)
        self._store = store
        self._answers: dict[Point, CellAnswer] = {}
        self._failed: dict[Point, FailedCell] = {}
        self._dimensions = question.build_dimensions()

    def run(self) -> Tuning:
        self._begin()
        self._climb()
        return self._conclude(self._descend())

    def _try(self, points: Sequence[Point]) -> None:
        """Simulates those of ``points`` that have not been."""
        known = self._answers.keys() | self._failed.keys()
        new = [point for point in dict.fromkeys(points) if point not in known]
        if new:
            found, failed = split_failed(self._run(self._question.build_grid(new)))
            self._answers |= {answer.point: answer for answer in found}
            self._failed |= {item.point: item for item in failed}

    def _run(self, grid: Grid) -> list[CellAnswer | FailedCell]:
        report = self._on_done
        heard = None if report is None else (lambda _: report(next(self._count)))
        return run_grid(grid, self._executor, heard, store=self._store)

    def _get_best(self) -> CellAnswer:
        return max(self._answers.values(), key=lambda answer: answer.rate)

    def _is_good(self, answer: CellAnswer) -> bool:
        return answer.rate >= self._get_best().rate * (1 - _KEPT_BACK * self._question.tolerance)

    def _begin(self) -> None:
        """Tries every second window with every budget."""
        start, windows = self._question.build_point(), self._dimensions["window_samples"][::-2]
        pairs = product(windows, self._dimensions["budget_tokens"])
        self._try([start, *(replace(start, window_samples=window, budget_tokens=budget) for window, budget in pairs)])

    def _climb(self) -> None:
        """Tries every value of each dimension at the best so far, until that is fastest."""
        before = 0.0
        while (rate := self._get_best().rate) > before * (1 + _GAIN):
            before = rate
            for dimension in ("ramp_rounds", "window_samples", "depth_steps", "budget_tokens"):
                self._try(self._list_line(self._get_best().point, dimension))

    def _descend(self) -> CellAnswer:
        """Returns the cheapest good setting tried, once no single step down from it is good and its curves are complete."""
        while True:
            chosen = min(filter(self._is_good, self._answers.values()), key=_rank_cost)
            tried = len(self._answers) + len(self._failed)
            self._try([point for name in self._dimensions for point in self._list_line(chosen.point, name)])
            if len(self._answers) + len(self._failed) == tried:
                return chosen

    def _list_line(self, point: Point, dimension: str) -> list[Point]:
        return [_change(point, dimension, value) for value in self._dimensions[dimension]]

    def _conclude(self, chosen: CellAnswer) -> Tuning:
        question = self._question
        lengths = question.study.build_workload(question.ranks).tokens
        curves = {name: self._get_curve(chosen.point, name) for name in self._dimensions}
        return Tuning(
            recommended=chosen,
            best=self._get_best(),
            windows=curves["window_samples"],
            budgets=curves["budget_tokens"],
            depths=curves["depth_steps"],
            ramps=curves["ramp_rounds"],
            tried=tuple(self._answers.values()),
            reasons=self._explain(chosen, curves),
            beside=self._look_beside(chosen.point),
            failed=tuple(self._failed.values()),
            samples_over_memory=int((lengths > question.memory_tokens).sum()),
            cautions=self._list_cautions(),
        )

    def _look_beside(self, point: Point) -> tuple[Beside, ...]:
        """Returns the recommendation with each choice that is the user's to make, fastest first."""
        study, found = self._question.study, []
        terms = study.terms
        others: list[tuple[str, str, Study]] = []
        packed = replace(study, terms=replace(terms, layout=Layout.PACKED)) if terms.layout is Layout.PADDED else None
        shared = replace(study, sharding=Sharding.SHARED) if study.sharding is not Sharding.SHARED else None
        if packed is not None:
            needs = "attention that keeps the samples of a row apart"
            others.append(("--layout packed", needs, packed))
        if shared is not None:
            others.append(("--shards shared", "one sampler order for all ranks", shared))
        if packed is not None and shared is not None:
            both = replace(packed, sharding=Sharding.SHARED)
            others.append(("--layout packed --shards shared", "both", both))
        if terms.order is not StepOrder.FULLEST:
            fullest = replace(study, terms=replace(terms, order=StepOrder.FULLEST))
            others.append(
                ("--order fullest", "long and short samples need not be mixed over the steps of a round", fullest)
            )
        for options, needs, other in others:
            (answer,) = self._run(Grid(study=other, points=(point,)))
            if isinstance(answer, CellAnswer):
                found.append(Beside(options, needs, answer))
        return tuple(sorted(found, key=lambda item: -item.answer.rate))

    def _list_cautions(self) -> tuple[str, ...]:
        question, found = self._question, []
        largest = self._dimensions["window_samples"][-1]
        if largest == question.shard_samples < question.window_max:
            found.append(
                f"no window above the {largest:,} samples of a rank was tried: for a longer data set, give its --samples"
            )
        if question.judged_samples is not None:
            found.append(f"an epoch of {LARGEST_JUDGED:,} samples was judged in place of {question.epoch_samples:,}")
        if self._failed:
            found.append(f"{len(self._failed)} simulations failed, the first: {next(iter(self._failed.values()))}")
        return tuple(found)

    def _get_curve(self, point: Point, dimension: str) -> tuple[CellAnswer, ...]:
        """Returns the answers that differ from ``point`` in one dimension at most, ascending."""
        line = [self._answers.get(other) for other in self._list_line(point, dimension)]
        return tuple(answer for answer in line if answer is not None)

    def _explain(self, chosen: CellAnswer, curves: dict[str, tuple[CellAnswer, ...]]) -> tuple[str, ...]:
        best, question = self._get_best(), self._question
        share = chosen.rate / best.rate
        memory = compute_host_tokens(chosen) / max(1, compute_host_tokens(best))
        reasons = [
            f"{share:.2%} of the best throughput tried ({best.rate:,.0f} tokens/s at {describe_point(best.point)}), "
            f"with {memory:.0%} of its host memory; the tolerance is {question.tolerance:.2%}, half of it kept back"
        ]
        for name, dimension in DIMENSIONS.items():
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


def describe_point(point: Point) -> str:
    """Returns what is tuned of a setting."""
    return (
        f"budget {point.budget_tokens:,}, window {point.window_samples:,}, depth {point.depth_steps}, ramp "
        f"{point.ramp_rounds}"
    )


def _change(point: Point, dimension: str, value: int) -> Point:
    match dimension:
        case "window_samples":
            return replace(point, window_samples=value)
        case "budget_tokens":
            return replace(point, budget_tokens=value)
        case "ramp_rounds":
            return replace(point, ramp_rounds=value)
        case _:
            return replace(point, depth_steps=value)


def _rank_cost(answer: CellAnswer) -> tuple[float, ...]:
    """Returns what sorts the cheapest first, and of settings that cost the same the fastest."""
    point = answer.point
    return compute_host_tokens(answer), point.window_samples, point.budget_tokens, point.depth_steps, -answer.rate
