"""Tables of `odb-ref sweep` and `odb-ref tune`, for a terminal and for a page."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from odb_sim.engine.cautions import say_amount
from odb_sim.engine.metrics import UPDATE_COLUMNS, describe_update, list_update_values
from odb_sim.studies.cells import CellAnswer
from odb_sim.studies.search import compute_host_tokens
from odb_sim.studies.tune import Tuning

Columns = Mapping[str, Callable[[CellAnswer], str]]
"""Headings, and functions that return the cells below them."""

SETTINGS: Final[Columns] = {
    "ranks": lambda answer: f"{answer.point.ranks:,}",
    "budget": lambda answer: f"{answer.summary.token_budget:,}",
    "policy": lambda answer: answer.point.policy,
    "window": lambda answer: "-" if answer.summary.window is None else f"{answer.summary.window:,}",
    "depth": lambda answer: "-" if answer.summary.depth is None else f"{answer.summary.depth:,}",
}
"""The settings of a simulation."""
_FIGURES: Final[Columns] = {
    "steps": lambda answer: f"{answer.summary.steps:,}",
    "samples an update": lambda answer: list_update_values(answer.summary)[0],
    "tokens an update": lambda answer: list_update_values(answer.summary)[1],
    "micro-batches an update": lambda answer: list_update_values(answer.summary)[2],
    "efficiency": lambda answer: f"{answer.summary.efficiency:.3f}",
    "excess": lambda answer: f"{answer.summary.excess:.3f}",
    "padding": lambda answer: f"{answer.summary.padding_ratio:.3f}",
    "first s": lambda answer: f"{answer.first_step_s:.3f}",
    "sim s": lambda answer: say_amount(answer.summary.sim_time_s),
    "tokens/s": lambda answer: f"{answer.rate:,.0f}",
}
SWEEP: Final[Columns] = {**SETTINGS, **_FIGURES}


def build_row(columns: Columns, answer: CellAnswer) -> list[str]:
    """Returns a table row under ``columns``."""
    return [show(answer) for show in columns.values()]


TUNE_NOTE: Final = (
    "first s: simulated seconds to the first step. host k: thousands of tokens in a rank's host memory at most, for window K, "
    "mean length L, padding p, depth D and budget B: K L being filled, 2 K L / (1 - p) collated, and D B in the queue."
)


def describe_beside(tuning: Tuning) -> list[str]:
    """Returns a line for each choice left to the user: what it would bring with its own best settings."""
    return [
        f"With {item.options}: {round(item.answer.rate / tuning.recommended.rate - 1, 3) + 0.0:+.1%} tokens/s, at "
        f"{describe_update(item.answer.summary)} an update. Needs: {item.needs}."
        for item in tuning.beside
    ]


def list_tune_columns(tuning: Tuning) -> Columns:
    """Returns the columns of a tuning's tables."""

    def name(answer: CellAnswer) -> str:
        named = (("recommended", tuning.recommended), ("best", tuning.best))
        return " and ".join(word for word, other in named if other is answer)

    return {
        "setting": name,
        **{heading: SWEEP[heading] for heading in ("window", "budget", "depth")},
        "ramp": lambda answer: f"{answer.point.ramp_rounds}",
        "age": lambda answer: f"{answer.point.max_age_rounds}",
        "padding share": lambda answer: f"{answer.point.padding_share}",
        "balance": lambda answer: answer.summary.cost,
        "tokens/s": SWEEP["tokens/s"],
        "of best": lambda answer: f"{answer.rate / tuning.best.rate:.2%}",
        **{heading: SWEEP[heading] for heading in (*UPDATE_COLUMNS, "efficiency", "excess", "first s", "steps")},
        "host k": lambda answer: f"{compute_host_tokens(answer) / 1000:,.0f}",
    }
