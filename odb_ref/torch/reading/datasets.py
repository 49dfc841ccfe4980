"""Wraps data sets for the inner DataLoader. Each sample is read with its own seed, and none is lost silently.

A DataLoader takes any StopIteration as the end of the samples. Spec: R11.4, R12.1.
"""

from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Callable, Iterator, Sequence, Sized
from dataclasses import dataclass
from itertools import count, islice
from typing import NamedTuple, TypeVar

import torch
from torch.utils.data import Dataset, IterableDataset, get_worker_info

from odb_ref.core.errors import OdbError
from odb_ref.torch.reading.description import describe, note_sample
from odb_ref.torch.reading.quarantine import BadSample, MeasureFn
from odb_ref.torch.reading.seeding import DrawDetector, Use, compute_seed, seed_generators
from odb_ref.torch.reading.service import ReadPlan

Chunk = list[tuple[int, object]]
"""Samples read together, each with its place in the sampler's order, in the form that the measure returns."""


class KeyChunk(NamedTuple):
    """Samples to read together: for each its place, and its key from the sampler."""

    seed: int
    """The epoch's seed."""
    keys: Sequence[tuple[int, object]]


@dataclass(slots=True)
class _Wanted:
    """Samples requested together: places and keys, and how many are not taken yet."""

    items: Iterator[tuple[int, object]]
    left: int
    chunks: int = 0
    """How many more chunks to take before their size is computed again: one per reader."""
    size: int = 0


class KeyFeed:
    """The keys of an epoch, in chunks: first those known when it begins, then those drawn. One thread adds, another takes.

    Samples requested together, such as the ``first`` of the known ones, are divided evenly among the ``readers``. If
    ``readers`` is None, chunks have their maximum size.
    """

    def __init__(self, plan: ReadPlan, readers: int | None = None, first: int = 0) -> None:
        self._seed = plan.seed
        self._parts: deque[_Wanted] = deque()
        """The remaining samples. A chunk never spans two parts."""
        self._is_closed = not plan.is_drawn
        self._readers = readers
        self.added = 0
        """Number of samples added so far."""
        self._asked = known = len(plan.places)
        """Number of samples requested so far: those an epoch begins with, and those drawn since."""
        if plan.keys is not None:
            items = zip(plan.places, plan.keys, strict=True)
            self._append(items, min(first if readers else 0, known))
            self._append(items, known - self.added)

    def add(self, items: Sequence[tuple[int, object]], count: int) -> None:
        """Adds places and keys. Requests ``count`` samples, added now or before, ahead of those that are read ahead."""
        self._asked += count
        cut = max(0, self._asked - self.added)
        for part in (items[:cut], items[cut:]):
            self._append(iter(part), len(part))

    def _append(self, items: Iterator[tuple[int, object]], count: int) -> None:
        self.added += count
        self._parts.append(_Wanted(items, count))

    def close(self) -> None:
        """Declares that no more keys will be added."""
        self._is_closed = True

    def take(self, most: int) -> KeyChunk | None:
        """Returns the next chunk of at most ``most`` samples, an empty one while nothing is drawn, or None at the end.

        Samples divided among readers come in chunks of equal size, so that all readers finish at about the same time.
        """
        is_closed = self._is_closed  # read this first, so that samples added before `close` are not lost
        while self._parts and not self._parts[0].left:
            self._parts.popleft()
        if not self._parts:
            return None if is_closed else KeyChunk(self._seed, [])
        part = self._parts[0]
        if not part.chunks:
            part.chunks = readers = self._readers or 1
            turns = -(-part.left // (most * readers))
            part.size = -(-part.left // (turns * readers)) if self._readers else most
        part.chunks -= 1
        size = min(part.size, part.left)
        part.left -= size
        return KeyChunk(self._seed, list(islice(part.items, size)))


class DataSetError(OdbError, RuntimeError):
    """A data set or a user's function returns or raises something that it must not."""


def contain(error: BaseException, what: str, where: str = "") -> DataSetError | None:
    """Returns an error to raise instead of one that would end more than it should or be lost, or None if there is no need.

    StopIteration would end an epoch. SystemExit, or the panic of a Rust extension, would silently end a worker. A worker sends
    the class of an error, and an error of a class made at run time never arrives.
    """
    is_in_worker = get_worker_info() is not None
    if isinstance(error, StopIteration) or (is_in_worker and not _can_be_sent(error)):
        name, text = describe(error).partition(":")[::2]
        return DataSetError(f"{what} raised {name}{where}{text and ':'}{text}")
    return None


def _can_be_sent(error: BaseException) -> bool:
    try:
        pickle.dumps(type(error))
    except Exception:  # pickling may raise anything
        return False
    return isinstance(error, Exception)


Argument = TypeVar("Argument")
Answer = TypeVar("Answer")


def call_contained(function: Callable[[Argument], Answer], name: str, argument: Argument) -> Answer:
    """Returns the function's answer.

    Raises: DataSetError instead of an error that would end more than the function; otherwise what the function raises.
    """
    try:
        return function(argument)
    except BaseException as error:
        if (instead := contain(error, name)) is None:
            raise
        raise instead from error


def begin_worker(
    dataset: Dataset[object] | None, process_init_fn: Callable[[], None] | None, init_fn: object, worker_id: int
) -> None:
    """Runs first in a worker: does what each of our processes does, then calls the user's function.

    ``dataset`` is the user's data set, which get_worker_info() returns instead of the wrapper; None if there is no wrapper.

    Raises: what the user's function raises, but DataSetError instead of StopIteration.
    """
    if process_init_fn is not None:
        process_init_fn()
    if dataset is not None:
        object.__setattr__(get_worker_info(), "dataset", dataset)
    if callable(init_fn):
        call_contained(init_fn, "worker_init_fn", worker_id)


class SeededDataset(Dataset[Chunk]):
    """A map-style data set, read and measured by `KeyChunk`. Its exceptions name the sample. If it ``is_guarded``, a
    `BadSample` takes the place of a sample that cannot be read.
    """

    def __init__(
        self,
        dataset: Dataset[object],
        measure: MeasureFn,
        *,
        is_guarded: bool = False,
        reporter: object = None,
    ) -> None:
        self._reporter = reporter  # first, so that it tells why the rest cannot be rebuilt
        self._wrapped = dataset
        self._measure = measure
        self._is_guarded = is_guarded
        self._has_all = has_many(dataset)
        get_one = getattr(type(dataset), "__getitem__", Dataset.__getitem__)
        self._has_one = not self._has_all or get_one is not Dataset.__getitem__
        """False if the data set offers only `__getitems__`."""
        self._is_drawing: bool | None = None
        """Whether reading a sample draws random numbers; None before the first sample."""
        self._detector: DrawDetector | None = None

    def __getitem__(self, chunk: KeyChunk) -> Chunk:
        if not chunk.keys:
            return []
        places, names = zip(*chunk.keys, strict=True)
        return list(zip(places, self._measure_each(names, self._read_chunk(chunk)), strict=True))

    def _measure_each(self, names: Sequence[object], samples: list[object]) -> Sequence[object]:
        """Measures all samples together. If that raises, measures them one by one to find and name the sample."""
        try:
            return self._measure(samples)
        except Exception:
            for name, sample in zip(names, samples, strict=True):
                try:
                    self._measure([sample])
                except Exception as error:
                    note_sample(error, name)
                    raise
            raise

    def _read_chunk(self, chunk: KeyChunk) -> list[object]:
        """Returns the samples, each as if it were read alone with its own seed.

        Seeding takes longer than reading a small sample. So while nothing is drawn, one seed serves all samples. Once something
        is drawn, the samples just read are read again, one by one, and from then on each sample is seeded. Spec: R12.3.
        Preserves: REPLAY.
        """
        names, seed = [name for _, name in chunk.keys], compute_seed(Use.UNDRAWN, chunk.seed)
        samples: list[object] = []
        if self._is_drawing is None:
            # Data sets that draw usually do so for the first sample. Trying it alone saves reading the others twice.
            first = self._read_undrawn(names[:1], seed)
            samples, self._is_drawing = first or [], first is None
        if not self._is_drawing:
            rest = self._read_undrawn(names[len(samples) :], seed)
            if rest is not None:
                return samples + rest
            self._is_drawing = True
        for place, name in chunk.keys[len(samples) :]:
            seed_generators(compute_seed(Use.SAMPLE, chunk.seed, place))
            samples.append(self._read(name))
        return samples

    def _read_undrawn(self, names: list[object], seed: int) -> list[object] | None:
        """Returns the samples, or None if reading them drew random numbers."""
        detector = self._detector
        if detector is None or detector.seed != seed:
            detector = self._detector = DrawDetector(seed)
        detector.arm()
        try:
            samples = self._read_names(names)
        except Exception:
            if not detector.has_drawn():
                raise
            return None  # the error may depend on the random numbers
        return None if detector.has_drawn() else samples

    def _read_names(self, names: list[object]) -> list[object]:
        """Returns the samples, read together if the data set supports that."""
        if self._has_all and names:
            try:
                return _read_at_once(self._wrapped, names)
            except Exception:
                if not self._is_guarded:
                    raise  # if guarded, reading one by one finds the bad sample
        return list(map(self._read, names))

    def _read(self, name: object) -> object:
        try:
            return self._wrapped[name] if self._has_one else _read_at_once(self._wrapped, [name])[0]
        except BaseException as error:
            instead = contain(error, "the data set", f" for the sample {name!r}")
            if self._is_guarded and isinstance(found := instead or error, Exception):
                return BadSample(describe(found))
            if instead is not None:
                raise instead from error
            if isinstance(error, Exception):
                note_sample(error, name)
            raise


def has_many(dataset: Dataset[object]) -> bool:
    """Returns whether a data set can read many samples at once."""
    return callable(getattr(dataset, "__getitems__", None))


def _read_at_once(dataset: Dataset[object], names: list[object]) -> list[object]:
    samples: object = call_contained(dataset.__getitems__, "__getitems__ of the data set", names)  # type: ignore[attr-defined]
    if not isinstance(samples, Sequence):
        samples = list(samples) if hasattr(samples, "__iter__") else samples
    if not isinstance(samples, Sequence) or len(samples) != len(names):
        found = f"{len(samples)} samples" if isinstance(samples, Sized) else type(samples).__name__
        raise DataSetError(f"__getitems__ of the data set returned {found} for {len(names)} keys: {names!r:.200}")
    return list(samples)


class SeededStream(IterableDataset[object]):
    """An iterable data set. Random numbers for a worker's n-th sample depend only on the epoch, the worker's number and n."""

    def __init__(self, dataset: Dataset[object], epoch_seed: torch.Tensor, *, reporter: object = None) -> None:
        self._reporter = reporter
        self._wrapped = dataset
        self._seed = epoch_seed

    def __iter__(self) -> Iterator[object]:
        worker = get_worker_info()
        numbers = int(self._seed.item()), 0 if worker is None else worker.id
        seed_generators(compute_seed(Use.STREAM, *numbers))
        samples: Iterator[object] = call_contained(iter, "__iter__ of the data set", self._wrapped)
        for index in count(1):
            seed_generators(compute_seed(Use.STREAM, *numbers, index))
            try:
                sample = next(samples)
            except StopIteration:
                return
            except BaseException as error:
                if (instead := contain(error, "the data set")) is None:
                    raise
                raise instead from error
            yield sample
