"""Defects as small diffs: a head that describes and locates each, the lines to remove (``-``), and the lines to add (``+``).

    the budget is one sample too wide | batching.grouping
    - padded + sample.length > budget_tokens
    + padded > budget_tokens

The lines to remove may be parts of lines. A line with ``#`` is a comment.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Defect:
    """A defect that replaces ``old``, which occurs once in the text of ``module``, by ``new``."""

    name: str
    module: str
    old: str
    new: str

    def plant(self, text: str) -> str:
        """Returns the text with the defect.

        Raises: ValueError when the text to change is not there once.
        """
        if (count := text.count(self.old)) != 1:
            raise ValueError(f"{self.name!r}: its text occurs {count} times in {self.module}, not once")
        return text.replace(self.old, self.new)


def read_defects(name: str) -> Iterator[tuple[Defect, tuple[str, ...]]]:
    """Yields the defects of a file in this folder, each with the other fields of its head."""
    entries: list[tuple[str, list[str], list[str]]] = []
    for line in Path(__file__).with_name(name).read_text(encoding="utf-8").splitlines():
        match line[:1]:
            case "" | "#":
                continue
            case "-":
                entries[-1][1].append(line[2:])
            case "+":
                entries[-1][2].append(line[2:])
            case _:
                entries.append((line, [], []))
    for head, old, new in entries:
        title, module, *more = head.split(" | ")
        yield Defect(name=title, module=module, old="\n".join(old), new="\n".join(new)), tuple(more)
