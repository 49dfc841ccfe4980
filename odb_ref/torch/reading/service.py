"""The interface of a sample service, which reads, measures and holds samples, and makes batches of them; nothing else.

A service knows nothing about rounds, offers or outcomes. It takes two kinds of requests: `SampleService.read` (or `draw`, for
an order shared with other ranks) and `collate`. It answers with `SampleListener.on_read` and `on_batch`, and may report a
failure. `ReadPipeline` runs in this process, `LoaderProcess` in one of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

END_S: Final = 0.5
"""How long the end of an epoch waits for a thread in the user's code, which may never return, for example from a lost mount."""

ReadItem = tuple[int, int, int, tuple[int, ...]]
"""A sample as the machine sees it: place in the sampler's order, length, supervised tokens, further costs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadPlan:
    """What to read in an epoch: the keys of a map-style data set in order, and their ``places`` in the sampler's order.

    If ``keys`` is None, the data set is iterable and read from its beginning. The plan keeps all places from ``first`` on
    except the ``dropped`` ones, and the ``kept`` places before it. Others are read for idle steps only. ``seed`` is the epoch's
    seed on this rank.
    """

    keys: Sequence[object] | None
    places: Sequence[int] = ()
    first: int = 0
    kept: frozenset[int] = frozenset()
    dropped: frozenset[int] = frozenset()
    seed: int = 0
    is_drawn: bool = False
    """True with shared shards: after these keys, samples are read as they are drawn during the epoch."""

    def has(self, place: int) -> bool:
        """Returns True if the plan keeps the sample at ``place``."""
        return place in self.kept or (place >= self.first and place not in self.dropped)


@dataclass(frozen=True, slots=True)
class BatchRequest:
    """A batch to make for a step, from the samples at ``places``, or an idle one. If unwanted, its samples are only dropped."""

    number: int
    places: tuple[int, ...]
    is_wanted: bool = True


class SampleListener(Protocol):
    """Receives a service's answers, on threads of the service. Answers may arrive after the epoch's end, from a thread that was
    still in the user's code, and must then be ignored.
    """

    def on_read(self, items: Sequence[ReadItem], *, is_ended: bool, is_full: bool) -> None:
        """Answers one `read` or `draw` with the requested items; with fewer only at the end, or if the window is full."""

    def on_warning(self, text: str) -> None:
        """Warns that something about the data or a function is probably not what the user intended."""

    def on_bad(self, place: int, cause: str) -> None:
        """Reports a sample that was set aside, before any sample that follows it."""

    def on_batch(self, number: int, batch: object) -> None:
        """Answers one request of a `collate`. Batches arrive in any order, and may be `Packed`."""

    def on_error(self, cause: str, error: BaseException) -> None:
        """Reports that reading, collating or the process doing it failed, with a one-line ``cause``. No more answers follow."""


class SampleService(Protocol):
    """Reads and collates for one rank, one epoch at a time."""

    def begin(self, plan: ReadPlan, listener: SampleListener, read_ahead: int) -> None:
        """Starts an epoch. The service may read up to ``read_ahead`` samples before they are requested.

        Raises: errors from starting a process.
        """

    def read(self, count: int, held: tuple[int, ...] | None = None, end: int | None = None) -> None:
        """Requests ``count`` samples without waiting. If the window's bytes are bounded, ``held`` lists the places of the
        samples that it already holds. With ``end`` requests all samples before this place, which are ``count`` if none is bad.
        """

    def draw(self, items: Sequence[tuple[int, object]], count: int, *, is_last: bool) -> None:
        """Adds samples that were drawn from an order shared with other ranks, as places and keys; ``is_last`` if no more
        follow. Requests the first ``count`` of all added samples that were not requested before. The others are read ahead.
        """

    def collate(self, requests: tuple[BatchRequest, ...]) -> None:
        """Requests batches without waiting."""

    def describe(self) -> str:
        """Describes the pending requests in words. Empty if there are none."""

    @property
    def is_inline(self) -> bool:
        """True if reading and collating happen on the consumer's thread, in `work`."""

    @property
    def has_work(self) -> bool:
        """True if there is something for `work` to do."""

    def work(self, steps: int, is_enough: Callable[[], bool] | None = None) -> None:
        """Does a share of the pending work, so that ``steps`` calls do it all. Stops early once ``is_enough`` returns True.

        Raises: exceptions of user code that do not derive from Exception.
        """

    def stop(self) -> None:
        """Stops reading and collating. Does not wait."""

    def end(self) -> None:
        """Ends the epoch and drops all samples and batches."""

    def close(self) -> None:
        """Ends the epoch, and all processes that outlive one."""
