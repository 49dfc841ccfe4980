"""The messages between the training process and the loader process: each a value that can be pickled.

The training process sends an `Order`, the loader process an `Answer`: mostly a `Report` of an epoch, which is dropped where it
arrives when that epoch is over.
"""

from __future__ import annotations

from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import TypeAlias

from odb_ref.core.errors import OdbError
from odb_ref.core.events import Event
from odb_ref.torch.backend.messages import Update
from odb_ref.torch.plan.start import EpochStart

Link: TypeAlias = "Connection[object, object]"
"""One end of the pipe between the two."""

# To the loader process ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class BeginEpoch:
    """Begin an epoch; the one before has ended."""

    epoch: int
    start: EpochStart


@dataclass(frozen=True, slots=True)
class Submit:
    """Have the machine handle an event, which happened at ``at_s`` if that is not None."""

    epoch: int
    event: Event
    at_s: float | None


@dataclass(frozen=True, slots=True)
class CloseTrace:
    """Complete the trace, and answer `TraceClosed`."""

    epoch: int


@dataclass(frozen=True, slots=True)
class EndEpoch:
    """End the epoch; the workers stay for the next."""


@dataclass(frozen=True, slots=True)
class Exit:
    """End the epoch, the workers and the process."""


Order = BeginEpoch | Submit | CloseTrace | EndEpoch | Exit

# To the training process -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Alive:
    """The loader process runs."""

    doing: str
    """What it is asked for and has under way."""


@dataclass(frozen=True, slots=True)
class Batch:
    """A step's batch, packed; comes before the `RoundCollated` of its round."""

    number: int
    packed: object


@dataclass(frozen=True, slots=True)
class RoundCollated:
    """All batches of a round have been sent."""

    round: int


@dataclass(frozen=True, slots=True)
class SetAside:
    """The sample at a place of the sampler's order was set aside."""

    place: int
    cause: str


@dataclass(frozen=True, slots=True)
class Doubt:
    """Something about the data or a function is probably not what the user means."""

    text: str


@dataclass(frozen=True, slots=True)
class ReadFailed:
    """Reading or collating has failed; the machine knows. The text is a traceback."""

    text: str


@dataclass(frozen=True, slots=True)
class Broken:
    """The machine cannot go on: an error of ours, or the traceback of any other."""

    error: OdbError | str


@dataclass(frozen=True, slots=True)
class Lost:
    """The machine is lost: why in a line, and the traceback."""

    cause: str
    text: str


Notice = Update | Batch | RoundCollated | SetAside | Doubt | ReadFailed | Broken | Lost


@dataclass(frozen=True, slots=True)
class Report:
    """What has happened in an epoch."""

    epoch: int
    notice: Notice


@dataclass(frozen=True, slots=True)
class TraceClosed:
    """The trace of an epoch is complete."""

    epoch: int


Answer = Report | TraceClosed | Alive
