"""The result of a check: for each property, whether it holds, is violated, or does not apply. Spec: R9."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from enum import StrEnum
from typing import Final


class Property(StrEnum):
    """The properties a trace is judged by. EXCHANGE is the assumption of the others: every answer combines what was posted."""

    EXCHANGE = "EXCHANGE"
    ALIGN = "ALIGN"
    CONSERVE = "CONSERVE"
    COVER = "COVER"
    ONCE = "ONCE"
    QUOTA = "QUOTA"
    FREE = "FREE"
    TERM = "TERM"
    ABORT = "ABORT"
    RELEASE = "RELEASE"
    STOP = "STOP"
    BUDGET = "BUDGET"
    SIZES = "SIZES"
    FEWEST = "FEWEST"
    AGE = "AGE"
    ORDER = "ORDER"
    WEIGHT = "WEIGHT"
    DEAL = "DEAL"
    RESUME = "RESUME"
    PEERS = "PEERS"
    UPDATE = "UPDATE"
    REPLAY = "REPLAY"


Judgement = tuple[Property, str]
"""A property that was checked, and how it is violated; an empty text means that it is not."""


class Status(StrEnum):
    """The verdict on one property."""

    HOLDS = "holds"
    VIOLATED = "violated"
    NOT_APPLICABLE = "not applicable"


def _or_dash(value: int | None) -> str:
    return "-" if value is None else str(value)


@dataclass(frozen=True, slots=True)
class Violation:
    """One violation of a property. Rank, round or step is None if unknown or if the violation has none."""

    property: Property
    what: str
    rank: int | None = None
    round: int | None = None
    step: int | None = None

    def __str__(self) -> str:
        place = f"rank {_or_dash(self.rank)} round {_or_dash(self.round)} step {_or_dash(self.step)}"
        return f"{self.property} {place}: {self.what}"


@dataclass(frozen=True, slots=True)
class PropertyVerdict:
    """The verdict on one property, with the number of instances checked, and the reason if it does not apply."""

    property: Property
    status: Status
    checked: int
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobVerdict:
    """The verdict on one epoch of one job. ``violations`` holds the first few of each property."""

    paths: tuple[str, ...]
    driver: str
    epoch: int
    ranks: int
    rounds: int
    steps: int
    samples: int
    set_aside: int
    """The samples that the traces say were set aside, which no trace can confirm."""
    outcome: str
    properties: tuple[PropertyVerdict, ...]
    violations: tuple[Violation, ...]
    unsaid: tuple[str, ...] = ()
    """The questions that these traces cannot answer, and why."""

    @property
    def is_ok(self) -> bool:
        """True when no property is violated."""
        return not self.violations

    def get_status(self, property_: Property) -> Status:
        """Returns the status of one property."""
        return next(item.status for item in self.properties if item.property is property_)


@dataclass(frozen=True, slots=True)
class Verdict:
    """The verdict on all jobs in the given files."""

    jobs: tuple[JobVerdict, ...]

    @property
    def is_ok(self) -> bool:
        """True when no job violates a property."""
        return all(job.is_ok for job in self.jobs)

    @property
    def violations(self) -> tuple[Violation, ...]:
        """The violations of all jobs."""
        return tuple(violation for job in self.jobs for violation in job.violations)


KEPT_VIOLATIONS: Final = 5
"""The most violations kept of one property. The first ones show the cause; the others follow from it."""


class Findings:
    """Collects the checks made and the violations found."""

    __slots__ = ("_counts", "_violations", "checked")

    def __init__(self) -> None:
        self.checked: Counter[Property] = Counter()
        """The number of instances checked of each property."""
        self._counts: Counter[Property] = Counter()
        self._violations: list[Violation] = []

    def violate(
        self,
        property_: Property,
        what: str,
        *,
        rank: int | None = None,
        round_: int | None = None,
        step: int | None = None,
    ) -> None:
        """Notes a violation."""
        self.checked[property_] += 1
        self._counts[property_] += 1
        if self._counts[property_] <= KEPT_VIOLATIONS:
            self._violations.append(Violation(property_, what, rank, round_, step))

    def judge(
        self, not_applicable: dict[Property, str], ignored: frozenset[Property] = frozenset()
    ) -> tuple[PropertyVerdict, ...]:
        """Returns a verdict for each property. ``not_applicable`` holds the reasons of those that do not apply. A violated
        property counts as violated all the same, unless it is ``ignored``.
        """
        return tuple(self._judge(item, not_applicable.get(item, ""), is_ignored=item in ignored) for item in Property)

    def get_violations(self, ignored: frozenset[Property]) -> tuple[Violation, ...]:
        """Returns the violations in the order they were found, without those of the properties ``ignored``."""
        return tuple(item for item in self._violations if item.property not in ignored)

    def _judge(self, property_: Property, reason: str, *, is_ignored: bool) -> PropertyVerdict:
        checked = self.checked[property_]
        if self._counts[property_] and not is_ignored:
            return PropertyVerdict(property_, Status.VIOLATED, checked)
        if reason or not checked:
            return PropertyVerdict(property_, Status.NOT_APPLICABLE, 0, reason or "nothing to check in this trace")
        return PropertyVerdict(property_, Status.HOLDS, checked)
