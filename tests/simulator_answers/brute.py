"""Tuning beside brute force: ``python -m tests.simulator_answers.brute [TRACE...] [--ranks N...]``; a part of ``make soak``.

Every combination of windows, budgets, depths and ramps is simulated over the epoch asked about; what the tuning recommends must
reach 0.99 of the best. The tests run a slice of it.
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
from odb_sim.studies.cells import CellAnswer, Point, split_failed
from odb_sim.studies.comparison import choose_budget
from odb_sim.studies.processes import Local, make_executor
from odb_sim.studies.sweep import Study, run_grid
from odb_sim.studies.tune import (
    DEPTHS,
    RAMPS,
    Question,
    Tuning,
    compute_budget_ladder,
    compute_ladder,
    describe_point,
    tune,
)

ENOUGH = 0.99


@dataclass(frozen=True, slots=True)
class Verdict:
    """What tuning recommends, and the best of all settings."""

    tuning: Tuning
    best: CellAnswer
    settings: int

    @property
    def share(self) -> float:
        """What the recommendation reaches of the best."""
        return self.tuning.recommended.rate / max(self.best.rate, self.tuning.best.rate)


def ask(lengths: Lengths, ranks: int, window_max: int = 4096) -> Question:
    return Question(
        study=Study(lengths=lengths), ranks=ranks, memory_tokens=choose_budget(lengths), window_max=window_max
    )


def try_all(
    question: Question,
    windows: Sequence[int],
    budgets: Sequence[int],
    depths: Sequence[int] = DEPTHS,
    ramps: Sequence[int] = RAMPS,
    executor: Executor | None = None,
) -> Verdict:
    """The tuning of ``question`` beside every one of these settings."""
    executor = executor or Local()
    tuning = tune(question, executor)
    start = question.build_point()
    points: list[Point] = [
        replace(start, window_samples=window, budget_tokens=budget, depth_steps=depth, ramp_rounds=ramp)
        for window, budget, depth, ramp in product(windows, budgets, depths, ramps)
    ]
    answers, _ = split_failed(run_grid(question.build_grid(points), executor))
    return Verdict(tuning, max(answers, key=lambda answer: answer.rate), len(points))


def main() -> int:
    """0 when every recommendation reaches enough of the best."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("traces", nargs="*", default=list_bundled_names())
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 64])
    parser.add_argument(
        "--full", action="store_true", help="every depth and ramp, not the least, the usual and the most"
    )
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    options = parser.parse_args()
    depths, ramps = (DEPTHS, RAMPS) if options.full else (DEPTHS[::2], RAMPS[::2])
    status = 0
    with make_executor(options.processes) as executor:
        for name, ranks in product(options.traces, options.ranks):
            began = time.monotonic()
            question = ask(load_lengths(name), ranks)
            windows = compute_ladder(min(question.window_max, question.shard_samples), 8)
            budgets = compute_budget_ladder(question.memory_tokens)
            verdict = try_all(question, windows, budgets, depths, ramps, executor)
            status |= int(verdict.share < ENOUGH)
            print(
                f"{name}, {ranks} ranks: {describe_point(verdict.tuning.recommended.point)} reaches {verdict.share:.4f} of "
                f"the best of {verdict.settings} ({describe_point(verdict.best.point)})"
                f"{'' if verdict.share >= ENOUGH else ': WRONG'}; {len(verdict.tuning.tried)} tried, "
                f"{time.monotonic() - began:.0f} s",
                flush=True,
            )
    return status


if __name__ == "__main__":
    sys.exit(main())
