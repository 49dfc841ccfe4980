"""The charts of a page, as JSON in the shapes that `assets/page.js` reads. Colours are names in `assets/page.css`, which has a
light and a dark value for each.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Final

from odb_sim.engine.fill import Column, FilledBatch, FillMap

JsonValue = None | bool | int | float | str | Sequence["JsonValue"] | Mapping[str, "JsonValue"]
JsonChart = Mapping[str, JsonValue]

_COLOURS: Final = frozenset(("odb", "paper", "peer", "standard", "hfg", "balanced", "bmt", "gmt", "packing"))
_LEFT_OUT: Final = -1
"""The step number of a column that stands for steps not shown."""
_FURTHER: Final = ("gmt", "hfg", "balanced", "bmt", "paper")


def choose_colours(policies: Sequence[str]) -> dict[str, str]:
    """Returns the colour of each policy: its own, the same on every page, or a spare one for a rule that does not ship."""
    others = [policy for policy in policies if policy not in _COLOURS]
    spare = [colour for colour in _FURTHER if colour not in policies] or list(_FURTHER)
    return {policy: policy for policy in policies if policy in _COLOURS} | {
        policy: spare[number % len(spare)] for number, policy in enumerate(others)
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """A value for each x of `LineChart`, or for each name of `Bars`."""

    name: str
    colour: str
    values: Sequence[float | None]
    colours: Sequence[str] | None = None
    """The colour of each bar, if they differ."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LineChart:
    """Lines over the same x. With ``is_stack`` each is stacked on the one before."""

    x_name: str
    x: Sequence[int | str]
    series: Sequence[Series]
    unit: str = ""
    is_percent: bool = False
    is_stack: bool = False
    has_zero: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Bars:
    """Horizontal bars, or dots with ``is_dots``: a row for each name."""

    names: Sequence[str]
    series: Sequence[Series]
    is_percent: bool = False
    is_dots: bool = False
    digits: int | None = None
    """Digits after the point, or None for the significant ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """A marked moment in a lane."""

    at_s: float
    lane: int
    label: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SpanChart:
    """Activities over time, in lanes. The time axis is compressed in ``gap_s``, which holds nothing but waiting."""

    lanes: Sequence[str]
    kinds: Sequence[tuple[str, str]]
    """Names of spans and their colours, in the order of the legend."""
    spans: Sequence[tuple[int, str, float, float]]
    """Lane, name, start and end in seconds."""
    begin_s: float
    end_s: float
    gap_s: tuple[float, float] | None = None
    mark: Mark | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Struck:
    """A fault, which a map shows behind the last step, in the row of the rank."""

    rank: int
    text: str


def encode_map(drawn: FillMap, struck: Struck | None = None) -> JsonChart:
    """Returns a map of ranks by steps, with the data of its tooltips."""
    empty = tuple(FilledBatch(samples=0, real=0, padded=0, lengths=()) for _ in drawn.ranks)
    columns: list[Column] = []
    for column in drawn.columns:
        if columns and column.step > columns[-1].step + 1:
            columns.append(Column(step=_LEFT_OUT, round=0, waited_for=None, cells=empty))
        columns.append(column)
    note: JsonValue = None
    if struck is not None and struck.rank in drawn.ranks:
        last = columns[-1] if columns else Column(step=-1, round=0, waited_for=None, cells=empty)
        note = {"x": len(columns), "rank": struck.rank, "text": struck.text}
        columns.append(Column(step=last.step + 1, round=last.round, waited_for=None, cells=empty))
    rows = list(zip(*(column.cells for column in columns), strict=True))
    return {
        "label": drawn.label,
        "budget": drawn.budget_tokens,
        "ranks": drawn.ranks,
        "steps": [None if column.step == _LEFT_OUT else column.step for column in columns],
        "rounds": [column.round for column in columns] if any(column.round for column in columns) else None,
        "slow": [column.waited_for for column in columns],
        "samples": [[cell.samples for cell in row] for row in rows],
        "real": [[cell.real for cell in row] for row in rows],
        "padded": [[cell.padded for cell in row] for row in rows],
        "wait": [[cell.wait_ms for cell in row] for row in rows],
        "lengths": [[cell.lengths for cell in row] for row in rows],
        "note": note,
    }


def describe_map(drawn: FillMap) -> str:
    """Returns how full the batches are, and which part of the run the map shows."""
    cells = [cell for column in drawn.columns for cell in column.cells]
    filled = sum(cell.real for cell in cells) / max(1, drawn.budget_tokens * len(cells))
    padding = sum(cell.padded - cell.real for cell in cells) / max(1, sum(cell.padded for cell in cells))
    room = f"{filled:.0%} of the {'largest ' if drawn.is_lowered else ''}budget of {drawn.budget_tokens:,} is filled"
    part = "of these, " if len(cells) < drawn.ranks_total * drawn.steps_total else ""
    said = f"{drawn.steps_total:,} steps"
    if len(drawn.columns) < drawn.steps_total:
        said += f"; shown: the first, the middle and the last {len(drawn.columns) // 3:,}"
    if len(drawn.ranks) < drawn.ranks_total:
        said += f"; shown: {len(drawn.ranks)} of {drawn.ranks_total:,} ranks"
    return f"{said}; {part}{room}, {padding:.0%} of the batches is padding"


@dataclass(frozen=True, slots=True, kw_only=True)
class Dimension:
    """A setting that was tried with several values, and the option that sets it."""

    name: str
    flag: str
    values: Sequence[int | str]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlottedMeasure:
    """A figure of each simulation, which may be plotted over a setting."""

    name: str
    is_percent: bool = False
    is_plotted: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Tried:
    """A simulation, with the place of each setting in the values of its `Dimension`, or None if the setting has no effect."""

    policy: str
    at: tuple[int | None, ...]
    values: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sliders:
    """A slider for each setting, the figures at the chosen values, and curves across one of the settings."""

    dimensions: Sequence[Dimension]
    measures: Sequence[PlottedMeasure]
    tried: Sequence[Tried]
    start: tuple[int, ...]
    notes: Mapping[str, str]
    """Remarks on some settings (recommended, for example), keyed by their places, joined by commas."""
    colours: Mapping[str, str]
    """The colour of each policy."""


Chart = LineChart | Bars | SpanChart | Sliders


def encode_chart(chart: Chart) -> JsonChart:
    """Returns what the script draws: the fields by name, and the kind of chart."""
    return {"kind": type(chart).__name__, **asdict(chart)}
