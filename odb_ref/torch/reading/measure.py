"""Measures samples: their length in tokens, and how many tokens carry loss. Runs where samples are read."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from odb_ref.torch.reading.costs import Resources
from odb_ref.torch.reading.serialization import count_bytes, pack
from odb_ref.torch.reading.tasks import (
    CHOOSING,
    COUNTING,
    IGNORE_INDEX,
    LABELS,
    SampleError,
    check_measure,
    get_field,
    get_labels,
    get_length,
    get_width,
    is_one_label,
    is_pair,
    to_array,
)

LengthFn = Callable[[object], int]

make_tuple: Final = tuple.__new__
"""The constructor of a named tuple in half the time. It is called for every sample."""

_MASKS: Final = ("loss_mask", "response_mask", "target", "targets", "target_ids", "target_mask")
"""Fields that mark the tokens with loss, each in its own way."""

_ZERO_ONE: Final = ("loss_mask", "response_mask", "target_mask")
"""The fields that mark each token by 0 or 1."""

_CHOOSING: Final = frozenset(CHOOSING)
_UNUSUAL: Final = frozenset((*LABELS, *_MASKS)) - {"labels"}


class Measured(NamedTuple):
    """A sample and its measures, in tokens. It is a tuple because one is made and sent for every sample."""

    length: int
    supervised: int
    sample: object
    nbytes: int = 0
    """The sample's approximate size in bytes, or 0 if it does not matter."""
    costs: tuple[int, ...] = ()
    """The amounts of further resources that the sample uses."""


def _count_labels(labels: object, is_shifted: bool) -> int:
    if isinstance(labels, torch.Tensor) and labels.device.type == "cpu" and labels.ndim == 1:
        labels = labels.numpy()
    if isinstance(labels, np.ndarray) and labels.ndim == 1:
        return int(np.count_nonzero(labels[int(is_shifted) :] != IGNORE_INDEX))
    if hasattr(labels, "tolist"):
        labels = labels.tolist()
    if isinstance(labels, Sequence) and labels and isinstance(labels[0], Sequence) and not isinstance(labels, str):
        return sum(_count_labels(row, is_shifted) for row in labels)
    if not isinstance(labels, Sequence) or isinstance(labels, str):
        raise SampleError(
            f"labels is {type(labels).__name__}, expected a tensor, an array or a sequence; pass {COUNTING}, or "
            "Loss(scaling='samples') for a mean over samples"
        )
    return sum(label != IGNORE_INDEX for label in labels[int(is_shifted) :])


@dataclass(frozen=True, slots=True)
class SupervisedCounter:
    """Counts the units of a sample that a loss averages over: tokens with a label other than -100, or 1 for a sample with one
    label or a pair (`odb_ref.torch.reading.tasks`).

    A causal language model predicts token i+1 at token i, so with ``is_shifted`` the first label carries no loss. Without
    labels those tokens count that a ``completion_mask`` and ``assistant_masks`` choose, or all. Spec: R1.1.
    """

    length_fn: LengthFn
    is_shifted: bool = True
    is_checked: bool = False
    """True if weights depend on the count."""
    is_assumed: bool = False
    """True if ``is_shifted`` is a default that the user did not confirm."""

    def __call__(self, sample: object) -> int:
        """Returns the count.

        Raises: SampleError when labels have an unknown format, or do not fit a model that predicts the next token. If weights
        depend on the count, also for samples without labels that have a mask, or several fields but no ``input_ids``.
        """
        labels = get_labels(sample)
        if labels is None:
            if is_pair(sample):
                return 1
            has_ids = get_field(sample, "input_ids") is not None
            if self.is_checked:
                _check_fields(sample, has_ids=has_ids)
            if (chosen := _find_chosen(sample)) is not None:
                return int(np.count_nonzero(chosen[int(self.is_shifted) :]))
            # A length_fn may return the length that a collator pads the sample to.
            length = get_length(sample) if has_ids else self.length_fn(sample)
            return max(0, length - int(self.is_shifted))
        if is_one_label(labels):
            values = to_array(labels)
            ignored = values == IGNORE_INDEX
            if self.is_checked and ignored.ndim and (ignored | np.isnan(values)).any():
                raise SampleError(
                    "a sample has float labels, some of them -100 or NaN, as if each token had one: pass Loss(supervised_fn=) "
                    "to count the labels that carry loss, or Loss(scaling='samples')"
                )
            return int(ignored.ndim > 0 or not ignored)
        if not self.is_checked and isinstance(labels, Mapping):  # the boxes of an image, for example
            return self.length_fn(sample)
        count, width = _count_labels(labels, self.is_shifted), get_width(labels)
        if self.is_checked:
            _check_masks(sample, labels)
        elif count > width > 0:  # the labels of an image, for example
            return min(count, self.length_fn(sample))
        if self.is_shifted and width:
            self._check_shift(sample, width)
        return count

    def _check_shift(self, sample: object, width: int) -> None:
        """Refuses labels that do not fit a model predicting the next token, which needs one label per token."""
        ids = get_field(sample, "input_ids")
        if ids is None and not self.is_checked:
            return
        tokens = self.length_fn(sample) if ids is None else get_width(ids)
        if ids is None and tokens == width and self.is_assumed and not _has_row(sample, width):
            raise SampleError(
                f"a sample has {width} labels and no row of as many tokens, so nothing tells whether the model predicts each "
                "label from the token before it: pass Loss(causal_shift=False), as for an encoder-decoder model, or "
                "causal_shift=True for a causal language model"
            )
        if not tokens or tokens == width:
            return
        if width == 1:
            raise SampleError(
                f"a sample has a list of 1 label for {tokens} tokens. If the label belongs to the whole sample, make it a "
                "number (labels=3, not [3]). If it is a target text of one token, pass Loss(causal_shift=False) or "
                "Loss(scaling='samples')"
            )
        raise SampleError(
            f"a sample has {width} labels for {tokens} {'tokens' if ids is None else 'input_ids'}, as in an encoder-decoder "
            "model: pass Loss(causal_shift=False) or Loss(supervised_fn=), or, for a mean over samples, as with CTC, "
            "Loss(scaling='samples')"
        )


def _has_row(sample: object, width: int) -> bool:
    """Returns False if no field beside the labels has ``width`` entries in any dimension."""
    if not isinstance(sample, Mapping):
        return True  # its fields are unknown
    values = [value for name, value in sample.items() if name not in LABELS]
    return any(width in getattr(value, "shape", (get_width(value),)) for value in values)


def _check_fields(sample: object, *, has_ids: bool) -> None:
    """Refuses a sample without labels if perhaps only some of its tokens carry loss."""
    mask = next((name for name in _MASKS if not isinstance(get_field(sample, name), str | None)), None)
    if mask is None and (has_ids or _count_fields(sample) < 2):
        return
    cause = "it has neither labels nor input_ids" if mask is None else f"it has {mask} but no labels"
    raise SampleError(
        f"cannot tell which tokens of a sample ({type(sample).__name__}) carry loss, because {cause}: pass {COUNTING}, "
        "or Loss(scaling='samples') for a mean over samples"
    )


def _find_chosen(sample: object) -> NDArray[np.bool_] | None:
    """Returns for each token whether all masks that choose the labels choose it, or None without such masks."""
    ids = get_field(sample, "input_ids")
    masks = [to_array(mask) for name in CHOOSING if (mask := get_field(sample, name)) is not None]
    if not masks or any(mask.shape != (count_row(ids),) for mask in masks):
        return None
    chosen: NDArray[np.bool_] = np.logical_and.reduce(masks)
    return chosen


def _check_masks(sample: object, labels: object) -> None:
    """Refuses a sample whose mask leaves out tokens with labels, because the loss may use either."""
    for name in _ZERO_ONE:
        mask = get_field(sample, name)
        if mask is None or isinstance(mask, str):
            continue
        left_out, labelled = to_array(mask).reshape(-1) == 0, to_array(labels).reshape(-1) != IGNORE_INDEX
        if left_out.shape == labelled.shape and (left_out & labelled).any():
            raise SampleError(
                f"the {name} of a sample leaves out tokens that have labels: set these labels to {IGNORE_INDEX}, or pass "
                f"{COUNTING}, or Loss(scaling='samples') for a mean over samples"
            )


def _count_fields(sample: object) -> int:
    """Returns how many parts a sample has. Ids and a mask are two; a text or a row of numbers is one."""
    match sample:
        case str() | bytes():
            return 1
        case torch.Tensor() | np.ndarray():
            is_table = sample.ndim == 2 and "float" not in str(sample.dtype)
            return sample.shape[0] if is_table else 1
        case [*parts]:
            is_row = bool(parts) and (isinstance(parts[0], int | float) or getattr(parts[0], "ndim", None) == 0)
            return 1 if is_row else len(parts)
        case np.void():
            return len(sample.dtype.names or ())
        case Mapping():
            found = dict(sample)
        case _:
            slots = [getattr(kind, "__slots__", ()) for kind in type(sample).__mro__]
            names = {name for own in slots for name in ((own,) if isinstance(own, str) else own)}
            found = {name: getattr(sample, name, None) for name in names.union(getattr(sample, "__dict__", ()))}
    inner = next(iter(found.values())) if len(found) == 1 else None
    return _count_fields(inner) if isinstance(inner, Mapping) else len(found)  # a wrapper may hold the others


def measure_row(sample: object, is_shifted: bool) -> tuple[int, int] | None:
    """Returns length and supervised tokens of the most common kind of sample, which has one row of tokens. None for any other.

    The results are those of `get_length` and `SupervisedCounter`, which look up each field in turn, in a tenth of their time.
    """
    if not (type(sample) is dict or isinstance(sample, Mapping)):
        return None
    ids, labels = sample.get("input_ids"), sample.get("labels")
    length = count_row(ids)
    if not length or not _UNUSUAL.isdisjoint(sample.keys()):
        return None
    if labels is None:
        return (length, length - is_shifted) if _CHOOSING.isdisjoint(sample.keys()) else None
    if type(labels) is not type(ids) or count_row(labels) != length:
        return None
    if isinstance(labels, list):
        ignored = labels.count(IGNORE_INDEX) - (is_shifted and labels[0] == IGNORE_INDEX)
        return length, length - is_shifted - ignored
    return None if is_one_label(labels) else (length, _count_labels(labels, is_shifted))


def count_row(value: object) -> int:
    """Returns the length of a tensor, array or list that is a single row of integers, otherwise 0."""
    if type(value) is torch.Tensor:
        return value.numel() if value.ndim == 1 else 0
    if type(value) is list:
        return len(value) if value and type(value[0]) is int else 0
    return value.size if type(value) is np.ndarray and value.ndim == 1 else 0


@dataclass(frozen=True, slots=True)
class Measure:
    """Runs in the inner DataLoader as its ``collate_fn``: turns samples into `Measured` ones, unbatched."""

    length_fn: LengthFn
    supervised_fn: LengthFn
    resources: Resources = Resources()  # noqa: RUF009 - frozen
    is_packing: bool = False
    """True if the samples go on to another process."""
    is_weighing: bool = False
    """True if their size in bytes matters."""

    def __call__(self, samples: Sequence[object]) -> list[Measured]:
        """Returns one `Measured` for each of ``samples``. Raises: SampleError when a measure is invalid."""
        supervised_fn = self.supervised_fn
        if self.length_fn is get_length and isinstance(supervised_fn, SupervisedCounter):
            is_shifted = supervised_fn.is_shifted
            measures = [measure_row(sample, is_shifted) or self._measure(sample) for sample in samples]
        else:
            measures = [self._measure(sample) for sample in samples]
        if not (self.is_weighing or self.is_packing or self.resources.cost_fn):
            rows = zip(measures, samples, strict=True)
            return [make_tuple(Measured, (length, supervised, sample, 0, ())) for (length, supervised), sample in rows]
        return [self._finish(*measure, sample) for measure, sample in zip(measures, samples, strict=True)]

    def _measure(self, sample: object) -> tuple[int, int]:
        length = check_measure(self.length_fn(sample), "the length of a sample", 1)
        supervised = check_measure(self.supervised_fn(sample), "the supervised tokens of a sample", 0)
        if supervised > length:
            raise SampleError(
                f"a sample has {supervised} supervised tokens and a length of {length}: count both in the same unit "
                "(length_fn=, supervised_fn=), or pass Loss(scaling='samples') for a mean over samples"
            )
        return length, supervised

    def _finish(self, length: int, supervised: int, sample: object) -> Measured:
        nbytes, costs = count_bytes(sample) if self.is_weighing else 0, self.resources.measure(sample)
        return Measured(length, supervised, pack(sample) if self.is_packing else sample, nbytes, costs)
