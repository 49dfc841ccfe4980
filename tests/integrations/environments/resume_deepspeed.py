"""DeepSpeed's three stages, resumed from a checkpoint in the middle of an epoch, with its own loop, Accelerate and the Trainer,
and from the checkpoint of another stage.

DS_ACCELERATOR=cpu torchrun --nproc-per-node 2 resume_deepspeed.py FOLDER
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from accelerate import Accelerator, DeepSpeedPlugin

from odb_ref.integrations.accelerate import accumulate
from odb_ref.integrations.deepspeed import backward
from odb_ref.integrations.hf import ODBOptions
from odb_ref.torch import JobState
from tests.helpers.options import nested
from tests.integrations.common import BUDGET_TOKENS, OPTIONS, make_all, make_data, make_loader
from tests.integrations.environments import resuming
from tests.integrations.environments.train_deepspeed import (
    STAGES,
    get_whole,
    make_config,
    make_deepspeed_trainer,
    make_model,
    pretend,
)

RATE = 0.05
AT = 3
"""The number of updates before the checkpoint."""
WINDOWS: dict[str, Any] = {"shard": "given", "accumulation_steps": 2, "shuffle": False}


def make_parts() -> tuple[Any, Any]:
    model = make_model()
    return model, torch.optim.AdamW(model.parameters(), lr=RATE)


class Log:
    """A record of a training, as `resuming.check` compares it."""

    def __init__(self, updates: int) -> None:
        self.updates = updates
        self.batches: list[list[int]] = []
        self.logs: list[dict[str, float]] = []

    def note(self, batch: Any, info: Any, loss: Any) -> bool:
        """Returns whether the checkpoint is due after this batch."""
        self.batches.append([] if info.is_idle else batch["numbers"].tolist())
        self.logs.append({"loss": loss.item(), "scale": info.loss_scale, "share": info.progress})
        self.updates += info.is_update_end
        return info.is_update_end and self.updates == AT

    def describe(self, model: Any) -> dict[str, Any]:
        return {"batches": self.batches, "logs": self.logs, "weights": get_whole(model)}


def train_plain(stage: int, folder: Path, is_resumed: bool) -> dict[str, Any]:
    model, optimizer = make_parts()
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=make_config(stage, 2))
    log = Log(AT if is_resumed else 0)
    with make_loader(make_data(), **WINDOWS) as loader:
        if is_resumed:
            _, client = engine.load_checkpoint(str(folder), tag="middle")
            JobState(loader).load_state_dict(client["loader"])
        for batch, info in loader.steps():
            loss = engine(batch["input_ids"], batch["labels"])["loss"]
            backward(engine, loss, info)
            engine.step()
            if log.note(batch, info, loss) and not is_resumed:
                state = {"loader": JobState(loader).state_dict()}
                engine.save_checkpoint(str(folder), tag="middle", client_state=state)
    return log.describe(engine.module)


def train_accelerate(stage: int, folder: Path, is_resumed: bool) -> dict[str, Any]:
    pretend()
    accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=make_config(stage, 1)))
    engine, optimizer = accelerator.prepare(*make_parts())
    log = Log(AT if is_resumed else 0)
    with make_loader(make_data(), **WINDOWS) as loader:
        accelerator.register_for_checkpointing(JobState(loader))
        if is_resumed:
            accelerator.load_state(str(folder))
        for batch, info in accelerator.prepare(loader).steps():
            with accumulate(accelerator, engine, info):
                loss = engine(batch["input_ids"], batch["labels"])["loss"]
                accelerator.backward(info.scale(loss))
            if info.is_update_end:
                optimizer.step()
                optimizer.zero_grad()
            if log.note(batch, info, loss) and not is_resumed:
                accelerator.save_state(str(folder))
    os.environ.pop("ACCELERATE_USE_DEEPSPEED", None)
    return log.describe(engine.module)


def train_trainer(stage: int, folder: Path, checkpoint: str | None, *, is_exact: bool) -> dict[str, Any]:
    free = {"update_samples": None, "updates_per_epoch": 6, "loader": nested(**(OPTIONS | {"shard": "given"}))}
    trainer = make_deepspeed_trainer(
        folder,
        make_config(stage, 2) | {"train_micro_batch_size_per_gpu": "auto"},
        odb=ODBOptions(token_budget=BUDGET_TOKENS, **({} if is_exact else free)),
        train_dataset=make_all() if is_exact else make_data(),
        per_device_train_batch_size=4,
        **resuming.SETTINGS,
    )
    trainer.train(resume_from_checkpoint=checkpoint and str(folder / checkpoint))
    os.environ.pop("ACCELERATE_USE_DEEPSPEED", None)
    whole = get_whole(trainer.model)
    return resuming.describe(trainer, trainer.noted.updates) | {"weights": whole}


def resume(kind: str, stage: int, folder: Path) -> dict[str, Any]:
    """Runs a whole training, and one resumed from its middle."""
    if kind.startswith("trainer"):
        train = partial(train_trainer, stage, folder, is_exact=kind == "trainer updates")
        return resuming.go_on(train)
    by_hand = {"plain": train_plain, "accelerate": train_accelerate}[kind]
    return {"whole": by_hand(stage, folder, False), "steps": [AT], "parts": [by_hand(stage, folder, True)]}


def change_stages(folder: Path) -> dict[str, Any]:
    """Resumes each stage from each other's checkpoint, with DeepSpeed's own loop. Returns the results, or the errors."""
    wholes = {stage: train_plain(stage, folder / str(stage), False) for stage in STAGES}
    found = {}
    for old, new in itertools.permutations(STAGES, 2):
        try:
            part = train_plain(new, folder / str(old), True)
        except AssertionError as error:
            found[f"{old} to {new}"] = {"stopped": str(error)}
        else:
            found[f"{old} to {new}"] = {"whole": wholes[old], "part": part}
    return found


def main() -> None:
    warnings.simplefilter("ignore")
    folder, kind = Path(sys.argv[1]), os.environ["ODB_KIND"]
    torch.set_num_threads(1)
    deepspeed.init_distributed("gloo", auto_mpi_discovery=False)
    if kind == "stages":
        found = change_stages(folder)
    else:
        found = {str(stage): resume(kind, stage, folder / str(stage)) for stage in STAGES}
    (folder / f"found-{dist.get_rank()}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
