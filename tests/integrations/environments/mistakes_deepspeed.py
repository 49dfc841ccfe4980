"""Settings that a newcomer to DeepSpeed may get wrong, at one stage: is the result right, or refused on every rank? It is right
if it equals that of one process that trains on the union of the ranks' batches.

    DS_ACCELERATOR=cpu torchrun --nproc-per-node 2 mistakes_deepspeed.py FOLDER
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from accelerate import Accelerator, DeepSpeedPlugin
from accelerate.utils import DataLoaderConfiguration, DummyOptim, DummyScheduler

from odb_ref.integrations.deepspeed import backward
from odb_ref.integrations.hf import ODBOptions
from tests.helpers.options import nested
from tests.integrations.common import (
    BUDGET_TOKENS,
    LEARNING_RATE,
    OPTIONS,
    Model,
    Samples,
    check_coverage,
    check_weights,
    collate,
    get_sample,
    get_weights,
    join,
    make_data,
    make_loader,
)
from tests.integrations.environments.resume_deepspeed import WINDOWS
from tests.integrations.environments.train_deepspeed import (
    get_whole,
    make_config,
    make_deepspeed_trainer,
    make_model,
    pretend,
)
from tests.integrations.noting import Log
from tests.integrations.test_accelerate import train_epoch

CLIP = 0.05
SCHEDULE = {
    "type": "WarmupDecayLR",
    "params": dict.fromkeys(("total_num_steps", "warmup_num_steps", "warmup_max_lr", "warmup_min_lr"), "auto"),
}


def initialize(config: dict[str, Any], **options: Any) -> Any:
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config, **options)[0]


def gather(updates: list[list[int]]) -> list[list[list[int]]]:
    everybody = [updates] * dist.get_world_size()
    dist.all_gather_object(everybody, updates)
    return everybody


def judge(updates: list[list[int]], model: Any) -> str:
    weights = get_whole(model)
    runs = [(one, weights) for one in gather(updates)]
    check_coverage(runs)
    try:
        check_weights(runs, Model(), precision=1e-5)
    except AssertionError:
        return "wrong"
    return "right"


# DeepSpeed's own loop -----------------------------------------------------------------------------------------------------


def run(engine: Any, *, steps_always: bool = True, **options: Any) -> list[list[int]]:
    log = Log()
    with make_loader(make_data(), **WINDOWS | options) as loader:
        for batch, info in loader.steps():
            loss = engine(batch["input_ids"], batch["labels"])["loss"]
            backward(engine, loss, info)
            if steps_always or info.is_update_end:
                engine.step()
            log.note(batch["numbers"], info, loss)
    return log.updates


def train(config: dict[str, Any], **options: Any) -> str:
    engine = initialize(config)
    return judge(run(engine, **options), engine.module)


def clip(stage: int) -> str:
    """The norm that is clipped is that of the whole gradient, over all ranks and the window."""
    engine = initialize(make_config(stage, 2) | {"gradient_clipping": CLIP})
    everybody = gather(run(engine))
    model, start = make_model(), torch.tensor(get_weights(Model()))
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    for numbers in zip(*everybody, strict=True):
        batch = collate([get_sample(number) for number in join(numbers)])
        model(batch["input_ids"], batch["labels"])["loss"].backward()
        assert torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP) > CLIP
        optimizer.step()
        optimizer.zero_grad()
    change = torch.tensor(get_weights(model)) - start
    error = torch.tensor(get_whole(engine.module)) - start - change
    return "right" if torch.linalg.norm(error) < 1e-4 * torch.linalg.norm(change) else "wrong"


def schedule(stage: int) -> str:
    """A schedule in its configuration makes a step with each update, including that of the last window."""
    params = {"total_num_steps": 12, "warmup_num_steps": 1, "warmup_max_lr": LEARNING_RATE}
    engine = initialize(make_config(stage, 2) | {"scheduler": {"type": "WarmupDecayLR", "params": params}})
    updates = run(engine)
    return "right" if engine.lr_scheduler.last_batch_iteration == len(updates) - 1 else "wrong"


def pass_loader(stage: int) -> str:
    with make_loader(make_data(), **WINDOWS) as loader:
        initialize(make_config(stage, 2), training_data=loader)
    return "nothing"


def mismatch_ranks(stage: int) -> str:
    """The loader has a single rank in a job of several, as with a process group that is not the engine's."""
    alone = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
    return train(make_config(stage, 2), process_group=alone, is_apart=True)


def list_plain(stage: int) -> dict[str, Callable[[], str]]:
    def config(steps: int, **settings: Any) -> dict[str, Any]:
        return make_config(stage, steps) | settings

    bare = {key: value for key, value in config(2).items() if not key.startswith("train_micro")}
    return {
        "steps in the configuration": lambda: train(config(2)),
        "no steps in the configuration": lambda: train(config(1)),
        "told to expect a division": lambda: train(config(1), trainer_divides_loss=True),
        "told to expect a division, steps": lambda: train(config(2), trainer_divides_loss=True),
        "other steps in the configuration": lambda: train(config(4)),
        "step only at a window's end": lambda: train(config(2), steps_always=False),
        "a batch size of the whole job": lambda: train(bare | {"train_batch_size": 32}),
        "batch sizes that imply other steps": lambda: train(bare | {"train_batch_size": 32, "gradient_accumulation_steps": 4}),
        "clipping": lambda: clip(stage),
        "a schedule in the configuration": lambda: schedule(stage),
        "the loader as training_data": lambda: pass_loader(stage),
        "other ranks": lambda: mismatch_ranks(stage),
    }  # fmt: skip


# Accelerate ---------------------------------------------------------------------------------------------------------------


def accelerate(
    config: dict[str, Any], *, is_told_always: bool = False, is_dummy: bool = False, settings: Any = (), **options: Any
) -> str:
    pretend()
    accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config), **dict(settings))
    model = make_model()
    parts: list[Any] = [torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)]
    if is_dummy:
        dummy = DummyOptim(model.parameters(), lr=LEARNING_RATE)
        parts = [dummy, DummyScheduler(dummy, total_num_steps=12, warmup_num_steps=1)]
    engine, optimizer, *_ = accelerator.prepare(model, *parts)
    with make_loader(make_data(), **WINDOWS | options) as loader, warnings.catch_warnings():
        warnings.filterwarnings("error", message="Accelerate makes a prepared schedule take 2 steps")
        updates = train_epoch(accelerator, engine, optimizer, loader, is_told_always=is_told_always)
    if is_dummy:
        return "right" if engine.get_lr()[0] > 0 and engine.global_steps == len(updates) else "wrong"
    return judge(updates, engine.module)


def list_accelerate(stage: int) -> dict[str, Callable[[], str]]:
    def config(steps: int | str = 1, **settings: Any) -> dict[str, Any]:
        return make_config(stage, 1) | {"gradient_accumulation_steps": steps} | settings

    dummy = {"optimizer": {"type": "SGD", "params": {"lr": LEARNING_RATE}}, "scheduler": SCHEDULE}
    shared_out = {"dataloader_config": DataLoaderConfiguration(split_batches=True)}
    return {
        "told in every step": lambda: accelerate(config(), is_told_always=True),
        "automatic steps": lambda: accelerate(config("auto")),
        "steps in the configuration": lambda: accelerate(config(4)),
        "told to expect a division": lambda: accelerate(config(), trainer_divides_loss=True),
        "an automatic batch size": lambda: accelerate(config(train_micro_batch_size_per_gpu="auto")),
        "a schedule in the configuration": lambda: accelerate(config(**dummy), is_dummy=True),
        "a schedule not shared out": lambda: accelerate(config(**dummy), is_dummy=True, settings=shared_out),
    }


# The Trainer --------------------------------------------------------------------------------------------------------------


def trainer(folder: Path, config: dict[str, Any], *, odb: Any = (), **settings: Any) -> Any:
    options = ODBOptions(
        token_budget=BUDGET_TOKENS, update_samples=None, loader=nested(**(OPTIONS | {"shard": "given"})), **dict(odb)
    )
    data = {"train_dataset": make_data(), "eval_dataset": Samples(range(11))}
    made = make_deepspeed_trainer(folder, config, odb=options, **data, **settings)
    made.train()
    return made


def train_whole(*args: Any, **options: Any) -> str:
    made = trainer(*args, **options)
    return judge(made.noted.updates, made.model)


def follow(*args: Any, **options: Any) -> str:
    """Returns whether the rate falls, until the end of training and no earlier."""
    history = trainer(*args, **options).state.log_history
    rates = [entry["learning_rate"] for entry in history if "learning_rate" in entry]
    return "right" if sorted(rates, reverse=True) == rates and 0 < rates[-1] < rates[0] else f"wrong: {rates}"


def count(*args: Any, **options: Any) -> str:
    """Returns whether DeepSpeed's own schedule made a step with each update."""
    made = trainer(*args, **options)
    steps = made.model_wrapped.lr_scheduler.last_batch_iteration
    return "right" if steps == made.state.global_step - 1 == 3 else f"wrong: {steps}"


def list_trainer(stage: int, folder: Path) -> dict[str, Callable[[], str]]:
    def config(steps: int | str = 2, **settings: Any) -> dict[str, Any]:
        sizes = {"train_micro_batch_size_per_gpu": 8, "gradient_accumulation_steps": steps}
        return make_config(stage, 1) | sizes | settings

    guess = {"updates_per_epoch": 2}
    evaluating = {"eval_strategy": "steps", "eval_steps": 2}
    return {
        "automatic steps": lambda: train_whole(folder, config("auto")),
        "other steps in the configuration": lambda: train_whole(folder, config(4)),
        "a batch size of the whole job": lambda: train_whole(folder, config(train_batch_size=7)),
        "other clipping": lambda: train_whole(folder, config(gradient_clipping=1.0)),
        "evaluation, its own": lambda: train_whole(folder, config(), **evaluating),
        "evaluation, ours": lambda: train_whole(folder, config(), odb={"evaluation": {"shard": "auto"}}, **evaluating),
        "a schedule of the Trainer": lambda: follow(folder, config(), odb=guess, lr_scheduler_type="linear"),
        "a schedule in the configuration": lambda: follow(folder, config(scheduler=SCHEDULE), odb=guess),
        "that by updates": lambda: count(folder, config(scheduler=SCHEDULE), max_steps=4),
    }


def main() -> None:
    warnings.simplefilter("ignore")
    folder, stage = Path(sys.argv[1]), int(os.environ["ODB_STAGES"])
    torch.set_num_threads(1)
    deepspeed.init_distributed("gloo", auto_mpi_discovery=False)
    found = {}
    for kind, cases in (
        ("plain", list_plain(stage)),
        ("accelerate", list_accelerate(stage)),
        ("trainer", list_trainer(stage, folder)),
    ):
        for name, case in cases.items():
            try:
                said = case()
            except Exception as error:
                said = f"{type(error).__name__}: {error}"
            found[f"{kind}: {name}"] = said
            os.environ.pop("ACCELERATE_USE_DEEPSPEED", None)
            dist.barrier()
    (folder / f"found-{dist.get_rank()}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
