"""What the trainer's side is told of the samples set aside: for the state, the counters and the warning.

The one book that decides is `Quarantine`, where samples are read; this is its list of entries, without a rule of its own.
"""

from __future__ import annotations

from bisect import bisect_left

from odb_ref.torch.plan.start import EpochStart
from odb_ref.torch.reading.quarantine import SAVED_CAUSE, Quarantined

KEPT_RECORDS = 100
"""So many bad samples are kept with their causes; all are counted."""


class BadSampleLog:
    """The places set aside on this rank in this epoch, in the order of the sampler."""

    def __init__(self, start: EpochStart) -> None:
        self._get_key = start.get_key
        self._places = list(start.progress.bad)
        self._records = [Quarantined(start.get_key(place), SAVED_CAUSE) for place in self._places[:KEPT_RECORDS]]
        self._is_told = False

    def add(self, place: int, cause: str) -> None:
        """Adds a place that lies behind those added before."""
        self._places.append(place)
        if len(self._records) < KEPT_RECORDS:
            self._records.append(Quarantined(self._get_key(place), cause))

    @property
    def count(self) -> int:
        """How many samples were set aside."""
        return len(self._places)

    @property
    def records(self) -> tuple[Quarantined, ...]:
        """The first of them, at most `KEPT_RECORDS`."""
        return tuple(self._records)

    def get_places(self, known: int) -> tuple[int, ...]:
        """Returns those among the first ``known`` places."""
        return tuple(self._places[: bisect_left(self._places, known)])

    def take_warning(self) -> str:
        """Returns what to warn of: once, as soon as a sample was set aside; otherwise empty."""
        if self._is_told or not self._records:
            return ""
        self._is_told = True
        first = self._records[0]
        return (
            f"the sample {first.index!r} was set aside: {first.cause} (more may follow: see ODBDataLoader.quarantined)"
        )
