"""Three kinds of error, never mixed (Spec: R8).

=====================  ================================================================================================
`UsageError`           the caller misused the API; the state is unchanged, so a corrected call may follow
`PeerError`            a message from the exchange is inconsistent; names round and field, and the rank if it is known
`InvariantError`       our own invariant failed: a defect of this library or of a custom rule; names the invariant
=====================  ================================================================================================

A fourth, `JobError`, is not an error of the protocol but the outcome of a job that ended early. Every rank raises it from its
`Outcome`, which is the same on all ranks, except that after a loss they may name different ranks (R7.5).
"""

from __future__ import annotations

import operator
from enum import StrEnum
from typing import Final, SupportsIndex, TypeVar

MOST: Final = 2**62 - 1
"""The greatest number a caller may pass. Ranks exchange 64-bit integers, and greater ones have a special meaning."""

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
    """A target rule failed or answered outside its bounds (Spec: R3.3), or a budget schedule returned no budget (R15.4)."""

    def __init__(self, detail: str) -> None:
        super().__init__("RULE-BOUNDS", detail)
        self.args = (detail,)  # pickle calls this class with them


class JobError(OdbError, RuntimeError):
    """The epoch ended early, on every rank. ``rank`` is where the end began (None if unknown), and ``cause`` is the reason.

    ``rank`` counts among the loader's ranks. If the job has others, the message names the rank in both numberings.
    """

    def __init__(self, message: str, rank: int | None, cause: str) -> None:
        super().__init__(message, rank, cause)
        self.rank = rank
        self.cause = cause

    def __str__(self) -> str:
        return str(self.args[0])


def read_integer(value: object) -> int | None:
    """Returns the value of any library's integer type as a Python ``int``, or None if it is not an integer."""
    is_boolean = isinstance(value, bool) or type(value).__name__ == "bool_"  # NumPy 1's boolean can be an index
    if is_boolean or not isinstance(value, SupportsIndex):
        return None
    try:
        return operator.index(value)
    except Exception:  # an array of several numbers or of fractions, or whatever a class of the user's raises
        return None


def describe_given(value: object) -> str:
    """Returns a short text for what a user's code has returned or raised, which may be large, or fail to be written."""
    try:
        return f"{value!s:.200}"
    except Exception:
        return f"a value of type {type(value).__name__} that cannot be written"


def check_integer(value: object, name: str, low: int, high: int = MOST) -> int:
    """Returns the value of any library's integer type as a Python ``int``.

    Raises: UsageError when it is not an integer, or is below ``low`` or above ``high``.
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
    """Returns the member of ``kind`` that ``value`` names. Raises: UsageError when there is no such member."""
    try:
        return kind(value)
    except ValueError:
        raise UsageError(f"{name} must be one of {', '.join(kind)}, got {value!r}") from None
