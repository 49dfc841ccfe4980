"""Tables and pages of `odb-ref sweep` and `odb-ref tune`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from simulator.report import COLOURS, Report, make_figure
from simulator.sweep import Answer, Point

if TYPE_CHECKING:
    from matplotlib.axes import Axes

DIMENSIONS: Final[dict[str, Callable[[Point], int | str]]] = {
    "window": lambda point: point.window_samples,
    "token budget": lambda point: point.budget_tokens,
    "depth": lambda point: point.depth_steps,
    "ranks": lambda point: point.ranks,
    "policy": lambda point: point.policy,
}
HEADER: Final = [
    "ranks",
    "token budget",
    "policy",
    "window",
    "depth",
    "steps",
    "efficiency",
    "excess",
    "padding",
    "first step s",
    "sim s",
    "tokens/s",
]
_MOST_LINES: Final = 12
_MARKERS: Final = "os^Dv*PX"


def build_row(answer: Answer) -> list[str]:
    """A table row under `HEADER`."""
    point, summary = answer.point, answer.summary
    return [
        f"{point.ranks:,}",
        f"{point.budget_tokens:,}",
        point.policy,
        f"{point.window_samples:,}" if summary.rounds else "-",
        f"{point.depth_steps:,}",
        f"{summary.steps:,}",
        f"{summary.efficiency:.3f}",
        f"{summary.excess:.3f}",
        f"{summary.padding_ratio:.3f}",
        f"{answer.first_step_s:.3f}",
        f"{summary.sim_time_s:,.1f}",
        f"{summary.tokens_per_s:,.0f}",
    ]


def write_sweep_report(path: Path, title: str, answers: Sequence[Answer]) -> None:
    """One page: efficiency, excess and throughput over the dimension with most values, a line for each combination of the
    others, and the table.

    Raises: UsageError when matplotlib is missing.
    """
    points = [answer.point for answer in answers]
    varying = {name: get for name, get in DIMENSIONS.items() if len({get(point) for point in points}) > 1}
    numeric = [name for name in varying if name != "policy"] or ["window"]
    across = max(numeric, key=lambda name: len({DIMENSIONS[name](point) for point in points}))
    lines: dict[str, list[Answer]] = {}
    for answer in answers:
        key = ", ".join(
            f"{get(answer.point)}" if name == "policy" else f"{name} {get(answer.point):,}"
            for name, get in varying.items()
            if name != across
        )
        lines.setdefault(key, []).append(answer)
    report = Report(f"Sweep: {title}", f"{len(answers)} simulations of the same samples. Times are simulated.")
    shown = dict(list(lines.items())[:_MOST_LINES])
    figure, axes = make_figure(11.0, 4.2, columns=3)
    for axis, (label, get) in zip(axes, _MEASURES.items(), strict=True):
        for number, (key, line) in enumerate(shown.items()):
            _plot_line(axis, line, across, get, label=key, marker=_MARKERS[number % len(_MARKERS)])
        _label(axis, across, label, [int(DIMENSIONS[across](point)) for point in points])
    if any(shown):
        handles, labels = axes[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=3, fontsize=8, frameon=False)
    left_out = len(lines) - len(shown)
    note = f" {left_out} further combinations are in the table only." if left_out else ""
    report.add_figure(figure, f"Efficiency (1 is the limit), excess (0 is the limit) and throughput by {across}.{note}")
    report.add_heading("All points")
    report.add_table(HEADER, [build_row(answer) for answer in answers])
    report.write(path)


_MEASURES: Final[dict[str, Callable[[Answer], float]]] = {
    "efficiency": lambda answer: answer.summary.efficiency,
    "excess": lambda answer: answer.summary.excess,
    "tokens per simulated second": lambda answer: answer.summary.tokens_per_s,
}


def _plot_line(
    axis: Axes, line: Sequence[Answer], across: str, get: Callable[[Answer], float], *, label: str, marker: str
) -> None:
    ordered = sorted(line, key=lambda answer: int(DIMENSIONS[across](answer.point)))
    axis.plot(
        [int(DIMENSIONS[across](answer.point)) for answer in ordered],
        [get(answer) for answer in ordered],
        marker=marker,
        label=label or None,
        color=COLOURS.get(line[0].point.policy) if label in COLOURS else None,
    )


def _label(axis: Axes, across: str, label: str, values: Sequence[int]) -> None:
    ticks = sorted(set(values))
    if len(ticks) > 1:
        axis.set_xscale("log", base=2)
    axis.minorticks_off()
    axis.set_xticks(ticks, [f"{tick:,}" for tick in ticks], rotation=45 if len(ticks) > 4 else 0)
    axis.set_xlabel(across)
    axis.set_title(label, fontsize=10)
