"""Communication between ranks outside the loader's own exchange."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, TypeVar

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import unset_fake_temporarily

from odb_ref.core.errors import JobError
from odb_ref.torch.gathering import all_reduce, gather_objects, name_rank

Value = TypeVar("Value")

_BUCKET_BYTES: Final = 25 * 2**20
"""How many bytes of gradients travel at once, as with DDP. Each such bucket is a copy that takes extra memory."""


def gather_results(make: Callable[[], Value], group: dist.ProcessGroup | None) -> list[Value]:
    """Returns what ``make`` returns on each rank, in rank order. A collective: if it raises on one, none waits for that rank.

    Raises: what ``make`` raises here, otherwise JobError for a rank where it raised.
    """
    own, error = list[Value](), None
    try:
        own = [make()]
    except Exception as raised:
        error = raised
    with unset_fake_temporarily():  # memory may be probed with fake tensors, which have no content to send
        said = gather_objects((own, "" if error is None else f"{type(error).__name__}: {error}"), group)
    if error is not None:
        raise error
    for rank, (_, cause) in enumerate(said):
        if cause:
            raise JobError(f"{name_rank(rank, group)} failed: {cause}", rank, cause)
    return [value for (value,), _ in said]


def reduce(
    own: Sequence[int], how: dist.ReduceOp.RedOpType, device: torch.device, group: dist.ProcessGroup | None
) -> list[int]:
    """Returns each value reduced over all ranks. A collective."""
    values = torch.tensor(own, dtype=torch.int64, device=device)
    return [int(value) for value in all_reduce(values, how, group).tolist()]


def average(tensors: Sequence[torch.Tensor], group: dist.ProcessGroup | None) -> None:
    """Replaces tensors in place by their mean over ranks. A collective: all ranks pass the same tensors in the same order."""
    if not dist.is_initialized() or dist.get_world_size(group) == 1:
        return
    bucket: list[torch.Tensor] = []
    for tensor in tensors:
        is_full = sum(item.nbytes for item in bucket) >= _BUCKET_BYTES
        if is_full or (bucket and (bucket[0].dtype, bucket[0].device) != (tensor.dtype, tensor.device)):
            _average_bucket(bucket, group)
            bucket = []
        bucket.append(tensor)
    if bucket:
        _average_bucket(bucket, group)


def _average_bucket(bucket: Sequence[torch.Tensor], group: dist.ProcessGroup | None) -> None:
    whole = all_reduce(torch.cat([tensor.flatten() for tensor in bucket]), group=group)
    whole /= dist.get_world_size(group)
    for tensor, part in zip(bucket, torch.split(whole, [tensor.numel() for tensor in bucket]), strict=True):
        tensor.copy_(part.view_as(tensor))
