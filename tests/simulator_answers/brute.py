"""Tuning beside brute force: ``python -m tests.simulator_answers.brute [TRACE...] [--ranks N...]``; a part of ``make soak``.

It simulates every combination of some windows, budgets, depths, ramps, ages and balances over the epoch in question, in free
mode and at updates of a global batch. The recommendation of the tuning must reach 0.99 of the best. What it shows beside, for
packed rows, must reach 0.98 of what a tuning with these finds. ``--full`` tries every value, trace and choice of the user's,
which takes hours. The tests run a slice of it.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product

from odb_sim.engine.updates import GlobalBatch
from odb_sim.inputs.lengths import Lengths, list_bundled_names, load_lengths
from odb_sim.studies.cells import CellAnswer, Point, Runner, split_failed
from odb_sim.studies.comparison import choose_budget
from odb_sim.studies.processes import make_executor
from odb_sim.studies.search import Value
from odb_sim.studies.sweep import Study, run_grid
from odb_sim.studies.tune import Choice, Question, Tuning, describe_point, list_choices, tune

from odb_ref.core.config import Terms

ENOUGH = 0.99
ENOUGH_BESIDE = 0.98
UPDATE_SAMPLES_A_RANK = 32
TRACES = ("gsm8k", "mm_mix_real", "llamafactory_demos", "azure_llm_2023_code")
LARGEST_OF_UPDATES = 2048
"""The samples of an epoch of updates, which only events can simulate. Longer ones are as well tuned by as many."""


FEW: Mapping[str, Callable[[Sequence[Value]], Sequence[Value]]] = {
    "window_samples": lambda values: values[::-2],
    "depth_steps": lambda values: values[-1:],
    "ramp_rounds": lambda values: values[::3],
    "max_age_rounds": lambda values: values[2::2],
    "padding_share": lambda values: values[::2],
}
"""The values of a setting to try: the greatest depth, because no other is faster, and of budget and balance every one."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """The recommendation of the tuning, and the best of all settings."""

    tuning: Tuning
    best: CellAnswer
    settings: int

    @property
    def share(self) -> float:
        """The share of the best that the recommendation reaches."""
        return self.tuning.recommended.rate / max(self.best.rate, self.tuning.best.rate)


def ask(
    lengths: Lengths,
    ranks: int,
    window_max: int = 4096,
    update_samples: int | None = None,
    samples: int | None = None,
) -> Question:
    study = Study(
        lengths=lengths,
        samples=samples,
        global_batch=GlobalBatch(samples=update_samples),
        terms=Terms(update_samples=update_samples),
    )
    return Question(study=study, ranks=ranks, memory_tokens=choose_budget(lengths), window_max=window_max)


def try_all(
    question: Question,
    values: Mapping[str, Sequence[Value]] | None = None,
    runner: Runner | None = None,
    *,
    choices: Iterable[Choice] = (),
) -> Verdict:
    """Compares the tuning of ``question`` with every combination of its settings' values, or of ``values``."""
    tuning = tune(question, runner, choices=choices)
    lists = {name: (values or {}).get(name, every) for name, every in question.build_dimensions().items()}
    points: list[Point] = [
        replace(question.build_point(), **dict(zip(lists, chosen, strict=True))) for chosen in product(*lists.values())
    ]
    answers, _ = split_failed(run_grid(question.study, points, runner or Runner()))
    return Verdict(tuning, max(answers, key=lambda answer: answer.rate), len(points))


def compare_beside(
    question: Question, tuning: Tuning, choices: Iterable[Choice], runner: Runner | None = None
) -> dict[str, float]:
    """Returns what is shown beside for each of ``choices``, divided by what a tuning of that choice finds."""
    shown = {item.choice: item.answer for item in tuning.beside}
    return {
        options: shown[options].rate / tune(replace(question, study=study), runner).best.rate
        for options, _, study in choices
    }


def main() -> int:
    """Returns 0 if every recommendation reaches enough of the best."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("traces", nargs="*")
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 64])
    parser.add_argument("--full", action="store_true", help="every trace, value and choice, which takes hours")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    options = parser.parse_args()
    status, traces = 0, options.traces or (list_bundled_names() if options.full else TRACES)
    with make_executor(options.processes) as executor:
        runner = Runner(executor)
        for name, ranks, is_update in product(traces, options.ranks, (False, True)):
            began = time.monotonic()
            update = UPDATE_SAMPLES_A_RANK * ranks if is_update else None
            lengths = load_lengths(name)
            samples = min(len(lengths), LARGEST_OF_UPDATES) if is_update and not options.full else None
            question = ask(lengths, ranks, update_samples=update, samples=samples)
            names = question.build_dimensions()
            few = {} if options.full else {item: FEW[item](values) for item, values in names.items() if item in FEW}
            choices = list(list_choices(question))[: None if options.full else 1]
            verdict = try_all(question, few, runner, choices=choices)
            beside = compare_beside(question, verdict.tuning, choices, runner)
            worst = min(beside, key=beside.__getitem__)
            is_right = verdict.share >= ENOUGH and beside[worst] >= ENOUGH_BESIDE
            status |= int(not is_right)
            print(
                f"{name}, {ranks} ranks{f', updates of {update:,}' if update else ''}: "
                f"{describe_point(verdict.tuning.recommended.point, names)} reaches {verdict.share:.4f} of the best of "
                f"{verdict.settings} ({describe_point(verdict.best.point, names)}); beside, {worst}: {beside[worst]:.4f}"
                f"{'' if is_right else ': WRONG'}; {len(verdict.tuning.tried)} tried, {time.monotonic() - began:.0f} s",
                flush=True,
            )
    return status


if __name__ == "__main__":
    sys.exit(main())
