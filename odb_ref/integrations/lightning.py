"""`LightningLoader`: an `ODBDataLoader` as the train loader of a Lightning Trainer, and `scale_loss` for its training step.

    class Tuned(LightningModule):
        def training_step(self, batch, batch_idx):
            loss = ...  # the mean over this batch's supervised tokens
            return scale_loss(self, loss)

    loader = LightningLoader(dataset, token_budget=16_384, accumulation_steps=2, collate_fn=collate)
    Trainer(strategy="ddp", accumulate_grad_batches=2, max_epochs=3).fit(Tuned(), loader)

Lightning divides each loss by ``accumulate_grad_batches``, to the end of an epoch; the loader's weights allow for it, and
`scale_loss` refuses to work with another number than the loader has. The gradient of every optimizer step is that of the mean
over all supervised tokens of its window on all ranks, the rest of an epoch that does not fill a window included.

Lightning shards and wraps loaders of PyTorch's class only: ``use_distributed_sampler`` changes nothing here. Since the length
of an epoch is not known before its end, Lightning reads one batch ahead; the loader's state is that of the last batch trained
on. It is gathered from all ranks into each checkpoint, so another number of ranks can go on with it. A checkpoint in the middle
of an accumulation window loses the window's gradient, as Lightning's do. The module uses automatic optimization, and a
training_step that takes a batch. Run and tested with DDP; other strategies were not run.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Final, Self

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from torch import Tensor
from torch.utils.data import Dataset

from odb_ref.integrations.steps import read_steps
from odb_ref.torch import ODBDataLoader, StepInfo, UsageError

_READ_AHEAD: Final = 1
"""Batches that Lightning holds beside the one it trains on."""


class LightningLoader:
    """An `ODBDataLoader` that knows what Lightning does to a loss, and which of its batches Lightning has trained on.

    ``options`` are those of `ODBDataLoader`; ``accumulation_steps`` is Lightning's ``accumulate_grad_batches``.

    Raises: UsageError as `ODBDataLoader`, and when an option is not the caller's to choose.
    """

    def __init__(
        self, dataset: Dataset[object], *, token_budget: int, accumulation_steps: int = 1, **options: object
    ) -> None:
        if "trainer_divides_loss" in options:
            raise UsageError("LightningLoader: trainer_divides_loss is not to be given: Lightning always divides")
        if options.get("on_idle", "replay") != "replay":
            raise UsageError("LightningLoader: Lightning needs a batch in every step, so on_idle must be 'replay'")
        self.loader = ODBDataLoader(
            dataset,
            token_budget=token_budget,
            accumulation_steps=accumulation_steps,
            trainer_divides_loss=True,
            **options,  # type: ignore[arg-type]
        )
        self.accumulation_steps = accumulation_steps
        self.step_info: StepInfo | None = None
        """What belongs to the batch that was trained on last."""
        self._pending: deque[tuple[StepInfo, Mapping[str, object]]] = deque()
        self._place: Mapping[str, object] | None = None
        """The loader's state after the batch that was trained on last."""
        self._epoch = 0
        self._loaded: list[Mapping[str, object]] = []
        self._is_begun = False

    def __iter__(self) -> Iterator[object]:
        # Lightning may begin an epoch, read ahead, and begin it again: nothing of it was trained on.
        if self._is_begun and self._pending:
            self.loader.set_epoch(self._epoch)
            if self._loaded:
                self.loader.load_state_dict(self._loaded)
        self._is_begun = True
        self._epoch = self.loader.epoch
        self._pending.clear()
        return self._read()

    def _read(self) -> Iterator[object]:
        for batch, info in read_steps(self.loader):
            if len(self._pending) > _READ_AHEAD:
                raise UsageError(
                    "a batch was trained on without its weight: training_step must return scale_loss(self, loss)"
                )
            self._pending.append((info, self.loader.state_dict()))
            yield batch

    def take_step(self) -> StepInfo:
        """What belongs to the batch that is being trained on; once for each batch, in their order.

        Raises: UsageError when there is no such batch.
        """
        if not self._pending:
            raise UsageError("scale_loss: no batch is being trained on, or its loss was scaled before")
        self.step_info, self._place = self._pending.popleft()
        self._is_begun = False
        self._loaded = []
        return self.step_info

    def state_dict(self) -> dict[str, object]:
        """All ranks' places after the last batch trained on; every rank calls it. Spec: R10."""
        own = self._place or self.loader.state_dict()
        if not dist.is_initialized():
            return {"ranks": [own]}
        gathered: list[Mapping[str, object]] = [own] * dist.get_world_size()
        dist.all_gather_object(gathered, own)
        # Ranks that share their batches, by a device mesh, have equal states.
        by_rank = {int(str(state["rank"])): state for state in gathered}
        return {"ranks": [by_rank[rank] for rank in sorted(by_rank)]}

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Goes on from a saved state with the next iteration, on as many ranks as there are now.

        Raises: UsageError when this is no such state.
        """
        states = state.get("ranks")
        if not isinstance(states, Sequence):
            raise UsageError("load_state_dict: this is no state of a LightningLoader")
        self._loaded = list(states)
        self._place = None
        self._is_begun = False
        self.loader.load_state_dict(self._loaded)

    def close(self) -> None:
        """Ends the loader: see `ODBDataLoader.close`."""
        self.loader.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def scale_loss(module: LightningModule, loss: Tensor) -> Tensor:
    """The mean loss of the batch being trained on, weighed: what ``training_step`` returns, called once in it.

    Preserves: WEIGHT.

    Raises: UsageError when the train loader is no `LightningLoader`, or Lightning would normalise otherwise than it expects.
    """
    trainer = module.trainer
    loader = trainer.train_dataloader
    if not isinstance(loader, LightningLoader):
        raise UsageError(f"scale_loss: the train loader is a {type(loader).__name__}, not a LightningLoader")
    if not trainer.training or not module.automatic_optimization:
        raise UsageError("scale_loss is for the training_step of a module with automatic optimization")
    if trainer.accumulate_grad_batches != loader.accumulation_steps:
        raise UsageError(
            f"Lightning divides losses by accumulate_grad_batches={trainer.accumulate_grad_batches}, the loader's weights are "
            f"for accumulation_steps={loader.accumulation_steps}: they must be equal, or the loss is normalised wrongly"
        )
    info = loader.take_step()
    if not info.local_supervised:
        loss = torch.nan_to_num(loss)  # a mean over no token is 0/0, which no weight makes harmless
    return loss * info.loss_scale
