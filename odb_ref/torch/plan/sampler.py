"""What a sampler of the user's lists, and for which epoch."""

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
"""A sampler that does not say how many keys it has may never end."""

_left: Final[dict[int, tuple[weakref.ref[object], Mapping[str, int]]]] = {}
"""By the identity of a sampler: the numbers it held when a loader was done with it."""


@runtime_checkable
class Repeating(Protocol):
    """A sampler that is filled up from its beginning until its keys can be shared out evenly: its length goes by the ranks."""

    least: int
    """How many keys there are without those repeated."""
    samples: int
    """How many it lists."""


class AllReplicas(Sampler[object]):
    """The order of which a `DistributedSampler` lists one rank's share: what its ranks list, one of each in turn.

    All ranks list the same, and may be more or fewer than the sampler counts.
    """

    def __init__(self, sampler: DistributedSampler[object]) -> None:
        self.sampler = sampler
        self.samples = sampler.total_size
        self.least = self.samples if sampler.drop_last else len(sampler.dataset)  # type: ignore[arg-type]

    def set_epoch(self, epoch: int) -> None:
        """Sets the sampler's."""
        self.sampler.set_epoch(epoch)

    def __len__(self) -> int:
        return self.samples

    def __iter__(self) -> Iterator[object]:
        whole = copy.copy(self.sampler)
        whole.rank, whole.num_replicas, whole.num_samples, whole.total_size = 0, 1, self.samples, self.samples
        return iter(whole)


def list_keys(sampler: Iterable[object], epoch: int) -> list[object]:
    """Returns what a sampler of the user's lists for an epoch.

    Raises: UsageError when the user has set the sampler to another epoch, or it lists another number of keys than it says.
    """
    set_epoch = getattr(sampler, "set_epoch", None)
    keys = _list_for(sampler, set_epoch, epoch) if callable(set_epoch) else _list(sampler)
    if isinstance(sampler, Sized) and len(keys) != (told := len(sampler)):
        found = len(keys) if len(keys) < told else "more"
        raise UsageError(f"the sampler says that it has {told} keys, and listed {found} for epoch {epoch}")
    return keys


def _list(sampler: Iterable[object]) -> list[object]:
    """Returns the keys of a sampler; of one that lists more than it says it has, which may never end, one more than that.

    Raises: UsageError when it does not say how many it has, and does not seem to end.
    """
    keys = list(islice(sampler, len(sampler) + 1 if isinstance(sampler, Sized) else MOST_UNTOLD))
    if not isinstance(sampler, Sized) and len(keys) == MOST_UNTOLD:
        raise UsageError(
            f"the sampler has no __len__, and does not end after {MOST_UNTOLD:,} keys: it is listed whole at the beginning of "
            "an epoch. Have it end, or make it an IterableDataset"
        )
    return keys


def _list_for(sampler: Iterable[object], set_epoch: Callable[[int], object], epoch: int) -> list[object]:
    """Sets the sampler to the epoch, and leaves it at the next: so it shows when the user sets it back to this one."""
    # The user's, which another loader may have too.
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
        # Whether it holds the epoch, or the sum of that and a seed.
        other = max(0, epoch + found[changed[0]] - wanted[changed[0]])
        set_epoch(other)
        is_other = not _find_changed(found, _read_numbers(own))
        if _list(sampler) != keys:
            set_epoch(other)  # listing may have moved it on
            which = f"epoch {other}" if is_other else f"another epoch ({changed[0]} is {found[changed[0]]})"
            raise UsageError(
                f"the sampler was set to {which}, and the loader reads epoch {epoch}: call "
                f"set_epoch({other if is_other else '...'}) of the loader, which sets the sampler too"
            )
    set_epoch(epoch + 1)
    with contextlib.suppress(TypeError):  # nothing can watch it
        _left[key] = weakref.ref(own, lambda _: _left.pop(key, None)), _read_numbers(own)
    return keys


def _read_numbers(sampler: object, name: str = "", depth: int = 2) -> dict[str, int]:
    """Returns the integers that a sampler holds, by name, and those of samplers in it: one is its epoch, most likely."""
    found: dict[str, int] = {}
    for key in (*getattr(sampler, "__dict__", ()), "epoch"):
        value = getattr(sampler, key, None)
        if (number := read_integer(value)) is not None and number >= 0:  # less than 0 says that none was set
            found[name + key] = number
        elif depth and hasattr(value, "set_epoch"):
            found |= _read_numbers(value, f"{name}{key}.", depth - 1)
    return found


def _find_changed(one: Mapping[str, int], other: Mapping[str, int]) -> list[str]:
    return [name for name in one if name in other and one[name] != other[name]]
