"""Shared by the integrations: reads an epoch as pairs of a batch and its `StepInfo`, in whole updates."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace

from odb_ref.torch import ODBDataLoader, StepInfo
from odb_ref.torch.batches import Batch


def read_updates(loader: ODBDataLoader[Batch], accumulation_steps: int) -> Iterator[tuple[Batch, StepInfo]]:
    """Yields the batches of an epoch, each with its `StepInfo`, which a framework would lose when it moves a batch to the
    device.

    Frameworks count the micro-steps of an update themselves, and handle the end of an epoch differently. So if an epoch's last
    update is not full, idle replays of its last batch fill it, on all ranks alike.

    The loader's epoch is completed before its last batch is yielded. So a framework that stops after this batch does not leave
    the epoch early, and a state saved at that point is the start of the next epoch. Spec: R10.

    Raises: JobError, like the loader.
    """
    steps = loader.steps()
    for batch, info in steps:
        if not info.is_last:
            yield batch, info
            continue
        next(steps, None)
        missing = -(info.step + 1) % accumulation_steps
        fillers = [copy.copy(batch) for _ in range(missing)]
        yield batch, replace(info, is_update_end=not missing)
        idle = replace(info, loss_scale=0.0, is_idle=True, local_samples=0, local_tokens=0, local_supervised=0)
        idle = replace(idle, global_samples=0, global_tokens=0, global_supervised=0)
        for number, filler in enumerate(fillers, 1):
            yield filler, replace(idle, step=info.step + number, is_update_end=number == missing)
