"""DeepSpeed's three stages, on two ranks with shards of 23 and 8 samples or on one with all, with its own loop, Accelerate and
the Trainer: the samples of each update, its loss, and the weights.

    DS_ACCELERATOR=cpu torchrun --nproc-per-node 2 train_deepspeed.py FOLDER
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

os.environ["DS_ACCELERATOR"] = "cpu"
import deepspeed
from accelerate import Accelerator, DeepSpeedPlugin, PartialState
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType

from odb_ref.integrations.accelerate import accumulate
from odb_ref.integrations.deepspeed import backward
from odb_ref.integrations.hf import ODBOptions
from odb_ref.torch import ODBDataLoader, UsageError
from tests.helpers.options import nested
from tests.integrations.common import (
    BUDGET_TOKENS,
    LEARNING_RATE,
    OPTIONS,
    Model,
    collate,
    make_all,
    make_data,
    make_loader,
)
from tests.integrations.noting import Log, NotingTrainer
from tests.integrations.test_hf import make_trainer

# Its shared-memory operation takes minutes to compile at first use, and gloo does the same.
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False

CPU = torch.device("cpu")
STAGES = [int(stage) for stage in os.environ["ODB_STAGES"]]
UPDATE_SAMPLES = 8
"""The samples of an update, for kinds that end in "updates". The last of 31 samples' updates holds 7."""


def make_model() -> Model:
    """Returns a model in single precision: in double, DeepSpeed before 0.19.8 is wrong at stage 1 with any loader."""
    return Model().float()


def make_config(stage: int, steps: int) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": steps,
        "zero_optimization": {"stage": stage, "overlap_comm": False},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "gradient_clipping": 0.0,
    }


def get_whole(model: Any) -> list[float]:
    """Returns the weights of a sharded model, put together by a collective."""
    with deepspeed.zero.GatheredParameters(list(model.parameters())):
        return torch.cat([parameter.detach().flatten().double() for parameter in model.parameters()]).tolist()


def make_mode(*, is_exact: bool, steps: int = 1, **options: Any) -> ODBDataLoader:
    """Returns a loader with updates of a fixed number of samples of all ranks, or of ``steps`` full steps."""
    if is_exact:
        return ODBDataLoader(
            make_all(),
            token_budget=BUDGET_TOKENS,
            collate_fn=collate,
            update_samples=UPDATE_SAMPLES,
            **nested(timeout_s=20, shuffle=False, **options),
        )
    return make_loader(make_data(), shard="given", accumulation_steps=steps, **options)


def train_plain(stage: int, steps: int = 1, *, is_exact: bool = False) -> Any:
    """Checks both that may divide: with windows the loader's weights expect DeepSpeed to divide, without them neither."""
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=make_config(stage, steps))
    log = Log()
    with make_mode(is_exact=is_exact, steps=steps, trainer_divides_loss=steps > 1) as loader:
        for batch, info in loader.steps():
            loss = engine(batch["input_ids"], batch["labels"])["loss"]
            backward(engine, loss, info)
            engine.step()
            log.note(batch["numbers"], info, info.scale(loss) / steps)
    return log.updates, log.losses, get_whole(engine.module)


def pretend() -> None:
    """Makes Accelerate believe that the processors are accelerators, without which it does not run DeepSpeed."""
    AcceleratorState._reset_state(reset_partial_state=True)
    PartialState(cpu=True)
    PartialState._shared_state |= {"distributed_type": DistributedType.DEEPSPEED, "device": CPU}


def train_accelerate(stage: int, *, is_exact: bool = False) -> Any:
    pretend()
    accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=make_config(stage, 1)))
    assert accelerator.distributed_type is DistributedType.DEEPSPEED
    model = make_model()
    engine, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=LEARNING_RATE))
    log = Log()
    with make_mode(is_exact=is_exact, steps=2) as loader:
        for batch, info in accelerator.prepare(loader).steps():
            with accumulate(accelerator, engine, info):
                loss = info.scale(engine(batch["input_ids"], batch["labels"])["loss"])
                accelerator.backward(loss)
            log.note(batch["numbers"], info, loss)
            if info.is_update_end:
                optimizer.step()
                optimizer.zero_grad()
    os.environ.pop("ACCELERATE_USE_DEEPSPEED", None)
    return log.updates, log.losses, get_whole(engine.module)


def make_deepspeed_trainer(folder: Path, config: dict[str, Any], **settings: Any) -> Any:
    """Returns a trainer with windows of two steps. It pretends late, or its arguments would take every rank for the first."""
    settings = {"use_cpu": False, "gradient_accumulation_steps": 2, "kind": NotingTrainer} | settings
    settings = {"model": make_model()} | settings
    return make_trainer(dist.get_rank(), folder, pretend=pretend, deepspeed=config, **settings)


def train_trainer(stage: int, folder: Path, *, is_exact: bool = False) -> Any:
    """Trains by default, with the updates of the plain Trainer, or in free mode."""
    free = {"update_samples": None, "updates_per_epoch": 3, "loader": nested(**(OPTIONS | {"shard": "given"}))}
    odb = ODBOptions(token_budget=BUDGET_TOKENS, **({} if is_exact else free))
    trainer = make_deepspeed_trainer(
        folder,
        make_config(stage, 2) | {"train_micro_batch_size_per_gpu": "auto"},
        odb=odb,
        train_dataset=make_all() if is_exact else make_data(),
        per_device_train_batch_size=UPDATE_SAMPLES // 2 // dist.get_world_size(),
        accelerator_config={"even_batches": False},
    )
    assert trainer.args.process_index == dist.get_rank()
    trainer.set_odb(replace(odb, survives_out_of_memory=True))
    with pytest.raises(UsageError, match="not with DEEPSPEED: its engine has collectives of its own"):
        trainer.train()
    trainer.set_odb(odb)
    trainer.train()
    os.environ.pop("ACCELERATE_USE_DEEPSPEED", None)
    return trainer.noted.updates, trainer.noted.losses, get_whole(trainer.model)


def main() -> None:
    folder, rank = Path(sys.argv[1]), int(os.environ["RANK"])
    torch.set_num_threads(1)
    deepspeed.init_distributed("gloo", auto_mpi_discovery=False)
    kinds = os.environ["ODB_KINDS"].split(",")
    found: dict[str, Any] = {}
    said: list[str] = []
    for stage in STAGES:
        runs = {
            "plain": partial(train_plain, stage),
            "windows": partial(train_plain, stage, 2),
            "plain updates": partial(train_plain, stage, is_exact=True),
            "accelerate": partial(train_accelerate, stage),
            "accelerate updates": partial(train_accelerate, stage, is_exact=True),
            "trainer": partial(train_trainer, stage, folder),
            "trainer updates": partial(train_trainer, stage, folder, is_exact=True),
        }
        with warnings.catch_warnings(record=True, action="always") as caught:
            found |= {f"{kind} {stage}": runs[kind]() for kind in kinds}
        said += [str(item.message) for item in caught if "odb" in f"{item.message} {item.filename}".lower()]
    found["said"] = said
    (folder / f"found-{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
