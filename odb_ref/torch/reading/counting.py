"""Measures a loader's samples: lengths, supervised tokens, further costs. Also checks that batches carry what was counted,
because weights cannot take into account what `collate_fn` changes.
Spec: R4.7. Preserves: WEIGHT.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch

from odb_ref.core.errors import OdbError
from odb_ref.torch.reading.costs import Resources
from odb_ref.torch.reading.measure import LengthFn, Measure, SupervisedCounter, count_row
from odb_ref.torch.reading.quarantine import MeasureFn
from odb_ref.torch.reading.tasks import (
    CHOOSING,
    COUNTING,
    IGNORE_INDEX,
    get_field,
    get_labels,
    get_length,
    get_width,
    is_pair,
    is_whole,
    to_array,
)

_ADVICE = (
    f"Mask labels and cut samples when they are read, or pass {COUNTING}, causal_shift=False if each label belongs to its own "
    "token (a masked language model), or Loss(scaling='samples'). With left padding the first label of each row counts too: "
    "pad on the right, or set that label to -100 when samples are read"
)
_MASKED = (
    "collate_fn masks tokens of samples without labels (at random, or because padding equals a real token), labels others than "
    "their completion_mask and assistant_masks choose, or pads on the left, so that the first label of a row counts. This "
    "cannot be counted in advance: pass Loss(scaling='samples'), mask when samples are read, leave out masks that choose no "
    "labels, or pad on the right"
)
_DROPPED = (
    "the samples have labels, and the batches that collate_fn makes do not: weights are exact only if the loss is that of "
    "these labels"
)
_UNLIKE = (
    "labels of samples differ from their input_ids, as in token classification or with labels shifted in advance, and the "
    "first label of each sample was not counted: pass Loss(causal_shift=False), or causal_shift=True if the model shifts them"
)
_OTHERWISE = (
    "Loss(supervised_fn=) does not count the labels that carry loss in the batch if the model shifts them, so weights are "
    "wrong then: do not count the first label of a causal model's sample, or pass Loss(causal_shift=False) if the model does "
    "not shift its labels. If the loss is a mean over what is counted, ignore this"
)
_UNCOUNTED = (
    "the lengths of samples do not include {}, so batches exceed the budget: pass a Batching(length_fn=) that counts them. A "
    "loss that compares samples within a batch (in-batch negatives) depends on how an update is divided"
)
_SPREAD: Final = (
    "samples with start_positions differ in length. A model that spreads a span's probability over padding, as those of "
    "transformers do, has a loss that depends on how an update is divided: pad samples to one length when they are read. If "
    "the model leaves padding out, ignore this"
)

_MASKS: Final = ("attention_mask", *CHOOSING)


class LabelError(OdbError, ValueError):
    """A batch carries loss for other tokens than were counted, so its weight would be wrong."""


def count_supervised(labels: object, *, is_shifted: bool) -> int | None:
    """Returns how many labels of a batch carry loss, without the first column if ``is_shifted``. None if that is unknown."""
    first = int(is_shifted)
    match labels:
        case torch.Tensor() if labels.is_nested:
            return sum(count_supervised(row, is_shifted=is_shifted) or 0 for row in labels.unbind())
        case torch.Tensor() if labels.ndim:
            counted = labels[..., first:]  # torch compares with -100 in an unsigned type too, as with 156
            return int((counted != IGNORE_INDEX).sum()) if labels.dtype.is_signed else counted.numel()
        case np.ndarray() if labels.ndim:
            return int(np.count_nonzero(labels[..., first:] != IGNORE_INDEX))
        case [*rows] if rows:
            if all(isinstance(label, int) for label in rows):
                return sum(label != IGNORE_INDEX for label in rows[first:])
            counts = [count_supervised(row, is_shifted=is_shifted) for row in rows]
            return None if None in counts else sum(count or 0 for count in counts)
        case _:
            return None


@dataclass(frozen=True, slots=True)
class LabelCheck:
    """Compares batches with their samples, if it is known which labels carry loss."""

    is_shifted: bool
    is_assumed: bool = False
    """True if ``is_shifted`` is a default that the user did not confirm."""
    has_own_length: bool = True
    """False if the length of a sample is the length of its `input_ids`."""
    is_advisory: bool = False
    """True if a function of the user's counts what carries loss: a difference is warned of then."""

    def collate(
        self,
        collate_fn: Callable[[list[object]], object],
        samples: list[object],
        counted: int,
        warn: Callable[[str], None],
    ) -> object:
        """Returns the batch if it carries what was counted, or if that is unknown.

        Raises: LabelError, and what ``collate_fn`` raises.
        """
        if self.is_advisory:
            is_causal = all(map(_is_like_input, samples))
            batch = collate_fn(samples)
            labels, is_shifted = self._find_labels(batch)
            if is_causal and count_supervised(labels, is_shifted=is_shifted) not in (None, counted):
                warn(_OTHERWISE)
            return batch
        # Must come first: a collate_fn may take samples apart.
        count, has_labels, is_paired = len(samples), get_labels(samples[0]) is not None, is_pair(samples[0])
        is_each = is_whole(samples[0])
        if is_each and not is_paired and len({np.shape(get_labels(sample)) for sample in samples}) > 1:  # type: ignore[call-overload]
            raise LabelError(
                "samples have float labels of different lengths, as if each token had one, and were counted as one each: pass "
                "Loss(supervised_fn=) to count what carries loss, or Loss(scaling='samples')"
            )
        masks = {} if has_labels or is_paired else _list_masks(samples)
        if not self.has_own_length and (names := _list_other_texts(samples[0])):
            warn(_UNCOUNTED.format(", ".join(names)))
        if self.is_assumed and self.is_shifted and has_labels and not is_each and _is_unlike_input(samples[0]):
            warn(_UNLIKE)
        is_span = is_each and get_field(samples[0], "start_positions") is not None
        if is_span and len({get_width(get_field(sample, "input_ids")) for sample in samples}) > 1:
            warn(_SPREAD)
        batch = collate_fn(samples)
        if is_paired:
            return batch
        labels, is_shifted = self._find_labels(batch)
        if has_labels and get_labels(batch) is None and labels is None:
            warn(_DROPPED)
        if is_each:
            _check_each(labels, count)
            return batch
        if labels is None:
            _check_masks(masks)
        found = count_supervised(labels, is_shifted=is_shifted)
        if found is None or found == counted:
            return batch
        without = ", without the first of each row" if is_shifted else ""
        raise LabelError(
            f"a batch holds {found} tokens that carry loss (labels other than {IGNORE_INDEX}{without}), but {counted} were "
            f"counted in its {count} samples, so its weight would be wrong. {_ADVICE if has_labels else _MASKED}"
        )

    def _find_labels(self, batch: object) -> tuple[object, bool]:
        """Returns the labels of a batch, and whether the model shifts them."""
        labels = get_field(batch, "shift_labels")
        return (get_field(batch, "labels"), self.is_shifted) if labels is None else (labels, False)


def _list_other_texts(sample: object) -> list[str]:
    """Returns the fields with tokens of other texts, except a decoder's, which are covered by the labels' length."""
    names = sample.keys() if isinstance(sample, Mapping) and get_field(sample, "input_ids") is not None else ()
    return [name for name in names if name.endswith("_input_ids") and name != "decoder_input_ids"]


def _is_unlike_input(sample: object) -> bool:
    """Returns whether the labels are not a copy of the input, as they must be for a shift, and the first label carries loss."""
    return _is_like_input(sample) is False and bool(to_array(get_field(sample, "labels"))[0] != IGNORE_INDEX)


def _is_like_input(sample: object) -> bool | None:
    """Returns whether all labels that carry loss are copies of the input. None if the two are not rows of one length."""
    rows = [get_field(sample, name) for name in ("input_ids", "labels")]
    if not count_row(rows[0]) or count_row(rows[0]) != count_row(rows[1]):
        return None
    ids, labels = map(to_array, rows)
    return not bool(((labels != ids) & (labels != IGNORE_INDEX)).any())


def _list_masks(samples: list[object]) -> dict[str, list[object]]:
    """Returns the masks of all samples, by name, for each mask that the first sample has."""
    names = [name for name in _MASKS if get_field(samples[0], name) is not None]
    return {name: [get_field(sample, name) for sample in samples] for name in names}


def _check_masks(masks: Mapping[str, Sequence[object]]) -> None:
    """Refuses masks that leave out a token when nothing has labels."""
    for name, values in masks.items():
        if any(map(_leaves_out, values)):
            raise LabelError(
                f"the {name} of some samples leaves out tokens, and neither samples nor their batch have labels that say "
                f"whether these carry loss. Pass {COUNTING}, or Loss(scaling='samples')"
            )


def _leaves_out(mask: object) -> bool:
    array = to_array(mask)
    if array.ndim == 0 or array.size != array.shape[-1] or array.all():
        return False
    # A mask of floats may be additive: 0 for visible tokens, large negative numbers for hidden ones.
    return array.dtype.kind in "biu" or (array.dtype.kind == "f" and bool((array == 1).any()))


def _check_each(labels: object, count: int) -> None:
    """Checks that a batch of samples with one label each has one label per sample."""
    shape = getattr(labels, "shape", (count,))
    if shape and shape[0] == count and (len(shape) == 1 or "float" in str(getattr(labels, "dtype", ""))):
        return
    raise LabelError(
        f"{count} samples have one label each, and their batch has labels of the shape {list(shape)}, so its weight would be "
        "wrong: pass Loss(supervised_fn=) to count what carries loss"
    )


def make_counting(
    length_fn: LengthFn | None,
    supervised_fn: LengthFn | None,
    *,
    causal_shift: bool,
    is_assumed: bool,
    resources: Resources,
    is_checked: bool,
    is_packing: bool,
    is_weighing: bool,
) -> tuple[MeasureFn, LabelCheck | None, dict[str, object]]:
    """Returns the measure of samples, the check of batches, and the settings that all ranks must share.

    The check is None if no weight depends on labels, or if a user's function counts them for a model that does not shift them.
    Functions cannot be compared between ranks, so the settings only state whether there is one. ``is_assumed`` means that the
    user did not set ``causal_shift``, ``is_checked`` that weights depend on supervised tokens, ``is_packing`` that samples go
    on to another process, and ``is_weighing`` that their bytes are bounded.
    """
    settings: dict[str, object] = {
        "length_fn": "default" if length_fn is None else "given",
        "supervised_fn": "default" if supervised_fn is None else "given",
        "cost_fn": "none" if resources.cost_fn is None else "given",
    }
    if supervised_fn is None:
        settings["causal_shift"] = causal_shift
    length = length_fn or get_length
    supervised = supervised_fn or SupervisedCounter(length, causal_shift, is_checked=is_checked, is_assumed=is_assumed)
    measure = Measure(length, supervised, resources, is_packing=is_packing, is_weighing=is_weighing)
    label_check = None
    if is_checked and (supervised_fn is None or causal_shift):
        label_check = LabelCheck(
            causal_shift,
            is_assumed=is_assumed,
            has_own_length=length_fn is not None,
            is_advisory=supervised_fn is not None,
        )
    return measure, label_check, settings
