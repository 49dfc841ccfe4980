"""An exception in words."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Final

_SAMPLE: Final = "the sample is "


def note_sample(error: Exception, name: object) -> None:
    """Notes at an exception which sample was read when it came, for `describe` and for who reads the traceback."""
    with contextlib.suppress(Exception):  # the user's own classes, perhaps: the exception is what matters
        error.add_note(f"{_SAMPLE}{' '.join(repr(name).split())[:100]}")


def describe(error: BaseException) -> str:
    """Returns an exception in one line, with the sample that is noted at it, if one is, and without the traceback that a
    worker process adds to its text.
    """
    name = type(error).__name__
    try:
        text = str(error)
    except BaseException as second:  # the user's own class, perhaps: nothing may come of describing it
        return f"{name}, whose text raises {type(second).__name__}"
    lines: Sequence[str] = [line.strip() for line in text.splitlines() if line.strip()]
    notes = [note for note in getattr(error, "__notes__", ()) if isinstance(note, str) and note.startswith(_SAMPLE)]
    if "Original Traceback" in text:  # the last line is what a worker raised, or the note at it
        *lines, last = lines
        found = lines.pop() if last.startswith(_SAMPLE) else last
        notes = [last] if last is not found else []
    else:
        found = f"{name}: {lines[0]}" if lines else name
    return found[:500] + "".join(f" ({note})" for note in notes[-1:])
