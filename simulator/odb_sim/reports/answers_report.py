"""Tables and pages of `odb-ref sweep` and `odb-ref tune`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from math import log2
from pathlib import Path
from typing import TYPE_CHECKING, Final

from odb_ref.core.errors import UsageError
from odb_sim.engine.cautions import summarize_cautions
from odb_sim.reports.page import COLOURS, HtmlReport, make_figure
from odb_sim.studies.cells import CellAnswer, Point
from odb_sim.studies.runs import has_window
from odb_sim.studies.tune import Tuning, compute_host_tokens

if TYPE_CHECKING:
    from matplotlib.axes import Axes

DIMENSIONS: Final[dict[str, Callable[[Point], int | str]]] = {
    "window": lambda point: point.window_samples,
    "budget": lambda point: point.budget_tokens,
    "depth": lambda point: point.depth_steps,
    "ranks": lambda point: point.ranks,
    "policy": lambda point: point.policy,
}
HEADER: Final = [
    "ranks",
    "budget",
    "policy",
    "window",
    "depth",
    "steps",
    "samples an update",
    "efficiency",
    "excess",
    "padding",
    "first s",
    "sim s",
    "tokens/s",
]
SETTINGS: Final = 5
"""So many columns say what was simulated."""
_MOST_LINES: Final = 12
_MARKERS: Final = "os^Dv*PX"
_DASHES: Final = ("-", "--", "-.", ":")
_NEAREST_TICKS: Final = 0.8
"""Values closer than this factor, as a power of two, share a label."""


def check_plots(path: str | None) -> None:
    """Checks that no page is asked for, or that it can be drawn: better said before many simulations than after them.

    Raises: UsageError when matplotlib is missing.
    """
    if path is not None and find_spec("matplotlib") is None:
        raise UsageError("--html needs matplotlib: pip install -e '.[plots]'")


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
        f"{summary.samples_per_update:,.0f}",
        f"{summary.efficiency:.3f}",
        f"{summary.excess:.3f}",
        f"{summary.padding_ratio:.3f}",
        f"{answer.first_step_s:.3f}",
        f"{summary.sim_time_s:,.1f}",
        f"{summary.tokens_per_s:,.0f}",
    ]


def write_sweep_report(path: Path, title: str, answers: Sequence[CellAnswer]) -> None:
    """One page: efficiency, excess and throughput over the dimension with most values, a line for each combination of the
    others, and the table.

    Raises: UsageError when matplotlib is missing.
    """
    points = [answer.point for answer in answers]
    varying = {name: get for name, get in DIMENSIONS.items() if len({get(point) for point in points}) > 1}
    numeric = [name for name in varying if name != "policy"] or ["window"]
    across = max(numeric, key=lambda name: len({DIMENSIONS[name](point) for point in points}))
    lines: dict[tuple[str, str], list[CellAnswer]] = {}
    for answer in answers:
        others = [name for name in varying if name not in (across, "policy")]
        key = ", ".join(f"{name} {DIMENSIONS[name](answer.point):,}" for name in others)
        lines.setdefault((answer.point.policy, key), []).append(answer)
    lead = f"{len(answers)} simulations of the same samples. Times are simulated."
    cautions = summarize_cautions(caution for answer in answers for caution in answer.cautions)
    report = HtmlReport(f"Sweep: {title}", lead, cautions)
    shown = list(lines.items())[:_MOST_LINES]
    styles = {key: number for number, key in enumerate(dict.fromkeys(key for (_, key), _ in shown))}
    colours = {policy: COLOURS.get(policy, f"C{n}") for n, policy in enumerate(dict.fromkeys(p for (p, _), _ in shown))}
    figure, axes = make_figure(11.0, 4.4, columns=3)
    for axis, (label, get) in zip(axes, _MEASURES.items(), strict=False):
        for (policy, key), line in shown:
            style = _Style(f"{policy}, {key}" if key else policy, colours[policy], styles[key])
            _plot_line(axis, line, across, get, style)
        _label(axis, across, label, [int(DIMENSIONS[across](point)) for point in points])
    if len(shown) > 1:
        handles, labels = axes[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=3, fontsize=8, frameon=False)
    left_out = len(lines) - len(shown)
    note = f" {left_out} further combinations are in the table only." if left_out else ""
    report.add_figure(figure, f"Efficiency (1 is the limit), excess (0 is the limit) and throughput by {across}.{note}")
    report.add_heading("All points")
    report.add_table(HEADER, [build_row(answer) for answer in answers])
    report.write(path)


_RATE: Final = "tokens per second and rank"
_FIRST: Final = "seconds to the first step"
_MEASURES: Final[dict[str, Callable[[CellAnswer], float]]] = {
    "efficiency": lambda answer: answer.summary.efficiency,
    "excess": lambda answer: answer.summary.excess,
    _RATE: lambda answer: answer.rate / answer.point.ranks,
    _FIRST: lambda answer: answer.first_step_s,
}


@dataclass(frozen=True, slots=True)
class _Style:
    label: str
    colour: str
    number: int
    """Lines of the same number share marker and dashes."""


def _plot_line(
    axis: Axes, line: Sequence[CellAnswer], across: str, get: Callable[[CellAnswer], float], style: _Style
) -> None:
    marker, dashes = _MARKERS[style.number % len(_MARKERS)], _DASHES[style.number % len(_DASHES)]
    if across == "window" and not has_window(line[0].point.policy):
        axis.axhline(get(line[0]), color=style.colour, linestyle=dashes, linewidth=1, label=style.label)
        return
    ordered = sorted(line, key=lambda answer: int(DIMENSIONS[across](answer.point)))
    axis.plot(
        [int(DIMENSIONS[across](answer.point)) for answer in ordered],
        [get(answer) for answer in ordered],
        marker=marker,
        linestyle=dashes,
        color=style.colour,
        label=style.label,
    )


def _label(axis: Axes, across: str, label: str, values: Sequence[int]) -> None:
    ticks: list[int] = []
    for value in sorted(set(values), reverse=True):
        if not ticks or log2(ticks[-1] / value) > _NEAREST_TICKS:
            ticks.append(value)
    if len(ticks) > 1:
        axis.set_xscale("log", base=2)
    axis.minorticks_off()
    axis.set_xticks(ticks, [f"{tick:,}" for tick in ticks], rotation=45 if len(ticks) > 4 else 0)
    axis.set_xlabel(across)
    axis.set_title(label, fontsize=10)
    if "token" in label:
        axis.yaxis.set_major_formatter("{x:,.0f}")


def write_tune_report(path: Path, title: str, lead: str, tuning: Tuning) -> None:
    """One page: the recommendation with its reasons, the trade-off curves, and everything that was tried.

    Raises: UsageError when matplotlib is missing.
    """
    report = HtmlReport(f"Tuning: {title}", lead, tuning.cautions)
    report.add_table(TUNE_HEADER, [build_tune_row(tuning.recommended, tuning), build_tune_row(tuning.best, tuning)])
    report.add_text(TUNE_NOTE)
    for reason in tuning.reasons:
        report.add_text(reason)
    for line in describe_beside(tuning):
        report.add_text(line)
    report.add_heading("What a window buys and costs")
    figure, axes = make_figure(11.0, 3.6, columns=3)
    windows = tuning.windows
    chosen = tuning.recommended
    for axis, label in zip(axes, ("efficiency", "excess", _FIRST), strict=True):
        _plot_curve(axis, windows, "window", label, chosen)
    report.add_figure(
        figure,
        f"At budget {chosen.point.budget_tokens:,} and depth {chosen.point.depth_steps}. A larger window groups better and "
        "delays the first step. The ring is the recommendation.",
    )
    report.add_heading("Throughput")
    figure, axes = make_figure(11.0, 3.6, columns=3)
    curves = (("window", windows), ("budget", tuning.budgets), ("depth", tuning.depths))
    for axis, (across, curve) in zip(axes, curves, strict=True):
        _plot_curve(axis, curve, across, _RATE, chosen)
    report.add_figure(figure, "Each curve changes one setting of the recommendation. The axes do not begin at 0.")
    report.add_heading("Everything tried")
    tried = sorted(tuning.tried, key=lambda answer: -answer.rate)
    report.add_table(TUNE_HEADER, [build_tune_row(answer, tuning) for answer in tried])
    report.write(path)


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
    "tokens/s",
    "of best",
    "efficiency",
    "excess",
    "first s",
    "steps",
    "host k",
]


def describe_beside(tuning: Tuning) -> list[str]:
    """Returns what each choice of the user's would bring at the recommendation, a line each."""
    return [
        f"With {item.options}: {item.answer.rate / tuning.recommended.rate - 1:+.1%} tokens/s. Needs: {item.needs}."
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
        f"{answer.rate:,.0f}",
        f"{answer.rate / tuning.best.rate:.2%}",
        f"{summary.efficiency:.3f}",
        f"{summary.excess:.3f}",
        f"{answer.first_step_s:.3f}",
        f"{summary.steps:,}",
        f"{compute_host_tokens(answer) / 1000:,.0f}",
    ]


def _plot_curve(axis: Axes, curve: Sequence[CellAnswer], across: str, label: str, chosen: CellAnswer) -> None:
    get = _MEASURES[label]
    values = [int(DIMENSIONS[across](answer.point)) for answer in curve]
    _plot_line(axis, curve, across, get, _Style("", COLOURS["odb"], 0))
    place = int(DIMENSIONS[across](chosen.point))
    axis.plot(place, get(chosen), "o", ms=13, mfc="none", mec="#b3261e", mew=1.8, zorder=3)
    _label(axis, across, label, values)
