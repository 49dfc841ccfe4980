"""The machine of a rank as the trainer's side knows it: its last summary, and the events it has not answered yet.

The machine is with the samples, perhaps in another process. Should it be lost, a stand-in goes on here from the last summary,
as a rank that has failed. Spec: R7.6.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from odb_ref.core.config import Config
from odb_ref.core.effects import OutcomeKind
from odb_ref.core.events import Agreed, Event, PeerLost
from odb_ref.core.state import Phase
from odb_ref.core.summary import StateSummary
from odb_ref.torch.backend.driver import Driver
from odb_ref.torch.backend.messages import Listener, Update
from odb_ref.torch.plan.start import EpochStart


class RemoteMachine:
    """Submits events, and follows what becomes of them. Its owner holds a lock around each call."""

    def __init__(self, config: Config, submit: Callable[[Event, float | None], None]) -> None:
        self._config = config
        self._handle = submit
        self._unanswered: deque[Event] = deque()
        self.summary: StateSummary | None = None
        """The state after the last event it has told of; None before the first."""

    def submit(self, event: Event, at_s: float | None = None) -> None:
        """Has the machine handle an event; ``at_s`` is when it happened, if not now. Does not wait for that."""
        self._unanswered.append(event)
        self._handle(event, at_s)

    def note(self, update: Update) -> None:
        """Follows the machine: it has handled an event."""
        if update.is_answer:
            self._unanswered.popleft()
        self.summary = update.summary

    def stand_in(self, cause: str, listener: Listener) -> None:
        """Goes on from the last summary as a rank that has failed, and hands it what the lost machine has not answered."""
        unanswered = tuple(self._unanswered)
        driver = Driver(self._config, EpochStart(keys=()), listener)
        self._handle = driver.submit
        driver.fail(cause, self.summary)
        for event in unanswered:
            driver.submit(event)

    @property
    def is_done(self) -> bool:
        """True when the epoch is over for it: steps are still taken, but nothing happens by itself."""
        return self.summary is not None and self.summary.phase is Phase.DONE

    @property
    def is_silent(self) -> bool:
        """True when it has answered every event."""
        return not self._unanswered

    def is_answered(self, event: Event) -> bool:
        """Returns True when it has answered this very event."""
        return all(item is not event for item in self._unanswered)

    @property
    def limit(self) -> int:
        """Steps numbered below this may be taken: none while an event is unanswered that may lower the limit."""
        if self.summary is None or any(isinstance(event, Agreed | PeerLost) for event in self._unanswered):
            return 0  # Spec: R7.4, R7.5
        return min(self.summary.delivered_steps, self.summary.step_limit)

    def count_ready(self, number: int) -> int:
        """Returns how many steps may be taken from ``number`` on before more must have been planned, or 1."""
        return 1 if self.summary is None else max(1, self.summary.released_steps - number - 1)

    def is_planned(self, number: int) -> bool:
        """Returns True when the step of this number is planned, or never will be."""
        return self.summary is not None and (self.summary.planned_steps > number or self.summary.is_ending)

    @property
    def is_complete(self) -> bool:
        """True when the epoch ends, on all ranks, by its completion."""
        outcome = self.summary.outcome if self.summary is not None else None
        return outcome is not None and outcome.kind is OutcomeKind.COMPLETE

    def is_last(self, number: int) -> bool:
        """Returns True when the epoch ends with the step of this number, on all ranks.

        Of one that is broken off no step is: who takes it early cannot know, and ranks would differ. Spec: R7.1.
        """
        return self.is_complete and self.summary is not None and number + 1 >= self.summary.planned_steps
