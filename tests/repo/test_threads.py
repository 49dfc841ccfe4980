"""Each thread of docs/threads.md is open, or names a test that names it too."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "threads.md"
LINK = re.compile(r"\[[^\]]+\]\(([^)]+)\)")


def list_rows() -> list[tuple[list[str], str]]:
    """The threads of each row of the table, those above where it has none of its own, and what is said of them."""
    rows: list[tuple[list[str], str]] = []
    for line in PAGE.read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if not line.startswith("|") or cells[0] == "thread" or set(line) <= set("|- "):
            continue
        rows.append((LINK.findall(cells[0]) or rows[-1][0], cells[2]))
    return rows


def test_there_are_rows_to_check() -> None:
    assert len(list_rows()) >= 14


@pytest.mark.parametrize(
    ("threads", "answer"), list_rows(), ids=lambda item: item[0].rpartition("/")[2] if item else ""
)
def test_a_thread_is_open_or_a_test_shows_it_solved(threads: list[str], answer: str) -> None:
    assert threads
    if answer == "open":
        return
    (place,), (name,) = LINK.findall(answer), re.findall(r"`(test_\w+)`", answer)
    text = (PAGE.parent / place).resolve().read_text()
    body = re.search(rf"^def {name}\(.*?(?=^def |^@|^class |\Z)", text, re.MULTILINE | re.DOTALL)
    assert body is not None, f"{place} has no {name}"
    assert [thread for thread in threads if thread not in body[0]] == []
