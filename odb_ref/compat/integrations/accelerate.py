"""`odb.integrations.accelerate`: a loop of one's own, with an `Accelerator`."""

from __future__ import annotations

from odb_ref.extras import require

require(__name__, "accelerate", extra="accelerate")

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

from accelerate import Accelerator
from accelerate.utils import send_to_device
from torch import Tensor
from torch.utils.data import DataLoader

from odb_ref.compat.config import LossScalingMode
from odb_ref.compat.dataloader import ODBDataLoader, ODBHandle, apply
from odb_ref.compat.integrations.bridge import Bridge, BridgeState
from odb_ref.compat.step_info import ODBStepInfo
from odb_ref.torch import UsageError

ODBAccelerateBridgeState = BridgeState


class OnDevice:
    """An `ODBDataLoader` whose batches are moved to the Accelerator's device, each with what belongs to it."""

    def __init__(self, loader: ODBDataLoader[object], accelerator: Accelerator) -> None:
        self.loader, self._accelerator = loader, accelerator

    def __iter__(self) -> Iterator[object]:
        for batch in self.loader:
            yield send_to_device(batch, self._accelerator.device)


@dataclass(slots=True, kw_only=True)
class ODBAccelerateBridge(Bridge):
    """What a loop asks: `consume_batch` before the model sees a batch, `backward` in place of the Accelerator's."""

    accelerator: Accelerator
    dataloader: ODBDataLoader[object] | OnDevice

    def backward(self, loss: Tensor, info: ODBStepInfo | None = None, **kwargs: object) -> None:
        """Does the backward pass of the weighed loss."""
        self.accelerator.backward(self.scale_loss(loss, info), **kwargs)

    def join_uneven_inputs(self, joinables: Iterable[object], **kwargs: object) -> AbstractContextManager[None]:
        """Returns a context that does nothing: all ranks take the same number of steps, so nobody has to be waited for."""
        return nullcontext()


def configure_accelerator(
    accelerator: Accelerator,
    dataloader: DataLoader[object] | ODBDataLoader[object],
    *,
    handle: ODBHandle | None = None,
    sample_budget: int | None = None,
    prepare_dataloader: bool = False,
    loss_scaling: LossScalingMode = None,
    **apply_kwargs: object,
) -> ODBAccelerateBridge:
    """Returns the bridge of a loop over ``dataloader``, which becomes an `ODBDataLoader` if it is none yet.

    `Accelerator.prepare` leaves such a loader as it is, before and after; with ``prepare_dataloader`` the bridge's moves
    batches to the device, which is all that is left to prepare.

    Raises: UsageError as `ODBDataLoader`.
    """
    if not isinstance(dataloader, ODBDataLoader):
        handle = apply(dataloader, loss_scaling=loss_scaling, **apply_kwargs)  # type: ignore[arg-type]
    elif apply_kwargs:
        raise UsageError(
            f"the loader has its settings already, and {', '.join(sorted(apply_kwargs))} is given beside it"
        )
    elif handle is None:
        handle = ODBHandle(dataloader.odb_config)
    loader: ODBDataLoader[object] = dataloader  # type: ignore[assignment]  # it is one now
    prepared = OnDevice(loader, accelerator) if prepare_dataloader else loader
    return ODBAccelerateBridge(
        accelerator=accelerator,
        dataloader=prepared,
        handle=handle,
        sample_budget=sample_budget,
        loss_scaling=loss_scaling,
    )
