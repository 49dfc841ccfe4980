"""What the two sides of a loader tell each other in an epoch.

One side is where samples are read and batches formed: a `Driver` with its machine. The other, the `TrainerSide`, is where the
model is trained: it holds the ready steps and the exchange. They may be two processes, so what goes from one to the other is
values: see `wire` for how these travel.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from odb_ref.core.effects import Post
from odb_ref.core.events import Event
from odb_ref.core.summary import StateSummary
from odb_ref.torch.backend.notes import RoundNote
from odb_ref.torch.plan.start import EpochStart


@dataclass(frozen=True, slots=True)
class Update:
    """What an event has led to, as far as the trainer's side needs to know."""

    summary: StateSummary
    post: Post | None = None
    planned: RoundNote | None = None
    is_answer: bool = False
    """True when the event came from the trainer's side: the oldest that was not answered."""
    is_finished: bool = False
    """True for the one update that ends the epoch: no post follows."""


class Listener(Protocol):
    """The trainer's side, as the other side sees it; called from its threads, one update at a time."""

    def on_update(self, update: Update) -> None:
        """Hears that the machine has handled an event."""
        ...

    def on_batch(self, number: int, batch: object) -> None:
        """The batch of a step; those of a round come in any order."""
        ...

    def on_collated(self, round_: int) -> None:
        """All batches of a round have come. To be answered with `Collated`."""
        ...

    def on_doubt(self, text: str) -> None:
        """Hears that something about the data or a function is probably not what the user means: to be warned of."""
        ...

    def on_bad(self, place: int, cause: str) -> None:
        """Hears that a sample was set aside; comes before any update on the samples behind it."""
        ...

    def on_error(self, error: BaseException) -> None:
        """Hears that reading or collating failed; the machine knows."""
        ...

    def on_broken(self, error: Exception) -> None:
        """Hears that the machine cannot go on: a defect of ours, of a rule, or a peer's message. Nothing more comes."""
        ...

    def on_lost(self, cause: str, error: BaseException) -> None:
        """Hears that the machine is gone, with the process that held it. Nothing more comes."""
        ...


class Backend(Protocol):
    """The side where samples are read and batches formed, as the trainer's side sees it; for one epoch at a time."""

    def begin(self, start: EpochStart, listener: Listener) -> None:
        """Starts an epoch.

        Raises: what starting a process raises.
        """
        ...

    def submit(self, event: Event, at_s: float | None = None) -> None:
        """Has the machine handle an event of the trainer's side; ``at_s`` is when it happened, if not now.

        Does not wait for that.
        """
        ...

    def describe(self) -> str:
        """Returns what is being read and collated, in words; empty when nothing that the machine waits for."""
        ...

    @property
    def is_inline(self) -> bool:
        """True when the consumer's thread reads and collates, by `work`."""
        ...

    @property
    def has_work(self) -> bool:
        """True when something waits for `work`."""
        ...

    def work(self, steps: int, limit_s: float | None = None) -> None:
        """Does a part of it, so that as many calls as ``steps`` do it all; begins nothing more after ``limit_s``.

        Raises: what user code raises that is not an Exception.
        """
        ...

    def close_trace(self) -> None:
        """Ends the trace: when it returns, it is complete."""
        ...

    def end(self) -> None:
        """Ends the epoch: what is reported from now on no longer counts."""
        ...

    def close(self) -> None:
        """Ends the epoch, and gives back workers that outlive one."""
        ...
