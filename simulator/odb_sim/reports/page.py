"""One page: a headline in words, then what each rank trains on in each step, then figures, and its origin in the footer.

A page is one file that needs no network. It holds text and tables as HTML, the data of its charts as JSON, one script that
draws them with Apache ECharts (`assets/`, spec/decisions/021), and glossary entries for the figures it names. Its size is
bounded for any run: `charts` limits the charts, and maps have at most `MOST_CELLS` batches in all.
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterable, Sequence
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Final

from odb_sim.engine.fill import MOST_CELLS, FillMap
from odb_sim.reports.charts import Chart, JsonChart, Sliders, Struck, describe_map, encode_chart, encode_map
from odb_sim.reports.document import PageSource, write_document

_NAME: Final = re.compile(r"`([^`]+)`")
_STRONG: Final = re.compile(r"\*\*(.+?)\*\*")
_PLAIN: Final = frozenset(("figure", "value", "run"))
"""Headings that need no link."""
_LONG: Final = 32
"""A column with a cell longer than this is a column of text."""


class Page:
    """Collects sections in order, and writes them as one page."""

    def __init__(
        self, title: str, headline: str, *, band: str = "", lead: str = "", cautions: Sequence[str] = ()
    ) -> None:
        """Starts the page with the answer. ``headline`` has its number between ``**`` and ``**``; ``band`` states how certain
        it is. ``cautions`` are those that the terminal prints: what the figures do not show by themselves.
        """
        self._title = title
        self._charts: list[JsonChart] = []
        self._named: dict[str, None] = {}
        """The glossary entries that the page needs, in order."""
        said = _STRONG.sub(r"<strong>\1</strong>", html.escape(headline))
        self._parts = [f'<p class="over">{html.escape(title)}</p><h1>{said}</h1>']
        self._parts += [f'<p class="band">{html.escape(band)}</p>'] if band else []
        self._parts += [f'<p class="lead">{html.escape(lead)}</p>'] if lead else []
        self._parts += [f'<p class="caution">Caution: {html.escape(caution)}.</p>' for caution in cautions]

    def add_heading(self, text: str) -> None:
        """Starts a section."""
        self._parts.append(f"<h2>{html.escape(text)}</h2>")

    def add_text(self, text: str) -> None:
        """Adds a paragraph of plain text."""
        self._parts.append(f"<p>{html.escape(text)}</p>")

    def add_code(self, lines: Iterable[str]) -> None:
        """Adds commands, one on each line."""
        self._parts += [f"<p><code>{html.escape(line)}</code></p>" for line in lines]

    def add_tiles(self, tiles: Iterable[tuple[str, str, str, str]]) -> None:
        """Adds figures in large type: value, unit, description, and name in the glossary, which may be empty."""
        shown = "".join(
            f'<div class="tile"><b>{html.escape(value)} <small>{html.escape(unit)}</small></b>'
            f"<span>{self._link(name, text)}</span></div>"
            for value, unit, text, name in tiles
        )
        self._parts.append(f'<div class="tiles">{shown}</div>')

    def add_maps(self, groups: Sequence[tuple[str, Sequence[FillMap]]], struck: Struck | None = None) -> None:
        """Adds maps of what each rank trains on in each step. The reader chooses one of the ``groups``, which have a name and a
        column of maps. The first map of each group shows the fault ``struck``.
        """
        if not groups:
            return
        self.add_heading("How full each step is on each rank")
        name = f"maps{len(self._charts)}"
        if len(groups) > 1:
            options = "".join(f"<option>{html.escape(title)}</option>" for title, _ in groups)
            self._parts.append(
                f'<p class="tabs"><label>shown <select data-tabs="{name}">{options}</select></label></p>'
            )
        share = MOST_CELLS // max(1, sum(len(maps) for _, maps in groups) // 2)
        for number, (_, maps) in enumerate(groups):
            small = [one.shorten(share) if len(groups) > 1 else one for one in maps]
            heads = [
                f'<div class="maphead"><b>{html.escape(one.label)}</b><span>{html.escape(describe_map(one))}</span></div>'
                f'<div class="chart" data-map="{place}" role="img" aria-label="{html.escape(one.label)}, rank by step: '
                f'{html.escape(describe_map(one))}"></div>'
                for place, one in enumerate(small)
            ]
            chart = self._keep(
                {
                    "kind": "Maps",
                    "maps": [encode_map(one, None if place else struck) for place, one in enumerate(small)],
                }
            )
            hidden = " hidden" if number else ""
            self._parts.append(f'<div data-chart="{chart}" data-group="{name}"{hidden}>{"".join(heads)}</div>')
        self._parts.append(
            '<p class="key"><span>0 % <i class="scale"></i>100 % of the budget holds tokens</span>'
            '<span><i style="background:var(--idle)"></i>idle</span></p>'
            '<p class="note">A column is a step, a row a rank. Point at a batch, or tap it, for its lengths, its padding and '
            "whom its rank waits for.</p>"
        )

    def add_chart(self, chart: Chart, caption: str = "") -> None:
        """Adds a chart and its caption."""
        is_drawn = not isinstance(chart, Sliders)
        drawn = f' class="chart" role="img" aria-label="{html.escape(caption)}"' if is_drawn else ""
        said = f"<figcaption>{html.escape(caption)}</figcaption>" if caption else ""
        number = self._keep(encode_chart(chart))
        self._parts.append(f'<figure><div{drawn} data-chart="{number}"></div>{said}</figure>')

    def add_table(self, header: Sequence[str], rows: Sequence[Sequence[str]], *, chosen: int | None = None) -> None:
        """Adds a table, and marks the row ``chosen``. Glossary names in the header or the first column become links."""
        head = "".join(f"<th>{self._link(cell)}</th>" for cell in header)
        long = {place for row in rows for place, cell in enumerate(row) if len(cell) > _LONG}
        body = "".join(
            f"<tr{' class=on' if number == chosen else ''}>"
            + "".join(self._make_cell(cell, place, is_long=place in long) for place, cell in enumerate(row))
            + "</tr>"
            for number, row in enumerate(rows)
        )
        self._parts.append(
            f'<div class="scroll" tabindex="0"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
        )

    def write(self, path: Path, source: PageSource) -> None:
        """Writes the page."""
        body = "\n".join([*self._parts, self._list_glossary()])
        scripts = ("echarts.min.js", "page.js") if self._charts else ()
        write_document(path, self._title, body, source=source, data={"charts": self._charts}, scripts=scripts)

    def _keep(self, chart: JsonChart) -> int:
        self._charts.append(chart)
        return len(self._charts) - 1

    def _make_cell(self, text: str, place: int, *, is_long: bool) -> str:
        # Columns of long text may wrap, figures may not.
        kind = ' class="text"' if is_long else ""
        return f"<td{kind}>{html.escape(text) if place else self._link(text)}</td>"

    def _link(self, name: str, text: str = "") -> str:
        shown = html.escape(text or name)
        if name not in read_glossary() or name in _PLAIN:
            return shown
        self._named[name] = None
        return f'<a href="#{_make_id(name)}">{shown}</a>'

    def _list_glossary(self) -> str:
        """Returns the glossary entries that the page names, and those that they name. Names with one meaning share an entry."""
        entries, named = read_glossary(), list(self._named)
        for name in named:
            for other in _NAME.findall(entries[name]):
                if other in entries and other not in named:
                    named.append(other)
        if not named:
            return ""
        together: dict[str, list[str]] = {}
        for name in named:
            together.setdefault(entries[name], []).append(name)
        items = ""
        for meaning, names in together.items():
            heads = ", ".join(f'<span id="{_make_id(name)}">{html.escape(name)}</span>' for name in names)
            items += f"<dt>{heads}</dt><dd>{_mark(meaning)}</dd>"
        summary = f"What the figures mean: {len(named)} entries of the glossary"
        return f"<details><summary>{summary}</summary><dl>{items}</dl></details>"


@cache
def read_glossary() -> dict[str, str]:
    """Returns the meaning of each name in GLOSSARY.md. If several tables explain a name, the first one counts."""
    text = (resources.files("odb_sim") / "GLOSSARY.md").read_text(encoding="utf-8")
    entries: dict[str, str] = {}
    for names, meaning in re.findall(r"^\| (`[^|]*`[^|]*) \| (.*) \|$", text, flags=re.MULTILINE):
        for name in _NAME.findall(names):
            entries.setdefault(name, meaning)
    return entries


def _make_id(name: str) -> str:
    return "g-" + re.sub(r"[^a-z0-9_]+", "-", name.lower())


def _mark(text: str) -> str:
    return _NAME.sub(r"<code>\1</code>", html.escape(text))
