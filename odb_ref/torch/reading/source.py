"""The inner DataLoader, a standard one that reads and measures, and the readers that request samples from it."""

from __future__ import annotations

import multiprocessing
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, count
from multiprocessing.connection import Connection
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from typing import Final

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset, IterableDataset, IterDataPipe, Sampler

from odb_ref.core.errors import UsageError
from odb_ref.core.rounds import count_fitting
from odb_ref.torch.reading import collate_workers
from odb_ref.torch.reading.collator import Collator
from odb_ref.torch.reading.datasets import (
    Chunk,
    DataSetError,
    KeyChunk,
    KeyFeed,
    SeededDataset,
    SeededStream,
    begin_worker,
    call_contained,
    has_many,
)
from odb_ref.torch.reading.description import Failure, RebuildReporter
from odb_ref.torch.reading.measure import Measured
from odb_ref.torch.reading.quarantine import BadSample, MeasureFn
from odb_ref.torch.reading.serialization import Packed
from odb_ref.torch.reading.service import ReadItem, ReadPlan, SampleListener

CHUNK_SAMPLES: Final = 16
"""The minimum number of samples a worker reads at a time, with one message per chunk. Also the size of chunks from data sets
that read many samples at once, and from iterable ones."""

LARGEST_CHUNK_HERE: Final = 256
"""The maximum without workers. Chunks of quickly read samples are sized to take about the same time (`Source._pace`). For small
samples the cost is mostly per chunk: messages or, without workers and reading ahead, the fixed work.
"""

_REPEATED: Final = (
    "the workers begin with the same samples, as happens with an iterable data set that does not divide them by "
    "torch.utils.data.get_worker_info(): each sample is then trained on once per worker"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderOptions:
    """Options of the inner DataLoader, with the same meaning as there."""

    num_workers: int = 0
    prefetch_factor: int | None = None
    persistent_workers: bool | None = None
    """If None, workers that are not forked stay until the data set or functions they were sent change."""
    multiprocessing_context: BaseContext | str | None = None
    worker_init_fn: object = None
    process_init_fn: Callable[[], None] | None = None
    """Runs first in workers and collators. ``worker_init_fn`` runs in workers only."""
    timeout: float = 0
    is_pinned: bool = False
    silence_s: float = 60.0
    """How long a loader process may be silent and idle before it counts as lost."""


class KeySampler(Sampler[KeyChunk]):
    """The sampler of the inner DataLoader.

    A DataLoader requests chunks ahead of time, and cannot be told to wait. While nothing is drawn it gets empty chunks.
    """

    def __init__(self) -> None:
        self.feed = KeyFeed(ReadPlan(keys=()))
        """The key feed of the epoch being read."""
        self.chunk_samples = CHUNK_SAMPLES
        """At least 1."""

    def __iter__(self) -> Iterator[KeyChunk]:
        feed = self.feed
        while (chunk := feed.take(self.chunk_samples)) is not None:
            yield chunk


def _keep(chunk: Chunk) -> Chunk:
    return chunk


class Source:
    """Yields measured samples in sampler order, for one epoch after another.

    Raises: UsageError for a data pipe, with workers, on several ranks.
    """

    def __init__(
        self, dataset: Dataset[object], measure: MeasureFn, options: LoaderOptions, *, is_guarded: bool
    ) -> None:
        self.workers: tuple[BaseProcess, ...] = ()
        """The children of this process when reading began, except collators. In a process of its own, these are the workers."""
        self._failures: Connection[Failure, Failure] | None = None
        reporter: RebuildReporter[Connection[Failure, Failure]] | None = None
        self._sampler = KeySampler()
        # With `__getitems__`, reading a whole chunk may take as long as reading one sample.
        self._may_grow = not has_many(dataset)
        if self._may_grow and not options.num_workers:
            self._sampler.chunk_samples = 1
        self._generator = torch.Generator()
        # Workers that outlive an epoch get the next epoch's seed through shared memory.
        with torch.inference_mode(False):  # otherwise the tensor could not be changed outside inference mode
            self._epoch_seed = torch.zeros((), dtype=torch.int64, device="cpu")
        # A DataLoader treats data pipes specially: with workers it makes a process group, which fails in another process.
        is_pipe = isinstance(dataset, IterDataPipe)
        is_group = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
        if is_pipe and options.num_workers and is_group:
            raise UsageError("an IterDataPipe on several ranks needs num_workers=0, or an IterableDataset around it")
        arguments: dict[str, object] = {
            "num_workers": options.num_workers,
            "worker_init_fn": partial(
                begin_worker, None if is_pipe else dataset, options.process_init_fn, options.worker_init_fn
            ),
            "timeout": options.timeout,
            "generator": self._generator,
            "persistent_workers": bool(options.persistent_workers),
        }
        if options.num_workers:
            arguments["multiprocessing_context"] = options.multiprocessing_context
            arguments["prefetch_factor"] = options.prefetch_factor
            self._failures, theirs = multiprocessing.Pipe(duplex=False)
            reporter = RebuildReporter(theirs)
        contained = partial(call_contained, measure, "the measure of a sample")
        if not isinstance(dataset, IterableDataset):
            dataset = SeededDataset(dataset, contained, is_guarded=is_guarded, reporter=reporter)
            arguments |= {"sampler": self._sampler, "batch_size": None, "collate_fn": _keep}
        else:
            arguments |= {"batch_size": CHUNK_SAMPLES, "collate_fn": contained}
        if isinstance(dataset, IterableDataset) and not is_pipe:
            if options.persistent_workers:
                self._epoch_seed.share_memory_()  # type: ignore[no-untyped-call]
            dataset = SeededStream(dataset, self._epoch_seed, reporter=reporter)
        self._loader: DataLoader[list[object]] = DataLoader(dataset, **arguments)  # type: ignore[arg-type]

    def close(self) -> None:
        """Ends the workers in their own time, so that finalizers registered in them run."""
        del self._loader  # nothing else refers to it, and its iterator waits for each worker

    def take_rebuild_failure(self) -> str:
        """Returns why a worker could not rebuild what it was sent, once, or an empty string."""
        return self._failures.recv().cause if self._failures is not None and self._failures.poll() else ""

    @property
    def readers(self) -> int | None:
        """The number of concurrent readers, or None if the data set reads whole chunks: their size must not depend on it."""
        return max(1, self._loader.num_workers) if self._may_grow else None

    def open(self, plan: ReadPlan, feed: KeyFeed, warn: Callable[[str], None]) -> Iterator[Chunk]:
        """Starts the workers. Iterates over the measured samples of an epoch with their places, in chunks as they were read."""
        self._sampler.feed = feed
        self._generator.manual_seed(plan.seed)
        self._epoch_seed.fill_(plan.seed)
        with torch.device("cpu"):  # the DataLoader draws a seed from our generator, whatever the user's default device
            chunks = iter(self._loader)
        if self._loader.num_workers and threading.current_thread() is threading.main_thread():
            # If a worker dies, torch's handler would raise in the main thread, whatever code is running there.
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        self.workers = tuple(
            child for child in multiprocessing.active_children() if not child.name.startswith(collate_workers.NAME)
        )
        return self._iterate(chunks, plan, warn)

    def _iterate(self, chunks: Iterator[list[object]], plan: ReadPlan, warn: Callable[[str], None]) -> Iterator[Chunk]:
        if plan.keys is not None:
            yield from self._pace(chunks)  # type: ignore[arg-type]  # what `SeededDataset` makes
        else:
            places = count()
            for chunk in _compare(chunks, warn) if self._loader.num_workers > 1 else chunks:
                yield [(place, item) for item, place in zip(chunk, places, strict=False)]
        if not self._loader.persistent_workers:
            self.workers = ()  # everything is read: a worker that crashes on its way out loses nothing

    def _pace(self, chunks: Iterator[Chunk]) -> Iterator[Chunk]:
        """Yields the chunks, and sizes the following ones so that each takes about ``moment_s`` to read."""
        workers = self._loader.num_workers
        least, most, moment_s = (CHUNK_SAMPLES, 64, 0.025) if workers else (1, LARGEST_CHUNK_HERE, 0.004)
        samples, began_s = 0, time.monotonic()
        for chunk in chunks:
            samples += len(chunk)
            if self._may_grow:
                seconds = max(moment_s, time.monotonic() - began_s)
                self._sampler.chunk_samples = max(least, min(most, int(moment_s * samples / seconds / max(1, workers))))
            handed_s = time.monotonic()
            yield chunk
            if not workers:
                began_s += time.monotonic() - handed_s  # the time spent on processing a chunk is not reading time


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """The bytes that still fit into a window. An empty window accepts any one sample. Spec: R2.3."""

    nbytes: int
    is_empty: bool


class Reader:
    """Reads the requested samples, and up to ``read_ahead`` more. One thread at a time may call `work`."""

    def __init__(
        self,
        source: Source,
        collator: Collator,
        plan: ReadPlan,
        listener: SampleListener,
        feed: KeyFeed,
        *,
        read_ahead: int,
        read_ahead_bytes: int | None = None,
    ) -> None:
        self._source = source
        self._collator = collator
        self._plan = plan
        self.listener = listener
        self._feed = feed
        self._read_ahead = read_ahead
        self._read_ahead_bytes = read_ahead_bytes
        self._chunks: Iterator[Chunk] | None = None
        self._buffer: deque[tuple[int, object]] = deque()
        """Samples read but not requested yet, with their places."""
        self._good_samples = 0
        self._buffer_bytes = 0
        self._wanted: deque[tuple[int, Room | None, int | None]] = deque()
        """Pending requests: the number of samples, the room for their bytes, and the place that they must precede."""
        self._seen_end = 0
        """All samples before this place have been read."""
        self._is_ended = False
        self.is_early = plan.first > 0
        """True if samples before the plan's first place may still come."""
        self._read_samples = 0

    def describe(self) -> str:
        """Describes the pending requests in words. Empty if there are none."""
        return f"reading, with {self._read_samples} samples so far" if self._wanted else ""

    def ask(self, count: int, room: Room | None = None, end: int | None = None) -> None:
        """Requests ``count`` samples, or those that fit into ``room``, or all before the place ``end``."""
        self._wanted.append((count, room, end))

    def count_work(self) -> int:
        """Returns an upper bound on the samples `work` has to read, plus pending answers."""
        buffered = self._good_samples
        if self._wanted:
            # Reads one sample more than requested, so that "ended" never depends on timing (REPLAY).
            return 1 if self._is_ended else max(1, self._wanted[0][0] + 2 - buffered)
        is_full = self._read_ahead_bytes is not None and self._buffer_bytes >= self._read_ahead_bytes
        return 0 if self._is_ended or is_full else max(0, self._read_ahead - buffered)

    def prepare(self) -> None:
        """Starts the workers if they are not running."""
        if self._chunks is None:
            self._chunks = self._source.open(self._plan, self._feed, self.listener.on_warning)

    def work(self) -> int:
        """Answers a request or reads a chunk. Returns by how much this reduces `count_work`."""
        if self._wanted and self._has_enough(*self._wanted[0]):
            self._answer(*self._wanted.popleft())
            return 1
        self.prepare()
        chunk = next(self._chunks or iter(()), None)
        if chunk is None:
            self._is_ended, self.is_early = True, False
            return 1
        chunk = self._leave_out(chunk)
        self._read_samples += len(chunk)
        self._put(chunk)
        return len(chunk)

    def _has_enough(self, count: int, room: Room | None, end: int | None) -> bool:
        """Returns True if it is known which samples are the answer, and whether the source ends with them."""
        buffered = self._good_samples
        if self._is_ended:
            return True
        if end is not None:
            return self._seen_end > end
        if buffered > count:
            return True
        return room is not None and self._buffer_bytes > room.nbytes and buffered > room.is_empty

    def _answer(self, count: int, room: Room | None, end: int | None) -> None:
        asked = min(count, self._good_samples)
        if end is not None or room is not None:
            good = [(place, item.nbytes) for place, item in self._buffer if isinstance(item, Measured)][:count]
            if end is not None:
                good = [(place, nbytes) for place, nbytes in good if place < end]
            asked = len(good)
            if room is not None:
                asked = count_fitting((nbytes for _, nbytes in good), room.nbytes, is_empty=room.is_empty)
        items = self._take(self._count_entries(asked))
        is_ended = self._is_ended and not self._buffer
        self.listener.on_read(items, is_ended=is_ended, is_full=not is_ended and len(items) < count)

    def _count_entries(self, good_samples: int) -> int:
        """Returns the number of buffer entries that hold this many good samples, including bad ones directly after them."""
        if self._good_samples == len(self._buffer):
            return good_samples
        kinds = accumulate(isinstance(item, Measured) for _, item in self._buffer)
        return sum(1 for good in kinds if good <= good_samples)

    def _take(self, entries: int) -> list[ReadItem]:
        """Takes entries from the buffer, reports the bad samples and returns the good ones."""
        pop = self._buffer.popleft
        entered = [pop() for _ in range(entries)]
        taken = {place: item for place, item in entered if isinstance(item, Measured)}
        for place, item in entered if len(taken) < entries else ():
            if isinstance(item, BadSample):
                self.listener.on_bad(place, item.cause)
        self._good_samples -= len(taken)
        self._buffer_bytes -= sum([item.nbytes for item in taken.values()])
        self._collator.put(taken)
        return [(place, length, supervised, costs) for place, (length, supervised, _, _, costs) in taken.items()]

    def _leave_out(self, chunk: Chunk) -> Chunk:
        """Returns what the plan keeps of a chunk. The rest may be replayed: a resumed rank may have no other sample."""
        plan = self._plan
        if not self.is_early and not plan.dropped:
            return chunk
        early = [(place, item) for place, item in chunk if place < plan.first and isinstance(item, Measured)]
        self._collator.offer([item for place, item in early if place not in plan.dropped])
        self.is_early = self.is_early and (not chunk or chunk[-1][0] + 1 < plan.first)
        return [(place, item) for place, item in chunk if plan.has(place)]

    def _put(self, chunk: Chunk) -> None:
        good = [item for _, item in chunk if isinstance(item, Measured)]
        self._good_samples += len(good)
        self._buffer_bytes += sum([item.nbytes for item in good])
        self._buffer.extend(chunk)
        self._seen_end = chunk[-1][0] + 1 if chunk else self._seen_end


class DrawReader(Reader):
    """Reads samples that were drawn, and known draws ahead. Answers a draw once all its samples are read, good or bad."""

    _answered_samples = 0

    def count_work(self) -> int:
        """Returns how many samples `work` has to read, plus pending answers."""
        if self._wanted:
            return max(1, self._wanted[0][0] - self._seen + 1)
        return self._feed.added - self._read_samples if self._read_ahead else 0

    @property
    def _seen(self) -> int:
        return self._read_samples - self._answered_samples

    def _has_enough(self, count: int, room: Room | None, end: int | None) -> bool:
        if self._is_ended and self._seen < count:
            raise DataSetError(f"the data set ended {count - self._seen} samples short of the number requested")
        return self._seen >= count

    def _answer(self, count: int, room: Room | None, end: int | None) -> None:
        self._answered_samples += count
        self.listener.on_read(self._take(count), is_ended=True, is_full=False)


def _compare(chunks: Iterator[list[object]], warn: Callable[[str], None]) -> Iterator[list[object]]:
    """Yields the chunks. Warns if the second worker begins with the same samples as the first."""
    first: object = None
    for number, chunk in enumerate(chunks):
        if number < 2:
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
