"""Pages of recorded runs, for `odb-ref replay` and for `odb-ref demo`, which trains."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import numpy as np

from odb_ref.trace.check import Status, Verdict
from odb_ref.trace.format import Json
from odb_sim.engine.batches import count_batches
from odb_sim.engine.fill import Fill, FillMap
from odb_sim.engine.metrics import Summary
from odb_sim.recorded.replay import Replay, build_run
from odb_sim.recorded.runs import RecordedRun, load_runs
from odb_sim.reports.charts import Bars, LineChart, Series, choose_colours
from odb_sim.reports.document import PageSource
from odb_sim.reports.page import Page
from odb_sim.reports.run_report import draw_fixed

TRAINING_FIGURES: Final = {
    "updates": ",",
    "held_out_loss": ".3f",
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
Curves = Mapping[str, Sequence[tuple[int, float, float]]]
"""For each way to train: updates done, seconds, and the loss over held-out texts at that time."""
TRAINED: Final = {"odb": "", "fixed batches": "fixed_", "free mode": "free_"}
"""The ways to train, and the prefixes of their figures."""
_MOST_STEPS: Final = 400
_MOMENTS: Final = 60
REPLAYED: Final = ["run", "driver", "outcome", "ranks", "rounds", "groups", "steps measured", "predicted", "decisions"]
TIMES: Final = ["run", "steps", "measured s", "predicted s", "from", "to", "error", "median error of a step"]
SIMULATED: Final = ["simulated", "steps", "samples an update", "efficiency", "excess", "padding", "idle steps", "speed"]


def draw_recorded(recorded: RecordedRun, label: str) -> FillMap:
    """Returns what each rank trained on in each step, according to its trace, which does not record for whom ranks waited."""
    fill, first = Fill(len(recorded.ranks)), recorded.ranks[0].start
    for number in range(recorded.rounds):
        steps = max(len(record.rounds[number]) for record in recorded.ranks)
        for record in (recorded.ranks[rank] for rank in fill.ranks):
            groups = [tuple(record.samples[at] for at in step.positions) for step in record.rounds[number]]
            groups += [()] * (steps - len(groups))  # a record may lack a step of the others
            held = count_batches(groups, recorded.config.layout)
            fill.add(record.rank, held.samples[None], held.real[None], held.padded[None], held.lengths)
        fill.end(first.round + number, np.zeros((len(recorded.ranks), steps)), np.zeros(steps, dtype=np.bool_))
    is_lowered = recorded.budget_schedule is not None
    return fill.build(label, recorded.config.budget_tokens, is_lowered=is_lowered, first_step=first.planned_steps)


def write_replay_report(
    path: Path, runs: Sequence[RecordedRun], replays: Sequence[Replay], source: PageSource, *, is_priced: bool
) -> None:
    """Writes the page of a replay: whether every decision is equal, what the ranks trained on, and, if a cost model was given
    (``is_priced``), measured times beside predictions.
    """
    decisions, differ = sum(item.decisions for item in replays), [item for item in replays if not item.is_equal]
    if differ:
        headline = f"**{len(differ)} of {len(replays)} runs** are decided otherwise than they were recorded"
    else:
        headline = f"All **{decisions:,} batches** are simulated as they were recorded"
    page = Page(
        f"odb-ref replay: {len(replays)} recorded run{'s' if replays[1:] else ''}",
        headline,
        lead="The simulator was given what the ranks read, and decided anew: every round's steps, every batch, every count.",
        cautions=[f"{item.name}: {item.difference}" for item in differ],
    )
    timed = [(item, item.timing) for item in replays if item.timing is not None and is_priced]
    page.add_maps([(item.name, _draw_pair(recorded)) for recorded, item in zip(runs, replays, strict=True)])
    if timed:
        page.add_heading("Times")
        page.add_table(TIMES, list_time_rows(replays))
        for item, timing in timed[:1]:
            page.add_chart(
                LineChart(
                    x_name="step",
                    x=list(range(len(timing.seconds[:_MOST_STEPS]))),
                    series=[
                        Series(
                            name=name,
                            colour=colour,
                            values=[round(pair[place], 6) for pair in timing.seconds[:_MOST_STEPS]],
                        )
                        for place, (name, colour) in enumerate((("measured", "standard"), ("predicted", "odb")))
                    ],
                    unit="s",
                    has_zero=True,
                ),
                f"{item.name}: seconds from one step taken to the next, on rank 0.",
            )
    page.add_heading("Runs")
    page.add_table(REPLAYED, list_replay_rows(replays))
    page.write(path, source)


def list_replay_rows(replays: Sequence[Replay]) -> list[list[str]]:
    """Returns a row for each run, under `REPLAYED`."""
    return [
        [
            *(item.name, item.driver, item.outcome),
            *(f"{value:,}" for value in (item.ranks, item.rounds, item.decisions)),
            *(f"{value:,}" for value in (item.measured_steps, item.predicted_steps)),
            "equal" if item.is_equal else "differ",
        ]
        for item in replays
    ]


def list_time_rows(replays: Sequence[Replay], parts: Sequence[str] = ()) -> list[list[str]]:
    """Returns a row for each run with times, under `TIMES`. If given, ``parts`` names the part that each run had in the cost
    model, as a last column.
    """
    rows = []
    for number, item in enumerate(replays):
        if (timing := item.timing) is None:
            continue
        seconds = (timing.measured_s, timing.predicted_s, timing.low_s, timing.high_s)
        errors = f"{timing.total_error:+.1%}", f"{timing.step_error:.1%}"
        row = [item.name, f"{timing.steps:,}", *(f"{value:,.3f}" for value in seconds), *errors]
        rows.append([*row, *parts[number : number + 1]])
    return rows


def list_simulated_rows(summaries: Sequence[Summary]) -> list[list[str]]:
    """Returns a row for each run of the demo, under `SIMULATED`. The last column is the time of fixed batches over its own."""
    fixed = {summary.ranks: summary.sim_time_s for summary in summaries if summary.policy == "standard"}
    return [
        [
            f"{summary.policy}, {summary.ranks} ranks",
            f"{summary.steps:,}",
            f"{summary.samples_per_update:,.0f}",
            *(f"{share:.3f}" for share in (summary.efficiency, summary.excess, summary.padding_ratio)),
            f"{summary.idle_steps:,}",
            f"{fixed[summary.ranks] / summary.sim_time_s:.2f}x",
        ]
        for summary in summaries
    ]


def _draw_pair(recorded: RecordedRun) -> list[FillMap]:
    maps = [draw_recorded(recorded, f"as recorded ({recorded.driver})")]
    # Fixed batches need all samples, so the trace must hold the whole epoch.
    is_whole = all(rank.is_ended for rank in recorded.ranks) and not recorded.starts and not recorded.full_reads
    return [*maps, draw_fixed(build_run(recorded))] if is_whole else maps


def write_demo_report(
    path: Path,
    *,
    drawn: Mapping[str, Sequence[FillMap]],
    summaries: Sequence[Summary],
    train: Mapping[str, Json],
    curves: Curves,
    train_traces: Sequence[Path],
    verdict: Verdict,
    source: PageSource,
) -> None:
    """Writes the demo's page: what was simulated, trained and checked."""
    ours, fixed = (
        next(item for item in summaries if item.ranks == summaries[0].ranks and item.policy == policy)
        for policy in ("odb", "standard")
    )
    held = sum(item.status is Status.HOLDS for job in verdict.jobs for item in job.properties)
    page = Page(
        "odb-ref demo",
        f"odb has an efficiency of **{ours.efficiency:.0%}** on {ours.ranks} ranks, fixed batches {fixed.efficiency:.0%}",
        band=f"Simulated at two sizes, then trained for real by {train.get('ranks')} processes; {held:,} properties hold of "
        "the traces" + (f", {len(verdict.violations)} are violated." if verdict.violations else ", none is violated."),
        lead=f"Lengths of {ours.lengths}, {ours.samples_total // ours.ranks:,} samples a rank, budget "
        f"{ours.token_budget:,} padded tokens, window {ours.window:,} samples.",
    )
    trained = load_runs(train_traces)[0]
    maps = [(name, list(maps)) for name, maps in drawn.items()]
    page.add_maps([*maps, ("trained, the same updates", [draw_recorded(trained, "trained for real")])])
    page.add_heading("Simulation")
    policies, sizes = list(dict.fromkeys(item.policy for item in summaries)), sorted({item.ranks for item in summaries})
    colours = choose_colours(policies)
    bars = [
        Series(
            name=policy, colour=colours[policy], values=[item.efficiency for item in summaries if item.policy == policy]
        )
        for policy in policies
    ]
    chart = Bars(names=[f"{size} ranks" for size in sizes], series=bars, is_percent=True)
    page.add_chart(chart, "Efficiency: 100 % is the limit.")
    page.add_table(SIMULATED, list_simulated_rows(summaries))
    page.add_heading("Training")
    page.add_text(
        f"{train.get('ranks')} processes over gloo train a small model on {train.get('texts')} real texts, three times, at "
        f"most {train.get('token_budget')} padded tokens in a batch. Fixed batches hold {train.get('fixed_batch_size')} texts; "
        f"odb has the same {train.get('update_samples')} texts in every optimizer update. The free mode has other updates, "
        f"of changing size: at this learning rate it is another training."
    )
    for drawn_curve, text in draw_curves(curves):
        page.add_chart(drawn_curve, text)
    page.add_table(["", *TRAINED], list_training_rows(train))
    page.add_heading("Check")
    page.add_table(
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
    page.write(path, source)


def draw_curves(curves: Curves) -> list[tuple[LineChart, str]]:
    """Returns the loss over held-out texts by updates and by seconds, each with a caption."""
    colours = {"fixed": ("fixed batches", "standard"), "odb": ("odb", "odb"), "free": ("free mode", "paper")}
    last_s = max(points[-1][1] for points in curves.values())
    texts = {
        "update": "Held-out loss by optimizer updates: odb lies on fixed batches, for it is the same training.",
        "s": "And by seconds: the clock is what differs.",
    }
    drawn = []
    for place, (name, text) in enumerate(texts.items()):
        marks = [round(last_s * i / _MOMENTS, 2) for i in range(_MOMENTS + 1)] if place else []
        x: list[float] = sorted(marks or {point[0] for points in curves.values() for point in points})
        series = [
            Series(
                name=colours[way][0],
                colour=colours[way][1],
                values=[None if at > points[-1][place] else _find_loss(points, at, place) for at in x],
            )
            for way, points in curves.items()
        ]
        drawn.append((LineChart(x_name=name, x=[f"{at:g}" for at in x], series=series), text))
    return drawn


def _find_loss(points: Sequence[tuple[int, float, float]], at: float, place: int) -> float:
    """Returns the last loss up to ``at``, which counts updates (``place`` 0) or seconds (1)."""
    return round(next(point[2] for point in reversed(points) if point[place] <= at), 4)


def list_training_rows(train: Mapping[str, Json]) -> list[list[str]]:
    """Returns the figures of the training runs side by side, for a table."""
    rows = []
    for key, style in TRAINING_FIGURES.items():
        values = [train.get(prefix + key) for prefix in TRAINED.values()]
        rows.append([key, *(format(value, style) if isinstance(value, int | float) else "-" for value in values)])
    return rows
