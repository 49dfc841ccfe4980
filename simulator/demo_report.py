"""The demo's report: what was simulated, trained and checked, as tables and plots."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from odb_ref.core.check import Status, Verdict
from odb_ref.core.trace import Json
from simulator.metrics import StepRow, Summary
from simulator.report import COLOURS, Report, make_figure
from simulator.runs import Result

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_BINS = 60


def write_report(path: Path, results: Sequence[Result], train: dict[str, Json], verdict: Verdict) -> None:
    """Writes the page.

    Raises: UsageError when matplotlib is missing.
    """
    summaries = [result.summary for result in results]
    first = summaries[0]
    report = Report(
        "odb-ref demo",
        "Online dynamic batching on real input: simulated at two sizes beside fixed batches, trained for real on two "
        "processes with uneven shards, and every trace checked against the properties of the specification.",
    )
    report.add_heading("Simulation")
    report.add_text(
        f"Lengths of {first.lengths}, {first.samples_total // first.ranks} samples a rank, budget {first.token_budget} "
        f"padded tokens, window {first.window} samples. Efficiency is real tokens over ranks times critical tokens; "
        "excess is how far the critical tokens lie above the real tokens of the fullest rank, and 0 is the limit."
    )
    report.add_table(
        ["policy", "ranks", "steps", "efficiency", "excess", "padding ratio", "idle steps", "simulated time"],
        [
            [
                item.policy,
                str(item.ranks),
                f"{item.steps:,}",
                f"{item.efficiency:.3f}",
                f"{item.excess:.3f}",
                f"{item.padding_ratio:.3f}",
                f"{item.idle_steps:,}",
                f"{item.sim_time_s:,.0f} s",
            ]
            for item in summaries
        ],
    )
    report.add_figure(_plot_policies(summaries), "Efficiency (higher is better) and excess (lower is better).")
    largest = max(item.ranks for item in summaries)
    chosen = [result for result in results if result.summary.ranks == largest]
    report.add_figure(
        _plot_steps(chosen),
        f"Share of the rank-time of each step that real tokens fill, over the epoch at {largest} ranks "
        f"(mean of {_BINS} stretches). What is missing is padding, and waiting for the slowest rank.",
    )
    report.add_heading("Training")
    report.add_text("Two processes, gloo, uneven shards of real text; the full figures are in summary.json.")
    _add_training(report, train)
    report.add_heading("Check")
    report.add_table(
        ["trace", "steps", "properties that hold", "not applicable", "violated"],
        [
            [
                ", ".join(Path(name).name for name in job.paths),
                f"{job.steps:,}",
                " ".join(item.property for item in job.properties if item.status is Status.HOLDS),
                " ".join(item.property for item in job.properties if item.status is Status.NOT_APPLICABLE),
                str(len(job.violations)),
            ]
            for job in verdict.jobs
        ],
    )
    report.write(path)


def _plot_policies(summaries: Sequence[Summary]) -> Figure:
    figure, axes = make_figure(columns=2)
    policies = list(dict.fromkeys(item.policy for item in summaries))
    sizes = sorted({item.ranks for item in summaries})
    width = 0.8 / len(policies)
    for axis, key in zip(axes, ("efficiency", "excess"), strict=True):
        for number, policy in enumerate(policies):
            values = [
                getattr(item, key)
                for size in sizes
                for item in summaries
                if (item.ranks, item.policy) == (size, policy)
            ]
            places = np.arange(len(sizes)) + (number - (len(policies) - 1) / 2) * width
            bars = axis.bar(places, values, width * 0.92, color=COLOURS[policy], label=policy)
            axis.bar_label(bars, fmt="%.2f", fontsize=8, padding=2)
        axis.set_xticks(range(len(sizes)), [f"{size} ranks" for size in sizes])
        axis.set_title(key, loc="left")
        axis.margins(y=0.15)
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=len(policies), frameon=False)
    return figure


def _plot_steps(results: Sequence[Result]) -> Figure:
    figure, (axis,) = make_figure()
    for result in results:
        policy = result.summary.policy
        progress, filled = _compute_fill(result.rows, result.summary.ranks)
        axis.plot(progress, filled, color=COLOURS[policy], label=policy, linewidth=1.8)
    axis.set_ylim(0, 1)
    axis.set_xlim(0, 1)
    axis.set_xlabel("share of the epoch's steps")
    axis.set_ylabel("filled share")
    axis.legend(frameon=False, loc="lower left", ncols=3)
    return figure


def _compute_fill(rows: Sequence[StepRow], ranks: int) -> tuple[list[float], list[float]]:
    stretches = np.array_split(np.arange(len(rows)), min(_BINS, len(rows)))
    filled = [
        sum(rows[i].real_tokens for i in stretch) / (ranks * sum(rows[i].critical_tokens for i in stretch))
        for stretch in stretches
    ]
    return [float(stretch.mean() + 0.5) / len(rows) for stretch in stretches], filled


def _add_training(report: Report, train: dict[str, Json]) -> None:
    rows = [[key, f"{value:,.4g}" if isinstance(value, float) else str(value)] for key, value in train.items()]
    report.add_table(["figure", "value"], rows)
