"""The names and arguments of the released peer, and what they do here."""

from __future__ import annotations

import importlib
import inspect
import warnings
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler

import odb_ref.compat as odb
from odb_ref.compat.step_info import find_step
from odb_ref.torch import UsageError
from tests.torch.data import Numbers, collate

MODULES = ("", ".integrations", ".integrations.hf", ".integrations.accelerate", ".integrations.lightning")
FACTORIES = (".integrations.llamafactory", ".integrations.llavafactory")


def test_the_constants_and_the_handle_are_those_of_the_release() -> None:
    theirs = pytest.importorskip("odb.constants")
    ours = importlib.import_module("odb_ref.compat.constants")
    names = [name for name in vars(theirs) if name.isupper()]
    assert names and {name: getattr(ours, name) for name in names} == {name: getattr(theirs, name) for name in names}
    with make() as loader:
        assert loader.odb_handle.token_budget == 60 and loader.odb_handle.join


def make(**options: Any) -> odb.ODBDataLoader:
    return odb.ODBDataLoader(Numbers(0, 20), **{"token_budget": 60, "collate_fn": collate, "num_workers": 0, **options})


@pytest.mark.parametrize("module", [*MODULES, *FACTORIES])
def test_every_public_name_is_there_and_takes_the_same_arguments(module: str) -> None:
    peer = pytest.importorskip("odb", reason="the peer is not installed: pip install online-dynamic-batching==0.1.2")
    assert peer.__version__ == odb.__version__
    for framework in ("transformers", "accelerate", "lightning"):
        pytest.importorskip(framework)
    theirs, ours = importlib.import_module(f"odb{module}"), importlib.import_module(f"odb_ref.compat{module}")
    for name in theirs.__all__:
        own, other = getattr(ours, name), getattr(theirs, name)
        if not callable(other):
            assert own == other, name
            continue
        _check_signature(name, own, other)
        for method, function in vars(other).items() if inspect.isclass(other) else ():
            if not method.startswith("_") and inspect.isfunction(function):
                _check_signature(f"{name}.{method}", getattr(own, method), function)


def _check_signature(name: str, own: Any, other: Any) -> None:
    known = inspect.signature(own).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in known.values()):
        return
    wanted = [
        key
        for key, item in inspect.signature(other).parameters.items()
        if item.kind in (item.POSITIONAL_OR_KEYWORD, item.KEYWORD_ONLY) and key != "state"
    ]
    assert [key for key in wanted if key not in known] == [], name


def test_integrations_are_reached_as_attributes() -> None:
    pytest.importorskip("transformers")
    assert odb.integrations.hf.configure_trainer is odb.integrations.configure_hf_trainer
    assert odb.integrations.llavafactory.enable_odb is odb.integrations.enable_llamafactory_odb
    assert {"hf", "ODBTrainer"} <= set(dir(odb.integrations))
    for module in (odb, odb.integrations):
        with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
            _ = module.nothing


def test_settings_have_their_legacy_names() -> None:
    assert make(token_budget=None, max_input_length=60, join_mode=False).odb_config == odb.ODBConfig(60, join=False)
    assert make(loss_scaling=True).odb_config.loss_scaling == "approx"
    assert make(loss_scaling=True, loss_scaling_approx=False).odb_config.loss_scaling == "exact"
    config = odb.ODBConfig(60, "exact", buffer_size=7, max_patches=9)
    assert (config.max_input_length, config.join_mode, config.loss_scaling_enabled) == (60, True, True)
    assert not config.loss_scaling_approx
    loader = make(config=config, token_budget=None)
    wanted = {"token_budget": 60, "scaling": "exact", "mode": "join", "window": 7, "max_patches": 9}
    assert wanted.items() <= loader.options.items()
    assert make(num_workers=2, prefetch_factor=64).options["window"] == 128
    assert "window" not in make(num_workers=2).options
    assert make(join=False).options["mode"] == "quota"
    assert make(causal_shift=False).options["causal_shift"] is False


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"token_budget": None}, "a token budget is needed"),
        ({"max_input_length": 61}, "say different things"),
        ({"batch_size": 4}, "batch_size=1 is wanted, got 4"),
        ({"loss_scaling": "bogus"}, "none, approx, exact"),
        ({"no_sync": True}, "different numbers of steps"),
        ({"config": odb.ODBConfig(61)}, "token_budget is given beside it"),
    ],
)
def test_what_makes_no_sense_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        make(**options)


def test_what_has_no_counterpart_is_said() -> None:
    with pytest.warns(UserWarning, match=r"group_order_flip='local' changes nothing"):
        make(group_order_flip="local")
    with warnings.catch_warnings(action="error"):
        make(group_order_flip="none", no_warmup=False, version=5)


def test_a_batch_carries_its_step_until_it_is_taken() -> None:
    with make(loss_scaling="exact", shuffle=True) as loader:
        batches = list(loader)
        seen = []
        for batch in batches:
            step = find_step(batch)
            assert batch[odb.LOCAL_BATCH_SIZE_KEY] == batch[odb.TOTAL_BATCH_SIZE_KEY] == step.local_samples
            assert batch[odb.LOCAL_TOKENS_KEY] == batch[odb.TOTAL_TOKENS_KEY] == step.local_tokens
            moved = {**batch}  # as a framework does
            weighed = odb.scale_loss(torch.tensor(2.0), moved)
            info = odb.pop_step_info(moved)
            assert set(moved) == {"numbers", "input_ids", "labels"}
            assert (info.all_samples_this_step, info.loss_scale) == (len(moved["numbers"]), step.loss_scale)
            assert weighed == 2.0 * step.loss_scale
            seen += moved["numbers"]
            assert odb.pop_step_info({**batch}, loss_scaling="none", world_size=3).loss_scale == 1.0
            assert odb.pop_step_info({**batch}, loss_scaling="approx", world_size=3).loss_scale == 3.0
    assert sorted(seen) == list(range(20))
    assert odb.scale_loss(torch.tensor(1.0), 3, 12, 2) == 0.5
    with pytest.raises(UsageError, match="not a mapping"):
        odb.pop_step_info(object())
    assert odb.scale_loss(torch.tensor(1.0), {}) == 1.0


@pytest.mark.parametrize("options", [{"update_samples": 8}, {"accumulation_steps": 3}, {"reduction": "sum"}])
@pytest.mark.parametrize("scaling", ["exact", "none"])
def test_a_scaling_that_is_named_weighs_whole_updates_too(scaling: str, options: dict[str, Any]) -> None:
    with make(loss_scaling="exact", **options) as loader:
        scales = [odb.pop_step_info(batch).loss_scale for batch in loader]
    with make(loss_scaling=scaling, **options) as loader:
        assert [odb.pop_step_info(batch, loss_scaling="exact").loss_scale for batch in loader] == scales


def test_a_batch_of_a_plain_loader_is_not_weighed_on_several_ranks() -> None:
    with pytest.warns(UserWarning, match="its loss is not weighed"):
        info = odb.pop_step_info({"input_ids": torch.ones(2, 3)}, world_size=2)
    assert (info.all_samples_this_step, info.loss_scale) == (2, 1.0)


@pytest.mark.parametrize("shuffle", [True, False])
def test_a_dataloader_is_changed_in_place(shuffle: bool) -> None:
    """Its order, seed and workers are kept. A distributed sampler is replaced by shards without repeated samples."""
    generator = torch.Generator().manual_seed(3)
    dataloader = DataLoader(Numbers(0, 20), batch_size=1, shuffle=shuffle, collate_fn=collate, generator=generator)
    held = dataloader
    handle = odb.apply(dataloader, 60, "exact", join=True)
    assert (handle.token_budget, handle.join, handle.config.loss_scaling) == (60, True, "exact")
    assert handle.step_info_key in next(iter(held))
    assert not isinstance(held, DataLoader)
    orders = []
    for _ in range(2):
        numbers = [number for batch in held for number in batch["numbers"]]
        assert sorted(numbers) == list(range(20))
        orders.append(numbers)
    assert (orders[0] == orders[1]) is not shuffle
    assert held.state_dict()["epoch"] == 3
    held.close()
    sampler = DistributedSampler(Numbers(0, 5), num_replicas=2, rank=0, shuffle=False)
    split = DataLoader(Numbers(0, 5), sampler=sampler, collate_fn=collate)
    odb.apply(split, token_budget=60)
    assert split.options["shuffle"] is False
    assert "sampler" not in split.options
