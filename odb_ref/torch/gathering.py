"""What all ranks' batches of a step have brought, sample by sample: for metrics over uneven ranks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

import torch
import torch.distributed as dist

from odb_ref.core.errors import UsageError
from odb_ref.torch.exchange.collectives import get_rank_and_size
from odb_ref.torch.info import StepInfo

Output = TypeVar("Output")
Value = TypeVar("Value")


def gather_objects(own: Value, group: dist.ProcessGroup | None) -> list[Value]:
    """Returns what each rank has, by rank, the same on every rank; a collective of the trainer's, not of the exchange."""
    _, size = get_rank_and_size(group)
    objects = [own] * size
    if size > 1:
        dist.all_gather_object(objects, own, group=group)
    return objects


def gather_samples(outputs: Iterable[Output], info: StepInfo, group: dist.ProcessGroup | None = None) -> list[Output]:
    """Returns one entry for each sample of the step ``info`` belongs to: rank by rank, the same on every rank; a collective.

    ``outputs`` has an entry for each sample of this rank's batch: a tensor's are its rows, which are brought to the CPU and
    may be of other sizes on other ranks. Those of an idle step, which a batch is replayed in, are left out, so over an epoch
    each sample is there once. ``group`` is the loader's process group, if it has one. Spec: R1.3. Preserves: ONCE.

    Raises: UsageError, on every rank, when a rank has not one entry for each of its samples.
    """
    if isinstance(outputs, torch.Tensor):
        outputs = outputs.detach().cpu()
    own = [] if info.is_idle else list(outputs)
    parts = gather_objects((info.local_samples, own), group)
    for rank, (samples, part) in enumerate(parts):
        if len(part) != samples:
            raise UsageError(
                f"gather_samples: rank {rank} has {len(part)} outputs for the {samples} samples of its batch, step {info.step}"
            )
    return [output for _, part in parts for output in part]
