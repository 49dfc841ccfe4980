"""The inner DataLoader, a standard one that reads and measures, and who asks it for samples."""

from __future__ import annotations

import multiprocessing
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from multiprocessing.process import BaseProcess
from typing import Final

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, IterDataPipe, Sampler

from odb_ref.core.errors import OdbError
from odb_ref.core.rounds import count_fitting
from odb_ref.torch.reading import collate_workers
from odb_ref.torch.reading.collator import Collator
from odb_ref.torch.reading.costs import Costed
from odb_ref.torch.reading.datasets import Contained, DataSetError, SampleKey, SeededDataset, SeededStream, WorkerInit
from odb_ref.torch.reading.measure import Measured
from odb_ref.torch.reading.quarantine import BadSample, GuardedDataset, MeasureFn
from odb_ref.torch.reading.reports import Gate, ReadItem
from odb_ref.torch.reading.serialization import Packed

CHUNK_SAMPLES: Final = 16
"""How many samples a worker reads at a time, at least: one message for each chunk."""

LARGEST_CHUNK: Final = 64
CHUNK_S: Final = 0.025
"""Samples that are read quickly come in chunks that take about so long: for small ones, messages are what takes the time."""

_REPEATED: Final = (
    "the workers begin with the same samples, as those of an iterable data set do that does not share them out by "
    "torch.utils.data.get_worker_info(): each sample is then trained on once for every worker"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderOptions:
    """What the inner DataLoader is made with; the fields mean what they mean there."""

    num_workers: int = 0
    prefetch_factor: int | None = None
    persistent_workers: bool | None = None
    """None: where starting a process takes seconds, workers stay as long as what they were sent stays the same."""
    multiprocessing_context: object = None
    worker_init_fn: object = None
    collator_init_fn: Callable[[], None] | None = None
    """What a process that collates does first: ``worker_init_fn`` is for workers, who read."""
    timeout: float = 0
    is_pinned: bool = False
    silence_s: float = 60.0
    """How long a loader process may be silent and idle before it is taken for lost."""


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
    draws: DrawFeed | None = None
    """With shared shards: what is to be read behind that, as it is drawn."""


class DrawFeed:
    """The samples that a rank draws in the course of an epoch, in chunks. One thread adds, another takes."""

    def __init__(self) -> None:
        self._chunks: deque[list[tuple[int, object]]] = deque()
        self._is_closed = False
        self.places: list[int] = []
        """The places of all that was taken."""

    def add(self, items: Sequence[tuple[int, object]]) -> None:
        """Adds places and keys."""
        self._chunks.extend(list(items[i : i + CHUNK_SAMPLES]) for i in range(0, len(items), CHUNK_SAMPLES))

    def close(self) -> None:
        """Nothing more is added."""
        self._is_closed = True

    def take(self) -> list[tuple[int, object]] | None:
        """Returns the next chunk, an empty one while nothing is drawn; None when nothing more comes."""
        is_closed = self._is_closed  # first: what was added before it was closed is not lost
        if not self._chunks:
            return None if is_closed else []
        chunk = self._chunks.popleft()
        self.places.extend(place for place, _ in chunk)
        return chunk


class KeyFeed(Sampler[list[SampleKey]]):
    """The batch sampler of the inner DataLoader: the keys of the epoch that is being read, in chunks.

    A DataLoader asks for chunks ahead of time, and cannot be told to wait. Where nothing is drawn yet it is given chunks of
    nothing, which come back at once.
    """

    def __init__(self) -> None:
        self.plan = ReadPlan(keys=())
        self.chunk_samples = CHUNK_SAMPLES

    def __iter__(self) -> Iterator[list[SampleKey]]:
        plan = self.plan
        items = zip(plan.places, plan.keys or (), strict=True)
        while chunk := [(plan.seed, place, key) for place, key in islice(items, self.chunk_samples)]:
            yield chunk
        while plan.draws is not None and (drawn := plan.draws.take()) is not None:
            yield [(plan.seed, place, key) for place, key in drawn]


class Source:
    """Hands out measured samples in sampler order, for one epoch after another."""

    def __init__(
        self, dataset: Dataset[object], measure: MeasureFn, options: LoaderOptions, *, is_guarded: bool
    ) -> None:
        self.workers: tuple[BaseProcess, ...] = ()
        """This process's children when reading began, but for those that collate: in a process of its own, the workers."""
        self._feed = KeyFeed()
        # Where a data set reads a chunk at once it may draw for it at once, and what it draws must not follow from the clock.
        self._may_grow = not hasattr(dataset, "__getitems__")
        self._generator = torch.Generator()
        # Workers that outlive an epoch learn of the next one's seed by shared memory.
        self._epoch_seed = torch.zeros((), dtype=torch.int64)
        # A DataLoader has ways of its own with data pipes.
        is_pipe = isinstance(dataset, IterDataPipe)
        arguments: dict[str, object] = {
            "collate_fn": Contained(measure, "the measure of a sample"),
            "num_workers": options.num_workers,
            "worker_init_fn": options.worker_init_fn if is_pipe else WorkerInit(dataset, options.worker_init_fn),
            "timeout": options.timeout,
            "generator": self._generator,
            "persistent_workers": bool(options.persistent_workers),
        }
        if options.num_workers:
            arguments["multiprocessing_context"] = options.multiprocessing_context
            arguments["prefetch_factor"] = options.prefetch_factor
        if not isinstance(dataset, IterableDataset):
            seeded = SeededDataset(dataset, is_guarded=is_guarded)
            dataset = GuardedDataset(seeded) if is_guarded else seeded
            arguments["batch_sampler"] = self._feed
        else:
            arguments["batch_size"] = CHUNK_SAMPLES
        if isinstance(dataset, IterableDataset) and not is_pipe:
            if options.persistent_workers:
                self._epoch_seed.share_memory_()  # type: ignore[no-untyped-call]
            dataset = SeededStream(dataset, self._epoch_seed)
        self._loader: DataLoader[object] = DataLoader(dataset, **arguments)  # type: ignore[arg-type]

    def open(self, plan: ReadPlan, warn: Callable[[str], None]) -> Iterator[tuple[int, object]]:
        """Returns the samples of an epoch with their places, as the measure answers them; worker processes start at once."""
        self._feed.plan = plan
        self._generator.manual_seed(plan.seed)
        self._epoch_seed.fill_(plan.seed)
        chunks = iter(self._loader)
        if self._loader.num_workers and threading.current_thread() is threading.main_thread():
            # What torch sets there raises in that thread, wherever it is, when a worker dies.
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        self.workers = tuple(
            child for child in multiprocessing.active_children() if not child.name.startswith(collate_workers.NAME)
        )
        return self._iterate(chunks, plan, warn)

    def _iterate(
        self, chunks: Iterator[object], plan: ReadPlan, warn: Callable[[str], None]
    ) -> Iterator[tuple[int, object]]:
        is_shared_out = plan.keys is None and self._loader.num_workers > 1
        items = self._flatten(_compare(chunks, warn) if is_shared_out else chunks)
        if plan.draws is not None:
            yield from _name_drawn(items, plan)
        elif plan.keys is not None:
            yield from _name(items, plan.places)
        else:
            for place, item in enumerate(items):
                if place in plan.kept or (place >= plan.first and place not in plan.dropped):
                    yield place, item
        if not self._loader.persistent_workers:
            self.workers = ()  # all is read: one that crashes while it ends takes nothing with it

    def _flatten(self, chunks: Iterator[object]) -> Iterator[object]:
        """Yields what is in the chunks, and has the next ones hold as many samples as a worker reads in a moment."""
        began_s, count, workers = time.monotonic(), 0, max(1, self._loader.num_workers)
        for chunk in chunks:
            if not isinstance(chunk, list):
                raise OdbError(f"unexpected answer of the inner DataLoader: {type(chunk).__name__}")
            count += len(chunk)
            if self._may_grow:
                quick = int(CHUNK_S * count / (workers * max(time.monotonic() - began_s, CHUNK_S)))
                self._feed.chunk_samples = max(CHUNK_SAMPLES, min(LARGEST_CHUNK, quick))
            yield from chunk


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """For how many bytes a window has room; one that is empty has room for any one sample. Spec: R2.3."""

    nbytes: int
    is_empty: bool


class Reader:
    """Reads samples as they are asked for, and so many ahead. `work` belongs to one thread at a time."""

    def __init__(
        self,
        source: Source,
        collator: Collator,
        plan: ReadPlan,
        listener: Gate,
        *,
        read_ahead: int,
        read_ahead_bytes: int | None = None,
    ) -> None:
        self._source = source
        self._collator = collator
        self._plan = plan
        self.listener = listener
        self._read_ahead = read_ahead
        self._read_ahead_bytes = read_ahead_bytes
        self._samples: Iterator[tuple[int, object]] | None = None
        self._buffer: deque[tuple[ReadItem, int]] = deque()
        """What is read and not asked for yet, each with its bytes."""
        self._buffer_bytes = 0
        self._wanted: deque[tuple[int, Room | None]] = deque()
        self._is_ended = False
        self._read_samples = 0

    def describe(self) -> str:
        """Returns what it is asked for, in words; empty when nothing."""
        return f"reading, with {self._read_samples} samples so far" if self._wanted else ""

    def ask(self, count: int, room: Room | None = None) -> None:
        """Asks for so many samples, or as many as there is room for."""
        self._wanted.append((count, room))

    def count_work(self) -> int:
        """Returns how many times `work` finds something to do."""
        buffered = len(self._buffer)
        if self._wanted:
            # One sample more than asked for, so that "ended" never depends on timing (REPLAY).
            return 1 if self._is_ended else max(1, self._wanted[0][0] + 2 - buffered)
        is_full = self._read_ahead_bytes is not None and self._buffer_bytes >= self._read_ahead_bytes
        return 0 if self._is_ended or is_full else max(0, self._read_ahead - buffered)

    def prepare(self) -> None:
        """Starts the workers, unless they are there."""
        if self._samples is None:
            self._samples = self._source.open(self._plan, self.listener.on_doubt)

    def work(self) -> None:
        """Answers what was asked for, or reads one sample."""
        if self._wanted and self._has_enough(*self._wanted[0]):
            self._answer(*self._wanted.popleft())
            return
        self.prepare()
        for place, item in self._samples or ():
            self._read_samples += 1
            self._put(place, item)
            return
        self._is_ended = True

    def _has_enough(self, count: int, room: Room | None) -> bool:
        """Returns True when it is known which samples are the answer, and whether the source has ended with them."""
        buffered = len(self._buffer)
        if self._is_ended or buffered > count:
            return True
        return room is not None and self._buffer_bytes > room.nbytes and buffered > room.is_empty

    def _answer(self, count: int, room: Room | None) -> None:
        asked = list(islice(self._buffer, count))
        if room is not None:
            asked = asked[: count_fitting((nbytes for _, nbytes in asked), room.nbytes, is_empty=room.is_empty)]
        for _, nbytes in asked:
            self._buffer.popleft()
            self._buffer_bytes -= nbytes
        items = [item for item, _ in asked]
        is_full = bool(self._buffer) and len(items) < count
        self.listener.on_read(items, is_ended=self._is_ended and not self._buffer, is_full=is_full)

    def _put(self, place: int, item: object) -> None:
        match item:
            case Measured():
                self._collator.put(place, item)
                costs = item.costs if isinstance(item, Costed) else ()
                self._buffer.append(((place, item.length, item.supervised, costs), item.nbytes))
                self._buffer_bytes += item.nbytes
            case BadSample():
                self.listener.on_bad(place, item.cause)
            case _:
                raise OdbError(f"unexpected answer of the measure: {item!r}")


class DrawReader(Reader):
    """Reads what was drawn, and nothing ahead of that; answers when it has seen all of a draw, good or set aside."""

    _answered_samples = 0

    def count_work(self) -> int:
        """Returns how many times `work` finds something to do."""
        return self._wanted[0][0] - self._seen + 1 if self._wanted else 0

    @property
    def _seen(self) -> int:
        return self._read_samples - self._answered_samples

    def _has_enough(self, count: int, room: Room | None) -> bool:
        if self._is_ended and self._seen < count:
            raise DataSetError(f"the data set ended {count - self._seen} samples before those it was asked for")
        return self._seen >= count

    def _answer(self, count: int, room: Room | None) -> None:
        self._answered_samples += count
        items = [item for item, _ in self._buffer]
        self._buffer.clear()
        self._buffer_bytes = 0
        self.listener.on_read(items, is_ended=True, is_full=False)


def _compare(chunks: Iterator[object], warn: Callable[[str], None]) -> Iterator[object]:
    """Yields the chunks; warns when the second worker begins as the first does."""
    first: object = None
    for number, chunk in enumerate(chunks):
        if number < 2 and isinstance(chunk, list):
            measures = list(map(_identify, chunk))
            if measures and measures == first:
                warn(_REPEATED)
            first = measures
        yield chunk


def _identify(item: object) -> object:
    match item:
        case Measured(length, supervised, Packed(data)):
            return length, supervised, data
        case _:
            return item


def _name_drawn(items: Iterator[object], plan: ReadPlan) -> Iterator[tuple[int, object]]:
    """Yields each item with its place, of those that have been handed out by then. Spec: R11.4, R14.4. Preserves: COVER."""
    drawn = [] if plan.draws is None else plan.draws.places
    first = len(plan.places)
    for count, item in enumerate(items):
        if count >= first + len(drawn):
            raise DataSetError(f"the data set gave more than the {first + len(drawn)} samples it was asked for")
        yield plan.places[count] if count < first else drawn[count - first], item


def _name(items: Iterator[object], places: Sequence[int]) -> Iterator[tuple[int, object]]:
    """Yields each item with its place. Spec: R11.4. Preserves: COVER."""
    count = 0
    for item in items:
        if count == len(places):
            raise DataSetError(f"the data set gave more than the {count} samples it was asked for")
        yield places[count], item
        count += 1
    if count < len(places):
        raise DataSetError(f"the data set ended after {count} of the {len(places)} samples it was asked for")
