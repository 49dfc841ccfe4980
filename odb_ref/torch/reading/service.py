"""The sample service: it reads samples, tells their measures, holds them, and makes batches of them; nothing else.

It knows no round, no offer and no outcome. Two requests (`SampleService.read`, or `draw` of an order shared with other ranks,
and `collate`) with two answers (`SampleListener.on_read`, `on_batch`), a failure, an end. `ReadPipeline` is one in this
process, `LoaderProcess` one in a process of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

END_S: Final = 0.5
"""How long the end of an epoch waits for a thread in the user's code, which may never come back: a mount is gone, say."""

ReadItem = tuple[int, int, int, tuple[int, ...]]
"""A sample as the machine sees it: its place in the sampler's order, length, supervised tokens and further costs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadPlan:
    """What to read in an epoch: the keys of a map-style data set in order, and their ``places`` in the sampler's order.

    An iterable data set (``keys`` is None) is read from its beginning: all from place ``first`` on and the ``kept`` places
    before it, but for the ``dropped`` ones. ``seed`` is that of the epoch on this rank.
    """

    keys: Sequence[object] | None
    places: Sequence[int] = ()
    first: int = 0
    kept: frozenset[int] = frozenset()
    dropped: frozenset[int] = frozenset()
    seed: int = 0
    is_drawn: bool = False
    """True with shared shards: behind that, what is drawn as the epoch goes is read."""

    def has(self, place: int) -> bool:
        """Returns True when the sample of an iterable data set at ``place`` is to be read."""
        return place in self.kept or (place >= self.first and place not in self.dropped)


@dataclass(frozen=True, slots=True)
class BatchRequest:
    """A batch to make for a step: the samples at ``places``, or an idle one. An unwanted one is only cleared away."""

    number: int
    places: tuple[int, ...]
    is_wanted: bool = True


class SampleListener(Protocol):
    """Who is answered; called from threads of the service, perhaps after the epoch's end: a thread may still be in the user's
    code then, and what it reports is to be ignored.
    """

    def on_read(self, items: Sequence[ReadItem], *, is_ended: bool, is_full: bool) -> None:
        """Answers one `read` or `draw`: the items asked for, fewer only at the end, or when the window is full."""
        ...

    def on_warning(self, text: str) -> None:
        """Something about the data or a function is probably not what the user means: to be warned of."""
        ...

    def on_bad(self, place: int, cause: str) -> None:
        """A sample was set aside; comes before the samples that lie behind it."""
        ...

    def on_batch(self, number: int, batch: object) -> None:
        """Answers one of the requests of a `collate`, in any order; the batch may be `Packed`."""
        ...

    def on_error(self, cause: str, error: BaseException) -> None:
        """Reading or collating failed, as ``cause`` says in a line, or the process that does it; nothing more comes."""
        ...


class SampleService(Protocol):
    """What reads and collates for one rank, for one epoch at a time."""

    def begin(self, plan: ReadPlan, listener: SampleListener, read_ahead: int) -> None:
        """Starts an epoch; so many samples may be read before they are asked for.

        Raises: what starting a process raises.
        """
        ...

    def read(self, count: int, held: tuple[int, ...] | None = None, end: int | None = None) -> None:
        """Asks for so many samples; does not wait. They are to join those ``held``, by place, in a window whose bytes are
        bounded; None: in none. With ``end`` all those that stand before this place: so many, if none is set aside.
        """
        ...

    def draw(self, items: Sequence[tuple[int, object]], count: int, *, is_last: bool) -> None:
        """Asks for samples of an order shared with other ranks, by places and keys, perhaps the last; and asks for the first so
        many of those that are read so and were not asked for yet. The others are read ahead.
        """
        ...

    def collate(self, requests: tuple[BatchRequest, ...]) -> None:
        """Asks for batches; does not wait."""
        ...

    def describe(self) -> str:
        """Returns what is asked for and under way, in words; empty when nothing is."""
        ...

    @property
    def is_inline(self) -> bool:
        """True when the consumer's thread reads and collates, by `work`."""
        ...

    @property
    def has_work(self) -> bool:
        """True when something waits for `work`."""
        ...

    def work(self, steps: int, is_enough: Callable[[], bool] | None = None) -> None:
        """Does a part of what waits, so that ``steps`` calls do it all; begins nothing more when that ``is_enough``.

        Raises: what user code raises that is not an Exception.
        """
        ...

    def stop(self) -> None:
        """Asks for no more to be read or collated. Does not wait."""
        ...

    def end(self) -> None:
        """Ends the epoch and drops what is held."""
        ...

    def close(self) -> None:
        """Ends the epoch, and the processes that outlive one."""
        ...
