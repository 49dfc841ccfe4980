"""How Sphinx makes the site: `make docs`. Works offline; a warning is an error."""

from __future__ import annotations

import argparse
import io
import re
import sys
from contextlib import redirect_stdout
from inspect import formatannotation, getdoc, signature
from pathlib import Path

from sphinx.application import Sphinx

ROOT = Path(__file__).resolve().parents[1]
HERE = ROOT / "docs"
sys.path[:0] = [str(ROOT), str(ROOT / "simulator")]

project = "odb-ref"
author = "odb-ref contributors"
copyright = author
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
html_theme = "furo"
html_title = "odb-ref"
html_static_path = ["_static"]
html_css_files = ["site.css"]
exclude_patterns = ["_build"]
source_suffix = {".md": "markdown"}
myst_heading_anchors = 3
default_role = "code"  # docstrings name things in single backquotes
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_default_options = {"exclude-members": "__init__, __new__"}
python_use_unqualified_type_names = True
maximum_signature_line_length = 88
# The inventory of no other project is fetched, so links to their types cannot be checked.
nitpicky = False
# The colours of text blocks in no language do not matter.
highlight_language = "text"

PAGES = {
    "ARCHITECTURE": "ARCHITECTURE.md",
    "CONTRIBUTING": "CONTRIBUTING.md",
    "CHANGELOG": "CHANGELOG.md",
    "GLOSSARY": "simulator/odb_sim/GLOSSARY.md",
    "protocol": "spec/protocol.md",
    "properties": "spec/properties.md",
    "traceability": "spec/traceability.md",
}
"""Pages of the repository that are pages of the site too, by the name they have there."""

_LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s]+)\)")


def _resolve_links(text: str, source: Path, target: Path) -> str:
    """Returns a page with links that work on the site: what is not a page of it becomes the path's name."""
    places = {(ROOT / path).resolve(): HERE / "generated" / f"{name}.md" for name, path in PAGES.items()}

    def replace(match: re.Match[str]) -> str:
        is_image, label, link = match.groups()
        if is_image or "://" in link or link.startswith("#"):
            return match[0]
        path, _, anchor = link.partition("#")
        found = (source.parent / path).resolve()
        page = places.get(found, found if found.is_relative_to(HERE) else None)
        if page is None:
            name = str(found.relative_to(ROOT))
            return f"`{name}`" if label.strip("`") in name else f"{label} (`{name}`)"
        relative = Path(*[".."] * len(target.parent.relative_to(HERE).parts)) / page.relative_to(HERE)
        return f"[{label}]({relative}{'#' if anchor else ''}{anchor})"

    return _LINK.sub(replace, text)


def _describe_commands() -> str:
    """Returns the page of the command line: what each ``--help`` prints."""
    from odb_sim.cli.main import build_parser

    parser = build_parser()
    parts = ["# The command line", "", "```text", parser.format_help().strip(), "```"]
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, command in action.choices.items():
                text = io.StringIO()
                with redirect_stdout(text):
                    command.print_help()
                parts += ["", f"## odb-ref {name}", "", "```text", text.getvalue().strip(), "```"]
    return "\n".join(parts) + "\n"


def _write_generated(_: Sphinx) -> None:
    folder = HERE / "generated"
    folder.mkdir(exist_ok=True)
    texts = {f"{name}.md": (ROOT / path).read_text(encoding="utf-8") for name, path in PAGES.items()}
    texts["cli.md"] = _describe_commands()
    for name, text in texts.items():
        # Written only when it differs, so that what has not changed is not built again.
        path = folder / name
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")


def _read_source(_: Sphinx, name: str, content: list[str]) -> None:
    target = HERE / f"{name}.md"
    stem = name.removeprefix("generated/")
    source = ROOT / PAGES[stem] if name.startswith("generated/") and stem in PAGES else target
    content[0] = _resolve_links(content[0], source, target)


def _tabulate(_: Sphinx, what: str, name: str, kind: type, options: object, lines: list[str]) -> None:
    """Makes a table of the parameters that a class lists below "Args:", each with its type."""
    if what != "class" or "Args:" not in lines or not kind.__module__.startswith("odb_ref.torch"):
        return
    begin = lines.index("Args:")
    end = lines.index("", begin)
    entries = [line.strip() if line.startswith("     ") else f"\0{line.strip()}" for line in lines[begin + 1 : end]]
    types = {name: formatannotation(one.annotation) for name, one in signature(kind).parameters.items()}
    table = [".. list-table::", "   :header-rows: 1", "", "   * - parameter", "     - type", "     - meaning"]
    for entry in " ".join(entries).split("\0")[1:]:
        parameter, _, meaning = entry.strip().partition(": ")
        table += [f"   * - ``{parameter}``", f"     - ``{types[parameter]}``", f"     - {meaning}"]
    lines[begin:end] = ["", *table]


def _shorten(_: Sphinx, what: str, name: str, kind: object, *__: object) -> tuple[str, None] | None:
    """Returns a signature without the parameters that are in a table."""
    is_listed = what == "class" and name.startswith("odb_ref.torch") and "Args:" in (getdoc(kind) or "")
    return ("(...)", None) if is_listed else None


def setup(app: Sphinx) -> None:
    """Connects what is above."""
    app.connect("builder-inited", _write_generated, priority=100)
    app.connect("source-read", _read_source)
    app.connect("autodoc-process-docstring", _tabulate, priority=100)
    app.connect("autodoc-process-signature", _shorten)
