"""A batch in two halves, and what carries loss in each."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, MutableMapping
from functools import partial
from typing import Final, TypeAlias, cast

import torch

from odb_ref.core.errors import UsageError
from odb_ref.torch.batches import Batch
from odb_ref.torch.reading.counting import count_supervised

Part: TypeAlias = "slice[int, int, None]"

_SPLIT: Final = "pass split=, a function (batch, samples) -> (first half, second half)"


def split_batch(batch: Batch, samples: int) -> tuple[Batch, Batch]:
    """Returns a batch of so many samples as two: tensors and lists with an entry for each sample are cut, all else is shared.

    Padding stays as wide as it was. For a mapping, tuple, list or tensor; whatever else (a packed row) needs a function of the
    caller's.

    Raises: UsageError when it is not clear what belongs to which sample.
    """
    half = (samples + 1) // 2
    parts: tuple[Part, Part] = slice(0, half), slice(half, samples)
    first, second = (cast(Batch, _cut(batch, part, samples)) for part in parts)
    return first, second


def _cut(batch: object, part: Part, samples: int) -> object:
    if isinstance(batch, torch.Tensor):
        return _cut_value(batch, part, samples, "the batch")
    if isinstance(batch, MutableMapping):
        found = copy.copy(batch)
        found.update({key: _cut_value(value, part, samples, f"batch[{key!r}]") for key, value in batch.items()})
        return found
    if isinstance(batch, tuple | list):
        values = [_cut_value(value, part, samples, f"batch[{number}]") for number, value in enumerate(batch)]
        made: object = getattr(batch, "_make", type(batch))(values)  # a named tuple takes its fields one by one
        return made
    raise UsageError(f"a batch that is a {type(batch).__name__} cannot be split: {_SPLIT}")


def _cut_value(value: object, part: Part, samples: int, name: str) -> object:
    if isinstance(value, Mapping):
        raise UsageError(f"{name} is a mapping, and nobody knows what of it belongs to which sample: {_SPLIT}")
    if not isinstance(value, torch.Tensor | list | tuple) or (isinstance(value, torch.Tensor) and not value.ndim):
        return value
    if len(value) != samples:
        raise UsageError(f"{name} has {len(value)} entries for {samples} samples, so it cannot be split: {_SPLIT}")
    return value[part]


def find_count(batch: Batch, expected: int) -> Callable[[Batch], int]:
    """Returns what counts the tokens of a batch that carry loss by its ``labels``, as it must to find ``expected`` in this one.

    Raises: UsageError when they do not show it.
    """
    for is_shifted in (True, False):
        count = partial(_count_labels, is_shifted=is_shifted)
        if count(batch) == expected:
            return count
    raise UsageError(
        f"{expected} tokens of a batch carry loss, which its labels do not show, so its halves cannot be weighed: pass count=, "
        "which says how many of a batch do, or use loss_reduction='sum', which needs none"
    )


def _count_labels(batch: object, *, is_shifted: bool) -> int:
    labels = batch.get("labels") if isinstance(batch, Mapping) else None
    return count_supervised(labels, is_shifted=is_shifted) or 0
