"""An exception in words."""

from __future__ import annotations

from collections.abc import Sequence


def describe(error: BaseException) -> str:
    """Returns an exception in one line, without the traceback that a worker process adds to its text."""
    name = type(error).__name__
    try:
        text = str(error)
    except BaseException as second:  # the user's own class, perhaps: nothing may come of describing it
        return f"{name}, whose text raises {type(second).__name__}"
    lines: Sequence[str] = [line.strip() for line in text.splitlines() if line.strip()]
    if not lines:
        return name
    if "Original Traceback" in text:
        return lines[-1][:500]
    return f"{name}: {lines[0]}"[:500]
