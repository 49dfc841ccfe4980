"""Whether a batch carries the loss that was counted in its samples: what `collate_fn` changes, no weight knows of.

Spec: R4.7. Preserves: WEIGHT.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch

from odb_ref.core.errors import OdbError
from odb_ref.torch.reading.measure import IGNORE_INDEX

_ADVICE = (
    "What masks labels or cuts samples belongs where samples are read; or pass supervised_fn= to count what is left, "
    "causal_shift=False when each label is that of its own token (a masked language model), or loss_scaling='samples'"
)
_DROPPED = (
    "the samples have labels and the batches that collate_fn makes have none: weights are exact only if the loss is that of "
    "these labels"
)


class LabelError(OdbError, ValueError):
    """A batch carries loss for other tokens than were counted, so its weight would be wrong."""


def _get_field(item: object, name: str) -> object:
    return item.get(name) if isinstance(item, Mapping) else getattr(item, name, None)


def count_supervised(labels: object, *, is_shifted: bool) -> int | None:
    """Returns how many labels of a batch carry loss, without the first column when ``is_shifted``, or None."""
    first = int(is_shifted)
    match labels:
        case torch.Tensor() if labels.ndim in (1, 2):
            return int((labels[..., first:] != IGNORE_INDEX).sum())
        case np.ndarray() if labels.ndim in (1, 2):
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
    """Compares batches with their samples, where it is known which labels carry loss."""

    is_shifted: bool

    def collate(
        self,
        collate_fn: Callable[[list[object]], object],
        samples: list[object],
        counted: int,
        warn: Callable[[str], None],
    ) -> object:
        """Returns the batch, when it carries what was counted, or does not say.

        Raises: LabelError, and what ``collate_fn`` raises.
        """
        # Before, for a collate_fn may take samples apart.
        count, has_labels = len(samples), _get_field(samples[0], "labels") is not None
        batch = collate_fn(samples)
        labels, is_shifted = _get_field(batch, "shift_labels"), False
        if labels is None:
            labels, is_shifted = _get_field(batch, "labels"), self.is_shifted
        if labels is None and has_labels:
            warn(_DROPPED)
        found = count_supervised(labels, is_shifted=is_shifted)
        if found is None or found == counted:
            return batch
        without = ", without the first of each row" if is_shifted else ""
        raise LabelError(
            f"a batch holds {found} tokens that carry loss (labels other than {IGNORE_INDEX}{without}), but {counted} were "
            f"counted in its {count} samples, so its weight would be wrong. {_ADVICE}"
        )
