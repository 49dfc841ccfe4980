"""DeepSpeed's three stages on two ranks with shards of 23 and 8 samples, by its own loop, Accelerate and the Trainer: what each
update was trained on, and the weights.

    DS_ACCELERATOR=cpu torchrun --nproc-per-node 2 train_deepspeed.py FOLDER
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from dataclasses import replace
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
from transformers import TrainingArguments

from odb_ref.integrations.accelerate import accumulate
from odb_ref.integrations.deepspeed import backward
from odb_ref.integrations.hf import STEP_INFO, ODBOptions, ODBTrainer
from odb_ref.torch import ODBDataLoader, UsageError, pop_step_info
from tests.integrations.common import (
    BUDGET_TOKENS,
    LEARNING_RATE,
    OPTIONS,
    Model,
    collate,
    make_shard,
)

# Its operation for shared memory is compiled on first use, for minutes; gloo does the same.
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False

CPU = torch.device("cpu")


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
    """The weights of a sharded model, put together; a collective."""
    with deepspeed.zero.GatheredParameters(list(model.parameters())):
        return torch.cat([parameter.detach().flatten().double() for parameter in model.parameters()]).tolist()


def train_plain(rank: int, stage: int, steps: int) -> Any:
    """Whoever is to divide: with windows the loader's weights expect it of DeepSpeed, without it of nobody."""
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=make_config(stage, steps))
    options = OPTIONS | {"shard": "given", "collate_fn": collate, "accumulation_steps": steps}
    options["trainer_divides_loss"] = steps > 1
    updates: list[list[int]] = [[]]
    with ODBDataLoader(make_shard(rank), token_budget=BUDGET_TOKENS, **options) as loader:
        for batch, info in loader.steps():
            backward(engine, engine(batch["input_ids"], batch["labels"])["loss"], info)
            engine.step()
            updates[-1] += [] if info.is_idle else batch["numbers"].tolist()
            if info.is_window_end:
                updates.append([])
    return updates[:-1], get_whole(engine.module)


def pretend() -> None:
    """Has Accelerate believe that the processors are accelerators: without one it runs no DeepSpeed."""
    AcceleratorState._reset_state(reset_partial_state=True)
    PartialState(cpu=True)
    PartialState._shared_state |= {"distributed_type": DistributedType.DEEPSPEED, "device": CPU}


def train_accelerate(rank: int, stage: int) -> Any:
    pretend()
    accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=make_config(stage, 1)))
    assert accelerator.distributed_type is DistributedType.DEEPSPEED
    model = Model()
    engine, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=LEARNING_RATE))
    options = OPTIONS | {"shard": "given", "accumulation_steps": 2, "collate_fn": collate}
    updates: list[list[int]] = [[]]
    with ODBDataLoader(make_shard(rank), token_budget=BUDGET_TOKENS, **options) as loader:
        for batch in accelerator.prepare(loader):
            info = pop_step_info(batch)
            with accumulate(accelerator, engine, info):
                accelerator.backward(info.scale(engine(batch["input_ids"], batch["labels"])["loss"]))
            updates[-1] += [] if info.is_idle else batch["numbers"].tolist()
            if info.is_window_end:
                optimizer.step()
                optimizer.zero_grad()
                updates.append([])
    os.environ.pop("ACCELERATE_USE_DEEPSPEED", None)
    return updates[:-1], get_whole(engine.module)


class Recorder(ODBTrainer):
    """Notes which samples each update trained on."""

    updates: Any = ()
    steps = 0

    def compute_loss(self, model: Any, inputs: Any, **kwargs: Any) -> Any:
        numbers = inputs.pop("numbers").tolist()
        if self.steps % self.args.gradient_accumulation_steps == 0:
            self.updates = [*self.updates, []]
        self.steps += 1
        self.updates[-1] += [] if inputs[STEP_INFO].is_idle else numbers
        return super().compute_loss(model, inputs, **kwargs)


def train_trainer(rank: int, stage: int, folder: Path) -> Any:
    args = TrainingArguments(
        output_dir=str(folder),
        use_cpu=False,
        report_to=[],
        disable_tqdm=True,
        optim="sgd",
        learning_rate=LEARNING_RATE,
        lr_scheduler_type="constant",
        max_grad_norm=0,
        remove_unused_columns=False,
        save_strategy="no",
        num_train_epochs=1,
        gradient_accumulation_steps=2,
        deepspeed=make_config(stage, 2) | {"train_micro_batch_size_per_gpu": 8},
    )
    pretend()  # not before: the arguments would take every rank for the first
    odb = ODBOptions(token_budget=BUDGET_TOKENS, updates_per_epoch=3, loader=OPTIONS | {"shard": "given"})
    trainer = Recorder(model=Model(), args=args, train_dataset=make_shard(rank), data_collator=collate, odb=odb)
    assert trainer.args.process_index == rank
    trainer.set_odb(replace(odb, survives_out_of_memory=True))
    with pytest.raises(UsageError, match="not with DEEPSPEED: its engine has collectives of its own"):
        trainer.train()
    trainer.set_odb(odb)
    trainer.train()
    os.environ.pop("ACCELERATE_USE_DEEPSPEED", None)
    return trainer.updates, get_whole(trainer.model)


def main() -> None:
    folder, rank = Path(sys.argv[1]), int(os.environ["RANK"])
    torch.set_num_threads(1)
    deepspeed.init_distributed("gloo", auto_mpi_discovery=False)
    kinds = os.environ["ODB_KINDS"].split(",")
    found: dict[str, Any] = {}
    said: list[str] = []
    for stage in (1, 2, 3):
        runs = {
            "plain": lambda stage=stage: train_plain(rank, stage, 1),
            "windows": lambda stage=stage: train_plain(rank, stage, 2),
            "accelerate": lambda stage=stage: train_accelerate(rank, stage),
            "trainer": lambda stage=stage: train_trainer(rank, stage, folder),
        }
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            found |= {f"{kind} {stage}": runs[kind]() for kind in kinds}
        said += [str(item.message) for item in caught if "odb" in f"{item.message} {item.filename}".lower()]
    found["said"] = said
    (folder / f"found-{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
