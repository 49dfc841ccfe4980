"""Holds samples between reading and collating, and makes batches of them."""

from __future__ import annotations

import copy
import gc
import sys
import threading
from collections.abc import Callable, Collection, Iterable, Mapping, MutableMapping, MutableSequence, Sequence
from dataclasses import dataclass
from enum import Enum, StrEnum
from functools import cache
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Final
from weakref import WeakValueDictionary

import numpy as np
import torch

from odb_ref.core.errors import UsageError
from odb_ref.torch.reading.counting import LabelCheck
from odb_ref.torch.reading.description import describe
from odb_ref.torch.reading.measure import Measured
from odb_ref.torch.reading.seeding import Use, compute_seed, seed_generators
from odb_ref.torch.reading.serialization import unpack
from odb_ref.torch.reading.service import BatchRequest
from odb_ref.torch.reading.tasks import get_field

_IDLE_ADVICE: Final = "pass Protocol(idle_sample=) or on_idle='none'"

_PADDED: Final = (
    "layout='packed' counts a batch's tokens without padding, but collate_fn makes a row for each sample, so its batches hold "
    "more than token_budget. Pass a collate_fn that lays the samples end to end, or none, or layout='padded'"
)
_JOINED: Final = (
    "collate_fn lays samples end to end, and neither position_ids nor attention_mask tell them apart, so attention may take "
    "them for one: return position_ids that begin again in each sample, or pass no collate_fn. If the model finds samples "
    "otherwise, ignore this"
)
_FEWER: Final = (
    "collate_fn returned fewer rows than samples. The samples it drops still count as trained on, also in the weights. Drop "
    "them when they are read: with Faults(on_bad_sample='quarantine') an error there sets a sample aside"
)

CollateFn = Callable[[list[object]], object]


@dataclass(frozen=True, slots=True)
class CollateTask:
    """The samples of a batch, and the seed for random numbers drawn while it is made."""

    seed: int
    samples: tuple[object, ...]
    supervised: int | None
    """The counted supervised tokens, or None for idle batches, where nothing depends on them."""


@dataclass(frozen=True, slots=True)
class Made:
    """A batch, and the warnings to issue."""

    batch: object
    warnings: tuple[str, ...] = ()


class OnIdle(StrEnum):
    """What a rank with no samples left yields in a step that other ranks train on. Spec: R1.3."""

    REPLAY = "replay"
    """A small real batch with loss scale 0, so that every collective of the model stays aligned."""
    NONE = "none"
    """No batch: the loader yields None."""


@dataclass(frozen=True, slots=True)
class BatchMaker:
    """Makes a batch, in any process, as a function of its samples and a seed only. Spec: R12.1."""

    collate_fn: CollateFn
    label_check: LabelCheck | None
    is_packed: bool = False

    def __call__(self, task: CollateTask) -> Made:
        """Returns the batch and the warnings to issue.

        Raises: what ``collate_fn`` raises, and LabelError when ``collate_fn`` has changed which tokens carry loss.
        """
        seed_generators(task.seed)
        samples = list(map(unpack, task.samples))
        count, warnings = len(samples), list[str]()
        if self.label_check is None or task.supervised is None:
            batch = self.collate_fn(samples)
        else:
            batch = self.label_check.collate(self.collate_fn, samples, task.supervised, warnings.append)
        rows = _count_rows(batch)
        if self.is_packed and 1 < rows == count:
            warnings.append(_PADDED)
        if self.is_packed and 1 == rows < count and not _tells_apart(batch):
            warnings.append(_JOINED)
        if not self.is_packed and 1 < rows < count:  # a single row may hold the samples end to end
            warnings.append(_FEWER)
        return Made(batch, tuple(warnings))


def _tells_apart(batch: object) -> bool:
    """Returns True if a field of a packed row says where its samples begin: a mask that is not all ones, positions that begin
    again, or offsets.
    """
    mask, positions = get_field(batch, "attention_mask"), get_field(batch, "position_ids")
    has_mask = bool((mask != 1).any()) if isinstance(mask, torch.Tensor) else mask is not None
    # Compares neighbours, because differences of unsigned integers are never negative.
    begins_again = (
        bool((positions[..., 1:] <= positions[..., :-1]).any())
        if isinstance(positions, torch.Tensor)
        else positions is not None
    )
    return has_mask or begins_again or get_field(batch, "cu_seq_lens_q") is not None


def _count_rows(batch: object) -> int:
    """Returns the number of token rows in a batch, or 0 if it is unknown or rows have no padding (nested)."""
    ids = get_field(batch, "input_ids")
    return len(ids) if isinstance(ids, torch.Tensor) and ids.ndim > 1 and not ids.is_nested else 0


class Collator:
    """Holds one rank's samples between reading and collating. One thread may fill it while another empties it."""

    def __init__(self, on_idle: OnIdle, get_idle_sample: Callable[[], object]) -> None:
        self._on_idle = on_idle
        self._get_idle_sample = get_idle_sample
        self._epoch_seed = 0
        self._samples: dict[int, Measured] = {}
        self._cheapest: Measured | None = None
        self._lock = threading.Lock()

    def renew(self, epoch_seed: int) -> Collator:
        """Returns a new collator for an epoch. The seed and the batch numbers determine the random numbers its batches draw.

        It is a new object because the previous epoch's threads may still use the old one. Both replay the same idle sample.
        """
        other = Collator(self._on_idle, self._get_idle_sample)
        other._epoch_seed, other._cheapest = epoch_seed, self._cheapest
        return other

    @property
    def is_replaying(self) -> bool:
        """True if idle steps replay a sample."""
        return self._on_idle is OnIdle.REPLAY

    def forget_idle_sample(self) -> None:
        """Drops the idle sample, which may have caused a failure, so that later epochs use another one."""
        self._cheapest = None

    def put(self, samples: Mapping[int, Measured]) -> None:
        """Adds samples, by place in the sampler's order."""
        with self._lock:
            self._samples.update(samples)
        self.offer(samples.values())

    def offer(self, samples: Collection[Measured]) -> None:
        """Replays one of these samples in idle steps if it costs less than all before. Holds no other."""
        if self.is_replaying and samples:
            best = self._cheapest
            if best is not None and best.supervised and best.length <= min([item.length for item in samples]):
                return
            # A batch without a supervised token has a mean loss of 0/0, which no weight makes harmless.
            least = min(samples, key=_compute_cost)
            if best is None or _compute_cost(least) < _compute_cost(best):
                sample = _copy(least.sample)  # a collate_fn may take a sample apart or change its tensors
                self._cheapest = best if sample is None else least._replace(sample=sample)

    def count_bytes(self, places: Iterable[int]) -> int:
        """Returns the bytes of the samples at these places, none of which is in a batch yet."""
        with self._lock:
            return sum(self._samples[place].nbytes for place in places)

    def take(self, request: BatchRequest) -> CollateTask | None:
        """Removes a batch's samples and returns the task to make it. None if it is unwanted, or an idle step replays nothing.

        Raises: UsageError when there is no sample to replay.
        """
        with self._lock:
            items = [self._samples.pop(place) for place in request.places]
        if not request.is_wanted:
            return None
        seed = compute_seed(Use.STEP, self._epoch_seed, request.number)
        if items:
            return CollateTask(seed, tuple([item.sample for item in items]), sum([item.supervised for item in items]))
        if not self.is_replaying:
            return None
        seed_generators(seed)
        return CollateTask(seed, (self._make_idle_sample(),), None)

    def _make_idle_sample(self) -> object:
        if self._cheapest is not None:
            return copy.deepcopy(self._cheapest.sample)
        try:
            sample = self._get_idle_sample()
        except Exception as error:  # a stream, or a data set that is empty, lacks key 0, or is for workers only
            what = "this rank has no sample to replay in idle steps, and cannot read the data set's first sample in its process"
            raise UsageError(f"{what} ({describe(error)}): {_IDLE_ADVICE}") from error
        copied = _copy(sample)
        return sample if copied is None else copied


def _compute_cost(item: Measured) -> tuple[bool, int]:
    return not item.supervised, item.length


class OwnMemory:
    """Gives each batch its own memory if ``collate_fn`` reuses a buffer or an object.

    Several batches are made ahead of the consumer. In a separate process each is packed at once, but with ``num_workers=0`` the
    next would overwrite it. Parts that only the batch refers to are not copied, and almost all parts are of this kind.
    """

    def __init__(self) -> None:
        self._left: WeakValueDictionary[int, object] = WeakValueDictionary()
        """The tensors and arrays that were not copied and still exist, by the address of their memory."""

    def keep(self, made: Made, samples: Sequence[object] = ()) -> object:
        """Returns the batch, with copies of all parts that something else may refer to, except the ``samples`` it was made from
        and their fields. Only ``made`` may refer to the batch.

        Raises: UsageError when such a part cannot be copied, or memory is reused all the same.
        """
        own: list[object] = []
        copies: dict[int, object] = {}
        given = cache(lambda: {id(part): part for sample in samples for part in (sample, *gc.get_referents(sample))})
        is_own = _sort_out([made.batch], own, copies, given)
        found = {place: part for part in own if (place := _locate(part))}
        for place in found:
            other = self._left.get(place)
            if other is not None and _locate(other) == place:
                raise UsageError(f"collate_fn overwrites an earlier batch that is still to be used. {_REUSED}")
        self._left.update(found)
        if is_own:
            return made.batch
        try:
            return copy.deepcopy(made.batch, {id(part): part for part in own} | copies | given())
        except Exception as error:  # whatever a batch's parts raise
            raise UsageError(
                f"collate_fn returned an object that it may reuse and that cannot be copied ({describe(error)}). {_REUSED}"
            ) from error


def _sort_out(
    parts: list[object], own: list[object], copies: dict[int, object], given: Callable[[], dict[int, object]]
) -> bool:
    """Returns True if only this list, and their containers in it, refer to ``parts`` and everything inside them. Parts that
    were ``given`` do not count.

    Adds tensors and arrays without other references to ``own``, and copies of other tensors to ``copies``, by identity.
    """
    is_own = True
    for part, count in zip(parts, _count_references(parts), strict=True):
        if isinstance(part, _UNCHANGING) or (count > _ALONE and id(part) in given()):
            continue
        if count <= _ALONE and _has_own_memory(part):
            own.append(part)
        elif isinstance(part, torch.Tensor):
            is_own = False
            if not (part.is_leaf and part.requires_grad):
                copies[id(part)] = part.clone()  # copies only the view, while a deep copy would copy all its memory
        elif (
            isinstance(part, np.ndarray) or count > _ALONE or not _sort_out(gc.get_referents(part), own, copies, given)
        ):
            is_own = False
    return is_own


def _count_references(parts: list[object]) -> list[int]:
    return [sys.getrefcount(part) for part in parts]


_UNCHANGING: Final = (
    *(type(None), bool, int, float, complex, str, bytes, Enum, np.generic, torch.dtype, torch.device, torch.Size),
    *(type, FunctionType, BuiltinFunctionType, ModuleType),
)
"""Types that are never modified, so that other references to them do not matter."""
_ALONE: Final = _count_references([object()])[0] + 1
"""The reference count of an object that is in a list and nowhere else, plus one for its container."""
_REUSED: Final = "With num_workers=0 several batches are made ahead, so return new objects for each batch"


def _has_own_memory(part: object) -> bool:
    """Returns False if the memory belongs, or may belong, to another tensor, an array or a buffer."""
    if isinstance(part, np.ndarray):
        return part.base is None and part.flags.owndata and not part.dtype.hasobject
    try:
        # Borrowed memory, for example from from_numpy, cannot be resized.
        return (
            isinstance(part, torch.Tensor)
            and part.layout is torch.strided
            and not part._is_view()
            and part.untyped_storage().resizable()
        )
    except (NotImplementedError, RuntimeError):  # a tensor class of another library
        return False


def _locate(part: object) -> int:
    """Returns the address of a tensor's or an array's memory, or 0 if there is none."""
    if isinstance(part, torch.Tensor):
        return part.untyped_storage().data_ptr()
    return int(part.ctypes.data) if isinstance(part, np.ndarray) else 0


def _copy(sample: object) -> object:
    """Returns a copy, or None if the sample cannot be copied."""
    try:
        return copy.deepcopy(sample)
    except Exception:  # parts of a sample may raise anything: an open file, a lock
        return None


def pin(batch: object) -> object:
    """Returns the batch with its tensors in page-locked memory, in new containers, as a DataLoader does."""
    method = getattr(batch, "pin_memory", None)
    if callable(method):
        result: object = method()
        return result
    match batch:
        case str() | bytes():
            return batch
        case Mapping():
            return _renew(batch, {key: pin(value) for key, value in batch.items()})
        case tuple():
            make = getattr(batch, "_make", type(batch))  # named tuples have `_make`
            return make(map(pin, batch))
        case Sequence():
            return _renew(batch, list(map(pin, batch)))
        case _:
            return batch


def _renew(batch: object, pinned: dict[object, object] | list[object]) -> object:
    """Returns a container like ``batch`` with these contents, or the contents alone if that is impossible."""
    try:
        if not isinstance(batch, MutableMapping | MutableSequence):
            return type(batch)(pinned)  # type: ignore[call-arg]
        clone = copy.copy(batch)  # it may have attributes beside its items
        if isinstance(clone, MutableMapping):
            clone.update(pinned)  # type: ignore[arg-type]
        else:
            clone[:] = pinned
    except TypeError:
        return pinned
    return clone
