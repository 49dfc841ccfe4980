"""Three kinds of error, never mixed (Spec: R8).

=====================  ================================================================================================
`UsageError`           the caller misused the API; the state is unchanged and the call may be made again, corrected
`PeerError`            a message from the exchange is inconsistent; names round and field, and the rank where it is known
`InvariantError`       our own invariant failed: a defect of this library or of a custom rule; names the invariant
=====================  ================================================================================================

What a *job* raises when a run ends early is a fourth thing, not an error of the protocol but its outcome: `JobError`,
made on every rank from its `Outcome`, which is the same on all, except that after a loss ranks may name different ones (R7.5).
"""

from __future__ import annotations

import operator
from enum import StrEnum
from typing import Final, SupportsIndex, TypeVar

MOST: Final = 2**62 - 1
"""The greatest number a caller may name: what ranks exchange are integers of 64 bits, of which those above are symbols."""

Choice = TypeVar("Choice", bound=StrEnum)


class OdbError(Exception):
    """Base of every exception this library raises on purpose."""


class UsageError(OdbError, ValueError):
    """The caller misused the API. The state is unchanged."""


class PeerError(OdbError, RuntimeError):
    """A message of the exchange contradicts the protocol."""


class InvariantError(OdbError, AssertionError):
    """An invariant of the protocol failed: ``invariant`` is its id in the spec."""

    def __init__(self, invariant: str, detail: str) -> None:
        super().__init__(invariant, detail)
        self.invariant = invariant
        self.detail = detail

    def __str__(self) -> str:
        return f"{self.invariant}: {self.detail}"


class RuleError(InvariantError):
    """A target rule answered outside its bounds (Spec: R3.3), or a budget schedule no budget (R15.4)."""

    def __init__(self, detail: str) -> None:
        super().__init__("RULE-BOUNDS", detail)
        self.args = (detail,)  # what pickle calls this class with


class JobError(OdbError, RuntimeError):
    """The epoch ended early, on every rank. ``rank`` is where it began (None when unknown), ``cause`` says why.

    It is the rank among those of the loader; where these are not all of the job, the message names both.
    """

    def __init__(self, message: str, rank: int | None, cause: str) -> None:
        super().__init__(message, rank, cause)
        self.rank = rank
        self.cause = cause

    def __str__(self) -> str:
        return str(self.args[0])


def read_integer(value: object) -> int | None:
    """Returns the integer that a value of any library stands for, as one of Python's; None where there is none."""
    if isinstance(value, bool) or not isinstance(value, SupportsIndex):
        return None
    try:
        return operator.index(value)
    except TypeError:  # an array of several, or of fractions
        return None


def check_integer(value: object, name: str, low: int, high: int = MOST) -> int:
    """Returns the value, an integer of any library's, as one of Python's.

    Raises: UsageError when it is not an integer, below ``low`` or above ``high``.
    """
    number = read_integer(value)
    if number is None:
        raise UsageError(f"{name} must be an integer, got {value!r}")
    if number < low:
        raise UsageError(f"{name} must be at least {low}, got {number}")
    if number > high:
        raise UsageError(f"{name} must be at most {high}, got {number}")
    return number


def choose(kind: type[Choice], value: str, name: str) -> Choice:
    """Returns the member of ``kind`` that ``value`` names.

    Raises: UsageError when there is none.
    """
    try:
        return kind(value)
    except ValueError:
        raise UsageError(f"{name} must be one of {', '.join(kind)}, got {value!r}") from None
