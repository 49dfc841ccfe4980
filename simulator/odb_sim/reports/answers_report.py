"""Pages of `odb-ref compare`, `sweep` and `tune`: the answer, the steps behind it, and sliders over the settings tried."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from odb_sim.engine.cautions import summarize_cautions
from odb_sim.engine.fill import FillMap
from odb_sim.engine.metrics import Summary, describe_update
from odb_sim.engine.updates import EVERY_STEP
from odb_sim.reports.charts import Bars, Dimension, PlottedMeasure, Series, Sliders, Tried, choose_colours
from odb_sim.reports.document import PageSource
from odb_sim.reports.page import Page
from odb_sim.reports.run_report import describe_seconds, draw_fixed, draw_run, split_percent
from odb_sim.reports.tables import SWEEP, TUNE_NOTE, build_row, describe_beside, list_tune_columns
from odb_sim.studies.cells import CellAnswer
from odb_sim.studies.comparison import REFERENCE, Compared
from odb_sim.studies.fitted import fit_batches
from odb_sim.studies.runs import Run
from odb_sim.studies.sweep import Study, describe_setting, find_fastest, has_worlds, list_sweep_cautions
from odb_sim.studies.tune import NAMES, Tuning

Table = tuple[str, list[str], list[list[str]]]

DIMENSIONS: Final = {"ranks": ("ranks", "--ranks"), **NAMES}
"""The name and the option of each setting, by the field of a point."""
_MEASURES: Final[dict[PlottedMeasure, Callable[[CellAnswer], float]]] = {
    PlottedMeasure(name="tokens/s", is_plotted=True): lambda answer: answer.rate,
    PlottedMeasure(name="efficiency", is_percent=True, is_plotted=True): lambda answer: answer.summary.efficiency,
    PlottedMeasure(name="padding", is_percent=True): lambda answer: answer.summary.padding_ratio,
    PlottedMeasure(name="excess", is_percent=True, is_plotted=True): lambda answer: answer.summary.excess,
    PlottedMeasure(name="first s", is_plotted=True): lambda answer: answer.first_step_s,
    PlottedMeasure(name="samples an update"): lambda answer: answer.summary.samples_per_update,
}


def write_compare_report(
    path: Path, terms: str, compared: Sequence[Compared], tables: Sequence[Table], source: PageSource
) -> None:
    """Writes the page of a comparison: the speed-up at one global batch, and how full the steps behind it are."""
    first = compared[0]
    reference, ours = first.reference, first.chosen
    cautions = summarize_cautions(caution for item in compared for caution in item.cautions)
    names = [item.what.workload.name for item in compared]
    title = f"odb-ref compare: {', '.join(names[:3])}{f' and {len(names) - 3} more' if names[3:] else ''}"
    page = Page(
        f"{title}, {first.what.workload.ranks:,} ranks",
        _make_compare_headline(compared),
        band=_describe_sure(compared),
        lead=terms,
        cautions=cautions,
    )
    if len(compared) == 1:
        page.add_tiles(_list_compare_tiles(first))
    maps = [
        (
            item.what.workload.name,
            _draw_pair(_choose_own(replace(item.what, policy=ours.policy)), ours.policy),
        )
        for item in compared
    ]
    page.add_maps(maps)
    page.add_heading("Speed-up")
    policies = [summary.policy for summary in first.summaries]
    colours = choose_colours(policies)
    if len(compared) == 1:
        bars = [
            Series(
                name="speed-up",
                colour="odb",
                values=[first.compute_speedup(one) for one in first.summaries],
                colours=[colours[policy] for policy in policies],
            )
        ]
        page.add_chart(Bars(names=policies, series=bars, digits=2), _describe_bars(reference))
    else:
        dots = [
            Series(
                name=one.policy,
                colour=colours[one.policy],
                values=[item.compute_speedup(item.summaries[number]) for item in compared],
            )
            for number, one in enumerate(first.summaries)
        ]
        page.add_chart(Bars(names=names, series=dots, is_dots=True, digits=2), _describe_bars(reference))
    for title, header, rows in tables:
        page.add_heading(title if len(tables) > 1 else "Figures")
        if len(tables) == 1:
            page.add_text(title)
        page.add_table(header, rows)
    page.write(path, source)


def _make_compare_headline(compared: Sequence[Compared]) -> str:
    first = compared[0]
    reference, ours = first.reference, first.chosen
    if ours is reference:
        rates = sorted(item.find_accumulated(item.chosen).samples_per_s for item in compared)
        said = " to ".join(f"{rate:,.1f}" for rate in dict.fromkeys((rates[0], rates[-1])))
        return f"{ours.policy} trains on **{said} samples a second**, at the global batch"
    ratios = [item.compute_speedup(item.chosen) for item in compared]
    said = f"{ratios[0]:.2f}" if len(ratios) == 1 else f"{min(ratios):.2f} to {max(ratios):.2f}"
    fixed = "fixed batches" if reference.policy == REFERENCE else reference.policy
    return f"{ours.policy} trains on **{said} times** the samples a second of {fixed}, at one global batch"


def _describe_sure(compared: Sequence[Compared]) -> str:
    """Returns the uncertainty of the headline, or an empty string if that of a trace is unknown."""
    found = [(item, band) for item in compared if (band := item.find_band(item.chosen)) is not None and band.shares]
    if len(found) < len(compared):
        return ""
    ratios = [(item.compute_speedup(item.chosen), band) for item, band in found]
    low, high = min(ratio * band.low for ratio, band in ratios), max(ratio * band.high for ratio, band in ratios)
    return f"Nine times of ten {low:.2f} to {high:.2f} times; {found[0][1].explain()}."


def _list_compare_tiles(item: Compared) -> list[tuple[str, str, str, str]]:
    tiles = []
    for one in dict.fromkeys((item.chosen, item.reference)):
        at_goal = item.find_accumulated(one)
        tiles += [
            (
                f"{at_goal.samples_per_s:,.1f}",
                "samples/s",
                f"{one.policy}: {describe_update(at_goal)} an update",
                "samples_per_s",
            ),
            (*split_percent(one.padding_ratio), f"{one.policy}: padding", "padding_ratio"),
        ]
    return tiles


def _describe_bars(reference: Summary) -> str:
    return (
        f"Samples a second over those of {reference.policy}, all at one global batch. bmt, gmt and packing know all lengths "
        "before the run; packing also needs a model that keeps the samples of a row apart."
    )


def write_sweep_report(
    path: Path, title: str, study: Study, answers: Sequence[CellAnswer], *, source: PageSource, sure: str = ""
) -> None:
    """Writes the page of a sweep: the fastest setting, its steps beside fixed batches, and a slider for each setting."""
    best, rates = find_fastest(answers)
    worst, by_rank = min(rates.values()), " and rank" * has_worlds(answers)
    page = Page(
        f"odb-ref sweep: {title}",
        f"The fastest of {len(answers):,} settings trains on **{rates[best]:,.0f} tokens a second{by_rank}**, "
        f"{rates[best] / max(1e-9, worst):.2f} times the slowest",
        band=sure,
        lead=f"{describe_setting(best)}. All settings were simulated on the same samples; times are simulated.",
        cautions=list_sweep_cautions(study, answers),
    )
    _add_sliders(page, answers, best, {})
    what = study.build_run(best.point)
    page.add_maps([(title, _draw_pair(what, f"{best.point.policy}, the fastest setting"))])
    page.add_heading("All settings")
    page.add_table(list(SWEEP), [build_row(SWEEP, answer) for answer in answers], chosen=answers.index(best))
    page.write(path, source)


def write_tune_report(
    path: Path, title: str, lead: str, tuning: Tuning, *, study: Study, source: PageSource, sure: str = ""
) -> None:
    """Writes the page of a tuning: the recommendation with its reasons, its steps, sliders, and all settings tried."""
    chosen, point = tuning.recommended, tuning.recommended.point
    page = Page(
        f"odb-ref tune: {title}",
        f"Set **{tuning.options}**: {chosen.rate / tuning.best.rate:.1%} of the best throughput that was found",
        band=sure,
        lead=lead,
        cautions=tuning.cautions,
    )
    seconds, unit = describe_seconds(chosen.summary.sim_time_s).split()
    page.add_tiles(
        [
            (f"{chosen.rate:,.0f}", "tokens/s", "over all ranks", "tokens_per_s"),
            (seconds, unit, "an epoch", "sim_time_s"),
            (
                *split_percent(chosen.summary.efficiency),
                "efficiency: what is neither padding nor waiting",
                "efficiency",
            ),
            (*split_percent(chosen.summary.padding_ratio), "padding", "padding_ratio"),
            (f"{chosen.first_step_s:.2f}", "s", "to the first step", "first_step_s"),
        ]
    )
    page.add_heading("Why")
    for reason in tuning.reasons:
        page.add_text(reason[0].upper() + reason[1:] + ".")
    for line in describe_beside(tuning):
        page.add_text(line)
    notes = {chosen: "This is the recommendation.", tuning.best: "This is the fastest that was tried."}
    _add_sliders(page, tuning.tried, chosen, notes)
    what = study.build_run(point)
    page.add_maps([(title, _draw_pair(what, f"{point.policy} as recommended"))])
    page.add_heading("Everything that was tried")
    tried = sorted(tuning.tried, key=lambda answer: -answer.rate)
    page.add_text(TUNE_NOTE)
    columns = list_tune_columns(tuning)
    page.add_table(list(columns), [build_row(columns, answer) for answer in tried], chosen=tried.index(chosen))
    page.write(path, source)


def _draw_pair(what: Run, label: str) -> list[FillMap]:
    """Returns the maps of a run, as its figures have it, and of fixed batches in the memory asked for."""
    return [draw_run(fit_batches(what), label), *([] if what.policy == REFERENCE else [draw_fixed(what)])]


def _choose_own(what: Run) -> Run:
    """Returns the run whose figures a comparison shows: each step is an update, unless the protocol forms the updates."""
    return what if what.forms_updates else replace(what, global_batch=EVERY_STEP)


def _add_sliders(page: Page, answers: Sequence[CellAnswer], start: CellAnswer, notes: dict[CellAnswer, str]) -> None:
    """Adds a slider for each setting that varies, if any does."""
    points = [answer.point for answer in answers]
    varying: dict[str, Dimension] = {}
    for field, (name, flag) in DIMENSIONS.items():
        found = dict.fromkeys(getattr(point, field) for point in points)
        if len(found) > 1:
            values = [value for value in found if value is not None]
            numbers = [value for value in values if isinstance(value, int)]
            varying[field] = Dimension(name=name, flag=flag, values=sorted(numbers) or values)
    if not varying:
        return

    def place(answer: CellAnswer) -> tuple[int | None, ...]:
        point = answer.point
        return tuple(
            None
            if field == "window_samples" and answer.summary.window is None
            else dimension.values.index(getattr(point, field))
            for field, dimension in varying.items()
        )

    def fix(answer: CellAnswer) -> tuple[int, ...]:
        return tuple(0 if at is None else at for at in place(answer))

    page.add_heading("What each setting buys")
    page.add_chart(
        Sliders(
            dimensions=list(varying.values()),
            measures=list(_MEASURES),
            tried=[
                Tried(
                    policy=answer.point.policy,
                    at=place(answer),
                    values=tuple(get(answer) for get in _MEASURES.values()),
                )
                for answer in answers
            ],
            start=fix(start),
            notes={",".join(map(str, fix(answer))): text for answer, text in notes.items()},
            colours=choose_colours(list(dict.fromkeys(point.policy for point in points))),
        ),
        "The ring is the setting chosen. Axes begin where the values do. In place of combinations that were not tried, the "
        "nearest that was is shown.",
    )
