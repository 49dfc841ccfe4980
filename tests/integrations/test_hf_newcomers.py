"""Mistakes that newcomers to the Trainer's integration may make: they work, or an error or a warning says what to do."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.integrations import require

require("transformers")
require("accelerate")

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, IterableDataset
from transformers import Trainer

from odb_ref.integrations.hf import STEP_INFO, enable
from odb_ref.torch import UsageError
from tests.integrations.arguments import make_arguments, make_odb
from tests.integrations.common import (
    SIZES,
    Model,
    check_coverage,
    check_runs,
    check_weights,
    collate,
    get_sample,
    get_weights,
    make_all,
    run_ranks,
)
from tests.integrations.noting import NotingTrainer
from tests.integrations.test_hf import AUTO, make_llama, make_trainer, train
from tests.torch.ranks import get_values, in_a_rank


class Own(NotingTrainer):
    """Computes its own loss, and does not call ODBTrainer's."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
        return self.note(inputs, lambda: model(inputs["input_ids"], inputs["labels"])["loss"])


class Adding(NotingTrainer):
    """Adds a term to the loss it receives."""

    def compute_loss(self, model: Any, inputs: Any, **kwargs: Any) -> Any:
        return super().compute_loss(model, inputs, **kwargs) + 1.0


class Scaling(NotingTrainer):
    """Computes its own loss, and weighs it."""

    takes_step_info = False

    def compute_loss(self, model: Any, inputs: Any, **_: Any) -> Any:
        loss = self.note(inputs, lambda: model(inputs["input_ids"], inputs["labels"])["loss"])
        return inputs.pop(STEP_INFO).scale(loss)


class Stepping(NotingTrainer):
    """Calls the model itself."""

    def training_step(self, model: Any, inputs: Any, *args: Any, **_: Any) -> Any:
        loss = model(inputs["input_ids"], inputs["labels"])["loss"]
        self.accelerator.backward(loss)
        return loss.detach()


class Calling(Trainer):
    """Calls the model itself, and knows nothing of `ODBTrainer`."""

    training_step = Stepping.training_step


class Dividing(NotingTrainer):
    """Divides by the Trainer's own count."""

    def compute_loss(self, model: Any, inputs: Any, num_items_in_batch: Any = None, **_: Any) -> Any:
        return model(inputs["input_ids"], inputs["labels"])["loss"] / num_items_in_batch


def test_losses_that_cannot_be_weighed_say_what_to_do(tmp_path: Path) -> None:
    """Without an error the weights of the first two would be wrong."""
    enabled = enable(Calling(Model(), make_arguments(tmp_path, remove_unused_columns=False)), AUTO)
    enabled.train_dataset, enabled.data_collator = make_all(), collate
    with pytest.raises(UsageError, match="training_step of ODBCalling does not call compute_loss"):
        enabled.train()
    with pytest.raises(UsageError, match=r"training_step of \w*Stepping does not call compute_loss"):
        make_trainer(0, tmp_path, kind=Stepping).train()
    with pytest.raises(TypeError) as raised:
        make_trainer(0, tmp_path, kind=Dividing).train()
    assert "return the mean over the batch's labels then" in raised.value.__notes__[0]


def use_own_losses(rank: int, folder: Path) -> Any:
    kinds = (NotingTrainer, Adding, Own, Scaling)
    return [train(rank, folder, kind=kind, gradient_accumulation_steps=2) for kind in kinds]


def test_a_loss_is_weighed_with_all_that_a_subclass_makes_of_it(tmp_path: Path) -> None:
    """Checks: WEIGHT. A term added after the weight used to count once for each micro-batch, and for each idle replay."""
    values = get_values(run_ranks(len(SIZES), use_own_losses, tmp_path))
    for variant in zip(*values, strict=True):
        runs = [run for run, *_ in variant]
        check_runs(runs)
    plain, more, *_ = ([round(loss, 3) for loss in losses] for *_, losses in values[0])
    assert more == [round(loss + 1, 3) for loss in plain]


class Seeing(NotingTrainer):
    """Puts a training step of its own around the Trainer's."""

    def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        self.seen = [*getattr(self, "seen", ()), inputs[STEP_INFO]]
        return super().training_step(model, inputs, *args, **kwargs)


def see_batches(rank: int, folder: Path) -> Any:
    found = []
    for odb in (AUTO, make_odb({"update_samples": "plain"})):
        trainer = make_trainer(rank, folder, kind=Seeing, odb=odb, gradient_accumulation_steps=2)
        trainer.train()
        found.append((trainer.seen, trainer.state.global_step, (trainer.noted.updates, get_weights(trainer.model))))
    return found


def test_a_training_step_of_a_subclass_gets_every_batch(tmp_path: Path) -> None:
    """Checks: WEIGHT. In the free mode, where the last update is not full, and in updates of a fixed size."""
    for variant in zip(*get_values(run_ranks(len(SIZES), see_batches, tmp_path)), strict=True):
        for seen, updates, _ in variant:
            assert [info.step for info in seen] == [*range(len(seen))]
            assert sum(info.is_update_end for info in seen) == updates and seen[-1].is_last
        check_weights([run for *_, run in variant], Model())


class Stream(IterableDataset[Any]):
    """All samples on every rank, or each rank its own."""

    def __init__(self, *, is_split: bool) -> None:
        self.is_split = is_split

    def __iter__(self) -> Iterator[Any]:
        for number in range(sum(SIZES)):
            if not self.is_split or number % dist.get_world_size() == dist.get_rank():
                yield get_sample(number)


def read_streams(rank: int, folder: Path) -> list[int]:
    settings = {"max_steps": 40, "eval_dataset": Stream(is_split=False)}
    for odb, evaluates in ((AUTO, False), (replace(AUTO, evaluation={}), True)):
        trainer = make_trainer(rank, folder, odb=odb, train_dataset=Stream(is_split=False), **settings)
        with pytest.raises(UsageError, match="Stream is iterable, so each of 2 ranks reads what it is given"):
            trainer.evaluate() if evaluates else trainer.train()
    for kind, said in (
        (Unprepared, "a DataLoader that is not prepared"),
        (Batches, "get_train_dataloader returned list"),
    ):
        enabled = enable(kind(Model(), make_arguments(folder)), AUTO)
        enabled.train_dataset, enabled.data_collator = make_all(), collate
        with pytest.raises(UsageError, match=said):
            enabled.train()
    odb = make_odb(shard="given")
    trainer = make_trainer(rank, folder, odb=odb, train_dataset=Stream(is_split=True), **settings)
    steps = [batch for update in trainer.get_train_dataloader() for batch in update.parts]
    return [number for batch in steps if not batch[STEP_INFO].is_idle for number in batch["numbers"].tolist()]


class Unprepared(Trainer):
    """Reads all samples on each rank."""

    def get_train_dataloader(self) -> Any:
        return DataLoader(self.train_dataset, batch_size=4, collate_fn=self.data_collator)


class Batches(Trainer):
    """Trains on batches made beforehand."""

    def get_train_dataloader(self) -> Any:
        return list(Unprepared.get_train_dataloader(self))


def test_data_that_all_ranks_read_alike_are_refused(tmp_path: Path) -> None:
    """Checks: ONCE, COVER. The Trainer's own loader divides a stream among ranks, so users do not expect to have to. A loader
    of a user's class, in contrast, is read whole on each rank, unless it is prepared.
    """
    first, second = get_values(run_ranks(len(SIZES), read_streams, tmp_path))
    assert sorted(first + second) == list(range(sum(SIZES)))


class Plain(Trainer):  # type: ignore[misc]
    """A third party's Trainer."""

    def __init__(self, *args: Any, odb: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)


@in_a_rank(run_ranks)
def test_what_means_nothing_or_something_else_is_said(tmp_path: Path) -> None:
    plain = make_trainer(0, tmp_path, kind=Plain)
    for odb in (60, {"token_budget": 60}):
        with pytest.raises(UsageError, match=rf"^odb must be ODBOptions\(token_budget=...\), got {odb}$"):
            enable(plain, odb)  # type: ignore[arg-type]
    with pytest.warns(match="dataloader_drop_last=True has no effect"):
        updates = train(0, tmp_path, dataloader_drop_last=True, odb=AUTO)[0][0]
    assert sorted(number for update in updates for number in update) == make_all().numbers


def evaluate_first(rank: int, folder: Path) -> Any:
    found = []
    for settings in ({}, {"torch_compile": True, "torch_compile_backend": "eager"}):
        trainer = make_trainer(rank, folder, odb=AUTO, **settings)
        trainer.evaluate(make_all())
        trainer.train()
        found.append((trainer.noted.updates, get_weights(trainer.model)))
    return found


def test_a_model_that_was_evaluated_is_trained_by_all_ranks_together(tmp_path: Path) -> None:
    """Checks: WEIGHT. Each rank trained alone, as with the plain Trainer, whose evaluation makes Accelerate leave out DDP."""
    for runs in zip(*get_values(run_ranks(len(SIZES), evaluate_first, tmp_path)), strict=True):
        check_runs(runs)


def check_run(rank: int, folder: Path) -> Any:
    return [
        train(rank, folder, odb=AUTO, gradient_accumulation_steps=2, **settings)[0]
        for settings in (
            {"torch_compile": True, "torch_compile_backend": "eager"},
            {"dataloader_num_workers": 2, "dataloader_persistent_workers": True},
            {"accelerator_config": {"split_batches": True}},
            {"gradient_checkpointing": True, "model": make_llama()},
        )
    ]


def test_settings_of_the_trainer_that_need_no_thought_change_nothing(tmp_path: Path) -> None:
    """Checks: WEIGHT, COVER."""
    values = get_values(run_ranks(len(SIZES), check_run, tmp_path))
    *variants, checkpointed = zip(*values, strict=True)
    for runs in variants:
        check_runs(runs)
    check_coverage(checkpointed)
    check_weights(checkpointed, make_llama(), precision=1e-4)
    first, *others = [runs[0] for runs in variants]
    assert all(torch.equal(torch.tensor(run[1]), torch.tensor(first[1])) for run in others)
