"""The messages between the training process and the loader process: each a value that can be pickled.

The training process sends calls of methods of the sample service, which the loader process makes (`operator.methodcaller`), and
None to end it. The loader process sends a `Notice` in an `EpochNotice`: it is dropped where it arrives when that epoch is over.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from odb_ref.torch.reading.service import ReadItem


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
