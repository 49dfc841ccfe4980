"""Interprets samples of common tasks by their field names: how many tokens they take, and what a loss averages over.

===========================  =================================================  ======================================
task                         tokens                                             a loss is a mean over
===========================  =================================================  ======================================
causal language model        ``input_ids``                                      tokens with a label, but for the first
masked one, token classes    ``input_ids``                                      tokens with a label
encoder and decoder          the longer of ``input_ids`` and ``labels``         tokens with a label
classes, values              ``input_ids``                                      samples (``label`` is one, or floats)
several choices              all rows of ``input_ids``, each as the longest     samples
several codebooks            all rows of ``input_ids``                          labels of all rows, but the first ones
preference pairs             twice the longer of chosen and rejected            samples
===========================  =================================================  ======================================

No field tells whether a model predicts each label from the token before it: that is ``causal_shift``. Spec: R1.1.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from odb_ref.core.errors import OdbError

IGNORE_INDEX: Final = -100
"""The label of a token that carries no loss."""

LABELS: Final = ("labels", "label", "label_ids", "start_positions")
"""Fields that may hold labels. The last one is for answers that are spans of the text."""

CHOOSING: Final = ("completion_mask", "assistant_masks")
"""Fields from which a collate_fn or a training loop makes labels."""

_PAIRS: Final = (
    ("prompt_ids", "chosen_ids", "rejected_ids"),
    ("prompt_input_ids", "chosen_input_ids", "rejected_input_ids"),
    ("prompt_input_ids", "input_ids_chosen", "input_ids_rejected"),
)
"""Prompt (which may be missing, or part of the other two), chosen and rejected, as TRL and LLaMA-Factory name them."""


COUNTING: Final = "Loss(supervised_fn=) to count what carries loss (not the first label of a causal model's sample)"
"""What errors ask to pass where nothing else says which tokens a loss is a mean over."""


MOST: Final = 2**42
"""The greatest measure of a sample. A million of these, over all ranks, add up to a number that can be exchanged."""


class SampleError(OdbError, ValueError):
    """A sample cannot be batched: it has no length, or an invalid one."""


def get_field(item: object, name: str) -> object:
    """Returns a field of a sample or a batch, or None if there is none of that name."""
    # Checks for a dict first: most samples are one, and many fields of each are looked up.
    return item.get(name) if type(item) is dict or isinstance(item, Mapping) else getattr(item, name, None)


def to_array(values: object) -> NDArray[np.bool_ | np.int64 | np.float64]:
    """Returns the values of a field as an array, from a tensor on any device too."""
    return np.asarray(values.detach().cpu() if isinstance(values, torch.Tensor) else values)


def get_labels(sample: object) -> object:
    """Returns the labels of a sample, or None if it has none."""
    for name in LABELS:
        labels = get_field(sample, name)
        if labels is not None and not isinstance(labels, str):
            return labels
    return None


def is_pair(sample: object) -> bool:
    """Returns True for a preference pair: two texts with one loss."""
    return get_field(sample, "input_ids") is None and _find_pair(sample) is not None


def is_whole(sample: object) -> bool:
    """Returns True if the loss averages over samples, because each is a pair or has one label."""
    labels = get_labels(sample)
    return is_pair(sample) if labels is None else is_one_label(labels)


def is_one_label(labels: object) -> bool:
    """Returns True for the class of a sample, its value, or several values together."""
    match labels:
        case torch.Tensor():
            return labels.ndim == 0 or labels.is_floating_point()
        case int() | float():
            return True
        case [float(), *_]:
            return True
        case _:
            kind = getattr(getattr(labels, "dtype", None), "kind", "")
            return kind == "f" or (kind != "" and getattr(labels, "ndim", None) == 0)


def get_length(sample: object) -> int:
    """Returns the tokens a sample takes in a batch: see the table. Raises: SampleError when it is unknown."""
    rows, longest = measure_rows(sample)
    return rows * longest


def measure_rows(sample: object) -> tuple[int, int]:
    """Returns how many rows of a batch a sample takes, and the tokens of the longest row.

    Raises: SampleError when it is unknown.
    """
    value = get_field(sample, "input_ids")
    if value is None:
        longer = _find_pair(sample)
        if longer is None:
            raise SampleError(f"a sample ({type(sample).__name__}) has no input_ids; pass Batching(length_fn=)")
        return 2, longer
    rows, longest = _measure(value, "input_ids")
    # There is nothing to train on in an empty input, whatever its labels.
    return rows, max(longest, get_width(get_field(sample, "labels"))) if longest else 0


def get_width(value: object) -> int:
    """Returns the number of values in a field's longest row, or 0 for a value without rows."""
    has_rows = bool(getattr(value, "shape", ())) or (isinstance(value, Sequence) and not isinstance(value, str))
    return _measure(value, "a row")[1] if has_rows else 0


def _measure(value: object, name: str) -> tuple[int, int]:
    shape = getattr(value, "shape", None)
    if isinstance(shape, Sequence) and shape:
        return math.prod(shape[:-1]), int(shape[-1])
    if isinstance(value, Sequence) and not isinstance(value, str):
        # A tensor with a single number has a `__len__` that raises.
        if value and hasattr(value[0], "__len__") and getattr(value[0], "ndim", None) != 0:
            return len(value), max(len(row) for row in value)
        return 1, len(value)
    raise SampleError(f"{name} is {type(value).__name__}, expected a tensor, an array or a sequence")


def _find_pair(sample: object) -> int | None:
    for prompt_name, *names in _PAIRS:
        texts = [get_field(sample, name) for name in names]
        if all(text is not None for text in texts):
            prompt = get_field(sample, prompt_name)
            first = 0 if prompt is None else _measure(prompt, prompt_name)[1]
            return first + max(_measure(text, name)[1] for text, name in zip(texts, names, strict=True))
    return None


def check_measure(value: object, name: str, low: int) -> int:
    """Returns a measure of a sample as a Python int; accepts integers of other libraries.

    Raises: SampleError when it is not an integer from ``low`` to `MOST`.
    """
    number = value.item() if hasattr(value, "item") else value
    if isinstance(number, bool) or not isinstance(number, int):
        raise SampleError(f"{name} is {number!r}, expected an integer")
    if not low <= number <= MOST:
        raise SampleError(f"{name} is {number}, expected an integer between {low} and {MOST}")
    return number
