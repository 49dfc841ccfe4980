"""What must be the same on all ranks in a round, and the quota. The first rank to reach a round sets what others must match."""

from __future__ import annotations

from typing import Final

from odb_ref.trace.check.decode import Rows
from odb_ref.trace.check.own.draws import DrawnPlaces
from odb_ref.trace.check.verdict import Findings, Property

_KEPT: Final = 32
"""The least number of rounds kept."""


class Rounds:
    """The rounds of a job: their steps, and the samples emitted."""

    def __init__(self, quota_samples: int | None) -> None:
        self._quota_samples = quota_samples
        self._start: tuple[int, int, int] | None = None
        """The next three values, once the first rank has begun."""
        self.first_round = 0
        self.steps_before = 0
        """The steps planned before the first round of the trace."""
        self.planned_samples_before = 0
        """The samples of all ranks planned before the first round of the trace."""
        self.count = 0
        """The number of rounds so far."""
        self.empty_count = 0
        """The number of rounds without a step: they only draw a part of an update, or have no good sample."""
        self.steps: list[int] = []
        """The steps of each of the last rounds. In a correct trace no rank is more than one round behind another."""
        self.total_steps = 0
        self.samples_before: list[int] = [0]
        """The samples of all ranks planned before each of those rounds, and after the last."""
        self.places = DrawnPlaces()
        """The places the ranks have drawn of a common order, if they share one."""

    def begin(self, first_round: int, planned_steps: int, planned_samples: int) -> bool:
        """Notes where a rank begins: all zeros, except in a resumed epoch. False if others begin the same round differently.

        Ranks that begin in different rounds do not make a trace wrong; they must end with a mismatch (R7.3).
        """
        start = first_round, planned_steps, planned_samples
        if self._start is None:
            self._start = self.first_round, self.steps_before, self.planned_samples_before = start
            self.total_steps = planned_steps
            self.samples_before = [planned_samples]
        return start == self._start or first_round != self._start[0]

    def _get_index(self, number: int) -> int:
        """Returns the index of round ``number`` among those kept."""
        return number - self.first_round - (self.count - len(self.steps))

    def is_quota_met(self, number: int) -> bool:
        """Returns True when the rounds before ``number`` have emitted the quota, and False if they are not known."""
        index = self._get_index(number)
        if self._quota_samples is None or not 0 <= index < len(self.samples_before):
            return False
        return self.samples_before[index] >= self._quota_samples

    def note_round(self, rank: int, number: int, counted: Rows, steps: int, findings: Findings) -> int:
        """Returns how many steps other ranks have in round ``number``, or ``steps`` if this rank is the first there."""
        index = self._get_index(number)
        if index != len(self.steps):
            return self.steps[index] if 0 <= index < len(self.steps) else steps
        first = self.total_steps
        self.count += 1
        self.empty_count += not steps
        self.steps.append(steps)
        self.total_steps += steps
        total = self.samples_before[index]
        for offset, row in enumerate(counted[:steps]):
            if self._quota_samples is not None:
                if total >= self._quota_samples:
                    what = f"is planned when {total} samples are, and the quota is {self._quota_samples}"
                    findings.violate(Property.QUOTA, what, rank=rank, round_=number, step=first + offset)
                findings.checked[Property.QUOTA] += 1
            total += row[0]
        if steps < len(counted) and (self._quota_samples is None or total < self._quota_samples):
            what = f"round is cut to {steps} of {len(counted)} steps, but only {total} samples are planned"
            findings.violate(Property.QUOTA, what, rank=rank, round_=number)
        self.samples_before.append(total)
        if len(self.steps) > 2 * _KEPT:
            del self.steps[:_KEPT], self.samples_before[:_KEPT]
        return steps

    @property
    def total_samples(self) -> int:
        """Samples planned by all ranks together."""
        return self.samples_before[-1]
