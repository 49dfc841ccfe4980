"""Samples that are read and in no batch yet, and how they become batches."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from odb_ref.core.errors import UsageError
from odb_ref.torch.measure import Measured
from odb_ref.torch.packing import Packed, unpack

CollateFn = Callable[[list[object]], object]


class OnIdle(StrEnum):
    """What a rank with nothing left yields in a step that other ranks train on. Spec: R1.3."""

    REPLAY = "replay"
    """A small real batch with loss scale 0, so that every collective of the model stays aligned."""
    NONE = "none"
    """None."""
    SKIP = "skip"
    """Nothing: the rank takes fewer steps than the others (for DDP's Join)."""


@dataclass(frozen=True, slots=True)
class BatchOrder:
    """A batch to make for a step: the samples at ``places``, or an idle one. An unwanted one is only cleared away."""

    number: int
    places: tuple[int, ...]
    is_wanted: bool = True


class Workbench:
    """Holds the samples of one rank between reading and collating. Safe to fill from one thread and empty from another."""

    def __init__(self, collate_fn: CollateFn, on_idle: OnIdle, get_idle_sample: Callable[[], object] | None) -> None:
        self._collate_fn = collate_fn
        self._on_idle = on_idle
        self._get_idle_sample = get_idle_sample
        self._samples: dict[int, object] = {}
        self._cheapest: Measured | None = None
        self._lock = threading.Lock()

    def put(self, place: int, item: Measured) -> None:
        """Adds the sample at a place of the sampler's order."""
        if self._on_idle is OnIdle.REPLAY and self._is_cheaper(item):
            # A copy, because a collate_fn may take a sample apart; a packed one is made anew each time.
            sample = item.sample if isinstance(item.sample, Packed) else copy.deepcopy(item.sample)
            self._cheapest = Measured(item.length, item.supervised, sample)
        with self._lock:
            self._samples[place] = item.sample

    def _is_cheaper(self, item: Measured) -> bool:
        # A batch without a supervised token has a mean loss of 0/0, which no weight makes harmless.
        best = self._cheapest
        return best is None or (not item.supervised, item.length) < (not best.supervised, best.length)

    def clear(self) -> None:
        """Drops every sample; keeps the one to replay."""
        with self._lock:
            self._samples.clear()

    def collate(self, order: BatchOrder) -> object:
        """The batch; None for an idle step that replays nothing and for one that is not wanted.

        Raises: what ``collate_fn`` raises, and UsageError when there is nothing to replay.
        """
        with self._lock:
            samples = [self._samples.pop(place) for place in order.places]
        if not order.is_wanted:
            return None
        if samples:
            return self._collate_fn([unpack(sample) for sample in samples])
        if self._on_idle is not OnIdle.REPLAY:
            return None
        return self._collate_fn([self._make_idle_sample()])

    def _make_idle_sample(self) -> object:
        if self._cheapest is not None:
            sample = self._cheapest.sample
            return sample.unpack() if isinstance(sample, Packed) else copy.deepcopy(sample)
        if self._get_idle_sample is None:
            raise UsageError(
                "this rank never had a sample to replay in idle steps: pass idle_sample= or on_idle='none'"
            )
        return self._get_idle_sample()


def pin(batch: object) -> object:
    """The batch with its tensors in page-locked memory, its containers made anew; what has no tensors stays as it is."""
    method = getattr(batch, "pin_memory", None)
    if callable(method):
        result: object = method()
        return result
    match batch:
        case dict():
            return {key: pin(value) for key, value in batch.items()}
        case list():
            return [pin(value) for value in batch]
        case tuple() if type(batch) is tuple:
            return tuple(pin(value) for value in batch)
        case _:
            return batch


def describe(error: BaseException) -> str:
    """An exception in one line, without the traceback that a worker process adds to its text."""
    lines: Sequence[str] = [line.strip() for line in str(error).splitlines() if line.strip()]
    name = type(error).__name__
    if not lines:
        return name
    if "Original Traceback" in str(error):
        return lines[-1][:500]
    return f"{name}: {lines[0]}"[:500]
