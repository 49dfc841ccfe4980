"""What one rank hands out: the steps released, delivered and taken, up to the limit where the epoch ends. Spec: R6.6, R7."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Final

from odb_ref.core.effects import OutcomeKind
from odb_ref.core.offer import NONE
from odb_ref.trace.check.decode import TracedFinish
from odb_ref.trace.check.verdict import Judgement, Property

_WHOSE_LIMIT: Final[dict[str, Property]] = {
    OutcomeKind.COMPLETE: Property.ALIGN,
    OutcomeKind.STOPPED: Property.STOP,
    OutcomeKind.LOST: Property.ABORT,
}
"""The property that a wrong step limit violates. After a failure it is RELEASE, because all released steps are handed out."""


class Output:
    """Follows the steps of one rank from their release to the end."""

    def __init__(self) -> None:
        self.released_steps = 0
        self.delivered_steps = 0
        self.taken_steps = 0
        self.begun_updates = 0
        """Counts updates with a step taken, in the same units as ``taken_updates``."""
        self.taken_updates = 0
        """Counts updates taken to their end, or steps without updates. All ranks count from the same start."""
        self.update_ends: deque[int] = deque()
        """For each planned update not yet taken to its end, the number of steps after which it ends."""
        self.step_limit = NONE
        """The lowest limit known."""
        self.most_queued_steps = 0
        """The fullest the queue has been, which is its depth as far as it mattered."""
        self._depth_steps = NONE
        """What the queue held when a step was held back, so that it has no room for more."""
        self.stopped_after: int | None = None
        """The steps taken when the consumer left, if the rank was still running."""
        self.has_left = False
        self.finish: TracedFinish | None = None

    @property
    def is_done(self) -> bool:
        """True when the rank has ended, and its consumer has taken all it may or has left."""
        return self.finish is not None and (self.has_left or self.taken_steps >= self.finish.step_limit)

    @property
    def is_with_consumer(self) -> bool:
        """True when only the consumer can go on: the rank has ended, or knows its end and its queue is full."""
        is_full = bool(self.held_back_steps) and self.taken_steps < self.delivered_steps
        return self.finish is not None or (self.step_limit != NONE and is_full)

    @property
    def is_out(self) -> bool:
        """True when the consumer takes no further step, because it has left or its rank ended LOST."""
        return self.has_left or (self.finish is not None and self.finish.kind == OutcomeKind.LOST)

    @property
    def held_back_steps(self) -> int:
        """The number of steps that may be delivered but are not."""
        return max(0, min(self.released_steps, self.step_limit) - self.delivered_steps)

    def resume(self, steps: int) -> None:
        """Begins after ``steps`` steps."""
        self.released_steps = self.delivered_steps = self.taken_steps = steps
        self.begun_updates = self.taken_updates = steps

    def plan_update(self, end: int) -> None:
        """Notes that an update ends after ``end`` steps. Call it for every update of the epoch, or for none."""
        self.update_ends.append(end)

    def limit(self, steps: int) -> None:
        """Notes that no step from this number on may be handed out."""
        self.step_limit = min(self.step_limit, steps)

    def deliver(self, number: int) -> Iterator[Judgement]:
        """Puts a step into the queue. Yields the judgements on it."""
        yield Property.ALIGN, "" if number == self.delivered_steps else "is not the next step to deliver"
        what = "is delivered before all ranks have said that they are ready for it"
        yield Property.RELEASE, "" if number < self.released_steps else what
        if self.stopped_after is not None:
            yield Property.STOP, "" if number < self.stopped_after else "is delivered after the consumer left"
        self.delivered_steps = max(self.delivered_steps, number + 1)

    def take(self) -> Iterator[Judgement]:
        """Takes the next step out of the queue. Yields the judgements on it."""
        number = self.taken_steps
        yield Property.RELEASE, "" if number < self.delivered_steps else "is taken before it is delivered"
        if self.has_left:
            yield Property.STOP, "is taken by a consumer that has left"
        elif number >= self.step_limit:
            is_lost = self.finish is not None and self.finish.kind == OutcomeKind.LOST
            yield Property.ABORT if is_lost else Property.STOP, f"is taken, but the limit is {self.step_limit}"
        self.taken_steps += 1
        self.begun_updates = self.taken_updates + 1
        if not self.update_ends or self.taken_steps >= self.update_ends[0]:
            self.taken_updates = self.begun_updates
            if self.update_ends:
                self.update_ends.popleft()

    def leave(self) -> None:
        """Notes that the consumer leaves."""
        self.has_left = True
        if self.finish is None and self.stopped_after is None:
            self.stopped_after = self.taken_steps
            self.limit(self.taken_steps)

    def judge_queue(self) -> Iterator[Judgement]:
        """Judges FREE: steps must be delivered while there is room. Yields the judgements. Call it after each record.

        A trace does not record the queue's depth, but the depth never changes.
        """
        queued = max(0, self.delivered_steps - self.taken_steps)
        if self.held_back_steps and self.finish is None:
            what = f"holds a step back with {queued} in the queue, which has had room for {self.most_queued_steps}"
            yield Property.FREE, what if queued < self.most_queued_steps else ""
            self._depth_steps = min(self._depth_steps, queued)
        self.most_queued_steps = max(self.most_queued_steps, queued)
        if queued > self._depth_steps:
            yield Property.FREE, f"has {queued} steps in the queue, which has room for {self._depth_steps}"

    def end(self, finish: TracedFinish) -> Iterator[Judgement]:
        """Notes that the rank finishes. Yields the judgement on its step limit."""
        self.finish = finish
        property_ = _WHOSE_LIMIT.get(finish.kind, Property.RELEASE)
        if self.stopped_after is not None and self.step_limit >= self.stopped_after:
            property_ = Property.STOP
        most = "has not ended" if self.step_limit == NONE else f"ends for it after {self.step_limit}"
        what = f"may take {finish.step_limit} steps; the epoch {most}"
        yield property_, "" if finish.step_limit == self.step_limit else what
