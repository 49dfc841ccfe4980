"""The demo's report: what was simulated, trained and checked, as tables and plots."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from odb_ref.core.events import SamplesRead
from odb_ref.trace.check import Status, Verdict
from odb_ref.trace.format import JsonObject, decode_event
from odb_ref.trace.reading import read_trace
from odb_sim.engine.metrics import StepRow, Summary
from odb_sim.reports.page import COLOURS, HtmlReport, make_figure
from odb_sim.studies.runs import Result

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_BINS = 60
_RANK_COLOURS = ("#1f6f8b", "#c27c0e", "#5b8c5a", "#8d5a97")
TRAINING_FIGURES = {
    "steps": ",",
    "samples": ",",
    "idle_steps": ",",
    "padding_ratio": ".3f",
    "efficiency": ".3f",
    "excess": ".3f",
    "data_wait_share": ".3f",
    "train_s": ".1f",
    "cpu_s": ".1f",
}


def write_report(
    path: Path, results: Sequence[Result], train: JsonObject, train_traces: Sequence[Path], verdict: Verdict
) -> None:
    """Writes the page.

    Raises: UsageError when matplotlib is missing.
    """
    summaries = [result.summary for result in results]
    first = summaries[0]
    report = HtmlReport(
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
    report.add_text(
        f"{train.get('ranks')} processes over gloo train a small model on real text with uneven shards; budget "
        f"{train.get('token_budget')} padded tokens, window {train.get('window')} samples. Fixed batches hold "
        f"{train.get('fixed_batch_size')} samples, the most whose padded size fits the same budget."
    )
    _add_training(report, train, train_traces)
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


def _add_training(report: HtmlReport, train: JsonObject, traces: Sequence[Path]) -> None:
    report.add_table(["", "odb", "fixed batches"], list_training_rows(train))
    report.add_figure(
        _plot_training(traces),
        "What each rank trained on, step by step. The shards are uneven: the rank that has run dry goes on taking every "
        "step, with weight 0, until the other is done.",
    )


def list_training_rows(train: JsonObject) -> list[list[str]]:
    """Returns the figures of the training run beside those of fixed batches, for a table."""
    rows = []
    for key, style in TRAINING_FIGURES.items():
        values = [train.get(key), train.get(f"fixed_{key}")]
        rows.append([key, *(format(value, style) if isinstance(value, int | float) else "-" for value in values)])
    return rows


def _plot_training(traces: Sequence[Path]) -> Figure:
    figure, (axis,) = make_figure()
    width = 0.9 / len(traces)
    for rank, path in enumerate(traces):
        tokens = _read_padded_tokens(path)
        places = np.arange(len(tokens)) + (rank + 0.5) * width
        axis.bar(places, tokens, width, color=_RANK_COLOURS[rank % len(_RANK_COLOURS)], label=f"rank {rank}")
    axis.set_xlabel("step")
    axis.set_ylabel("padded tokens")
    axis.margins(x=0.01)
    figure.legend(*axis.get_legend_handles_labels(), loc="outside lower center", ncols=len(traces), frameon=False)
    return figure


def _read_padded_tokens(path: Path) -> list[int]:
    """Returns the padded tokens of each step of one rank, from its trace; 0 where it idles."""
    lengths: list[int] = []
    steps: list[int] = []
    for record in read_trace(path)[1]:
        if record.event is not None:
            match decode_event(record.event):
                case SamplesRead(samples):
                    lengths += [sample.length for sample in samples]
        for effect in record.effects:
            match effect:
                case {"kind": "collate", "steps": list(plan)}:
                    groups = [step["positions"] for step in plan]
                    steps += [
                        len(group) * max((lengths[position] for position in group), default=0) for group in groups
                    ]
    return steps
