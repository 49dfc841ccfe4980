"""Sets bad samples aside: they are not trained on, but counted and reported.

The core numbers a rank's samples without gaps (R1.1) and never sees a bad one. Its *positions* count only good samples. A
*place* counts everything the sampler lists, good or bad. `Quarantine` maps one to the other. Spec: R11.
"""

from __future__ import annotations

import contextlib
import sys
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from torch.utils.data import Dataset

from odb_ref.core.errors import OdbError
from odb_ref.core.resume import RoundStart
from odb_ref.torch.reading.description import describe
from odb_ref.torch.reading.measure import Measured

SAVED_CAUSE: Final = "before the state was saved"
"""The cause recorded for bad samples that come from a saved state."""

KEPT_RECORDS: Final = 100
"""How many bad samples are recorded with their causes. All are counted."""

SHARE_FLOOR: Final = 10
"""A limit given as a share above 0 always allows this many bad samples."""


class OnBadSample(StrEnum):
    """What to do with a sample that cannot be read or measured."""

    FAIL = "fail"
    """End the epoch on every rank."""
    QUARANTINE = "quarantine"
    """Set the sample aside."""


class BadSampleWarning(UserWarning):
    """A sample was set aside. Issued once per epoch on each rank."""


class QuarantineError(OdbError, ValueError):
    """Too many bad samples, or a sample that a saved epoch needs is bad."""


# Where samples are read --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class BadSample:
    """Takes the place of a sample."""

    cause: str


MeasureFn = Callable[[Sequence[object]], Sequence[object]]
"""Maps samples to `Measured` ones, or to `BadSample` if a guard caught an error."""


def measure_guarded(measure: MeasureFn, samples: Sequence[object]) -> Sequence[object]:
    """Returns one item for each of ``samples``: a `BadSample` for one that cannot be measured."""
    if not any(isinstance(sample, BadSample) for sample in samples):
        with contextlib.suppress(Exception):  # measuring one by one finds the bad sample
            return measure(samples)
    return [_measure_one(measure, sample) for sample in samples]


def _measure_one(measure: MeasureFn, sample: object) -> object:
    if isinstance(sample, BadSample):
        return sample
    try:
        (item,) = measure([sample])
    except Exception as error:  # whatever length_fn raises
        return BadSample(describe(error))
    return item


def find_good(dataset: Dataset[object], measure: MeasureFn, tries: int) -> object:
    """Returns the first good sample among the first ``tries`` of a data set, as measured.

    Raises: QuarantineError when none is good.
    """
    for index in range(tries):
        with contextlib.suppress(Exception):  # any error marks a bad sample
            (item,) = measure([dataset[index]])
            if isinstance(item, Measured):
                return item.sample
    raise QuarantineError(
        f"none of the first {tries} samples is good, so none can be replayed in idle steps: pass Protocol(idle_sample=)"
    )


# Where samples are counted -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Quarantined:
    """A sample that was set aside: its key (for an iterable data set its place), and the cause."""

    index: object
    cause: str


class Places:
    """Maps *positions*, which count a rank's good samples without gaps, to *places*, and back. Stored as runs.

    With a shard of its own, the rank's first sample is at ``place``, and all later places follow except those ``left_out``.
    With shared shards (``is_drawn``) the rank draws runs of places. They follow ``carried`` (position, place) pairs.
    """

    def __init__(
        self,
        position: int = 0,
        place: int = 0,
        *,
        left_out: Iterable[int] = (),
        is_drawn: bool = False,
        carried: Iterable[tuple[int, int]] = (),
    ) -> None:
        self._left_out = sorted(left_out)
        pairs = list(carried)
        self._positions, self._places = [one for one, _ in pairs], [other for _, other in pairs]
        self._next = position
        """The position of the next sample drawn."""
        self.end = place if is_drawn else None
        """All samples that a rank has drawn are before this place. None with a shard of its own."""
        if not is_drawn:
            self._add_runs(place, sys.maxsize)

    @classmethod
    def resume(cls, start: RoundStart, carried: Sequence[int], left_out: Iterable[int]) -> Places:
        """Returns the places at the start of a round with shared shards, including those drawn for it. Spec: R14.6."""
        pairs = zip(start.carried, carried, strict=True)
        drawn = range(start.draw.first, start.draw.first + start.draw.count)
        begin = drawn.stop if start.is_ended else drawn.start  # an order that has ended was drawn for an earlier round
        found = cls(start.read_samples, begin, left_out=left_out, is_drawn=True, carried=pairs)
        found.draw(drawn)
        return found

    def draw(self, places: range) -> None:
        """Appends places that were drawn. Ignores a draw that is already known."""
        if self.end is not None and len(places) and places.start >= self.end:
            self._add_runs(places.start, places.stop)
            self.end = places.stop

    def _add_runs(self, begin: int, end: int) -> None:
        for left in (*self._left_out[bisect_left(self._left_out, begin) : bisect_left(self._left_out, end)], end):
            if begin < left:
                self._positions.append(self._next)
                self._places.append(begin)
                self._next += left - begin
            begin = left + 1

    def skip(self, place: int) -> None:
        """Leaves out a further place."""
        run = bisect_right(self._places, place) - 1
        position = self._positions[run] + place - self._places[run]
        self._positions[run + 1 :] = [other - 1 for other in self._positions[run + 1 :]]
        self._next -= 1
        self._positions.insert(run + 1, position)
        self._places.insert(run + 1, place + 1)
        for empty in (run + 1, run):  # of the two parts
            ends = self._positions[empty + 1] if empty + 1 < len(self._positions) else self._next
            if self._positions[empty] == ends:
                del self._positions[empty], self._places[empty]

    def get_place(self, position: int) -> int:
        """Returns the place of the good sample at ``position``, as far as is known."""
        run = bisect_right(self._positions, position) - 1
        return self._places[run] + position - self._positions[run]

    def get_position(self, place: int) -> int:
        """Returns the position of the good sample at ``place``."""
        run = bisect_right(self._places, place) - 1
        return self._positions[run] + place - self._places[run]


class Quarantine:
    """The samples that one rank has set aside in one epoch. Only one thread may change it at a time."""

    def __init__(
        self,
        get_key: Callable[[int], object],
        *,
        max_bad: float,
        total_samples: int | None,
        bad: Iterable[int] = (),
        known_places: int = 0,
        places: Places | None = None,
    ) -> None:
        self._get_key = get_key
        self._max_bad = max_bad
        self._total_samples = total_samples
        self._bad = list(bad)
        self.places = Places(left_out=self._bad) if places is None else places
        self._known_places = known_places
        self._records = [Quarantined(get_key(place), SAVED_CAUSE) for place in self._bad[:KEPT_RECORDS]]
        self._last = Quarantined(get_key(self._bad[-1]), SAVED_CAUSE) if self._bad else None
        self._is_told = False

    @property
    def count(self) -> int:
        """Number of samples set aside."""
        return len(self._bad)

    @property
    def records(self) -> tuple[Quarantined, ...]:
        """The first samples set aside, at most `KEPT_RECORDS`."""
        return tuple(self._records)

    def get_bad_places(self, begin: int = 0, end: int = sys.maxsize) -> tuple[int, ...]:
        """Returns the places set aside from ``begin`` up to, but not including, ``end``."""
        return tuple(self._bad[bisect_left(self._bad, begin) : bisect_left(self._bad, end)])

    def take_warning(self) -> str:
        """Returns a warning, once, as soon as a sample was set aside. Otherwise returns an empty string."""
        if self._is_told or not self._records:
            return ""
        self._is_told = True
        first = self._records[0]
        return (
            f"the sample {first.index!r} was set aside: {first.cause} (more may follow: see ODBDataLoader.quarantined)"
        )

    def add(self, place: int, cause: str) -> str:
        """Sets the sample at ``place`` aside, which must follow those set aside before. Returns an error message or "".

        It is an error if there are too many, or if the sample was good when the epoch was saved. Spec: R11.1, R11.2, R11.3.
        Preserves: REPLAY, RESUME.
        """
        if place < self._known_places:
            return f"the sample {self._get_key(place)!r} was good before the state was saved, but cannot be read now: {cause}"
        self._bad.append(place)
        read_samples = self.places.get_position(place) + len(self._bad)
        self.places.skip(place)
        self._last = Quarantined(self._get_key(place), cause)
        if len(self._records) < KEPT_RECORDS:
            self._records.append(self._last)
        limit = self._compute_limit(read_samples)
        if len(self._bad) <= limit:
            return ""
        return (
            f"{len(self._bad)} bad samples, but max_bad_samples={self._max_bad} allows only {limit} on this rank. The last is "
            f"{self.describe_last()}"
        )

    def _compute_limit(self, read_samples: int) -> int:
        if isinstance(self._max_bad, int) or not self._max_bad:
            return int(self._max_bad)
        known = read_samples if self._total_samples is None else self._total_samples
        return max(SHARE_FLOOR, int(self._max_bad * known))

    def describe_last(self) -> str:
        """Returns the key and cause of the last sample set aside."""
        return "" if self._last is None else f"{self._last.index!r}: {self._last.cause}"

    def find_emptiness(self) -> str:
        """Returns an error message if the data end without one good sample, or an empty string. Spec: R11.2."""
        if len(self._bad) < 2:
            return ""
        return f"all {len(self._bad)} samples of this rank are bad. The last is {self.describe_last()}"

    def get_known(self, good_samples: int, is_all: bool) -> int:
        """Returns how many places hold the first ``good_samples`` good samples. If these are all (``is_all``), bad samples
        after the last one count too. With shared shards, returns the end of all draws, which are always read completely.

        Spec: R11.3. Preserves: RESUME.
        """
        if self.places.end is not None:
            return self.places.end
        last = self.places.get_place(good_samples - 1) if good_samples else -1
        return max(last, self._bad[-1]) + 1 if is_all and self._bad else last + 1
