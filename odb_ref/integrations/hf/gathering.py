"""Gathers what a Trainer needs of a step for its metrics: each rank's rows, whatever their number; none if it is idle.

A Trainer gathers tensors of the same shape from all ranks. Here each rank has its own number of samples, and the replays of
idle ranks must not count.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import TypeVar

import torch
from accelerate import Accelerator
from accelerate.utils import gather, pad_across_processes, recursively_apply
from torch import Tensor
from transformers.trainer_pt_utils import find_batch_size

from odb_ref.torch import StepInfo

Tensors = TypeVar("Tensors")


def gather_rows(tensors: Tensors, *_: object, info: StepInfo, **__: object) -> Tensors:
    """Returns the rows of all ranks' tensors, rank by rank, without those of idle ranks. A collective of all ranks.

    A number counts as one row.
    """
    rows: int = 0 if info.is_idle else find_batch_size(tensors) or 1
    kept: list[int] = gather(torch.tensor([rows], device=_get_device(tensors))).tolist()
    padded = gather(pad_across_processes(tensors, dim=0))

    def keep(padded: Tensor) -> Tensor:
        if not padded.ndim:  # there is only one process
            return padded[None]
        return torch.cat([part[:count] for part, count in zip(padded.chunk(len(kept)), kept, strict=True)])

    found: Tensors = recursively_apply(keep, padded)
    return found


def keep_rows(tensors: Tensors, *_: object, **__: object) -> Tensors:
    """Returns only this rank's rows, for a pass that may be repeated on this rank and on no other."""
    found: Tensors = recursively_apply(lambda tensor: tensor if tensor.ndim else tensor[None], tensors)
    return found


@contextmanager
def gathering(accelerator: Accelerator, info: StepInfo | None) -> Iterator[None]:
    """Within the context, a Trainer's metrics are gathered by `gather_rows` or, without a step of all ranks, by `keep_rows`."""
    names = ("gather", "gather_for_metrics")
    for name in names:
        setattr(accelerator, name, keep_rows if info is None else partial(gather_rows, info=info))
    try:
        yield
    finally:
        for name in names:
            delattr(accelerator, name)  # uncovers the method again


def _get_device(tensors: object) -> torch.device:
    while not isinstance(tensors, Tensor):
        tensors = next(iter(tensors.values() if isinstance(tensors, Mapping) else tensors))  # type: ignore[call-overload]
    return tensors.device
