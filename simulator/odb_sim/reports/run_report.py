"""The page of `odb-ref simulate`: how long the epoch takes, how full its steps are beside fixed batches, and its fault."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

import numpy as np

from odb_sim.engine.cautions import summarize_cautions
from odb_sim.engine.fill import Fill, FillMap, choose_ranks
from odb_sim.engine.metrics import StepRow, Summary, describe_update
from odb_sim.engine.timeline import TRACKS, Span, Timeline, choose_fault_begin
from odb_sim.inputs.conditions import Fault, FaultKind
from odb_sim.reports.charts import LineChart, Mark, Series, SpanChart, Struck
from odb_sim.reports.document import PageSource
from odb_sim.reports.page import Page
from odb_sim.studies.bands import Band
from odb_sim.studies.comparison import REFERENCE
from odb_sim.studies.fitted import fit_batches
from odb_sim.studies.runs import Driver, Result, Run, describe_budget, describe_window, run

SHOWN_RANKS: Final = 4
"""The largest number of ranks with timelines."""
LARGEST_TIMED: Final = 200_000
"""A larger epoch has no timelines unless it has faults, because they need a simulation of every rank's machine."""
_SHOWN_STEPS: Final = 14
_STEPS_AFTER: Final = 6
_STRETCHES: Final = 120
_LONG: Final = 3
"""A wait after a fault is shortened if it exceeds this many times the length of what is usually shown."""
_LEAST_S: Final = 0.1
_STRUCK: Final = {
    FaultKind.READ: ("fails to read a sample", "reader"),
    FaultKind.COLLATE: ("fails to collate", "collator"),
    FaultKind.STOP: ("leaves its loop", "trainer"),
    FaultKind.KILL: ("dies", "trainer"),
}
"""The description of each fault, and the track that shows it."""
_KINDS: Final = (
    ("compute", "compute"),
    ("wait for ranks", "ranks"),
    ("wait for data", "data"),
    ("collective", "collective"),
    ("idle", "idle"),
    ("exchange", "exchange"),
    ("collate", "collator"),
    ("fill", "reader"),
)
_KEY_FIGURES: Final = {
    "steps": "",
    "updates": "",
    "samples_per_update": "samples",
    "tokens_per_update": "tokens",
    "rounds": "",
    "samples_emitted": "samples",
    "idle_steps": "batches",
    "padding_ratio": "%",
    "efficiency": "%",
    "excess": "%",
    "length_autocorrelation": "",
    "displacement_samples": "places",
    "compute_share": "%",
    "data_wait_share": "%",
    "trainer_wait_share": "%",
    "collective_share": "%",
    "ending_share": "%",
    "exchange_s": "s",
    "sim_time_s": "s",
    "samples_per_s": "samples/s",
    "tokens_per_s": "tokens/s",
    "outcome": "",
}
"""The figures of the table, and their units."""


def draw_run(what: Run, label: str) -> FillMap:
    """Simulates a run, and returns what each rank trains on in each step."""
    fill = Fill(what.workload.ranks)
    run(what, fill=fill)
    return fill.build(label, what.budget_tokens, is_lowered=what.budget_schedule is not None)


def draw_fixed(what: Run) -> FillMap:
    """Returns the map of fixed batches on the same samples, in the same memory and at the same global batch."""
    steady = replace(what.conditions, faults=())
    fixed = replace(
        what,
        policy=REFERENCE,
        rule=None,
        limits=(),
        starts=(),
        full_reads=(),
        budget_schedule=None,
        conditions=steady,
        driver=Driver.AUTO,
    )
    fitted = fit_batches(fixed)
    fill = Fill(what.workload.ranks)
    size = run(fitted, fill=fill).summary.batch_size
    return fill.build(f"fixed batches of {size:,}", what.budget_tokens)


def make_timeline(what: Run) -> Timeline | None:
    """Returns the collector of the timelines on a page: those of ranks with a fault and of a few others. It is None if the
    epoch is too large.
    """
    if what.workload.samples_total > LARGEST_TIMED and not what.conditions.faults:
        return None
    return Timeline(_choose_ranks(what))


def _choose_ranks(what: Run) -> tuple[int, ...]:
    return choose_ranks(what.workload.ranks, SHOWN_RANKS, {fault.rank for fault in what.conditions.faults})


def write_run_report(
    path: Path,
    what: Run,
    result: Result,
    *,
    fill: Fill,
    timeline: Timeline | None,
    source: PageSource,
    band: Band | None = None,
) -> None:
    """Writes the page of a run observed by ``fill`` and ``timeline``."""
    summary, rows, fault = result.summary, result.rows, _find_fault(what, result.summary)
    depth = "" if summary.depth is None else f", depth {summary.depth}"
    page = Page(
        f"odb-ref simulate: {summary.policy} on {summary.lengths}, {summary.ranks:,} ranks",
        _make_headline(fault, summary),
        band="" if band is None else describe_band(summary, band),
        lead=f"{summary.samples_total:,} samples in {summary.shards} shards, {summary.mode} mode, "
        f"{describe_budget(summary)} {summary.layout} tokens{describe_window(summary)}{depth}; an update holds "
        f"{describe_update(summary)}. Times are simulated, by the cost model.",
        cautions=summarize_cautions(result.cautions),
    )
    page.add_tiles(
        [
            (f"{summary.tokens_per_s:,.0f}", "tokens/s", "over all ranks", "tokens_per_s"),
            (*split_percent(summary.efficiency), "efficiency: what is neither padding nor waiting", "efficiency"),
            (*split_percent(summary.padding_ratio), "padding", "padding_ratio"),
            (*split_percent(summary.trainer_wait_share), "of the time: waiting for ranks", "trainer_wait_share"),
            (*split_percent(summary.data_wait_share), "of the time: waiting for data", "data_wait_share"),
            (f"{summary.idle_steps:,}", "", "idle batches", "idle_steps"),
        ]
    )
    spans = [] if timeline is None else timeline.list_spans(_choose_ranks(what))
    if summary.fault_s is not None:
        page.add_heading("The fault")
        page.add_text(_describe_fault(summary))
        page.add_chart(_draw_fault(fault, summary, rows, spans), "The steps before it and what comes after.")
    ours = fill.build(summary.policy, summary.token_budget, is_lowered=summary.budget_schedule is not None)
    struck = None if summary.outcome_rank is None else Struck(rank=summary.outcome_rank, text=summary.outcome_cause)
    beside = [] if summary.policy == REFERENCE else [draw_fixed(what)]
    page.add_maps([(summary.lengths, [ours, *beside])], struck)
    if rows:
        page.add_heading("Where the time goes")
        page.add_chart(
            _draw_shares(rows),
            "Share of the ranks' time, over the epoch. Waiting for ranks is what unequal batches cost; waiting for data is "
            "the loader's.",
        )
        if spans and summary.fault_s is None:
            last = min(_SHOWN_STEPS, len(rows)) - 1
            page.add_chart(
                _draw_spans(spans, 0.0, rows[last].end_s),
                f"The first {last + 1} steps, on {len({span[0] for span in spans})} ranks. What readers, collators and the "
                "exchange do costs nothing unless a trainer waits for data.",
            )
    figures = summary.to_json()
    page.add_heading("Figures")
    page.add_table(
        ["figure", "value", "unit"], [[key, *_show(figures[key], unit)] for key, unit in _KEY_FIGURES.items()]
    )
    page.write(path, source)


def _find_fault(what: Run, summary: Summary) -> Fault | None:
    """Returns the fault that ended the epoch, or None."""
    struck = (fault for fault in what.conditions.faults if fault.rank == summary.outcome_rank)
    return None if summary.fault_s is None else next(struck, None)


def _make_headline(fault: Fault | None, summary: Summary) -> str:
    if fault is not None:
        return (
            f"**Rank {fault.rank} {_STRUCK[fault.kind][0]}** {describe_seconds(summary.fault_s or 0.0)} into the epoch, which "
            f"ends {summary.outcome}: {summary.samples_emitted:,} of {summary.samples_total:,} samples are trained on"
        )
    return (
        f"{summary.samples_emitted:,} samples on {summary.ranks:,} ranks take **{describe_seconds(summary.sim_time_s)}**, at "
        f"an efficiency of {summary.efficiency:.0%}"
    )


def describe_band(summary: Summary, band: Band) -> str:
    """Returns how certain the time of a run is, and which costs make it uncertain."""
    seconds = summary.sim_time_s
    return (
        f"Nine times of ten {describe_range(seconds * band.low, seconds * band.high)}, "
        f"{summary.tokens_per_s / band.high:,.0f} to {summary.tokens_per_s / band.low:,.0f} tokens/s; {band.explain()}"
    )


def split_percent(share: float) -> tuple[str, str]:
    """Returns the number and the unit with which a tile shows a share."""
    return f"{100 * share:.1f}", "%"


def describe_seconds(seconds: float) -> str:
    """Returns a time in the largest unit of which it has at least two."""
    for unit, size in (("days", 86_400), ("hours", 3_600), ("minutes", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:,.1f} {unit}"
    return f"{seconds:,.3g} seconds"


def describe_range(low_s: float, high_s: float) -> str:
    """Returns two times, with a single unit if they share one."""
    low, high = describe_seconds(low_s), describe_seconds(high_s)
    unit = high.partition(" ")[2]
    return f"{low.removesuffix(' ' + unit)} to {high}"


def _describe_fault(summary: Summary) -> str:
    """Returns which rank the fault strikes, when and why, and what follows from it."""
    who = "No rank" if summary.outcome_rank is None else f"Rank {summary.outcome_rank}"
    return (
        f"{who}, {summary.fault_s or 0.0:,.3f} s into the epoch, after {summary.steps:,} steps: "
        f"{summary.outcome_cause or 'no effect'}. The epoch ends {summary.outcome}: {summary.samples_emitted:,} of "
        f"{summary.samples_total:,} samples are trained on, and the last rank has ended {summary.abort_s or 0.0:,.3f} s later."
    )


def _draw_fault(fault: Fault | None, summary: Summary, rows: Sequence[StepRow], spans: Sequence[Span]) -> SpanChart:
    fault_s, rank = summary.fault_s or 0.0, summary.outcome_rank
    begin_s = choose_fault_begin(rows, fault_s)
    ended_s = fault_s + (summary.abort_s or 0.0)
    shown = rows[: sum(row.start_s <= fault_s for row in rows) + _STEPS_AFTER]
    usual_s = max(_LEAST_S, fault_s - begin_s, *[row.end_s - begin_s for row in shown[-1:]])
    end_s = max(begin_s + usual_s, ended_s) + 0.04 * usual_s
    # Little happens between the death of a rank and the moment when the others notice it.
    is_long = end_s - begin_s > (1 + _LONG) * usual_s
    gap = (begin_s + 1.15 * usual_s, ended_s - 0.05 * usual_s) if is_long else None
    chart = _draw_spans(spans, begin_s, end_s, gap)
    lane = f"rank {rank} {'trainer' if fault is None else _STRUCK[fault.kind][1]}"
    mark = Mark(
        at_s=fault_s,
        lane=chart.lanes.index(lane) if lane in chart.lanes else 0,
        label=f"rank {rank}",
        text=f"{fault_s:,.3f} s: {summary.outcome_cause or 'a fault'}",
    )
    return replace(chart, mark=mark)


def _list_lanes(spans: Sequence[Span]) -> list[tuple[int, str]]:
    found = {(rank, track) for rank, track, *_ in spans}
    return [(rank, track) for rank in sorted({rank for rank, _ in found}) for track in TRACKS if (rank, track) in found]


def _draw_spans(
    spans: Sequence[Span], begin_s: float, end_s: float, gap_s: tuple[float, float] | None = None
) -> SpanChart:
    lanes = _list_lanes([span for span in spans if span[4] > begin_s and span[3] < end_s])
    shown = [
        (lanes.index((rank, track)), name, round(max(begin, begin_s), 6), round(min(end, end_s), 6))
        for rank, track, name, begin, end in spans
        if end > begin_s and begin < end_s
    ]
    used = {name for _, name, _, _ in shown}
    return SpanChart(
        lanes=[f"rank {rank} {track}" for rank, track in lanes],
        kinds=[kind for kind in _KINDS if kind[0] in used],
        spans=shown,
        begin_s=begin_s,
        end_s=end_s,
        gap_s=gap_s,
    )


def _draw_shares(rows: Sequence[StepRow]) -> LineChart:
    firsts = [int(part[0]) for part in np.array_split(np.arange(len(rows)), min(_STRETCHES, len(rows)))]
    spent = np.array([(row.compute_s, row.sync_wait_s, row.data_wait_s, row.collective_s) for row in rows])
    sums = np.add.reduceat(spent, firsts)
    wholes = sums.sum(axis=1, keepdims=True)
    shares = sums / np.where(wholes, wholes, 1.0)
    names = {"compute": "compute", "wait for ranks": "ranks", "wait for data": "data", "collective": "collective"}
    return LineChart(
        x_name="step",
        x=firsts,
        series=[
            Series(name=name, colour=colour, values=shares[:, place].round(4).tolist())
            for place, (name, colour) in enumerate(names.items())
        ],
        is_percent=True,
        is_stack=True,
    )


def _show(value: str | int | float | None, unit: str) -> tuple[str, str]:
    if isinstance(value, float):
        return (f"{100 * value:,.1f}" if unit == "%" else f"{value:,.3f}", unit)
    return f"{value:,}" if isinstance(value, int) else str(value), unit
