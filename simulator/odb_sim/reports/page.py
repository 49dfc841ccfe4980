"""A one-file HTML report that opens offline: text, tables, and plots as inline SVG."""

from __future__ import annotations

import html
import io
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from odb_ref.core.errors import UsageError
from odb_sim.inputs.files import write_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS: Final = {
    "odb": "#1f6f8b",
    "paper": "#c27c0e",
    "peer": "#b3261e",
    "standard": "#8d99a6",
    "hfg": "#5b8c5a",
    "balanced": "#8d5a97",
    "bmt": "#d98ba7",
    "gmt": "#1d2733",
    "packing": "#7fb0d0",
}
"""A policy has the same colour in every plot."""

_STYLE: Final = """
body{font:16px/1.5 system-ui,sans-serif;color:#1d2733;max-width:62rem;margin:2.5rem auto;padding:0 1.25rem}
h1{font-size:1.7rem;margin-bottom:.2rem}h2{margin-top:2.4rem;border-bottom:1px solid #dde3e9;padding-bottom:.3rem}
table{border-collapse:collapse;margin:1rem 0;font-variant-numeric:tabular-nums;font-size:.92rem}
th,td{padding:.35rem .7rem;border-bottom:1px solid #e6ebf0;text-align:right;white-space:nowrap}
th:first-child,td:first-child,td.text{text-align:left}th{background:#f5f7f9}
figure{margin:1.2rem 0}figure svg{max-width:100%;height:auto}figcaption{color:#55606c;font-size:.9rem}
td.text{white-space:normal;min-width:14rem}
.caution{background:#fff6e0;border-left:4px solid #c27c0e;padding:.4rem .8rem;margin:.5rem 0}
code{background:#f3f5f7;padding:.1rem .3rem;border-radius:3px}.scroll{overflow-x:auto}
"""


def make_figure(width_in: float = 8.0, height_in: float = 3.2, columns: int = 1) -> tuple[Figure, Sequence[Axes]]:
    """Returns an empty figure and its axes, left to right.

    Raises: UsageError when matplotlib is missing.
    """
    try:
        from matplotlib.figure import Figure as Canvas
    except ImportError:
        raise UsageError("plots need matplotlib: pip install -e '.[plots]'") from None
    figure = Canvas(figsize=(width_in, height_in), layout="constrained")
    axes = figure.subplots(1, columns, squeeze=False)[0]
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(axis="y", color="#e6ebf0")
        axis.set_axisbelow(True)
    return figure, tuple(axes)


class HtmlReport:
    """Collects sections in order and writes them as one page."""

    def __init__(self, title: str, lead: str, cautions: Sequence[str] = ()) -> None:
        """Begins with what the figures do not show by themselves, as the terminal says it."""
        self._title = title
        self._parts = [f"<h1>{html.escape(title)}</h1>", f"<p>{html.escape(lead)}</p>"]
        self._parts += [f'<p class="caution">Caution: {html.escape(caution)}.</p>' for caution in cautions]

    def add_heading(self, text: str) -> None:
        """Starts a section."""
        self._parts.append(f"<h2>{html.escape(text)}</h2>")

    def add_text(self, text: str) -> None:
        """A paragraph of plain text."""
        self._parts.append(f"<p>{html.escape(text)}</p>")

    def add_table(self, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """A table; the first column is left-aligned, numbers to the right."""
        head = "".join(f"<th>{html.escape(cell)}</th>" for cell in header)
        body = "".join("<tr>" + "".join(map(_make_cell, row)) + "</tr>" for row in rows)
        self._parts.append(
            f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
        )

    def add_figure(self, figure: Figure, caption: str) -> None:
        """A plot with a caption that says what to see in it."""
        from matplotlib import rc_context

        buffer = io.StringIO()
        # Names of parts of a plot are hashes: with the same salt, the same figures give the same page.
        with rc_context({"svg.hashsalt": "odb-ref"}):
            figure.savefig(buffer, format="svg", metadata={"Date": None})
        svg = buffer.getvalue()
        self._parts.append(
            f"<figure>{svg[svg.index('<svg') :]}<figcaption>{html.escape(caption)}</figcaption></figure>"
        )

    def write(self, path: Path) -> None:
        """Writes the page."""
        page = (
            f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{html.escape(self._title)}</title>'
            f'<meta name="viewport" content="width=device-width"><style>{_STYLE}</style></head><body>'
            + "\n".join(self._parts)
            + "</body></html>\n"
        )
        write_text(path, page)


def _make_cell(text: str) -> str:
    # Long text may break; a figure may not.
    kind = ' class="text"' if len(text) > 32 else ""
    return f"<td{kind}>{html.escape(text)}</td>"
