"""Describes exceptions in one line, for messages and for other processes."""

from __future__ import annotations

import contextlib
import sys
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Final, Generic, Protocol, TypeVar


class _Sending(Protocol):
    def send(self, failure: Failure, /) -> None: ...


Pipe = TypeVar("Pipe", bound=_Sending)

_SAMPLE: Final = "the sample is "


def note_sample(error: Exception, name: object) -> None:
    """Adds a note to an exception that names the sample being read, for `describe` and for readers of the traceback."""
    with contextlib.suppress(Exception):  # the repr or add_note of user classes may fail: the exception matters more
        error.add_note(f"{_SAMPLE}{' '.join(repr(name).split())[:100]}")


def describe(error: BaseException) -> str:
    """Returns an exception in one line, with its note on the sample, if any. Leaves out a worker's traceback in its text."""
    name = type(error).__name__
    try:
        text = str(error)
    except BaseException as second:  # perhaps a user's class: describing it must not fail
        return f"{name}, whose text raises {type(second).__name__}"
    lines: Sequence[str] = [line.strip() for line in text.splitlines() if line.strip()]
    notes = [note for note in getattr(error, "__notes__", ()) if isinstance(note, str) and note.startswith(_SAMPLE)]
    if "Original Traceback" in text:  # the last line is the worker's exception, or the note on it
        *lines, last = lines
        found = lines.pop() if last.startswith(_SAMPLE) else last
        notes = [last] if last is not found else []
    else:
        found = f"{name}: {lines[0]}" if lines else name
    return found[:500] + "".join(f" ({note})" for note in notes[-1:])


def describe_exit(code: int | None) -> str:
    """Describes the end of a process that should not have ended. The code is None if the process may only be about to end."""
    return "exited unexpectedly" + ("" if code is None else f" (exit code {code})")


@dataclass(frozen=True, slots=True)
class Failure:
    """An exception on its way to another process, which may not know its class: described in one line, and its traceback."""

    cause: str
    traceback: str

    @classmethod
    def of(cls, error: BaseException, cause: str = "") -> Failure:
        """Returns the failure. ``cause`` replaces the description."""
        return cls(cause or describe(error), "".join(traceback.format_exception(error)))


class RebuildReporter(Generic[Pipe]):
    """Sends the exception that ends a new process before it runs.

    It must come first in what the process is sent: on arrival it becomes the process's ``sys.excepthook``.
    """

    def __init__(self, pipe: Pipe) -> None:
        self.pipe = pipe

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__dict__ |= state
        sys.excepthook = self._report

    def _report(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        cause = (
            f"the data set, or a function passed to the loader, cannot be rebuilt in another process: {describe(error)}"
        )
        with contextlib.suppress(OSError):  # nobody waits for it any more
            self.pipe.send(Failure.of(error, cause))
        sys.__excepthook__(kind, error, trace)
