"""Tuning beside brute force, for long epochs: ``python -m tests.simulator_answers.brute [TRACE...] [--ranks N...]``.

Every window and budget on the ladders is simulated with another draw, those near the best with twice the samples; what the
tuning recommends must come within its tolerance of the best. The whole takes some minutes, and is not part of the tests: they
run a slice of it.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from itertools import product

from odb_sim.inputs.lengths import Lengths, list_bundled_names, load_lengths
from odb_sim.studies.comparison import choose_budget
from odb_sim.studies.sweep import Answer, Local, Point, Study, make_executor, run_grid
from odb_sim.studies.tune import SHORT_WINDOWS, Question, Tuning, compute_budget_ladder, compute_ladder, tune

TRUTH_SEED = 99
SCREENING = 0.25
"""First every setting is simulated with a quarter of the samples ..."""
NEAR = 0.01
"""... then those that come so near to the best with twice as many: that moves a rate by a tenth of this."""
LEAST_WINDOWS = 9


@dataclass(frozen=True, slots=True)
class Verdict:
    """What tuning recommends, the best of all settings, and the tokens a second of both by the same long simulation."""

    tuning: Tuning
    recommended: float
    best: Point
    best_rate: float
    settings: int

    @property
    def loss(self) -> float:
        """How far below the best the recommendation is, as a share."""
        return 1 - self.recommended / self.best_rate


def ask(lengths: Lengths, ranks: int, window_max: int) -> Question:
    return Question(
        study=Study(lengths=lengths, samples=ranks * SHORT_WINDOWS * window_max),
        ranks=ranks,
        memory_tokens=choose_budget(lengths),
        window_max=window_max,
    )


def try_all(
    question: Question, windows: Sequence[int], budgets: Sequence[int], executor: Executor | None = None
) -> Verdict:
    """The tuning of ``question`` beside every one of these settings, at the recommended depth."""
    executor = executor or Local()
    tuning = tune(question, executor)
    chosen = tuning.recommended.point
    points = [
        replace(chosen, window_samples=window, budget_tokens=budget) for window, budget in product(windows, budgets)
    ]
    points = list(dict.fromkeys([chosen, *points]))
    # A steady state does not depend on the epoch's length.
    truth = replace(question, study=replace(question.study, seed=TRUTH_SEED, samples=None))
    screened = _simulate(truth, points, SCREENING, executor)
    best = max(answer.rate for answer in screened)
    near = [point for point, answer in zip(points, screened, strict=True) if answer.rate > (1 - NEAR) * best]
    answers = _simulate(truth, list(dict.fromkeys([chosen, *near])), 2.0, executor)
    winner = max(answers, key=lambda answer: answer.rate)
    return Verdict(tuning, answers[0].rate, winner.point, winner.rate, len(points))


def _simulate(question: Question, points: Sequence[Point], times: float, executor: Executor) -> list[Answer]:
    """``times`` as many samples as the tuning would draw, as long as there is a steady state to see."""
    drawn = []
    for point in points:
        least = point.ranks * point.window_samples * LEAST_WINDOWS
        drawn.append(replace(point, samples=max(least, int(times * (question.choose_samples(point) or 0)))))
    return run_grid(question.build_grid(drawn), executor)


def main() -> int:
    """0 when every recommendation is within the tolerance."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("traces", nargs="*", default=list_bundled_names())
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 64])
    parser.add_argument("--window-min", type=int, default=32)
    parser.add_argument("--window-max", type=int, default=1024)
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    options = parser.parse_args()
    status = 0
    with make_executor(options.processes) as executor:
        for name, ranks in product(options.traces, options.ranks):
            began = time.monotonic()
            question = ask(load_lengths(name), ranks, options.window_max)
            windows = compute_ladder(options.window_max, options.window_min)
            verdict = try_all(question, windows, compute_budget_ladder(question.memory_tokens), executor)
            chosen, best = verdict.tuning.recommended.point, verdict.best
            is_good = verdict.loss <= question.tolerance and not verdict.tuning.cautions
            status |= int(not is_good)
            print(
                f"{name}, {ranks} ranks: window {chosen.window_samples}, budget {chosen.budget_tokens}, depth "
                f"{chosen.depth_steps} is {verdict.loss:.2%} below the best of {verdict.settings} (window "
                f"{best.window_samples}, budget {best.budget_tokens}){'' if is_good else ': WRONG'}; "
                f"{len(verdict.tuning.tried)} tried, {time.monotonic() - began:.0f} s",
                flush=True,
            )
    return status


if __name__ == "__main__":
    sys.exit(main())
