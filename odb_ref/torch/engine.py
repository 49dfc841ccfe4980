"""Reading and collating, in threads of the process that holds the samples."""

from __future__ import annotations

import multiprocessing
import queue
import threading
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from dataclasses import dataclass
from itertools import islice
from multiprocessing.process import BaseProcess
from typing import Final, Protocol

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler

from odb_ref.core.errors import OdbError
from odb_ref.torch.costs import Costed
from odb_ref.torch.measure import Measured
from odb_ref.torch.packing import unpack
from odb_ref.torch.quarantine import BadSample, GuardedDataset, GuardedMeasure, MeasureFn, OnBadSample, find_good
from odb_ref.torch.workbench import BatchOrder, CollateFn, OnIdle, Workbench, describe, pin

CHUNK_SAMPLES: Final = 16
"""How many samples a worker reads at a time: one message for each chunk."""

IDLE_TRIES: Final = 100
"""Among so many samples a good one is looked for, where a rank has none of its own to replay."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderOptions:
    """What the inner DataLoader is made with; the fields mean what they mean there."""

    num_workers: int = 0
    prefetch_factor: int | None = None
    persistent_workers: bool = False
    multiprocessing_context: object = None
    worker_init_fn: object = None
    timeout: float = 0
    is_pinned: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadPlan:
    """What to read in an epoch: the keys of a map-style data set in order, and their ``places`` in the sampler's order.

    An iterable data set (``keys`` is None) is read from its beginning: all from place ``first`` on and the ``kept`` places
    before it, but for the ``dropped`` ones.
    """

    keys: Iterable[object] | None
    places: Iterable[int] = ()
    first: int = 0
    kept: frozenset[int] = frozenset()
    dropped: frozenset[int] = frozenset()
    seed: int = 0


ReadItem = tuple[int, int, int, tuple[int, ...]]
"""A sample as the machine sees it: its place in the sampler's order, length, supervised tokens and further costs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSpec:
    """All an engine needs, in whichever process it runs."""

    dataset: Dataset[object]
    measure: MeasureFn
    options: LoaderOptions
    collate_fn: CollateFn
    on_bad_sample: OnBadSample
    on_idle: OnIdle
    idle_sample: object
    """What to replay in idle steps when no sample has been read; None: the first of a map-style data set."""


class EngineListener(Protocol):
    """Who an engine reports to; called from its threads."""

    def on_read(self, items: list[ReadItem], is_ended: bool) -> None:
        """Answers one ``read``: as many items as asked for, fewer only at the end."""
        ...

    def on_bad(self, place: int, cause: str) -> None:
        """A sample was set aside; comes before the samples that lie behind it."""
        ...

    def on_collated(self, round_: int, batches: Sequence[tuple[int, object]]) -> None:
        """Answers one ``collate``: step numbers with their batches."""
        ...

    def on_error(self, cause: str, error: BaseException) -> None:
        """Reading or collating failed, as ``cause`` says in a line; nothing more comes."""
        ...


class KeyFeed(Sampler[object]):
    """The sampler of the inner DataLoader: the keys of the epoch that is being read."""

    def __init__(self) -> None:
        self.keys: Iterable[object] = ()

    def __iter__(self) -> Iterator[object]:
        return iter(self.keys)


class Source:
    """The inner DataLoader: a standard one, that hands out measured samples in chunks, in sampler order."""

    def __init__(self, dataset: Dataset[object], measure: MeasureFn, options: LoaderOptions) -> None:
        self.is_iterable = isinstance(dataset, IterableDataset)
        self.workers: tuple[BaseProcess, ...] = ()
        """This process's children when reading began: the workers, and in a process of its own nothing else."""
        self._feed = KeyFeed()
        self._generator = torch.Generator()
        arguments: dict[str, object] = {
            "batch_size": CHUNK_SAMPLES,
            "collate_fn": measure,
            "num_workers": options.num_workers,
            "worker_init_fn": options.worker_init_fn,
            "timeout": options.timeout,
            "generator": self._generator,
            "persistent_workers": options.persistent_workers,
        }
        if options.num_workers:
            arguments["multiprocessing_context"] = options.multiprocessing_context
            arguments["prefetch_factor"] = options.prefetch_factor
        if not self.is_iterable:
            arguments["sampler"] = self._feed
        self._loader: DataLoader[object] = DataLoader(dataset, **arguments)  # type: ignore[arg-type]

    def open(self, plan: ReadPlan) -> Iterator[tuple[int, object]]:
        """The samples of an epoch with their places, as the measure answers them; worker processes start at once."""
        self._feed.keys = plan.keys if plan.keys is not None else ()
        self._generator.manual_seed(plan.seed % 2**63)
        chunks = iter(self._loader)
        self.workers = tuple(multiprocessing.active_children())
        return self._iterate(chunks, plan)

    def _iterate(self, chunks: Iterator[object], plan: ReadPlan) -> Iterator[tuple[int, object]]:
        items = (item for chunk in chunks if isinstance(chunk, list) for item in chunk)
        if plan.keys is not None:
            yield from zip(plan.places, items, strict=False)
        else:
            for place, item in enumerate(items):
                if place in plan.kept or (place >= plan.first and place not in plan.dropped):
                    yield place, item
        if not self._loader.persistent_workers:
            self.workers = ()  # all is read: one that crashes while it ends takes nothing with it


class Engine:
    """Reads in one thread and collates in another, for one epoch at a time."""

    def __init__(self, spec: EngineSpec) -> None:
        dataset, measure = _guard(spec)
        self._source = Source(dataset, measure, spec.options)
        self._bench = Workbench(spec.collate_fn, spec.on_idle, _make_idle_source(spec))
        self._is_pinned = spec.options.is_pinned
        self._epoch: _Epoch | None = None

    def begin(self, plan: ReadPlan, listener: EngineListener, read_ahead: int) -> None:
        """Starts the two threads; nothing is reported before the first `read`."""
        self.end()
        self._epoch = _Epoch(
            self._source, self._bench, plan, listener, read_ahead=read_ahead, is_pinned=self._is_pinned
        )

    def read(self, count: int) -> None:
        """Asks for samples; does not wait."""
        if self._epoch is not None:
            self._epoch.read(count)

    def collate(self, round_: int, orders: tuple[BatchOrder, ...]) -> None:
        """Asks for the batches of a round; does not wait."""
        if self._epoch is not None:
            self._epoch.collate(round_, orders)

    def stop(self) -> None:
        """Asks the threads to end. Does not wait."""
        if self._epoch is not None:
            self._epoch.stop()

    def end(self) -> None:
        """Ends the threads and drops what is read: when it returns, nothing more is reported."""
        epoch, self._epoch = self._epoch, None
        if epoch is not None:
            epoch.end()
            self._bench.clear()

    def find_dead_worker(self) -> BaseProcess | None:
        """A worker that has ended by itself, and with an error. For a process that has no other children."""
        return next((worker for worker in self._source.workers if worker.exitcode), None)


def _guard(spec: EngineSpec) -> tuple[Dataset[object], MeasureFn]:
    """What to read and how to measure it, so that a bad sample does what the specification says."""
    if spec.on_bad_sample is OnBadSample.FAIL:
        return spec.dataset, spec.measure
    # What an iterable data set raises ends it, so there is nothing to go on with.
    dataset = spec.dataset if isinstance(spec.dataset, IterableDataset) else GuardedDataset(spec.dataset)
    return dataset, GuardedMeasure(spec.measure)


def _make_idle_source(spec: EngineSpec) -> Callable[[], object] | None:
    dataset, idle_sample = spec.dataset, spec.idle_sample
    if idle_sample is not None:
        return lambda: idle_sample
    if isinstance(dataset, IterableDataset) or (isinstance(dataset, Sized) and not len(dataset)):
        return None
    if spec.on_bad_sample is OnBadSample.FAIL:
        return lambda: dataset[0]
    tries = min(IDLE_TRIES, len(dataset)) if isinstance(dataset, Sized) else 1
    return lambda: unpack(find_good(GuardedDataset(dataset), GuardedMeasure(spec.measure), tries))


class _Epoch:
    def __init__(
        self,
        source: Source,
        bench: Workbench,
        plan: ReadPlan,
        listener: EngineListener,
        *,
        read_ahead: int,
        is_pinned: bool,
    ) -> None:
        self._bench = bench
        self._listener = listener
        self._read_ahead = read_ahead
        self._is_pinned = is_pinned
        self._condition = threading.Condition()
        self._wanted: deque[int] = deque()
        self._is_open = True
        self._orders: queue.SimpleQueue[tuple[int, tuple[BatchOrder, ...]] | None] = queue.SimpleQueue()
        self._threads = (
            threading.Thread(target=self._read_all, args=(source, plan), name="odb-read", daemon=True),
            threading.Thread(target=self._collate_all, name="odb-collate", daemon=True),
        )
        for thread in self._threads:
            thread.start()

    def read(self, count: int) -> None:
        with self._condition:
            self._wanted.append(count)
            self._condition.notify_all()

    def collate(self, round_: int, orders: tuple[BatchOrder, ...]) -> None:
        self._orders.put((round_, orders))

    def stop(self) -> None:
        with self._condition:
            self._is_open = False
            self._condition.notify_all()
        self._orders.put(None)

    def end(self) -> None:
        self.stop()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join()

    def _read_all(self, source: Source, plan: ReadPlan) -> None:
        try:
            self._read_from(source.open(plan))
        except Exception as error:  # whatever the data set raises
            # Its traceback would keep the DataLoader's iterator, and with it the workers, until some later collection.
            traceback.clear_frames(error.__traceback__)
            self._listener.on_error(describe(error), error)

    def _read_from(self, samples: Iterator[tuple[int, object]]) -> None:
        buffer: deque[ReadItem] = deque()
        is_ended = False
        while True:
            # One sample more than asked for, so that "ended" never depends on timing (REPLAY).
            with self._condition:
                while self._is_open and not self._wanted and (is_ended or len(buffer) >= self._read_ahead):
                    self._condition.wait()
                if not self._is_open:
                    return
                count = self._wanted[0] if self._wanted else None
            if count is not None and (is_ended or len(buffer) > count):
                items = [buffer.popleft() for _ in range(min(count, len(buffer)))]
                self._wanted.popleft()
                self._listener.on_read(items, is_ended and not buffer)
                continue
            pulled = list(islice(samples, 1))
            is_ended = not pulled
            for place, item in pulled:
                match item:
                    case Measured():
                        self._bench.put(place, item)
                        buffer.append(
                            (place, item.length, item.supervised, item.costs if isinstance(item, Costed) else ())
                        )
                    case BadSample():
                        self._listener.on_bad(place, item.cause)
                    case _:
                        raise OdbError(f"unexpected answer of the measure: {item!r}")

    def _collate_all(self) -> None:
        try:
            while (order := self._orders.get()) is not None:
                round_, orders = order
                batches: list[tuple[int, object]] = []
                for item in orders:
                    if not self._is_open:
                        return
                    batch = self._bench.collate(item)
                    batches.append((item.number, pin(batch) if self._is_pinned else batch))
                self._listener.on_collated(round_, batches)
        except Exception as error:  # whatever collate_fn raises
            self._listener.on_error(describe(error), error)
