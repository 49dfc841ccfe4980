"""What a sampler of the user's lists, and for which epoch."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterable, Iterator, Sized
from typing import Final

from torch.utils.data import DistributedSampler, Sampler

from odb_ref.core.errors import UsageError, read_integer

_left_at: Final[dict[int, tuple[weakref.ref[object], int | None]]] = {}
"""By the identity of a sampler: the epoch that it was left at when a loader last listed it."""


class AllReplicas(Sampler[object]):
    """The order of which a `DistributedSampler` lists one rank's share: what its ranks list, one of each in turn.

    All ranks list the same, and may be more or fewer than the sampler counts.
    """

    def __init__(self, sampler: DistributedSampler[object]) -> None:
        self._sampler = sampler

    @property
    def epoch(self) -> int:
        """That of the sampler."""
        return self._sampler.epoch

    def set_epoch(self, epoch: int) -> None:
        """Sets the sampler's."""
        self._sampler.set_epoch(epoch)

    def __len__(self) -> int:
        return self._sampler.total_size

    def __iter__(self) -> Iterator[object]:
        whole = copy.copy(self._sampler)
        whole.rank, whole.num_replicas, whole.num_samples = 0, 1, whole.total_size
        return iter(whole)


def list_keys(sampler: Iterable[object], epoch: int) -> list[object]:
    """Returns what a sampler of the user's lists for an epoch.

    Raises: UsageError when the user has set the sampler to another epoch, or it does not list as many keys as it says.
    """
    set_epoch = getattr(sampler, "set_epoch", None)
    if callable(set_epoch):
        _check_epoch(sampler, epoch)
        set_epoch(epoch)
    keys = list(sampler)
    _note_epoch(sampler)
    if isinstance(sampler, Sized) and len(keys) != (told := len(sampler)):
        raise UsageError(f"the sampler says that it has {told} keys, and listed {len(keys)} for epoch {epoch}")
    return keys


def _check_epoch(sampler: object, epoch: int) -> None:
    found = read_integer(getattr(sampler, "epoch", None))
    _, left_at = _left_at.get(id(sampler), (None, 0))
    if found is not None and found not in (epoch, left_at):
        raise UsageError(
            f"the sampler was set to epoch {found}, and the loader reads epoch {epoch}: call set_epoch({found}) of the loader, "
            "which sets the sampler too"
        )


def _note_epoch(sampler: object) -> None:
    key = id(sampler)
    try:
        watch = weakref.ref(sampler, lambda _: _left_at.pop(key, None))
    except TypeError:
        return  # a list, say
    _left_at[key] = watch, read_integer(getattr(sampler, "epoch", None))
