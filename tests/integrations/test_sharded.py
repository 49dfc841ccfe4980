"""Sharded models without an accelerator. Accelerate and the Trainer shard only on accelerators, and we say so.

`pretend` makes them believe that there is one, so that `tests/integrations/test_matrix.py` runs their own code for FSDP.
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
from accelerate import Accelerator, PartialState
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

from odb_ref.integrations.accelerate import accumulate
from odb_ref.torch import UsageError
from tests.integrations.common import SIZES, Model, get_weights, make_loader, make_shard, run_ranks
from tests.integrations.test_hf import make_trainer
from tests.torch.ranks import get_values


def get_whole(model: nn.Module) -> list[float]:
    """Returns the weights of a sharded model, put together by a collective."""
    if isinstance(model, FullyShardedDataParallel):
        with FullyShardedDataParallel.summon_full_params(model):
            return get_weights(model)
    return torch.cat([parameter.full_tensor().detach().flatten() for parameter in model.parameters()]).tolist()


def is_sharded(model: nn.Module) -> bool:
    """Checks the checks: a rank holds less than the whole."""
    held = sum(getattr(item, "_local_tensor", item).numel() for item in model.parameters())
    return held < sum(item.numel() for item in Model().parameters())


def pretend() -> None:
    """Makes Accelerate believe that the processors are accelerators."""
    PartialState._shared_state |= {"distributed_type": DistributedType.MULTI_GPU, "device": torch.device("cpu")}


def make_sharded_trainer(rank: int, folder: Path, version: int, **settings: Any) -> Any:
    """Returns a trainer whose model is sharded by this version of FSDP, if ``pretend`` makes that possible."""
    AcceleratorState._reset_state(reset_partial_state=True)
    config = {"version": version, "sync_module_states": False, "cpu_ram_efficient_loading": False}
    config["state_dict_type"] = "SHARDED_STATE_DICT"
    # Torch computes the gradient norm of FSDP 1 in single precision, but of nothing else.
    model = Model().float() if version == 1 else Model()
    return make_trainer(rank, folder, model=model, fsdp=True, fsdp_config=config, **settings)


def shard_nothing(rank: int, folder: Path) -> list[str]:
    """Returns what the Trainer reports without an accelerator. `Accelerator()` then joins no group, which is refused."""
    trainer = make_sharded_trainer(rank, folder, 2)
    with warnings.catch_warnings(record=True, action="always") as caught:
        trainer.train()
    AcceleratorState._reset_state(reset_partial_state=True)
    with make_loader(make_shard(rank), shard="given") as loader:
        _, info = next(loader.steps())
    with pytest.raises(UsageError, match=r"^2 ranks were started, but Accelerate does not connect them"):
        accumulate(Accelerator(), Model(), info)
    return [str(item.message) for item in caught if "was requested" in str(item.message)]


def test_where_nothing_is_sharded_or_joined_it_is_said(tmp_path: Path) -> None:
    said = "FSDP was requested, but Accelerate silently runs MULTI_CPU, so every rank holds the whole model. Weights are the "
    said += "same, memory use is not"
    assert get_values(run_ranks(len(SIZES), shard_nothing, tmp_path)) == [[said]] * len(SIZES)
