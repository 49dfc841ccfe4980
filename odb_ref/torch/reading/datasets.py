"""Data sets as the inner DataLoader sees them: each sample is read with its own seed, and none is lost without a word.

A DataLoader takes any StopIteration for the end of the samples. Spec: R11.4, R12.1.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence, Sized
from dataclasses import dataclass
from itertools import count, islice
from typing import Generic, NamedTuple, TypeVar

import torch
from torch.utils.data import Dataset, IterableDataset, get_worker_info

from odb_ref.core.errors import OdbError
from odb_ref.torch.reading.description import describe, note_sample
from odb_ref.torch.reading.quarantine import BadSample, MeasureFn
from odb_ref.torch.reading.seeding import DrawDetector, Use, compute_seed, seed_generators
from odb_ref.torch.reading.service import ReadPlan

Chunk = list[tuple[int, object]]
"""Samples that were read at once, each with its place in the sampler's order, as the measure answers them."""


class KeyChunk(NamedTuple):
    """What to read at once: of each sample its place, and what the sampler calls it."""

    seed: int
    """That of the epoch."""
    keys: Sequence[tuple[int, object]]


@dataclass(slots=True)
class _Wanted:
    """Samples that are wanted at the same time: places and keys, and how many were not taken yet."""

    items: Iterator[tuple[int, object]]
    left: int
    chunks: int = 0
    """How many are still taken before their size is computed again: one for each reader."""
    size: int = 0


class KeyFeed:
    """The keys of an epoch, in chunks: those known when it begins, then those drawn. One thread adds, another takes.

    Samples that are wanted at the same time, such as the ``first`` of those known, are shared out among so many ``readers``;
    without any, chunks are as large as they may be.
    """

    def __init__(self, plan: ReadPlan, readers: int | None = None, first: int = 0) -> None:
        self._seed = plan.seed
        self._parts: deque[_Wanted] = deque()
        """A chunk holds samples of one."""
        self._is_closed = not plan.is_drawn
        self._readers = readers
        self.added = 0
        """How many samples were added."""
        self._asked = known = len(plan.places)
        """How many samples are wanted by now: those an epoch begins with, and what was drawn since."""
        if plan.keys is not None:
            items = zip(plan.places, plan.keys, strict=True)
            self._append(items, min(first if readers else 0, known))
            self._append(items, known - self.added)

    def add(self, items: Sequence[tuple[int, object]], count: int) -> None:
        """Adds places and keys; so many samples are asked for, added now or before, and do not wait for what is read ahead."""
        self._asked += count
        cut = max(0, self._asked - self.added)
        for part in (items[:cut], items[cut:]):
            self._append(iter(part), len(part))

    def _append(self, items: Iterator[tuple[int, object]], count: int) -> None:
        self.added += count
        self._parts.append(_Wanted(items, count))

    def close(self) -> None:
        """Nothing more is added."""
        self._is_closed = True

    def take(self, most: int) -> KeyChunk | None:
        """Returns the next chunk of at most so many, an empty one while nothing is drawn; None when nothing more comes.

        Where they are shared out, chunks are equally large, and so many that all readers are done at about the same time.
        """
        is_closed = self._is_closed  # first: what was added before it was closed is not lost
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
    """A data set or a function of the user answers what it must not."""


def contain(error: BaseException, what: str, where: str = "") -> DataSetError | None:
    """Returns what to raise in the place of an error that ends more than it should; None where nothing is wrong.

    StopIteration ends an epoch. What is not an Exception (SystemExit, the panic of a Rust extension) ends a worker without
    a word.
    """
    is_in_worker = get_worker_info() is not None
    if isinstance(error, StopIteration) or (is_in_worker and not isinstance(error, Exception)):
        name, text = describe(error).partition(":")[::2]
        return DataSetError(f"{what} raised {name}{where}{text and ':'}{text}")
    return None


Argument = TypeVar("Argument")
Answer = TypeVar("Answer")


@dataclass(frozen=True, slots=True)
class Contained(Generic[Argument, Answer]):
    """A function from which no StopIteration comes."""

    function: Callable[[Argument], Answer]
    name: str

    def __call__(self, argument: Argument) -> Answer:
        """Returns what the function returns.

        Raises: DataSetError in the place of what would end more than the function, else what the function raises.
        """
        try:
            return self.function(argument)
        except BaseException as error:
            if (instead := contain(error, self.name)) is None:
                raise
            raise instead from error


@dataclass(frozen=True, slots=True)
class WorkerInit:
    """What a worker does first: what each process of ours does, then what the user asked for."""

    dataset: Dataset[object] | None
    """The user's, which the worker tells of in place of a wrapper; None where there is no wrapper."""
    process_init_fn: Callable[[], None] | None
    init_fn: object

    def __call__(self, worker_id: int) -> None:
        """Raises: what the user's function raises, DataSetError in the place of StopIteration."""
        if self.process_init_fn is not None:
            self.process_init_fn()
        if self.dataset is not None:
            object.__setattr__(get_worker_info(), "dataset", self.dataset)
        if callable(self.init_fn):
            Contained(self.init_fn, "worker_init_fn")(worker_id)


class SeededDataset(Dataset[Chunk]):
    """A map-style data set, read and measured by the `KeyChunk`. What it raises for a sample says for which; where it
    ``is_guarded``, a `BadSample` stands in the place of that sample.
    """

    def __init__(self, dataset: Dataset[object], measure: MeasureFn, *, is_guarded: bool = False) -> None:
        self._wrapped = dataset
        self._measure = measure
        self._is_guarded = is_guarded
        self._has_all = has_many(dataset)
        get_one = getattr(type(dataset), "__getitem__", Dataset.__getitem__)
        self._has_one = not self._has_all or get_one is not Dataset.__getitem__
        """False where samples can be read at once alone."""
        self._is_drawing: bool | None = None
        """Whether anything was drawn for a sample; None before the first was read."""
        self._detector: DrawDetector | None = None

    def __getitem__(self, chunk: KeyChunk) -> Chunk:
        if not chunk.keys:
            return []
        places, names = zip(*chunk.keys, strict=True)
        return list(zip(places, self._measure_each(names, self._read_chunk(chunk)), strict=True))

    def _measure_each(self, names: Sequence[object], samples: list[object]) -> Sequence[object]:
        """Returns the measures, of all samples at once; where that raises, the exception says which sample it was."""
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
        """Returns the samples, each as it is read alone with its own seed.

        To seed takes longer than to read a small sample. While nothing is drawn one seed serves for all; what is read when
        something was drawn is read again, one by one, and from then on every sample is seeded. Spec: R12.3. Preserves: REPLAY.
        """
        names, seed = [name for _, name in chunk.keys], compute_seed(Use.UNDRAWN, chunk.seed)
        samples: list[object] = []
        if self._is_drawing is None:
            # What draws does so for the first sample, in most cases: no other is read twice then.
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
        """Returns the samples; None when something was drawn."""
        detector = self._detector
        if detector is None or detector.seed != seed:
            detector = self._detector = DrawDetector(seed)
        detector.arm()
        try:
            samples = self._read_names(names)
        except Exception:
            if not detector.has_drawn():
                raise
            return None  # it may have raised for what was drawn
        return None if detector.has_drawn() else samples

    def _read_names(self, names: list[object]) -> list[object]:
        """Returns the samples, read at once where the data set offers that."""
        if self._has_all and names:
            try:
                return _read_at_once(self._wrapped, names)
            except Exception:
                if not self._is_guarded:
                    raise  # else one by one finds which it is
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
    """Returns whether a data set offers to read many samples at once."""
    return callable(getattr(dataset, "__getitems__", None))


def _read_at_once(dataset: Dataset[object], names: list[object]) -> list[object]:
    samples: object = Contained(dataset.__getitems__, "__getitems__ of the data set")(names)  # type: ignore[attr-defined]
    if not isinstance(samples, Sequence):
        samples = list(samples) if hasattr(samples, "__iter__") else samples
    if not isinstance(samples, Sequence) or len(samples) != len(names):
        found = f"{len(samples)} samples" if isinstance(samples, Sized) else type(samples).__name__
        raise DataSetError(f"__getitems__ of the data set gave {found} for {len(names)} keys: {names!r:.200}")
    return list(samples)


class SeededStream(IterableDataset[object]):
    """An iterable data set: what a worker draws for its n-th sample follows from the epoch, the worker's number and n."""

    def __init__(self, dataset: Dataset[object], epoch_seed: torch.Tensor) -> None:
        self._wrapped = dataset
        self._seed = epoch_seed

    def __iter__(self) -> Iterator[object]:
        worker = get_worker_info()
        numbers = int(self._seed.item()), 0 if worker is None else worker.id
        seed_generators(compute_seed(Use.STREAM, *numbers))
        samples = Contained(_iterate, "__iter__ of the data set")(self._wrapped)
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


def _iterate(dataset: Dataset[object]) -> Iterator[object]:
    return iter(dataset)
