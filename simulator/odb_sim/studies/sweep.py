"""Grids of simulations: every combination of some settings, each a cell of a study (`odb_sim.studies.cells`).

The answers come in the order of the grid, and are the same whatever executor runs them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from typing import Final

import numpy as np

from odb_ref.core.batching.cost import get_cost
from odb_ref.core.config import Terms
from odb_ref.core.errors import InvariantError
from odb_sim.engine.cautions import summarize_cautions
from odb_sim.engine.updates import EVERY_STEP, TOLERATED, GlobalBatch
from odb_sim.inputs.conditions import STEADY, Conditions
from odb_sim.inputs.costs import Costs
from odb_sim.inputs.lengths import Lengths
from odb_sim.inputs.workload import Sharding, Workload, build_workload
from odb_sim.studies.bands import Band, estimate, is_quick
from odb_sim.studies.cells import Cell, CellAnswer, CellFailure, Point, Runner, compute_key
from odb_sim.studies.fitted import describe_fit, fit_batches
from odb_sim.studies.runs import Run, describe_window, has_window, is_rule, run

_NO_LENGTHS: Final = Lengths("", np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64))


@dataclass(frozen=True, slots=True, kw_only=True)
class Study:
    """The data and settings that all simulations of a study share."""

    lengths: Lengths
    samples: int | None = None
    seed: int = 0
    sharding: Sharding = Sharding.EVEN
    global_batch: GlobalBatch = EVERY_STEP
    batch_size: int | None = None
    """The samples of a fixed batch. None means the number of longest samples that fit the budget."""
    costs: Costs = field(default_factory=Costs)
    conditions: Conditions = STEADY
    terms: Terms = field(default_factory=Terms)

    def build_workload(self, ranks: int, samples: int | None = None) -> Workload:
        """Returns the workload of ``ranks`` ranks, with ``samples`` samples if given, else the study's.

        Raises: UsageError when there are more ranks than samples.
        """
        samples = self.samples if samples is None else samples
        return build_workload(self.lengths, ranks=ranks, sharding=self.sharding, samples=samples, seed=self.seed)

    def build_run(self, point: Point, workload: Workload | None = None) -> Run:
        """Returns the run of ``point``, on a new workload if none is given.

        Raises: UsageError when the point is not valid.
        """
        what = Run(
            workload=self.build_workload(point.ranks, point.samples) if workload is None else workload,
            policy=point.policy,
            budget_tokens=point.budget_tokens,
            batch_size=self.batch_size,
            global_batch=self.global_batch,
            window_samples=point.window_samples,
            depth_steps=point.depth_steps,
            sharding=self.sharding,
            seed=self.seed,
            costs=self.costs,
            conditions=self.conditions,
        )
        own = {name: getattr(point, name) for name in ("ramp_rounds", "max_age_rounds", "padding_share")}
        terms = replace(self.terms, **{name: value for name, value in own.items() if value is not None})
        if point.cost is not None and point.cost != terms.cost.name:
            terms = replace(terms, cost=get_cost(point.cost))
        return terms.apply(what)

    def check(self, points: Sequence[Point]) -> None:
        """Checks that every point is valid, before any is run. Raises: UsageError when one is not."""
        for ranks in dict.fromkeys(point.ranks for point in points):
            workload = self.build_workload(ranks)
            for point in points:
                if point.ranks == ranks:
                    self.build_run(point, workload)


def build_points(
    *,
    policies: Sequence[str],
    ranks: Sequence[int],
    budgets: Sequence[int],
    windows: Sequence[int],
    depths: Sequence[int],
    update_samples: int | None = None,
) -> tuple[Point, ...]:
    """Returns every combination in the order given, ranks first. A policy without a window, or a depth, gets only the first."""
    return tuple(
        Point(policy=policy, ranks=rank, budget_tokens=budget, window_samples=window, depth_steps=depth)
        for rank, budget, policy, window, depth in product(ranks, budgets, policies, windows, depths)
        if has_window(policy, update_samples) or window == windows[0]
        if is_rule(policy) or depth == depths[0]
    )


def simulate_point(study: Study, point: Point) -> CellAnswer:
    """Returns the answer of one point. A worker of the executor runs this.

    Raises: InvariantError, naming the point, when a property of the protocol does not hold.
    """
    return simulate_run(study.build_run(point), point)


def simulate_run(what: Run, point: Point) -> CellAnswer:
    """Returns the answer of one run, which ``point`` describes, with smaller batches if its updates would hold too much.

    Raises: InvariantError, naming the point, when a property of the protocol does not hold.
    """
    try:
        fitted = fit_batches(what)
        result = run(fitted)
    except InvariantError as error:
        raise InvariantError(error.invariant, f"{point}: {error.detail}") from None
    first_step_s = result.rows[0].data_wait_s / point.ranks if result.rows else 0.0
    return CellAnswer(point, result.summary, first_step_s, (*result.cautions, *describe_fit(what, fitted)))


def has_worlds(answers: Sequence[CellAnswer]) -> bool:
    """Returns whether numbers of ranks differ. More ranks are faster, so settings are then compared by the rate per rank."""
    return len({answer.point.ranks for answer in answers}) > 1


def find_fastest(answers: Sequence[CellAnswer]) -> tuple[CellAnswer, dict[CellAnswer, float]]:
    """Returns the fastest setting, and the tokens per second of each, per rank if `has_worlds`."""
    is_by_rank = has_worlds(answers)
    rates = {answer: answer.rate / (answer.point.ranks if is_by_rank else 1) for answer in answers}
    return max(answers, key=rates.__getitem__), rates


def describe_setting(answer: CellAnswer) -> str:
    """Returns the setting of an answer as a phrase."""
    point, summary = answer.point, answer.summary
    said = f"{point.policy} on {point.ranks:,} ranks, budget {summary.token_budget:,}{describe_window(summary)}"
    return said + ("" if summary.depth is None else f", depth {summary.depth}")


def list_sweep_cautions(study: Study, answers: Sequence[CellAnswer]) -> list[str]:
    """Returns the cautions of all settings, and one if their updates differ, because they then train differently."""
    updates = [answer.summary.samples_per_update for answer in answers]
    said = summarize_cautions(caution for answer in answers for caution in answer.cautions)
    if study.global_batch.goal is None and max(updates) > TOLERATED * min(updates):
        said.append(
            f"every step is an update here, of {min(updates):,.0f} to {max(updates):,.0f} samples: with --global-batch N all "
            "settings are judged with updates of N samples"
        )
    return said


def estimate_answer(study: Study, answer: CellAnswer) -> Band | None:
    """Returns the band of the time of a setting, or None if it would take too long to compute."""
    what = fit_batches(study.build_run(answer.point))
    return estimate(what, answer.summary) if is_quick(what) else None


def run_grid(study: Study, points: Sequence[Point], runner: Runner) -> list[CellAnswer | CellFailure]:
    """Returns the answers or failures of all points, in order.

    Raises: UsageError before any is run when a point is not valid; the error of the first point to fail, unless its process
    was killed. Points not yet begun are then given up.
    """
    study.check(points)
    lengths, rest = study.lengths, replace(study, lengths=_NO_LENGTHS)
    arrays = [lengths.tokens, lengths.supervised_tokens, *([] if lengths.resources is None else [lengths.resources])]
    cells = [
        Cell(
            point,
            compute_key(arrays, [point.policy], lengths.name, rest, point),
            partial(simulate_point, study, point),
        )
        for point in points
    ]
    return runner.run(cells)
