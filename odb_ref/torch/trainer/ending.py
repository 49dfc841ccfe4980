"""How an epoch ends for the consumer: what it raises, if anything."""

from __future__ import annotations

from odb_ref.core.effects import Outcome, OutcomeKind
from odb_ref.core.errors import JobError, OdbError
from odb_ref.core.summary import StateSummary


class Ending:
    """What has gone wrong on this rank, and what the consumer is told of it."""

    def __init__(self) -> None:
        self._failure: BaseException | None = None
        self._defect: Exception | None = None

    def note_failure(self, error: BaseException) -> None:
        """Keeps what has failed on this rank, for a traceback; the first of several."""
        self._failure = self._failure or error

    def note_defect(self, error: Exception) -> None:
        """Keeps what the consumer is to raise in any case: this rank's machine cannot go on."""
        self._defect = error

    @property
    def is_broken(self) -> bool:
        """True when the machine cannot go on."""
        return self._defect is not None

    def check(self, summary: StateSummary | None) -> None:
        """Returns when the epoch is complete.

        Raises: what ended it otherwise; JobError names the rank and the cause.
        """
        if self._defect is not None:
            raise self._defect
        if summary is None or summary.outcome is None:
            raise OdbError("the epoch has ended without an outcome")
        if summary.outcome.kind is not OutcomeKind.COMPLETE:
            raise _make_error(summary.outcome) from self._failure


def _make_error(outcome: Outcome) -> JobError:
    who = "a rank that could not be named" if outcome.rank is None else f"rank {outcome.rank}"
    match outcome.kind:
        case OutcomeKind.STOPPED:
            what = "left the loop before its end"
        case OutcomeKind.FAILED:
            what = "failed"
        case OutcomeKind.MISMATCH:
            what = "is configured differently"
        case _:
            what = "is lost"
    return JobError(f"{who} {what}: {outcome.cause}", rank=outcome.rank, cause=outcome.cause)
