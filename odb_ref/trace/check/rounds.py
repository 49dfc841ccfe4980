"""What every rank must see alike in a round, and the quota: followed once for all ranks, at the first that gets there."""

from __future__ import annotations

from typing import Final

from odb_ref.trace.check.decode import Rows
from odb_ref.trace.check.own.draws import DrawnPlaces
from odb_ref.trace.check.verdict import Findings, Property

_KEPT: Final = 32
"""At least so many rounds are kept."""


class Rounds:
    """The rounds of a job: number of steps, samples emitted."""

    def __init__(self, quota_samples: int | None) -> None:
        self._quota_samples = quota_samples
        self._start: tuple[int, int, int] | None = None
        """Round, steps and samples of all ranks at which the first rank began: the next three, once it has."""
        self.first_round = 0
        self.steps_before = 0
        """Steps planned before the first round of the trace; likewise samples of all ranks."""
        self.planned_samples_before = 0
        self.count = 0
        """How many rounds the trace has had."""
        self.empty_count = 0
        """How many of them made no step: those that only draw a part of an update, or one without a good sample."""
        self.steps: list[int] = []
        """Steps of the last rounds: no rank of a right trace is more than one behind another."""
        self.total_steps = 0
        self.samples_before: list[int] = [0]
        """Samples of all ranks planned before each of those rounds, and after the last."""
        self.places = DrawnPlaces()
        """What the ranks have drawn of a common order, if they share one."""

    def begin(self, first_round: int, planned_steps: int, planned_samples: int) -> bool:
        """Notes where a rank begins, zeros but for a resumed epoch. False when it differs from others in the same round.

        Ranks that begin in different rounds are not a mistake of the trace: they must end with a mismatch (R7.3).
        """
        start = first_round, planned_steps, planned_samples
        if self._start is None:
            self._start = self.first_round, self.steps_before, self.planned_samples_before = start
            self.total_steps = planned_steps
            self.samples_before = [planned_samples]
        return start == self._start or first_round != self._start[0]

    def _get_index(self, number: int) -> int:
        """Returns where round ``number`` stands among those kept."""
        return number - self.first_round - (self.count - len(self.steps))

    def is_quota_met(self, number: int) -> bool:
        """Returns True when the rounds before ``number`` have emitted the quota. False when they are not known."""
        index = self._get_index(number)
        if self._quota_samples is None or not 0 <= index < len(self.samples_before):
            return False
        return self.samples_before[index] >= self._quota_samples

    def note_round(self, rank: int, number: int, counted: Rows, steps: int, findings: Findings) -> int:
        """Returns how many steps other ranks have in round ``number``; ``steps``, when this rank is the first to say."""
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
