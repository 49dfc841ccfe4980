"""`odb.integrations.accelerate`: for your own loop with an `Accelerator`."""

from __future__ import annotations

from odb_ref.extras import require

require(__name__, "accelerate", extra="accelerate")

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

from accelerate import Accelerator
from accelerate.utils import send_to_device
from torch import Tensor
from torch.utils.data import DataLoader

from odb_ref.compat.config import LossScalingMode
from odb_ref.compat.dataloader import ODBDataLoader, apply
from odb_ref.compat.handle import ODBHandle
from odb_ref.compat.integrations.bridge import Bridge, BridgeState
from odb_ref.compat.step_info import ODBStepInfo
from odb_ref.torch import UsageError

ODBAccelerateBridgeState = BridgeState


class OnDevice:
    """An `ODBDataLoader` whose batches are moved to the Accelerator's device, together with their step's information."""

    def __init__(self, loader: ODBDataLoader[object], accelerator: Accelerator) -> None:
        self.loader, self._accelerator = loader, accelerator

    def __iter__(self) -> Iterator[object]:
        for batch in self.loader:
            yield send_to_device(batch, self._accelerator.device)


@dataclass(slots=True)
class ODBAccelerateBridge(Bridge):
    """For a loop: call `consume_batch` before the model sees a batch, and `backward` instead of the Accelerator's."""

    accelerator: Accelerator
    dataloader: object
    handle: ODBHandle
    sample_budget: int | None = None
    loss_scaling: LossScalingMode = None
    state: BridgeState = field(default_factory=BridgeState)

    def backward(self, loss: Tensor, info: ODBStepInfo | None = None, **kwargs: object) -> Tensor:
        """Runs the backward pass of the weighted loss, and returns this loss."""
        scaled = self.scale_loss(loss, info)
        self.accelerator.backward(scaled, **kwargs)
        return scaled

    def join_uneven_inputs(self, joinables: Iterable[object], **kwargs: object) -> AbstractContextManager[object]:
        """Returns the Accelerator's own context. It never has to wait, because all ranks take the same number of steps."""
        context: AbstractContextManager[object] = self.accelerator.join_uneven_inputs([*joinables], **kwargs)
        return context


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
    """Returns the bridge for a loop over ``dataloader``, which is turned into an `ODBDataLoader` if it is not one yet.

    `Accelerator.prepare` leaves such a loader unchanged, before and after. With ``prepare_dataloader`` the bridge's loader also
    moves batches to the device. With a ``handle`` the loader may be any that was made before.

    Raises: UsageError, like `ODBDataLoader`.
    """
    if isinstance(dataloader, ODBDataLoader):
        handle = ODBHandle(dataloader.odb_config) if handle is None else handle
    elif handle is None:
        handle = apply(dataloader, loss_scaling=loss_scaling, **apply_kwargs)  # type: ignore[arg-type]
        apply_kwargs = {}
    if apply_kwargs:
        raise UsageError(
            f"the loader has its settings already, and {', '.join(sorted(apply_kwargs))} is given beside it"
        )
    made: object = accelerator.prepare(dataloader) if prepare_dataloader else dataloader
    if prepare_dataloader and isinstance(made, ODBDataLoader):
        made = OnDevice(made, accelerator)
    return ODBAccelerateBridge(accelerator, made, handle, sample_budget, loss_scaling)
