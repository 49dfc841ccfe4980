"""What the integrations share: an epoch read as pairs of a batch and what belongs to it."""

from __future__ import annotations

from collections.abc import Iterator

from odb_ref.torch import ODBDataLoader, StepInfo, pop_step_info


def read_steps(loader: ODBDataLoader) -> Iterator[tuple[object, StepInfo]]:
    """The batches of an epoch, each with its information, which a framework would lose on the batch's way to the device.

    The epoch is concluded before its last batch is handed out: a framework that stops after that batch does not leave the
    epoch early, and a state saved then stands at the start of the next one. Spec: R10.

    Raises: JobError as the loader does.
    """
    iterator = iter(loader)
    for batch in iterator:
        info = pop_step_info(batch)
        if info.is_last:
            next(iterator, None)
        yield batch, info
