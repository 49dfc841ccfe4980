"""Deviations from the cost models: jitter, slow ranks, slow loaders, and faults.

A run remains a function of its arguments, because jitter comes from the seed. Faults are named after those of real jobs, and
act at a sample, a round or a step of one rank, never at a time.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from math import isfinite
from typing import Final

import numpy as np
from numpy.typing import NDArray

from odb_ref.core.effects import Outcome, OutcomeKind
from odb_ref.core.errors import UsageError

LARGEST_FACTOR: Final = 1_000_000
"""The greatest factor by which a rank or loader may be slower."""


class FaultKind(StrEnum):
    """The kinds of fault of a rank, and what ``at`` counts."""

    READ = "read"
    """The data set raises at sample number ``at`` of the rank."""
    COLLATE = "collate"
    """The collate function raises in round ``at``."""
    STOP = "stop"
    """The consumer leaves its loop after ``at`` steps, while the others continue."""
    KILL = "kill"
    """The process is gone after ``at`` steps. The others learn of it when their deadline has passed."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault of one rank. It does not happen if the run ends before it."""

    kind: FaultKind
    rank: int
    at: int

    @property
    def cause(self) -> str:
        """The cause that a report names."""
        return f"{self.kind} fault at {self.at}"

    @property
    def outcome(self) -> Outcome:
        """The outcome of an epoch that the fault ends, worded as by the machine if it learns of the fault in time."""
        if self.kind is FaultKind.STOP:
            return Outcome(OutcomeKind.STOPPED, self.rank, f"its consumer left after {self.at} steps")
        kind = OutcomeKind.LOST if self.kind is FaultKind.KILL else OutcomeKind.FAILED
        return Outcome(kind, self.rank, self.cause)

    def __str__(self) -> str:
        return f"{self.kind}:{self.rank}:{self.at}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Conditions:
    """The conditions of a run; by default there are no deviations.

    ``jitter`` is the standard deviation of the logarithm of a factor, drawn anew for each read, collation, computation and
    exchange on each rank; its median is 1. ``slow_ranks`` and ``slow_loaders`` pair a rank with the factor by which its
    computation, or its reading and collating, takes longer. ``deadline_s`` is how long ranks wait for one that is gone.

    Raises: UsageError when a value is not valid.
    """

    jitter: float = 0.0
    slow_ranks: tuple[tuple[int, float], ...] = ()
    slow_loaders: tuple[tuple[int, float], ...] = ()
    faults: tuple[Fault, ...] = ()
    deadline_s: float = 60.0

    def __post_init__(self) -> None:
        if not 0 <= self.jitter <= 3:
            raise UsageError(f"jitter must lie in 0..3, got {self.jitter}")
        if not isfinite(self.deadline_s) or self.deadline_s < 0:
            raise UsageError(f"deadline_s must be a number of at least 0, got {self.deadline_s}")
        for rank, factor in (*self.slow_ranks, *self.slow_loaders):
            if not 0 < factor <= LARGEST_FACTOR:
                raise UsageError(
                    f"rank {rank} slower by {factor}: the factor must be above 0 and at most {LARGEST_FACTOR:,}"
                )
        for what, pairs in (("computes", self.slow_ranks), ("loads", self.slow_loaders)):
            factors: dict[int, float] = {}
            for rank, factor in pairs:
                if rank in factors:
                    raise UsageError(
                        f"rank {rank} {what} {factor:g} times as long: {factors[rank]:g} times was given already"
                    )
                factors[rank] = factor
        for fault in self.faults:
            if fault.at < 0:
                raise UsageError(f"{fault.kind} fault at {fault.at}: must not be negative")

    def check_ranks(self, ranks: int) -> None:
        """Checks that every rank named exists. Raises: UsageError naming one that does not."""
        named = [rank for rank, _ in (*self.slow_ranks, *self.slow_loaders)] + [fault.rank for fault in self.faults]
        for rank in named:
            if not 0 <= rank < ranks:
                raise UsageError(f"there is no rank {rank}: ranks are 0..{ranks - 1}")

    def find_fault(self, kind: FaultKind, rank: int) -> int | None:
        """Returns where the first fault of this kind happens on ``rank``, or None if there is none."""
        return min((fault.at for fault in self.faults if fault.kind is kind and fault.rank == rank), default=None)


STEADY: Final = Conditions()
"""No deviations."""


def list_factors(slow: tuple[tuple[int, float], ...], ranks: range) -> NDArray[np.float64]:
    """Returns the factor by which each of ``ranks`` takes longer."""
    factors = dict(slow)
    return np.array([factors.get(rank, 1.0) for rank in ranks])


def parse_factor(text: str) -> tuple[int, float]:
    """Returns the rank and the factor of ``RANK:FACTOR``. Raises: UsageError when the text is malformed."""
    rank, _, factor = text.partition(":")
    try:
        return int(rank), float(factor)
    except ValueError:
        raise UsageError(f"{text!r}: expected RANK:FACTOR, for example 3:1.5") from None


def parse_fault(text: str) -> Fault:
    """Returns the fault of ``KIND:RANK:AT``. Raises: UsageError when the text is malformed."""
    parts = text.split(":")
    try:
        kind, rank, at = parts
        return Fault(FaultKind(kind), int(rank), int(at))
    except ValueError:
        kinds = ", ".join(FaultKind)
        raise UsageError(f"{text!r}: expected KIND:RANK:AT with a kind of {kinds}, for example stop:3:20") from None


@dataclass(frozen=True, slots=True)
class BudgetTable:
    """A schedule of token budgets as a value: the tokens from each number of planned steps on. Spec: R15.4.

    Raises: UsageError when it does not begin with step 0, its steps do not ascend, or tokens are below 1.
    """

    changes: tuple[tuple[int, int], ...]

    def __post_init__(self) -> None:
        steps = [step for step, _ in self.changes]
        if steps[:1] != [0] or steps != sorted(set(steps)) or min(tokens for _, tokens in self.changes) < 1:
            raise UsageError(f"a budget schedule is STEP:TOKENS,..., from step 0 on, with increasing steps, got {self}")

    def __call__(self, step: int, current: int) -> int:
        """Returns the tokens once ``step`` steps are planned, whatever the budget in force."""
        return next(tokens for begin, tokens in reversed(self.changes) if step >= begin)

    def __str__(self) -> str:
        return ",".join(f"{step}:{tokens}" for step, tokens in self.changes)


def parse_budget_schedule(text: str) -> BudgetTable:
    """Returns the schedule in ``text``, such as ``0:4096,500:8192``: tokens from each number of steps on. Spec: R15.4.

    Raises: UsageError when the text is not a schedule.
    """
    try:
        pairs = [part.split(":") for part in text.split(",")]
        changes = tuple([(int(step), int(tokens)) for step, tokens in pairs])
    except ValueError:
        raise UsageError(f"a budget schedule is STEP:TOKENS,..., got {text!r}") from None
    return BudgetTable(changes)
