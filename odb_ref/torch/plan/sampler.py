"""Lists the keys of a user's sampler, for the right epoch."""

from __future__ import annotations

import contextlib
import copy
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from itertools import islice
from typing import Final, Protocol, runtime_checkable

from torch.utils.data import DistributedSampler, Sampler

from odb_ref.core.errors import UsageError, read_integer

MOST_UNTOLD: Final = 2**26
"""The limit for a sampler without a length, which may never end."""

_left: Final[dict[int, tuple[weakref.ref[object], Mapping[str, int]]]] = {}
"""For each sampler, by identity, the numbers it held when a loader last used it."""


@runtime_checkable
class Repeating(Protocol):
    """A sampler that repeats or drops keys until they divide evenly, so that its length depends on ranks or batch size."""

    own_samples: int
    """The number of keys it lists, unless an epoch is continued that was begun with another number."""
    samples: int
    """The number of keys it lists now."""


class AllReplicas(Sampler[object]):
    """The full order behind a `DistributedSampler`, which lists one rank's share. It takes one key of each rank in turn.

    All ranks list the same order. Their number may differ from the one that the sampler assumes.
    """

    def __init__(self, sampler: DistributedSampler[object]) -> None:
        self.sampler = sampler
        self.samples = self.own_samples = sampler.total_size

    def set_epoch(self, epoch: int) -> None:
        """Sets the epoch of the wrapped sampler."""
        self.sampler.set_epoch(epoch)

    def __len__(self) -> int:
        return self.samples

    def __iter__(self) -> Iterator[object]:
        whole = copy.copy(self.sampler)
        whole.rank, whole.num_replicas, whole.num_samples, whole.total_size = 0, 1, self.samples, self.samples
        return iter(whole)


def list_keys(sampler: Iterable[object], epoch: int) -> list[object]:
    """Returns the keys that a user's sampler lists for an epoch.

    Raises: UsageError when the user has set the sampler to another epoch, or it lists another number of keys than its length.
    """
    set_epoch = getattr(sampler, "set_epoch", None)
    keys = _list_for(sampler, set_epoch, epoch) if callable(set_epoch) else _list(sampler)
    if isinstance(sampler, Sized) and len(keys) != (told := len(sampler)):
        found = len(keys) if len(keys) < told else "more"
        raise UsageError(f"the sampler has a length of {told}, but listed {found} keys for epoch {epoch}")
    return keys


def _list(sampler: Iterable[object]) -> list[object]:
    """Returns a sampler's keys. Stops one key after the sampler's stated length, because it may never end.

    Raises: UsageError when it has no length and does not seem to end.
    """
    keys = list(islice(sampler, len(sampler) + 1 if isinstance(sampler, Sized) else MOST_UNTOLD))
    if not isinstance(sampler, Sized) and len(keys) == MOST_UNTOLD:
        raise UsageError(
            f"the sampler has no __len__ and did not end after {MOST_UNTOLD:,} keys, but all its keys are listed at the "
            "beginning of an epoch. Make it end, or use an IterableDataset"
        )
    return keys


def _list_for(sampler: Iterable[object], set_epoch: Callable[[int], object], epoch: int) -> list[object]:
    """Lists the keys for the epoch, and leaves the sampler at the next one, so that a change by the user can be noticed."""
    # Use the user's own sampler, which another loader may use too.
    own = sampler.sampler if isinstance(sampler, AllReplicas) else sampler
    key, found = id(own), _read_numbers(own)
    _, left = _left.get(key, (None, None))
    if left is None:
        set_epoch(0)
        left = _read_numbers(own)
    set_epoch(epoch)
    wanted = _read_numbers(own)
    keys = _list(sampler)
    if (changed := _find_changed(found, wanted)) and _find_changed(found, left):
        # Works whether the number is the epoch or the sum of epoch and seed.
        other = max(0, epoch + found[changed[0]] - wanted[changed[0]])
        set_epoch(other)
        is_other = not _find_changed(found, _read_numbers(own))
        if _list(sampler) != keys:
            set_epoch(other)  # because listing may have advanced the sampler
            which = f"epoch {other}" if is_other else f"another epoch ({changed[0]} is {found[changed[0]]})"
            raise UsageError(
                f"the sampler was set to {which}, but the loader reads epoch {epoch}: call "
                f"set_epoch({other if is_other else '...'}) of the loader, which sets the sampler too"
            )
    set_epoch(epoch + 1)
    with contextlib.suppress(TypeError):  # the sampler does not support weak references
        _left[key] = weakref.ref(own, lambda _: _left.pop(key, None)), _read_numbers(own)
    return keys


def _read_numbers(sampler: object, name: str = "", depth: int = 2) -> dict[str, int]:
    """Returns the integers in a sampler and in samplers inside it, by name. One of them is most likely its epoch."""
    found: dict[str, int] = {}
    for key in (*getattr(sampler, "__dict__", ()), "epoch"):
        value = getattr(sampler, key, None)
        if (number := read_integer(value)) is not None and number >= 0:  # negative numbers mean that none was set
            found[name + key] = number
        elif depth and hasattr(value, "set_epoch"):
            found |= _read_numbers(value, f"{name}{key}.", depth - 1)
    return found


def _find_changed(one: Mapping[str, int], other: Mapping[str, int]) -> list[str]:
    return [name for name in one if name in other and one[name] != other[name]]
