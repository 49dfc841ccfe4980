"""The frame of every page: one file that contains its styles, scripts and data, with its origin in the footer."""

from __future__ import annotations

import hashlib
import html
import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Final

from odb_ref import __version__
from odb_sim.inputs.files import write_text

_ASSETS: Final = resources.files("odb_sim.reports") / "assets"
_DIGITS: Final = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class PageSource:
    """The origin of a page: the command that made it, and the names of its input data."""

    command: str
    data: Sequence[str]

    def list_lines(self) -> list[str]:
        """Returns the footer: the command, a digest of each data file, the version and the date."""
        lines = [f"<code>{html.escape(self.command)}</code>"]
        lines += [html.escape(name) + compute_digest(name) for name in self.data]
        return [*lines, f"odb-ref {__version__}, {datetime.now(UTC):%d %B %Y}"]


def compute_digest(name: str) -> str:
    """Returns the first hexadecimal digits of the SHA-256 of a data file or bundled trace, as ``sha256sum`` prints it, or an
    empty string if ``name`` is neither.
    """
    bundled = resources.files("odb_sim") / "data" / f"{name}.csv.gz"
    path = bundled if name.isidentifier() and bundled.is_file() else Path(name)
    return f": sha256 {hashlib.sha256(path.read_bytes()).hexdigest()[:_DIGITS]}" if path.is_file() else ""


@cache
def read_asset(name: str) -> str:
    """Returns the text of a file in `assets`."""
    return (_ASSETS / name).read_text(encoding="utf-8")


def write_document(
    path: Path, title: str, body: str, *, source: PageSource, data: object = None, scripts: Sequence[str] = ()
) -> None:
    """Writes a page: ``body`` and the footer, then ``data`` as JSON for the ``scripts``."""
    foot = "".join(f"<p>{line}</p>" for line in source.list_lines())
    text = json.dumps(data, separators=(",", ":")).replace("</", "<\\/")
    parts = [f'<script type="application/json" id="data">{text}</script>'] if scripts else []
    parts += [f"<script>{read_asset(name)}</script>" for name in scripts]
    write_text(
        path,
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{html.escape(title)}</title>'
        f'<meta name="viewport" content="width=device-width,initial-scale=1"><style>{read_asset("page.css")}</style></head>'
        f"<body><main>{body}<footer>{foot}</footer></main>{''.join(parts)}</body></html>\n",
    )
