"""Tables of `odb-ref sweep` and `odb-ref tune`: what stands in a terminal, and on a page."""

from __future__ import annotations

from typing import Final

from odb_sim.engine.metrics import UPDATE_COLUMNS, describe_update, list_update_values
from odb_sim.studies.cells import CellAnswer
from odb_sim.studies.runs import has_window
from odb_sim.studies.search import compute_host_tokens
from odb_sim.studies.tune import Tuning

HEADER: Final = [
    "ranks",
    "budget",
    "policy",
    "window",
    "depth",
    "steps",
    *UPDATE_COLUMNS,
    "efficiency",
    "excess",
    "padding",
    "first s",
    "sim s",
    "tokens/s",
]
SETTINGS: Final = 5
"""So many columns say what was simulated."""


def build_row(answer: CellAnswer) -> list[str]:
    """Returns a table row under `HEADER`."""
    point, summary = answer.point, answer.summary
    return [
        f"{point.ranks:,}",
        f"{point.budget_tokens:,}",
        point.policy,
        f"{point.window_samples:,}" if has_window(point.policy) else "-",
        f"{point.depth_steps:,}",
        f"{summary.steps:,}",
        *list_update_values(summary),
        f"{summary.efficiency:.3f}",
        f"{summary.excess:.3f}",
        f"{summary.padding_ratio:.3f}",
        f"{answer.first_step_s:.3f}",
        f"{summary.sim_time_s:,.1f}",
        f"{summary.tokens_per_s:,.0f}",
    ]


TUNE_NOTE: Final = (
    "first s: simulated seconds to the first step. host k: thousands of tokens in a rank's host memory at most, for window K, "
    "mean length L, padding p, depth D and budget B: K L being filled, 2 K L / (1 - p) collated, and D B in the queue."
)
TUNE_HEADER: Final = [
    "setting",
    "window",
    "budget",
    "depth",
    "ramp",
    "age",
    "balance",
    "tokens/s",
    "of best",
    *UPDATE_COLUMNS,
    "efficiency",
    "excess",
    "first s",
    "steps",
    "host k",
]


def describe_beside(tuning: Tuning) -> list[str]:
    """Returns what each choice of the user's would bring at what is best for it, a line each."""
    return [
        f"With {item.options}: {item.answer.rate / tuning.recommended.rate - 1:+.1%} tokens/s, at "
        f"{describe_update(item.answer.summary)} an update. Needs: {item.needs}."
        for item in tuning.beside
    ]


def build_tune_row(answer: CellAnswer, tuning: Tuning) -> list[str]:
    """Returns a table row under `TUNE_HEADER`."""
    point, summary = answer.point, answer.summary
    names = [name for name, other in (("recommended", tuning.recommended), ("best", tuning.best)) if other is answer]
    return [
        " and ".join(names),
        f"{point.window_samples:,}",
        f"{point.budget_tokens:,}",
        f"{point.depth_steps:,}",
        f"{point.ramp_rounds}",
        f"{point.max_age_rounds}",
        f"{answer.summary.cost}",
        f"{answer.rate:,.0f}",
        f"{answer.rate / tuning.best.rate:.2%}",
        *list_update_values(summary),
        f"{summary.efficiency:.3f}",
        f"{summary.excess:.3f}",
        f"{answer.first_step_s:.3f}",
        f"{summary.steps:,}",
        f"{compute_host_tokens(answer) / 1000:,.0f}",
    ]
