"""Sharded models over uneven ranks, to the very end: FSDP 1 and 2, under plain torch, Accelerate and the Trainer.

Accelerate shards on accelerators only. `pretend` has it believe that there is one, so that its own code for FSDP runs here.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest

from tests.integrations import require

require("transformers")
require("accelerate")

import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin, PartialState
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from transformers import TrainingArguments

from odb_ref.integrations.accelerate import accumulate
from odb_ref.torch import ODBDataLoader, UsageError
from tests.helpers.options import nested
from tests.integrations.common import (
    BUDGET_TOKENS,
    LEARNING_RATE,
    OPTIONS,
    SIZES,
    STEPS,
    Model,
    check_coverage,
    check_weights,
    collate,
    get_weights,
    make_shard,
    set_environment,
)
from tests.integrations.test_hf import GIVEN, Recorder
from tests.torch.ranks import run_ranks

pytestmark = pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")

CPU = torch.device("cpu")


def get_whole(model: nn.Module) -> list[float]:
    """The weights of a sharded model, put together; a collective."""
    if isinstance(model, FullyShardedDataParallel):
        with FullyShardedDataParallel.summon_full_params(model):
            return get_weights(model)
    return torch.cat([parameter.full_tensor().detach().flatten() for parameter in model.parameters()]).tolist()


def is_sharded(model: nn.Module) -> bool:
    """Checks the checks: a rank holds less than the whole."""
    held = sum(getattr(item, "_local_tensor", item).numel() for item in model.parameters())
    return held < sum(item.numel() for item in Model().parameters())


def train_plain(rank: int, kind: str, steps: int) -> Any:
    model: nn.Module = Model()
    if kind == "fsdp2":
        fully_shard(model.layers[2])
        fully_shard(model)
    else:
        model = FullyShardedDataParallel(model, device_id=CPU, use_orig_params=True)
    assert is_sharded(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    options = OPTIONS | {"shard": "given", "accumulation_steps": steps, "collate_fn": collate}
    updates: list[list[int]] = [[]]
    with ODBDataLoader(make_shard(rank), token_budget=BUDGET_TOKENS, **nested(**options)) as loader:
        for batch, info in loader.steps():
            if kind == "fsdp2":
                model.set_requires_gradient_sync(info.is_update_end)
            info.scale(model(batch["input_ids"], batch["labels"])["loss"]).backward()
            updates[-1] += [] if info.is_idle else batch["numbers"].tolist()
            if info.is_update_end:
                optimizer.step()
                optimizer.zero_grad()
                updates.append([])
    assert updates.pop() == []
    return updates, get_whole(model)


def pretend() -> None:
    """Makes Accelerate believe that the processors are accelerators."""
    PartialState._shared_state |= {"distributed_type": DistributedType.MULTI_GPU, "device": CPU}


def train_accelerate(rank: int, version: int) -> Any:
    AcceleratorState._reset_state(reset_partial_state=True)
    PartialState(cpu=True)
    pretend()
    plugin = FullyShardedDataParallelPlugin(fsdp_version=version, cpu_ram_efficient_loading=False)
    accelerator = Accelerator(fsdp_plugin=plugin)
    assert accelerator.distributed_type is DistributedType.FSDP
    if version == 1:  # first the model, as Accelerate's guide says: its weights are others then
        wrapped = accelerator.prepare(Model())
        optimizer = accelerator.prepare(torch.optim.SGD(wrapped.parameters(), lr=LEARNING_RATE))
    else:
        model = Model()
        wrapped, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=LEARNING_RATE))
    assert is_sharded(wrapped)
    options = OPTIONS | {"shard": "given", "accumulation_steps": 2, "collate_fn": collate}
    updates: list[list[int]] = [[]]
    with ODBDataLoader(make_shard(rank), token_budget=BUDGET_TOKENS, **nested(**options)) as loader:
        for batch, info in accelerator.prepare(loader).steps():
            with accumulate(accelerator, wrapped, info):
                accelerator.backward(info.scale(wrapped(batch["input_ids"], batch["labels"])["loss"]))
            updates[-1] += [] if info.is_idle else batch["numbers"].tolist()
            if info.is_update_end:
                optimizer.step()
                optimizer.zero_grad()
                updates.append([])
    return updates[:-1], get_whole(wrapped)


def train_trainer(
    rank: int, folder: Path, version: int | None, *, is_pretended: bool = True, kind: Any = Recorder, odb: Any = GIVEN
) -> Any:
    AcceleratorState._reset_state(reset_partial_state=True)
    config = {"version": version, "sync_module_states": False, "cpu_ram_efficient_loading": False}
    args = TrainingArguments(
        output_dir=str(folder),
        use_cpu=True,
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
        fsdp=True,
        fsdp_config=config,
    )
    if is_pretended:
        pretend()
    # Torch computes the norm of FSDP 1's gradients in single precision, and of no other.
    model = Model().float() if version == 1 else Model()
    trainer = kind(model=model, args=args, train_dataset=make_shard(rank), data_collator=collate, odb=odb)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.train()
    said = [str(item.message) for item in caught if "was asked for" in str(item.message)]
    if not is_pretended:
        return said
    assert is_sharded(trainer.model_wrapped)
    assert said == []
    return trainer.updates, get_whole(trainer.model_wrapped)


def train_all(rank: int, folder: Path) -> Any:
    set_environment(rank, len(SIZES))
    warnings.filterwarnings("ignore", message="FSDP")
    plain = [train_plain(rank, kind, steps) for kind, steps in (("fsdp2", 2), ("fsdp1", 1))]
    framed = [train_accelerate(rank, 2), train_accelerate(rank, 1)]
    framed += [train_trainer(rank, folder, 2), train_trainer(rank, folder, 1)]
    return plain, framed, train_trainer(rank, folder, 2, is_pretended=False), join_nobody(rank)


def join_nobody(rank: int) -> str:
    """What `Accelerator()` does where there is no accelerator: nothing, on each rank by itself."""
    AcceleratorState._reset_state(reset_partial_state=True)
    options = OPTIONS | {"shard": "given", "collate_fn": collate}
    with ODBDataLoader(make_shard(rank), token_budget=BUDGET_TOKENS, **nested(**options)) as loader:
        _, info = next(loader.steps())
    with pytest.raises(UsageError) as caught:
        accumulate(Accelerator(), Model(), info)
    return str(caught.value)


def test_the_weights_are_those_of_one_process_on_the_union(tmp_path: Path) -> None:
    """Checks: WEIGHT, COVER, ALIGN. One rank idles from the middle of the epoch on, and a batch has no label."""
    results = run_ranks(len(SIZES), train_all, tmp_path, timeout_s=280)
    assert not any(result.error for result in results), results
    assert not any(result.is_gone for result in results), results
    plain, framed, said, refusals = zip(*(result.value for result in results), strict=True)
    for runs, steps in zip(zip(*plain, strict=True), (2, 1), strict=True):
        assert [len(updates) for updates, _ in runs] == [-(-STEPS // steps)] * len(SIZES)
        check_coverage(runs)
        check_weights(runs, Model())
    for runs, precision in zip(zip(*framed, strict=True), (1e-9, 1e-9, 1e-9, 1e-4), strict=True):
        check_coverage(runs)
        check_weights(runs, Model(), precision=precision)
    for warned in said:
        assert warned == [
            "FSDP was asked for, and Accelerate runs MULTI_CPU without a word: every rank holds the whole model. Weights are "
            "the same, memory is not"
        ]
    assert all(text.startswith("2 ranks are started, and Accelerate joins none") for text in refusals)
