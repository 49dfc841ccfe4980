"""Splits a batch into two halves, and counts the supervised tokens in each."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, MutableMapping, Sized
from functools import partial
from typing import Final, TypeAlias, cast

import numpy as np
import torch

from odb_ref.core.errors import UsageError
from odb_ref.torch.batches import Batch
from odb_ref.torch.reading.counting import count_supervised
from odb_ref.torch.reading.tasks import get_field, get_labels

Part: TypeAlias = "slice[int, int, None]"

_SPLIT: Final = "pass split=, a function (batch, samples) -> (first half, second half)"
_PAIRS: Final = (
    "; where preference pairs are laid out as all chosen texts and then all rejected ones, pass split_pairs and count_pairs of "
    "odb_ref.torch.loop"
)


def split_batch(batch: Batch, samples: int) -> tuple[Batch, Batch]:
    """Splits a batch of ``samples`` in two: cuts tensors, arrays and lists with an entry for each, shares single values.

    Padding keeps its width. Works for a mapping, tuple, list or tensor. All else (a packed row) needs your own function.

    Raises: UsageError when it is unclear which entries belong to which sample.
    """
    return _halve(batch, samples, most_rows=1)


def split_pairs(batch: Batch, samples: int) -> tuple[Batch, Batch]:
    """Splits a batch of ``samples`` preference pairs in two, like `split_batch`, without separating a pair.

    Values with two entries per pair must have those of all chosen texts first, then those of all rejected ones, as in TRL and
    LLaMA-Factory.

    Raises: UsageError when it is unclear which entries belong to which pair.
    """
    return _halve(batch, samples, most_rows=2)


def count_pairs(batch: object) -> int:
    """Returns the number of pairs in a batch for `split_pairs`, which is the number of units the loss averages over.

    Raises: UsageError when it has no ``input_ids``.
    """
    texts = get_field(batch, "input_ids")
    if not isinstance(texts, Sized):
        raise UsageError(
            "a batch of pairs has no input_ids to count: pass count=, which says how many pairs a batch has"
        )
    return len(texts) // 2


def _halve(batch: Batch, samples: int, *, most_rows: int) -> tuple[Batch, Batch]:
    half = (samples + 1) // 2
    parts: tuple[Part, Part] = slice(0, half), slice(half, samples)
    first, second = (cast(Batch, _cut(batch, part, samples, most_rows)) for part in parts)
    return first, second


def _cut(batch: object, part: Part, samples: int, most_rows: int) -> object:
    cut = partial(_cut_value, part=part, samples=samples, most_rows=most_rows)
    if isinstance(batch, torch.Tensor):
        return cut(batch, name="the batch")
    if isinstance(batch, MutableMapping):
        found = copy.copy(batch)
        found.update({key: cut(value, name=f"batch[{key!r}]") for key, value in batch.items()})
        return found
    if isinstance(batch, tuple | list):
        values = [cut(value, name=f"batch[{number}]") for number, value in enumerate(batch)]
        made: object = getattr(batch, "_make", type(batch))(values)  # a named tuple takes its fields one by one
        return made
    raise UsageError(f"a batch that is a {type(batch).__name__} cannot be split: {_SPLIT}")


def _cut_value(value: object, *, part: Part, samples: int, most_rows: int, name: str) -> object:
    if not isinstance(value, torch.Tensor | np.ndarray | list | tuple):
        if isinstance(value, str | bytes) or not isinstance(value, Sized):
            return value
        kind = "mapping" if isinstance(value, Mapping) else type(value).__name__
        raise UsageError(f"{name} is a {kind}, and nobody knows what of it belongs to which sample: {_SPLIT}")
    if isinstance(value, torch.Tensor | np.ndarray) and not value.ndim:
        return value
    rows, rest = divmod(len(value), samples)
    if rest or not 1 <= rows <= most_rows:
        hint = _PAIRS if (rows, rest, most_rows) == (2, 0, 1) else ""
        raise UsageError(
            f"{name} has {len(value)} entries for {samples} samples, so it cannot be split: {_SPLIT}{hint}"
        )
    if rows == 1:
        return value[part]
    starts = range(0, len(value), samples)
    if isinstance(value, torch.Tensor):
        return torch.cat([value[start : start + samples][part] for start in starts])
    if isinstance(value, np.ndarray):
        return np.concatenate([value[start : start + samples][part] for start in starts])
    return [entry for start in starts for entry in value[start : start + samples][part]]


def list_fields(batch: object, samples: int) -> dict[str, bool | None]:
    """Returns, for each field of a batch, whether it has an entry for each sample. None if it is a single value."""
    match batch:
        case Mapping():
            fields = dict(batch)
        case tuple() | list():
            fields = dict(enumerate(batch))
        case _:
            fields = {"the batch": batch}
    return {str(name): _has_each(value, samples) for name, value in fields.items()}


def _has_each(value: object, samples: int) -> bool | None:
    if isinstance(value, str | bytes) or not isinstance(value, Sized) or getattr(value, "ndim", 1) == 0:
        return None
    return len(value) == samples


def describe_half(batch: object, samples: int) -> str:
    """Returns a hint for an error in a half that `split_batch` has made."""
    names = ", ".join(name for name, is_each in list_fields(batch, samples).items() if is_each)
    return (
        f"this was half of a batch, cut to {samples} entries in {names}: if those of a field are not those of the samples, in "
        f"their order, {_SPLIT}"
    )


def find_count(batch: Batch, expected: int) -> Callable[[Batch], int] | None:
    """Returns a function that counts a batch's supervised tokens by its ``labels`` and finds ``expected`` in this batch. None
    if the labels do not show them.
    """
    is_each = getattr(get_labels(batch), "ndim", None) == 1  # one label per sample: none is predicted from another
    for is_shifted in (False,) if is_each else (True, False):
        count = partial(_count_labels, is_shifted=is_shifted)
        if count(batch) == expected:
            return count
    return None


def _count_labels(batch: object, *, is_shifted: bool) -> int:
    labels = get_labels(batch)
    if isinstance(labels, torch.Tensor) and labels.is_floating_point():
        return len(labels)  # one row of values per sample
    return count_supervised(labels, is_shifted=is_shifted) or 0
