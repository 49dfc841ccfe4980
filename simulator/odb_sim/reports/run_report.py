"""Pages of `odb-ref simulate` and `odb-ref compare`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np

from odb_sim.engine.cautions import summarize_cautions
from odb_sim.engine.metrics import StepRow, Summary
from odb_sim.engine.timeline import TRACKS, Span, Timeline
from odb_sim.inputs.conditions import Fault
from odb_sim.reports.page import COLOURS, HtmlReport, make_figure
from odb_sim.studies.comparison import Compared
from odb_sim.studies.runs import Result, describe_window

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from odb_sim.inputs.lengths import Integers

_SHOWN_RANKS: Final = 4
_SHOWN_STEPS: Final = 16
_STRETCHES: Final = 120
SPAN_COLOURS: Final = {
    "fill": "#8fb8de",
    "collate": "#b39ddb",
    "exchange": "#5b8c5a",
    "wait for data": "#d1495b",
    "compute": "#1f6f8b",
    "idle": "#c9d1d9",
    "wait for ranks": "#efc7a4",
    "collective": "#e0b040",
}
"""What a span is drawn in, in the order of the legend."""
FAULT_COLOUR: Final = "#b00020"
_STEPS_BEFORE: Final = 8
_AFTER: Final = 0.5
"""So much of the time before a fault is shown after it, and at least the next."""
_LEAST_AFTER_S: Final = 0.5
_MARKERS: Final = {"odb": "D", "paper": "o", "peer": "o", "standard": "s", "hfg": "s", "balanced": "s"}
"""Circles form groups online, squares have fixed batches; the others, triangles, know all lengths."""
_KEY_FIGURES: Final = (
    "steps",
    "rounds",
    "samples_emitted",
    "idle_steps",
    "padding_ratio",
    "efficiency",
    "excess",
    "length_autocorrelation",
    "displacement_samples",
    "compute_share",
    "data_wait_share",
    "trainer_wait_share",
    "collective_share",
    "exchange_s",
    "sim_time_s",
    "samples_per_s",
    "tokens_per_s",
    "outcome",
)


def choose_ranks(ranks: int, faults: Sequence[Fault] = ()) -> frozenset[int]:
    """Returns the ranks whose timelines the page of a run shows: those with a fault, the first, the last, and two between."""
    chosen = {rank * (ranks - 1) // (_SHOWN_RANKS - 1) for rank in range(_SHOWN_RANKS)}
    return frozenset(chosen | {fault.rank for fault in faults})


def write_run_report(path: Path, result: Result, timeline: Timeline, faults: Sequence[Fault] = ()) -> None:
    """One page of a run: its figures, how they went over the epoch, the timelines of some ranks, and its fault.

    Raises: UsageError when matplotlib is missing.
    """
    summary, rows = result.summary, result.rows
    report = HtmlReport(
        f"{summary.policy} on {summary.lengths}, {summary.ranks:,} ranks",
        f"One simulated epoch: {summary.samples_total:,} samples in {summary.shards} shards, {summary.mode} mode, budget "
        f"{summary.token_budget:,} padded tokens"
        + (f" (fixed batches of {summary.batch_size:,})" if summary.batch_size is not None else "")
        + describe_window(summary)
        + f", depth {summary.depth}. Times are simulated; GLOSSARY.md of the simulator has the "
        "formula of every figure.",
        summarize_cautions(result.cautions),
    )
    figures = summary.to_json()
    report.add_table(["figure", "value"], [[key, _show(figures[key])] for key in _KEY_FIGURES])
    spans = timeline.list_spans(choose_ranks(summary.ranks, faults))
    if summary.fault_s is not None:
        report.add_heading("The fault")
        report.add_text(_describe_fault(summary))
        begin_s = rows[-_STEPS_BEFORE:][0].start_s if rows else 0.0
        end_s = summary.fault_s + max(_AFTER * (summary.fault_s - begin_s), _LEAST_AFTER_S)
        report.add_figure(
            _plot_timeline(
                _cut(spans, begin_s, end_s), (begin_s, end_s), fault=(summary.fault_s, summary.outcome_rank)
            ),
            "The last steps before it, and what comes after: the line is the moment at which it acts.",
        )
    if rows:
        report.add_heading("Over the epoch")
        report.add_figure(_plot_quality(rows, summary), _describe_stretches(rows) + " Efficiency 1 is the limit.")
        report.add_figure(
            _plot_waits(rows, summary),
            "Left: what the ranks' trainers do with their time. Waiting for ranks is the straggler's cost; waiting for data is "
            "the loader's. Right: steps in a rank's queue when it takes one, that one included.",
        )
        report.add_heading("Timelines")
        middle_s = rows[len(rows) // 2].start_s
        for title, begin_s in (("The start", 0.0), ("The middle", middle_s)):
            first = next(i for i, row in enumerate(rows) if row.end_s > begin_s)
            end_s = rows[min(first + _SHOWN_STEPS, len(rows)) - 1].end_s
            report.add_figure(
                _plot_timeline(_cut(spans, begin_s, end_s), (begin_s, end_s)),
                f"{title}: {min(_SHOWN_STEPS, len(rows) - first)} steps of a few ranks. What readers, collators and the "
                "exchange do costs nothing unless a trainer waits for data.",
            )
    report.write(path)


def _describe_fault(summary: Summary) -> str:
    """Returns which rank it befalls, when and why, and what comes of it."""
    who = "No rank" if summary.outcome_rank is None else f"Rank {summary.outcome_rank}"
    return (
        f"{who}, {summary.fault_s or 0.0:,.3f} s into the epoch, after {summary.steps:,} steps: "
        f"{summary.outcome_cause or 'no effect'}. The epoch ends {summary.outcome}: {summary.samples_emitted:,} of "
        f"{summary.samples_total:,} samples are trained on, and the last of the other ranks has ended "
        f"{summary.abort_s or 0.0:,.3f} s later."
    )


def _cut(spans: Sequence[Span], begin_s: float, end_s: float) -> list[Span]:
    return [span for span in spans if span[4] > begin_s and span[3] < end_s]


def _show(value: str | int | float | None) -> str:
    if isinstance(value, float):
        return f"{value:,.3f}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def _describe_stretches(rows: Sequence[StepRow]) -> str:
    stretch = -(-len(rows) // _STRETCHES)
    return "Each point is a step." if stretch == 1 else f"Each point is the mean of {stretch} steps or so."


def _split(rows: Sequence[StepRow]) -> list[Integers]:
    return np.array_split(np.arange(len(rows)), min(_STRETCHES, len(rows)))


def _plot_quality(rows: Sequence[StepRow], summary: Summary) -> Figure:
    stretches = _split(rows)
    places = [float(stretch.mean()) for stretch in stretches]

    def total(stretch: Integers, get: Callable[[StepRow], float]) -> float:
        return sum(get(rows[i]) for i in stretch.tolist())

    padded = [total(stretch, lambda row: row.padded_tokens) for stretch in stretches]
    real = [total(stretch, lambda row: row.real_tokens) for stretch in stretches]
    critical = [total(stretch, lambda row: row.critical_tokens) for stretch in stretches]
    figure, (left, right) = make_figure(11.0, 3.0, columns=2)
    left.plot(places, [1 - a / b if b else 0.0 for a, b in zip(real, padded, strict=True)], color=COLOURS["paper"])
    filled = [a / (summary.ranks * b) if b else 0.0 for a, b in zip(real, critical, strict=True)]
    right.plot(places, filled, color=COLOURS["odb"])
    for axis, title in ((left, "padding ratio"), (right, "efficiency")):
        axis.set_title(title, loc="left", fontsize=11)
        axis.set_xlabel("step")
    left.set_ylim(bottom=0)
    right.set_ylim(0, 1.02)
    return figure


def _plot_waits(rows: Sequence[StepRow], summary: Summary) -> Figure:
    stretches = _split(rows)
    places = [float(stretch.mean()) for stretch in stretches]
    seconds = [
        [sum(getattr(rows[i], name) for i in stretch.tolist()) for stretch in stretches]
        for name in ("compute_s", "sync_wait_s", "collective_s", "data_wait_s")
    ]
    wholes = [sum(parts) or 1.0 for parts in zip(*seconds, strict=True)]
    shares = [[part / whole for part, whole in zip(parts, wholes, strict=True)] for parts in seconds]
    figure, (left, right) = make_figure(11.0, 3.2, columns=2)
    names = ("compute", "wait for ranks", "collective", "wait for data")
    left.stackplot(places, *shares, labels=names, colors=[SPAN_COLOURS[name] for name in names])
    left.set_ylim(0, 1)
    left.set_title("share of the ranks' time", loc="left", fontsize=11)
    left.legend(loc="upper center", bbox_to_anchor=(0.5, -0.2), ncols=4, frameon=False, fontsize=9)
    queued = [sum(rows[i].queued_steps for i in part.tolist()) / (summary.ranks * len(part)) for part in stretches]
    right.plot(places, queued, color=COLOURS["odb"])
    right.set_ylim(0, max(summary.depth, *queued) * 1.05)
    right.set_title("steps in the queue, mean over ranks", loc="left", fontsize=11)
    for axis in (left, right):
        axis.set_xlabel("step")
    return figure


def _plot_timeline(
    spans: Sequence[Span], limits_s: tuple[float, float], *, fault: tuple[float, int | None] | None = None
) -> Figure:
    ranks = sorted({span[0] for span in spans})
    tracks = [track for track in reversed(TRACKS) if any(span[1] == track for span in spans)]
    figure, (axis,) = make_figure(11.0, 0.5 + 0.22 * len(ranks) * (len(tracks) + 1))
    lanes: dict[tuple[int, str], float] = {}
    for place, rank in enumerate(ranks):
        for number, track in enumerate(tracks):
            lanes[rank, track] = place * (len(tracks) + 0.8) + number
    for name, colour in SPAN_COLOURS.items():
        own = [span for span in spans if span[2] == name]
        if own:
            axis.barh(
                [lanes[rank, track] for rank, track, *_ in own],
                [span[4] - span[3] for span in own],
                left=[span[3] for span in own],
                height=0.8,
                color=colour,
                # An edge keeps short spans visible; the trainer's have no gap between them to tell them apart.
                edgecolor="white" if own[0][1] == "trainer" else colour,
                linewidth=0.4 if own[0][1] == "trainer" else 1.0,
                label=name,
            )
    if fault is not None:
        moment_s, struck = fault
        axis.axvline(moment_s, color=FAULT_COLOUR, linewidth=1.2)
        if struck in ranks and struck is not None:
            heights = [lanes[struck, tracks[-1]]]
            axis.plot([moment_s], heights, "X", markersize=9, color=FAULT_COLOUR, label=f"rank {struck}: the fault")
    axis.set_yticks(list(lanes.values()), [_label_lane(rank, track, tracks) for rank, track in lanes], fontsize=8)
    axis.tick_params(axis="y", length=0)
    axis.invert_yaxis()
    axis.set_xlim(*limits_s)
    axis.set_xlabel("simulated seconds")
    axis.grid(False)
    figure.legend(*axis.get_legend_handles_labels(), loc="outside lower center", ncols=8, frameon=False, fontsize=9)
    return figure


def _label_lane(rank: int, track: str, tracks: Sequence[str]) -> str:
    return f"rank {rank}   {track}" if track == tracks[0] else track


Table = tuple[str, list[str], list[list[str]]]


def write_compare_report(path: Path, terms: str, compared: Sequence[Compared], tables: Sequence[Table]) -> None:
    """One page of a comparison: speed-up and efficiency of every policy on every trace, and the tables.

    Raises: UsageError when matplotlib is missing.
    """
    reference = compared[0].reference.policy
    cautions = summarize_cautions(caution for item in compared for caution in item.cautions)
    report = HtmlReport("Policies compared", terms, cautions)
    figure, (left, right) = make_figure(11.0, 1.6 + 0.55 * len(compared), columns=2)
    _plot_dots(left, compared, lambda item, one: item.compute_speedup(one))
    left.set_title(f"speed-up over {reference}", loc="left", fontsize=11)
    _plot_dots(right, compared, lambda _, one: one.efficiency)
    right.set_title("efficiency", loc="left", fontsize=11)
    right.set_yticklabels([])
    right.set_xlim(0, 1.0)
    handles, labels = left.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False, fontsize=9)
    report.add_figure(
        figure,
        "Further right is better. Circles and ours form batches online, squares have fixed batches, triangles know all lengths "
        "before the run; packing also needs a model that keeps the samples of a row apart.",
    )
    for title, header, rows in tables:
        if len(tables) > 1:
            report.add_heading(title)
        else:
            report.add_heading("Figures")
            report.add_text(title)
        report.add_table(header, rows)
    report.write(path)


def _plot_dots(axis: Axes, compared: Sequence[Compared], get: Callable[[Compared, Summary], float]) -> None:
    names = [item.what.workload.name for item in compared]
    policies = [summary.policy for summary in compared[0].summaries]
    for number, policy in enumerate(policies):
        # Each a little lower than the one before, so that equal values stay apart.
        shift = 0.6 * (number / max(1, len(policies) - 1) - 0.5)
        axis.plot(
            [get(item, item.summaries[number]) for item in compared],
            [place + shift for place in range(len(names))],
            _MARKERS.get(policy, "^"),
            markersize=8 if policy == "odb" else 6,
            color=COLOURS.get(policy, f"C{number}"),
            label=policy,
        )
    for place in range(1, len(names)):
        axis.axhline(place - 0.5, color="#e6ebf0", linewidth=0.8)
    axis.set_yticks(range(len(names)), names)
    axis.set_ylim(len(names) - 0.5, -0.5)
    axis.tick_params(axis="y", length=0)
    axis.grid(False, axis="y")
    axis.grid(axis="x", color="#e6ebf0")
