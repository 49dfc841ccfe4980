"""The messages between the training process and the loader process: each a value that can be pickled.

The training process sends a `Request`, the loader process a `Notice` in an `EpochNotice`, which is dropped where it arrives
when that epoch is over.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from odb_ref.torch.reading.service import BatchRequest, ReadItem, ReadPlan

# To the loader process ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class BeginEpoch:
    """Begin an epoch; the one before has ended."""

    epoch: int
    plan: ReadPlan
    read_ahead: int
    handled_signals: tuple[int, ...]
    """Those that the user handles, in the training process."""


@dataclass(frozen=True, slots=True)
class ReadRequest:
    """Answer with `SamplesMeasured`: so many samples, or as many as there is room for beside those ``held``, by place, or all
    before the place ``end``.
    """

    count: int
    held: tuple[int, ...] | None
    end: int | None


@dataclass(frozen=True, slots=True)
class DrawRequest:
    """Read these places and keys; answer with `SamplesMeasured`, of the first ``count`` that were not asked for before."""

    items: Sequence[tuple[int, object]]
    count: int
    is_last: bool


@dataclass(frozen=True, slots=True)
class CollateRequest:
    """Answer with a `BatchMade` for each."""

    requests: tuple[BatchRequest, ...]


@dataclass(frozen=True, slots=True)
class StopRequest:
    """Read and collate no more in this epoch."""


@dataclass(frozen=True, slots=True)
class EndEpoch:
    """Drop what is held; the workers stay for the next epoch."""


@dataclass(frozen=True, slots=True)
class Exit:
    """End the epoch, the workers and the process."""


Request = BeginEpoch | ReadRequest | DrawRequest | CollateRequest | StopRequest | EndEpoch | Exit

# To the training process -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SamplesMeasured:
    """What was read: of each sample its place, length, supervised tokens and further costs, packed."""

    rows: array[int]
    count: int
    is_ended: bool
    is_full: bool

    @classmethod
    def pack(cls, items: Sequence[ReadItem], *, is_ended: bool, is_full: bool) -> SamplesMeasured:
        """Returns the message."""
        rows = array("q")
        for place, length, supervised, costs in items:
            rows.extend((place, length, supervised, *costs))
        return cls(rows, len(items), is_ended, is_full)

    def unpack(self) -> Iterator[ReadItem]:
        """Yields the samples."""
        width = len(self.rows) // max(1, self.count)
        for first in range(0, len(self.rows), width or 1):
            place, length, supervised, *costs = self.rows[first : first + width]
            yield place, length, supervised, tuple(costs)


@dataclass(frozen=True, slots=True)
class BatchMade:
    """The batch of a step, packed."""

    number: int
    packed: object


@dataclass(frozen=True, slots=True)
class SetAside:
    """The sample at a place of the sampler's order was set aside."""

    place: int
    cause: str


@dataclass(frozen=True, slots=True)
class WarningText:
    """Something about the data or a function is probably not what the user means."""

    text: str


@dataclass(frozen=True, slots=True)
class Failed:
    """Reading or collating has failed: why in a line, and the traceback."""

    cause: str
    traceback: str


Notice = SamplesMeasured | BatchMade | SetAside | WarningText | Failed


@dataclass(frozen=True, slots=True)
class EpochNotice:
    """What has happened in an epoch."""

    epoch: int
    notice: Notice


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """The loader process runs."""

    doing: str
    """What it is asked for and has under way."""
