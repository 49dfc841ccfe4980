"""Scripts written for the released peer, with the import changed: exact gradients over uneven ranks, every sample once."""

from __future__ import annotations

import importlib.metadata
import re
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.helpers.capture import capture
from tests.integrations import require

require("transformers")
require("accelerate")

import torch
from accelerate import Accelerator
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from transformers import Trainer

import odb_ref.compat as odb
from odb_ref.compat.callbacks import setup_odb_training
from odb_ref.compat.integrations.accelerate import configure_accelerator
from odb_ref.compat.integrations.hf import ODBTrainerMixin, configure_trainer, enable_odb
from odb_ref.compat.integrations.llamafactory import enable_odb as enable_llamafactory
from odb_ref.torch import UsageError
from tests.integrations.arguments import PLAIN, make_arguments
from tests.integrations.common import (
    BUDGET_TOKENS,
    LEARNING_RATE,
    SIZES,
    Model,
    Samples,
    check_runs,
    check_weights,
    collate,
    get_weights,
    make_shard,
    run_ranks,
)
from tests.torch.ranks import get_values, in_a_rank

ALL = Samples(range(sum(SIZES)))


def make_plain(dataset: Any = ALL, **options: Any) -> Any:
    return DataLoader(dataset, **{"batch_size": 1, "shuffle": True, "collate_fn": collate, **options})


class Recorder(Trainer):
    """A Trainer that knows nothing of this library."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.updates: list[list[int]] = []

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        numbers = inputs.pop("numbers").tolist()
        self.updates.append(numbers)
        return super().compute_loss(model, inputs, *args, **kwargs)


class Native(ODBTrainerMixin, Recorder):
    """A new trainer as the release recommends: its own loader makes batches that carry their steps."""

    def get_train_dataloader(self) -> Any:
        loader = make_plain(self.train_dataset)
        odb.apply(loader, token_budget=BUDGET_TOKENS, loss_scaling="exact", window=12)
        return loader


def make_trainer(folder: Path, *, kind: Any = Recorder, **settings: Any) -> Any:
    defaults = PLAIN | {"learning_rate": LEARNING_RATE, "remove_unused_columns": False, "num_train_epochs": 1}
    args = make_arguments(folder, **defaults | settings)
    return kind(model=Model(), args=args, train_dataset=ALL, data_collator=collate)


def finish(trainer: Any) -> Any:
    trainer.train()
    return drop_idle(trainer.updates), get_weights(trainer.model)


def drop_idle(updates: list[list[int]]) -> list[list[int]]:
    """Returns a rank's batches without replays, which are samples that it has trained on before."""
    seen: set[int] = set()
    found = []
    for numbers in updates:
        found.append([number for number in numbers if number not in seen])
        seen |= set(numbers)
    return found


def loop(rank: int, *, scale: str) -> Any:
    """Runs the loop of the release's README, in the context that it requires."""
    loader = odb.ODBDataLoader(
        make_shard(rank),
        token_budget=BUDGET_TOKENS,
        batch_size=1,
        num_workers=1,
        prefetch_factor=12,
        collate_fn=collate,
        loss_scaling="exact",
        join=True,
        shard="given",
    )
    model = DistributedDataParallel(Model())
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    updates, emitted = [], 0
    with Join([model]):
        for batch in loader:
            info = odb.pop_step_info(batch, loss_scaling=scale)
            updates.append([] if info.step.is_idle else batch.pop("numbers").tolist())
            batch.pop("numbers", None)
            info.scale(model(**batch)["loss"]).backward()
            optimizer.step()
            optimizer.zero_grad()
            emitted += info.all_samples_this_step
    loader.close()
    return (updates, get_weights(model.module)), emitted


def accelerate(rank: int) -> Any:
    accelerator = Accelerator(cpu=True)
    model = Model()
    dataloader = make_plain()
    bridge = configure_accelerator(accelerator, dataloader, token_budget=BUDGET_TOKENS, loss_scaling="exact", window=12)
    wrapped, optimizer, prepared = accelerator.prepare(
        model, torch.optim.SGD(model.parameters(), lr=LEARNING_RATE), dataloader
    )
    assert prepared is dataloader
    updates = []
    with bridge.join_uneven_inputs([wrapped]):
        for batch in bridge.dataloader:
            info = bridge.consume_batch(batch)
            updates.append([] if info.step.is_idle else batch.pop("numbers").tolist())
            batch.pop("numbers", None)
            bridge.backward(wrapped(**batch)["loss"])
            optimizer.step()
            optimizer.zero_grad()
            bridge.mark_optimizer_step()
    dataloader.close()
    assert (bridge.state.emitted_samples, bridge.state.optimizer_steps) == (len(ALL), len(updates))
    return updates, get_weights(model)


def train_all(rank: int, folder: Path) -> Any:
    enabled = make_trainer(folder)
    loader = enabled.get_train_dataloader()
    bridge = enable_odb(enabled, train_dataloader=loader, token_budget=BUDGET_TOKENS, window=12)
    native = make_trainer(folder, kind=Native, max_steps=7)  # less than an epoch
    handed = make_trainer(folder, kind=Native)
    configure_trainer(handed, dataloader=handed.get_train_dataloader(), wrap_compute_loss=False)
    runs = [finish(enabled), finish(native), finish(handed), accelerate(rank), loop(rank, scale="exact")[0]]
    state = bridge.state
    by_callback = make_trainer(folder)
    begun = setup_odb_training(by_callback, make_plain(), BUDGET_TOKENS)
    by_callback.train()
    assert begun.state.emitted_samples == by_callback.state.total_data_step == len(ALL)
    assert enabled.state.total_data_step == state.emitted_samples
    return runs, (state.emitted_samples, state.optimizer_steps, state.last_step_info.step.is_last)


def test_the_weights_are_those_of_one_process_on_the_union(tmp_path: Path) -> None:
    """Checks: WEIGHT, COVER, ALIGN. Setups from the release's guides, on two ranks, with a batch without a label."""
    values = get_values(run_ranks(len(SIZES), train_all, tmp_path))
    enabled, native, handed, accelerated, looped = zip(*(value[0] for value in values), strict=True)
    for runs in (enabled, handed, accelerated, looped):
        check_runs(runs)
    check_weights(native, Model())
    for value in values:
        assert value[1] == (len(ALL), len(enabled[0][0]), True)


# The release's README -----------------------------------------------------------------------------------------------------


class Answer(nn.Module):
    """A model like those of transformers: called with a batch, it returns a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Model()
        self.calls: list[dict[str, torch.Tensor]] = []

    def forward(self, **batch: torch.Tensor) -> SimpleNamespace:
        self.calls.append(batch)
        return SimpleNamespace(loss=self.inner(batch["input_ids"], batch["labels"])["loss"])


def strip(samples: list[dict[str, Any]]) -> dict[str, Any]:
    return {name: value for name, value in collate(samples).items() if name != "numbers"}


def list_blocks() -> list[str]:
    """Returns the Python blocks of the README that came with the release."""
    try:
        text = importlib.metadata.metadata("online-dynamic-batching").get_payload()
    except importlib.metadata.PackageNotFoundError:
        return []
    return re.findall(r"```python\n(.*?)```", text, re.DOTALL)


def run_blocks(kind: str, blocks: list[str], folder: Path) -> list[int]:
    """Returns how many samples each block counted or showed the model, -1 for one that trains nothing."""
    found = []
    for block in blocks:
        code = block
        if kind == "ours":
            code = code.replace("import odb\n", "import odb_ref.compat as odb\n").replace(
                "from odb.", "from odb_ref.compat."
            )
        model = Answer()
        make, args = Trainer, None
        if "rainer" in block:
            settings = {"dataloader_num_workers": 1, "per_device_train_batch_size": 1}
            args = make_arguments(folder, num_train_epochs=1, remove_unused_columns=False, **settings)
            make = partial(Trainer, data_collator=strip)
        trainer = make(model=Model(), args=args, train_dataset=ALL) if args else None
        names: dict[str, Any] = {
            "dataset": ALL,
            "train_dataset": ALL,
            "collate_fn": strip,
            "model": Model() if args else model,
            "training_args": args,
            "trainer": trainer,
            "Trainer": make,
            "CustomTrainer": Trainer,
            "train_dataloader": trainer and trainer.get_train_dataloader(),
            "emitted_samples": 0,
            "odb": importlib.import_module("odb_ref.compat" if kind == "ours" else "odb"),
        }
        if "for batch in dataloader" in block and "DataLoader(" not in block:
            names["dataloader"] = names["odb"].ODBDataLoader(
                ALL, token_budget=16384, batch_size=1, num_workers=1, prefetch_factor=8, collate_fn=strip
            )
        exec(code, names)
        if "enable_odb(" in block:
            names["trainer"].train()
            names["emitted_samples"] = names["trainer"].progress.samples
        shown = max(names["emitted_samples"], sum(len(call["input_ids"]) for call in model.calls))
        found.append(shown if "for batch in" in block or "enable_odb(" in block else -1)
    return found


if __name__ == "__main__":
    print(run_blocks("peer", [block for block in list_blocks() if "for batch in" in block], Path(sys.argv[1])))


needs_release = pytest.mark.skipif(
    not list_blocks(), reason="the peer is not installed: pip install online-dynamic-batching==0.1.2"
)


@needs_release
def test_the_readme_of_the_release_runs_with_the_import_changed(tmp_path: Path) -> None:
    blocks = [block for block in list_blocks() if "=..." not in block]  # a list of signatures
    assert len(blocks) == 7, "another release: see what its README says"
    (value,) = get_values(run_ranks(1, lambda rank: run_blocks("ours", blocks, tmp_path)))
    every = len(ALL)
    assert value == [every, -1, -1, every, every, -1, every]


@pytest.mark.deep
@needs_release
def test_what_the_release_makes_of_its_own_loops(tmp_path: Path) -> None:
    """It runs in one process, in which the release also shows the model every sample. A failure at its end does not count."""
    command = [sys.executable, "-m", "tests.compat.test_training", str(tmp_path)]
    done = capture(command, timeout=120)
    print(done.stderr[-1000:])
    if done.returncode == 0:
        assert done.stdout.splitlines()[-1] == str([len(ALL), len(ALL)])


# Further settings ---------------------------------------------------------------------------------------------------------


@in_a_rank(run_ranks)
def test_budgets_and_arguments_of_llamafactory(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, max_steps=3)
    with pytest.raises(UsageError, match="max_steps=3"):
        configure_trainer(trainer, token_budget=60, sample_budget=10)
    bridge = configure_trainer(trainer, token_budget=60, sample_budget=10, max_steps_policy="overwrite", window=12)
    trainer.train()
    assert 10 <= bridge.state.emitted_samples < len(ALL)
    configure_trainer(trainer, token_budget=60, sample_budget=len(ALL), max_optimizer_steps=2)
    trainer.train()
    assert trainer.state.global_step == 2
    arguments = SimpleNamespace(odb_token_budget=60, odb_loss_scaling="approx", odb_join=True)
    trainer = make_trainer(tmp_path)
    bridge = enable_llamafactory(trainer, finetuning_args=arguments, num_train_epochs=0.5)
    assert bridge.handle.config == odb.ODBConfig(60, "approx")
    trainer.train()
    assert len(ALL) / 2 <= bridge.state.emitted_samples < len(ALL)


@in_a_rank(run_ranks)
def test_lightning_trains_with_the_weights_of_the_batches(tmp_path: Path) -> None:
    """Checks: WEIGHT, COVER. A wrapped module, one with the mixin, and a budget in samples."""
    require("lightning")
    import lightning.pytorch as pl

    from odb_ref.compat.integrations.lightning import (
        ODBLightningCallback,
        ODBLightningMixin,
        configure_lightning_module,
    )

    class Module(pl.LightningModule):
        """A module that knows nothing of this library."""

        def __init__(self) -> None:
            super().__init__()
            self.model = Model()
            self.updates: list[list[int]] = []

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            assert set(batch) == {"numbers", "input_ids", "labels"}
            self.updates.append(batch["numbers"].tolist())
            loss = self.model(batch["input_ids"], batch["labels"])["loss"]
            return loss if batch_idx % 2 else {"loss": loss}

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=LEARNING_RATE)

    class Mixed(ODBLightningMixin, Module):
        """A module that takes the steps out of its batches."""

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            info = self.consume_odb_batch(batch)
            loss = super().training_step(batch, 1)
            return self.scale_odb_loss(loss, info)

    def fit(module: Any, dataloader: Any, *callbacks: Any) -> Any:
        trainer = pl.Trainer(
            max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
            enable_model_summary=False, default_root_dir=tmp_path, callbacks=list(callbacks),
        )  # fmt: skip
        trainer.fit(module, dataloader)
        dataloader.close()
        return module.updates, get_weights(module.model)

    runs = []
    options = {"token_budget": BUDGET_TOKENS, "loss_scaling": "exact", "window": 12}
    for module, callbacks in ((Module(), ()), (Mixed(), ()), (Module(), (ODBLightningCallback(10),))):
        dataloader = make_plain()
        if isinstance(module, Mixed):
            module.set_odb_handle(odb.apply(dataloader, **options))
        else:
            configure_lightning_module(module, dataloader=dataloader, **options)
        runs.append(fit(module, dataloader, *callbacks))
    with pytest.raises(UsageError, match="Lightning would step inside updates"):
        configure_lightning_module(Module(), dataloader=make_plain(), update_samples=8, **options)
    with pytest.raises(UsageError, match="a sample budget needs a module"):
        fit(Module(), make_plain(), ODBLightningCallback(10))
    whole, mixed, stopped = runs
    for run in (whole, mixed):
        check_runs([run])
    assert 10 <= sum(map(len, stopped[0])) < len(ALL)
