"""Reads and collates, in threads of the process that holds the samples, or in the thread that asks for a step."""

from __future__ import annotations

import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Sequence, Sized
from dataclasses import dataclass
from functools import partial
from multiprocessing.process import BaseProcess
from typing import Final

from torch.utils.data import Dataset

from odb_ref.torch.reading.collate_workers import CollateWorkers
from odb_ref.torch.reading.collator import BatchMaker, CollateFn, Collator, Made, OnIdle, OwnMemory
from odb_ref.torch.reading.counting import LabelCheck
from odb_ref.torch.reading.datasets import KeyFeed
from odb_ref.torch.reading.description import describe
from odb_ref.torch.reading.quarantine import MeasureFn, OnBadSample, find_good, measure_guarded
from odb_ref.torch.reading.seeding import isolate
from odb_ref.torch.reading.serialization import unpack
from odb_ref.torch.reading.service import END_S, BatchRequest, ReadPlan, SampleListener
from odb_ref.torch.reading.source import DrawReader, LoaderOptions, Reader, Room, Source

IDLE_TRIES: Final = 100
"""How many samples to search for a good one, if a rank has none of its own to replay."""
QUICK_S: Final = 0.004
"""Work up to this long is done at once, not in shares: restoring the generators takes a fifth of a millisecond each time."""
_UNKNOWN: Final = 255
"""The exit code that multiprocessing reports for a fork server's child while another thread reads the real one. This happens
when torch joins a finished worker while this module looks at the workers.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineSpec:
    """Everything a pipeline needs, in any process."""

    dataset: Dataset[object]
    measure: MeasureFn
    options: LoaderOptions
    collate_fn: CollateFn
    on_bad_sample: OnBadSample
    on_idle: OnIdle
    idle_sample: object
    """The sample to replay in idle steps if none has been read. None means the first of a map-style data set."""
    window_bytes: int | None = None
    """How many bytes of samples a window may hold. None means no limit."""
    label_check: LabelCheck | None = None
    """None if no weight depends on labels, or if a user's function counts them for a model that does not shift them."""
    is_packed: bool = False
    """True if a batch's tokens are counted without padding."""


class ReadPipeline:
    """Reads and collates for one epoch at a time, either in two threads of its own or in the thread that calls `work`."""

    def __init__(self, spec: PipelineSpec, *, is_inline: bool) -> None:
        self._spec = spec
        self._source: Source | None = None
        """Made by the first `begin`, because user code may raise then, as in the length of a data set."""
        self._collator = Collator(spec.on_idle, partial(_get_idle_sample, spec))
        self._make = BatchMaker(spec.collate_fn, spec.label_check, is_packed=spec.is_packed)
        self._workers: CollateWorkers | None = None
        if not is_inline:
            options = spec.options
            context, init_fn = options.multiprocessing_context, options.process_init_fn
            self._workers = CollateWorkers(self._make, options.num_workers, context=context, init_fn=init_fn)
        self._own = OwnMemory() if is_inline else None
        self.is_inline = is_inline
        self._epoch: _Epoch | None = None
        self._feed: KeyFeed | None = None
        self._left: tuple[threading.Thread, ...] = ()
        """Threads of earlier epochs that were still in the user's code when their epoch ended."""

    def begin(self, plan: ReadPlan, listener: SampleListener, read_ahead: int) -> None:
        """Starts an epoch. Reports nothing before the first `read`."""
        self.end()
        # Processes that outlive an epoch may have died in the meantime.
        if self._source is None or self.find_dead_worker() is not None:
            self._kill_workers()
            self._source = _make_source(self._spec)
        if self._workers is not None and self._workers.has_lost_one:
            self._workers.close()
        self._collator = self._collator.renew(plan.seed)
        most = self._spec.window_bytes
        first = 2 * read_ahead + 1  # what is requested first, plus one: see `Reader.count_work`
        self._feed = KeyFeed(plan, self._source.readers, first)
        reader = (DrawReader if plan.is_drawn else Reader)(
            self._source,
            self._collator,
            plan,
            listener,
            self._feed,
            read_ahead=0 if self.is_inline else read_ahead,
            read_ahead_bytes=None if most is None else most // 2,
        )
        maker = _Maker(self._collator, self._make, self._workers, listener, self._own)
        self._epoch = _Epoch(reader, maker, self._left, is_inline=self.is_inline)
        if self._workers is not None:
            self._epoch.start(is_forking=self._workers.is_forking)

    def read(self, count: int, held: tuple[int, ...] | None = None, end: int | None = None) -> None:
        """Requests samples: see `SampleService.read`."""
        if self._epoch is not None:
            room = None
            if held is not None and self._spec.window_bytes is not None:
                room = Room(nbytes=self._spec.window_bytes - self._collator.count_bytes(held), is_empty=not held)
            self._epoch.read(count, room, end)

    def draw(self, items: Sequence[tuple[int, object]], count: int, *, is_last: bool) -> None:
        """Adds and requests samples of an order that is drawn during an epoch: see `SampleService.draw`."""
        if self._epoch is not None and self._feed is not None:
            self._feed.add(items, count)
            if is_last:
                self._feed.close()
            self._epoch.read(count)

    def collate(self, requests: tuple[BatchRequest, ...]) -> None:
        """Requests batches without waiting."""
        if self._epoch is not None:
            self._epoch.collate(requests)

    def describe(self) -> str:
        """Describes the pending requests in words. Empty if there are none."""
        return "" if self._epoch is None else self._epoch.describe()

    @property
    def has_work(self) -> bool:
        """True if there is something for `work` to do."""
        return self.is_inline and self._epoch is not None and self._epoch.has_work

    def work(self, steps: int, is_enough: Callable[[], bool] | None = None) -> None:
        """Does a share of the pending work, so that ``steps`` calls do it all. Stops early once ``is_enough`` returns True.

        Restores the process's generators afterwards, whatever user code draws in it. Spec: R12.2.

        Raises: exceptions of user code that do not derive from Exception, because they should end the caller's thread.
        """
        if self._epoch is not None:
            self._epoch.work(steps, is_enough)

    def stop(self) -> None:
        """Stops reading and collating. Does not wait."""
        if self._epoch is not None:
            self._epoch.stop()

    def end(self) -> None:
        """Ends the epoch and drops the samples read.

        A thread stuck in the user's code is abandoned; only the next epoch's threads wait for it.
        """
        epoch, self._epoch = self._epoch, None
        if epoch is None:
            return
        epoch.end()
        self._left = tuple(thread for thread in (*self._left, *epoch.threads) if thread.is_alive())
        if self._left and not self.is_inline:
            self._kill_workers()  # one of them may be what the thread is waiting for
        self._collator = self._collator.renew(0)
        if self._workers is not None and self._workers.pending:
            self._workers.close()  # otherwise their batches would arrive in the next epoch

    def _kill_workers(self) -> None:
        for worker in self._readers:  # this process's children
            worker.kill()

    def close(self) -> None:
        """Ends the epoch, and the processes that collate."""
        self.end()
        if self._workers is not None:
            self._workers.close()
        if self._source is not None:
            self._source.close()

    @property
    def _readers(self) -> tuple[BaseProcess, ...]:
        return () if self._source is None else self._source.workers

    @property
    def processes(self) -> tuple[BaseProcess, ...]:
        """The processes that read and those that collate."""
        return self._readers + (() if self._workers is None else self._workers.processes)

    def find_dead_worker(self) -> BaseProcess | None:
        """Returns a worker that has failed by itself. For a process without other children."""
        return find_failed(self._readers)

    def take_rebuild_failure(self) -> str:
        """Returns why a worker could not rebuild what it was sent, once, or an empty string."""
        return "" if self._source is None else self._source.take_rebuild_failure()


def find_failed(workers: Sequence[BaseProcess]) -> BaseProcess | None:
    """Returns the first process that ended with an error.

    A worker that ended without one may have finished its part. If it has not, torch finds out after some seconds.
    """
    return next((worker for worker in workers if worker.exitcode not in (None, 0, _UNKNOWN)), None)


def _make_source(spec: PipelineSpec) -> Source:
    is_guarded = spec.on_bad_sample is OnBadSample.QUARANTINE
    measure = partial(measure_guarded, spec.measure) if is_guarded else spec.measure
    return Source(spec.dataset, measure, spec.options, is_guarded=is_guarded)


def _get_idle_sample(spec: PipelineSpec) -> object:
    dataset = spec.dataset
    if spec.idle_sample is not None:
        return spec.idle_sample
    if isinstance(dataset, Sized) and not len(dataset):  # it may make a sample of any index all the same
        raise IndexError("the data set is empty")
    if spec.on_bad_sample is OnBadSample.FAIL:
        return dataset[0]
    tries = min(IDLE_TRIES, len(dataset)) if isinstance(dataset, Sized) else 1
    return unpack(find_good(dataset, spec.measure, tries))


class _Maker:
    """Makes batches, in this process or in ``workers``. One thread at a time may call `work`."""

    def __init__(
        self,
        collator: Collator,
        make: BatchMaker,
        workers: CollateWorkers | None,
        listener: SampleListener,
        own: OwnMemory | None,
    ) -> None:
        self.collator = collator
        self._make = make
        self._workers = workers
        self.listener = listener
        self._own = own
        """Keeps later batches from overwriting a batch made in this process."""
        self._requests: deque[BatchRequest] = deque()
        self._collating: int | None = None

    def prepare(self) -> None:
        """Starts a process, if batches are made in processes."""
        if self._workers is not None:
            if self._workers.pending:
                self._workers.close()  # a slow thread of an earlier epoch has begun these batches
            self._workers.prepare()

    def describe(self) -> str:
        return "" if self._collating is None else f"collating step {self._collating}"

    def ask(self, requests: tuple[BatchRequest, ...]) -> None:
        self._requests.extend(requests)

    def count_work(self) -> int:
        """Returns how many calls of `work` will find something to do."""
        if self._workers is None:
            return len(self._requests)
        return 2 * len(self._requests) + self._workers.pending

    def work(self) -> int:
        """Begins one batch or hands one out. Returns 1, the amount by which this reduces `count_work`."""
        workers = self._workers
        if workers is None or (self._requests and workers.make_room(len(self._requests))):
            self._begin(self._requests.popleft(), workers)
        else:
            self._put(*workers.collect())
        self._collating = None if workers is None else workers.oldest
        return 1

    def _begin(self, request: BatchRequest, workers: CollateWorkers | None) -> None:
        self._collating = request.number
        task = self.collator.take(request)
        if task is None:
            self._put(request.number, Made(None))
        elif workers is None:
            self._put(request.number, self._make(task), task.samples)
        else:
            workers.begin(request.number, task)

    def _put(self, number: int, made: Made, samples: Sequence[object] = ()) -> None:
        for text in made.warnings:
            self.listener.on_warning(text)
        self.listener.on_batch(number, made.batch if self._own is None else self._own.keep(made, samples))


class _Epoch:
    """The requests of one epoch, carried out by two threads of its own, or by the caller of `work`."""

    def __init__(self, reader: Reader, maker: _Maker, after: tuple[threading.Thread, ...], *, is_inline: bool) -> None:
        self._after = after
        self.is_inline = is_inline
        self._reader = reader
        self._maker = maker
        self._is_idle = False
        """True once an idle step is to replay a sample."""
        self._condition = threading.Condition()
        self._working = threading.RLock()
        self._is_open = True
        self.threads: tuple[threading.Thread, ...] = ()

    def start(self, *, is_forking: bool) -> None:
        """Starts the threads. If processes are forked, starts these first, unless a thread of an earlier epoch could interfere.

        Things that a data set has opened, such as an SQLite connection, may belong to the user's thread. Only workers forked
        from that thread, or from its own fork, can use them.
        """
        parts = (self._reader, self._maker)
        if is_forking and not any(thread.is_alive() for thread in self._after):
            for part in parts:
                self._do(part, part.prepare)
        self.threads = tuple(
            threading.Thread(target=self._run, args=(part,), name=name, daemon=True)
            for part, name in zip(parts, ("odb-read", "odb-collate"), strict=True)
        )
        for thread in self.threads:
            thread.start()

    def read(self, count: int, room: Room | None = None, end: int | None = None) -> None:
        with self._condition:
            self._reader.ask(count, room, end)
            self._condition.notify_all()

    def collate(self, requests: tuple[BatchRequest, ...]) -> None:
        with self._condition:
            if self._maker.collator.is_replaying:
                self._is_idle |= any(request.is_wanted and not request.places for request in requests)
            self._maker.ask(requests)
            self._condition.notify_all()

    def describe(self) -> str:
        if self._is_held:
            return "reading once more what it had read before its state was saved"
        return " and ".join(text for part in (self._reader, self._maker) if (text := part.describe()))

    @property
    def has_work(self) -> bool:
        return self._is_open and any(self._count_work(part) for part in (self._reader, self._maker))

    def stop(self) -> None:
        with self._condition:
            self._is_open = False
            self._condition.notify_all()

    def end(self) -> None:
        self.stop()
        deadline = time.monotonic() + END_S
        for thread in self.threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, deadline - time.monotonic()))
        if self._working.acquire(timeout=END_S):  # the thread in `work` has then noticed the end
            self._working.release()

    def work(self, steps: int, is_enough: Callable[[], bool] | None) -> None:
        with self._working, isolate():
            least_s = time.monotonic() + QUICK_S
            for part in (self._reader, self._maker):
                share = -(-self._count_work(part) // steps)
                while self._is_open and self._count_work(part) and (share > 0 or time.monotonic() < least_s):
                    if is_enough is not None and is_enough():
                        return
                    share -= self._do(part, part.work)

    @property
    def _is_held(self) -> bool:
        """True while an idle step of a resumed rank waits for the earlier samples, one of which it replays."""
        return self._is_idle and self._reader.is_early

    def _count_work(self, part: Reader | _Maker) -> int:
        """Returns how many calls of the part's `work` find something to do."""
        if self._is_held:
            return 1 if part is self._reader else 0  # the reader may have no request
        return part.count_work()

    def _do(self, part: Reader | _Maker, work: Callable[[], int | None]) -> int:
        try:
            return work() or 0
        except BaseException as error:  # user code may raise anything
            self.stop()
            self._maker.collator.forget_idle_sample()
            part.listener.on_error(describe(error), error)
            if not self.is_inline:
                # The traceback would keep the DataLoader's iterator, and its workers, alive until some later collection. It is
                # cleared only now, because the iterator then waits for each worker.
                traceback.clear_frames(error.__traceback__)
            if not isinstance(error, Exception):
                raise
            return 1

    def _run(self, part: Reader | _Maker) -> None:
        for thread in self._after:  # it is still in the user's code, which may not be made for two threads
            thread.join()
        if self._is_open:
            self._do(part, part.prepare)  # workers start before they are needed
        while True:
            with self._condition:
                while self._is_open and not self._count_work(part):
                    self._condition.wait()
                if not self._is_open:
                    return
            was_early = self._reader.is_early
            self._do(part, part.work)
            if was_early:
                with self._condition:
                    self._condition.notify_all()
