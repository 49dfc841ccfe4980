"""Each framework with each way to hold a model that runs here: the loss of every update, coverage, resuming from a checkpoint
in the middle of an epoch, and warnings, on one process and two.

DeepSpeed has a separate environment: `tests/integrations/test_deepspeed.py`.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.integrations import require

require("transformers")
require("accelerate")
require("lightning")

import lightning.pytorch as pl
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from accelerate import Accelerator, FullyShardedDataParallelPlugin, PartialState
from accelerate.state import AcceleratorState
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

from odb_ref.integrations.accelerate import accumulate
from odb_ref.integrations.lightning import LightningLoader, scale_loss
from odb_ref.torch import JobState
from tests.helpers.options import nested
from tests.integrations.arguments import make_odb
from tests.integrations.common import (
    BUDGET_TOKENS,
    LEARNING_RATE,
    OPTIONS,
    Model,
    check_coverage,
    collate,
    get_weights,
    join,
    make_data,
    make_loader,
    run_ranks,
    train_alone,
)
from tests.integrations.noting import Log
from tests.integrations.test_hf import make_trainer
from tests.integrations.test_lightning import make_trainer as make_lightning
from tests.integrations.test_sharded import get_whole, is_sharded, make_sharded_trainer, pretend
from tests.torch.ranks import get_values

pytestmark = pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")

AT = 4
"""The updates before the checkpoint, which is in the middle of the first of two epochs."""
STEPS = 2
"""The batches of an update."""


# Plain torch --------------------------------------------------------------------------------------------------------------


def hold(strategy: str) -> Any:
    model: Any = Model()
    if strategy == "ddp":
        return DistributedDataParallel(model)
    if strategy == "fsdp2":
        fully_shard(model.layers[2])
        fully_shard(model)
        return model
    return FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=True)


def train_plain(strategy: str, folder: Path, *, is_resumed: bool) -> Log:
    model, log = hold(strategy), Log()
    assert strategy == "ddp" or dist.get_world_size() == 1 or is_sharded(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=0.5)
    with make_loader(make_data(), shard="given", accumulation_steps=STEPS) as loader:
        saved: dict[str, Any] = {"loader": JobState(loader)}
        if is_resumed:
            weights, momenta = get_state_dict(model, optimizer)
            parts = {"model": weights, "optimizer": momenta} | saved
            dcp.load(parts, checkpoint_id=folder)
            set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=momenta)
        while loader.epoch < 2:
            for batch, info in loader.steps():
                if strategy == "fsdp2":
                    model.set_requires_gradient_sync(info.is_update_end)
                elif strategy == "ddp":
                    model.require_backward_grad_sync = info.is_update_end
                loss = info.scale(model(batch["input_ids"], batch["labels"])["loss"])
                loss.backward()
                if info.is_update_end:
                    optimizer.step()
                    optimizer.zero_grad()
                if log.note(batch["numbers"], info, loss) == AT and not is_resumed:
                    weights, momenta = get_state_dict(model, optimizer)
                    dcp.save({"model": weights, "optimizer": momenta} | saved, checkpoint_id=folder)
    log.weights = get_weights(model) if strategy == "ddp" else get_whole(model)
    return log


# Accelerate ---------------------------------------------------------------------------------------------------------------


def train_accelerate(strategy: str, folder: Path, *, is_resumed: bool) -> Log:
    AcceleratorState._reset_state(reset_partial_state=True)
    settings: dict[str, Any] = {"cpu": True}
    if strategy != "ddp":
        PartialState(cpu=True)
        pretend()
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=int(strategy[-1]), cpu_ram_efficient_loading=False, state_dict_type="SHARDED_STATE_DICT"
        )
        settings = {"fsdp_plugin": plugin}
    accelerator, log = Accelerator(**settings), Log()
    model: Any = Model()
    if strategy == "fsdp1":
        model = accelerator.prepare(model)
        optimizer = accelerator.prepare(torch.optim.SGD(model.parameters(), lr=LEARNING_RATE))
    else:
        optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=0.5)
        model, optimizer = accelerator.prepare(model, optimizer)
    with make_loader(make_data(), shard="given", accumulation_steps=STEPS) as loader:
        accelerator.register_for_checkpointing(JobState(loader))
        if is_resumed:
            accelerator.load_state(str(folder))
        while loader.epoch < 2:
            for batch, info in loader.steps():
                with accumulate(accelerator, model, info):
                    loss = info.scale(model(batch["input_ids"], batch["labels"])["loss"])
                    accelerator.backward(loss)
                    optimizer.step()
                    optimizer.zero_grad()
                if log.note(batch["numbers"], info, loss) == AT and not is_resumed:
                    accelerator.save_state(str(folder))
    log.weights = get_weights(model) if strategy == "ddp" else get_whole(model)
    return log


# Lightning ----------------------------------------------------------------------------------------------------------------


class Module(pl.LightningModule):
    def __init__(self, log: Log, *, is_split: bool) -> None:
        super().__init__()
        self.model, self.noted, self.is_split = Model(), log, is_split

    def configure_model(self) -> None:
        if self.is_split:
            mesh = self.device_mesh["data_parallel"]
            fully_shard(self.model.layers[2], mesh=mesh)
            fully_shard(self.model, mesh=mesh)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = scale_loss(self, self.model(batch["input_ids"], batch["labels"])["loss"])
        # Lightning will divide by the steps of the update.
        self.noted.note(batch["numbers"], self.trainer.train_dataloader._info, loss.detach() / STEPS)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=LEARNING_RATE, momentum=0.5)


def train_lightning(strategy: str, folder: Path, *, is_resumed: bool) -> Log:
    size, log = dist.get_world_size(), Log()
    settings: dict[str, Any] = {}
    if strategy != "ddp":
        sizes = {"data_parallel_size": size, "tensor_parallel_size": 1}
        settings["strategy"] = ModelParallelStrategy(**sizes, process_group_backend="gloo")
    options = OPTIONS | {"shard": "given", "accumulation_steps": STEPS, "collate_fn": collate}
    module = Module(log, is_split=strategy != "ddp")
    with LightningLoader(make_data(), token_budget=BUDGET_TOKENS, **nested(**options)) as loader:
        keep = pl.callbacks.ModelCheckpoint(dirpath=folder, filename="{step}", every_n_train_steps=AT, save_top_k=-1)
        settings |= {"accumulate_grad_batches": STEPS, "max_epochs": 2, "callbacks": [loader.callback, keep]}
        trainer = make_lightning(folder, size, **settings)
        trainer.fit(module, loader, ckpt_path=str(folder / f"step={AT}.ckpt") if is_resumed else None)
    log.weights = get_weights(module.model) if strategy == "ddp" else get_whole(module.model)
    return log


# Hugging Face -------------------------------------------------------------------------------------------------------------


def train_trainer(strategy: str, folder: Path, *, is_resumed: bool) -> Log:
    momentum = "momentum=0" if strategy == "fsdp1" else "momentum=0.5"
    settings = {"optim_args": momentum, "save_strategy": "steps", "save_steps": AT, "num_train_epochs": 2}
    settings |= {"gradient_accumulation_steps": STEPS, "odb": make_odb(shard="given"), "train_dataset": make_data()}
    if strategy == "ddp":
        AcceleratorState._reset_state(reset_partial_state=True)
        trainer = make_trainer(dist.get_rank(), folder, **settings)
    else:
        trainer = make_sharded_trainer(dist.get_rank(), folder, int(strategy[-1]), pretend=pretend, **settings)
    trainer.train(resume_from_checkpoint=str(folder / f"checkpoint-{AT}") if is_resumed else None)
    log: Log = trainer.noted
    log.weights = get_weights(trainer.model) if strategy == "ddp" else get_whole(trainer.model_wrapped)
    return log


# All of them --------------------------------------------------------------------------------------------------------------

Train = Callable[..., Log]
CELLS: list[tuple[Train, str]] = [
    (train_plain, "fsdp2"),
    (train_plain, "ddp"),
    (train_accelerate, "fsdp1"),
    (train_plain, "fsdp1"),
    (train_accelerate, "fsdp2"),
    (train_accelerate, "ddp"),
    (train_lightning, "fsdp2"),
    (train_lightning, "ddp"),
    (train_trainer, "fsdp1"),
    (train_trainer, "ddp"),
    (train_trainer, "fsdp2"),
]
"""``make test`` runs every second one, on two processes: the sharded ones, which no other test trains."""


def run_cell(rank: int, folder: Path, train: Train, strategy: str) -> Any:
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    with warnings.catch_warnings(record=True, action="always") as caught:
        whole = train(strategy, folder, is_resumed=False)
        part = train(strategy, folder, is_resumed=True)
    ours = [str(item.message) for item in caught if "odb" in str(item.message).lower() or "odb_ref" in item.filename]
    return whole, part, ours


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [2, 1])
@pytest.mark.parametrize(
    ("train", "strategy"),
    CELLS,
    ids=lambda item: item if isinstance(item, str) else item.__name__.removeprefix("train_"),
)
def test_the_losses_of_one_process_each_sample_once_the_same_after_a_checkpoint_and_no_warning(
    tmp_path: Path, train: Train, strategy: str, world_size: int
) -> None:
    """Checks: WEIGHT, COVER, RESUME, REPLAY. Two epochs over shards of 23 and 8, with momentum."""
    values = get_values(run_ranks(world_size, run_cell, tmp_path / "saved", train, strategy))
    wholes, parts, said = zip(*values, strict=True)
    check_coverage([(whole.updates, whole.weights) for whole in wholes], epochs=2)
    updates = [join(numbers) for numbers in zip(*(whole.updates for whole in wholes), strict=True)]
    # With FSDP 1 Accelerate restores no momentum in an optimizer that has not made a step yet.
    is_plain = strategy == "fsdp1" and train in (train_accelerate, train_trainer)
    wanted = train_alone(Model(), updates, momentum=0.0 if is_plain else 0.5)
    found = [sum(losses) / world_size for losses in zip(*(whole.losses for whole in wholes), strict=True)]
    assert len(found) > AT
    # In one cell the model is in single precision, see there.
    assert found == pytest.approx(wanted, rel=1e-5 if (train, strategy) == (train_trainer, "fsdp1") else 1e-9)
    for whole, part in zip(wholes, parts, strict=True):
        assert (part.updates, part.losses) == (whole.updates[AT:], whole.losses[AT:])
        assert part.weights == whole.weights
    assert said == ([],) * world_size
