"""Evaluation on uneven ranks, in every framework: each sample once, and metrics without replays or padding."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from odb_ref.torch.gathering import own_memory
from tests.integrations import require

require("transformers")
require("accelerate")
require("lightning")

import lightning.pytorch as pl
import numpy as np
import torch
from accelerate import Accelerator
from torch import nn
from torch.distributed.fsdp import fully_shard
from torchmetrics import CatMetric

from odb_ref import ODBDataLoader, UsageError, gather_samples
from odb_ref.integrations.hf import ODBOptions, ODBTrainer
from odb_ref.integrations.lightning import LightningLoader, scale_loss
from odb_ref.integrations.lightning_evaluation import EvaluationLoader, get_step_info
from tests.helpers.options import nested
from tests.integrations.arguments import make_odb
from tests.integrations.common import (
    BUDGET_TOKENS,
    LEARNING_RATE,
    OPTIONS,
    SIZES,
    Model,
    Samples,
    collate,
    get_sample,
    make_all,
    make_loader,
    make_shard,
)
from tests.integrations.test_hf import make_trainer
from tests.integrations.test_lightning import make_trainer as make_lightning
from tests.integrations.test_lightning import run_ranks
from tests.torch.ranks import get_values

pytestmark = pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")

ALL = list(range(sum(SIZES)))
READ = {**OPTIONS, "token_budget": BUDGET_TOKENS, "collate_fn": collate}
GIVEN = {**READ, "shard": "given"}


def compute_alone() -> float:
    """Returns the mean loss over all supervised tokens, in one process."""
    batch = collate([get_sample(number) for number in ALL])
    with torch.no_grad():
        return float(Model()(batch["input_ids"], batch["labels"])["loss"])


def check(runs: Iterable[Any]) -> None:
    """Checks that every rank has each sample once, and the mean loss."""
    alone = compute_alone()
    for numbers, loss in runs:
        assert sorted(numbers) == ALL
        assert loss == pytest.approx(alone, rel=1e-12)


# Your own loops -------------------------------------------------------------------------------------------------------


def loop(model: nn.Module, rank: int, reduce: Any) -> Any:
    """Every rank calls the model in each step, even when idle, because a sharded model gathers its weights there."""
    totals = torch.zeros(2, dtype=torch.float64)
    numbers: list[int] = []
    with make_loader(make_shard(rank), shard="given") as loader, torch.no_grad():
        for batch, info in loader.steps():
            loss = model(input_ids=batch["input_ids"], labels=batch["labels"])["loss"]
            if info.local_supervised:
                totals += torch.stack([loss, torch.ones_like(loss)]) * info.local_supervised
            numbers += gather_samples(batch["numbers"], info)
    loss, supervised = reduce(totals).tolist()
    return [int(number) for number in numbers], loss / supervised


def add_up(totals: Any) -> Any:
    torch.distributed.all_reduce(totals)
    return totals


def evaluate_loops(rank: int) -> Any:
    with make_loader(make_shard(rank), shard="given") as loader:
        _, info = next(loader.steps())
        with pytest.raises(UsageError, match="rank 1 has"):
            gather_samples(range(info.local_samples + rank), info)
    sharded = Model()
    fully_shard(sharded)
    accelerator = Accelerator(cpu=True)
    prepared = accelerator.prepare(Model())
    return [
        loop(Model(), rank, add_up),
        loop(sharded, rank, add_up),
        loop(prepared, rank, lambda totals: accelerator.reduce(totals, "sum")),
    ]


def test_a_loop_of_ones_own_gathers_each_sample_once() -> None:
    """Checks: COVER, ONCE, ALIGN. Plain torch, a sharded model, Accelerate."""
    # https://github.com/pytorch/torchtitan/issues/1618
    values = get_values(run_ranks(len(SIZES), evaluate_loops))
    for runs in zip(*values, strict=True):
        check(runs)


def test_one_process_gathers_what_it_has() -> None:
    with make_loader(make_all()) as loader:
        found = [number for batch, info in loader.steps() for number in gather_samples(batch["numbers"], info)]
    assert sorted(int(number) for number in found) == ALL
    assert {number.untyped_storage().nbytes() for number in found} == {8}, "a row keeps its batch in memory"
    sparse = torch.eye(3).to_sparse()
    assert own_memory(sparse) is sparse, "it has no storage of which it could be a part"


# The Hugging Face Trainer ---------------------------------------------------------------------------------------------------


class Speaking(Model):
    """Returns its samples as a model returns logits, and takes a token count, as the models of transformers do."""

    accepts_loss_kwargs = True

    def forward(self, input_ids: Any, labels: Any, numbers: Any, num_items_in_batch: Any = None) -> Any:
        loss = super().forward(input_ids, labels)["loss"]
        if num_items_in_batch is not None:
            loss = loss * (labels[:, 1:] != -100).sum() / num_items_in_batch
        return {"loss": loss, "numbers": numbers, "lengths": (input_ids > 0).sum(1), "rows": input_ids}


def judge(prediction: Any) -> dict[str, Any]:
    """Returns what a metric sees: labels padded with -100 to the longest of all."""
    numbers, lengths, rows = prediction.predictions
    assert len(numbers) == len(lengths) == len(rows) == len(prediction.label_ids)
    for number, length, row, labels in zip(numbers, lengths, rows, prediction.label_ids, strict=True):
        ids = get_sample(int(number))["input_ids"].numpy()
        assert length == np.count_nonzero(ids)
        np.testing.assert_array_equal(row[: len(ids)], ids)
        assert set(labels[len(ids) :]) <= {-100}
    return {"numbers": sorted(map(int, numbers)), "order": list(map(int, numbers))}


class Batches:
    """A metric that is called with one batch after another, and told which is the last."""

    def __init__(self) -> None:
        self.numbers: list[int] = []

    def __call__(self, prediction: Any, compute_result: bool) -> dict[str, Any]:
        self.numbers += map(int, prediction.predictions[0])
        found = sorted(self.numbers)
        if compute_result:
            self.numbers = []
        return {"numbers": found} if compute_result else {}


def evaluate_trainer(rank: int, world_size: int, folder: Path) -> Any:
    given = {"shard": "given", "token_budget": 2 * BUDGET_TOKENS}
    found = []
    for evaluation, dataset in ((given, make_shard(rank) if world_size > 1 else Samples(ALL)), ({}, Samples(ALL))):
        odb = make_odb({"evaluation": nested(**evaluation)})
        trainer = make_trainer(
            rank, folder, kind=ODBTrainer, odb=odb, model=Speaking(), eval_dataset=dataset, max_steps=2
        )
        trainer.compute_metrics = judge
        metrics = trainer.evaluate()
        assert trainer.evaluate()["eval_loss"] == metrics["eval_loss"]
        predicted = trainer.predict(dataset)
        assert predicted.metrics["test_numbers"] == metrics["eval_numbers"]
        assert predicted.metrics["test_loss"] == metrics["eval_loss"]
        if dataset.numbers == ALL:
            assert metrics["eval_order"] == predicted.predictions[0].tolist() == ALL, "rows are those of the data set"
        assert metrics["eval_samples_per_second"] == pytest.approx(len(ALL) / metrics["eval_runtime"], rel=0.02)
        found.append((metrics["eval_numbers"], metrics["eval_loss"]))
    trainer.args.include_for_metrics = ["loss"]
    with pytest.raises(UsageError, match="batches differ"):
        trainer.evaluate()
    trainer.args.include_for_metrics, trainer.args.batch_eval_metrics = [], True
    batches = Batches()
    trainer.compute_metrics = batches
    for _ in range(2):
        assert trainer.evaluate()["eval_numbers"] == found[-1][0]
    # Training continues as if there had been no evaluation.
    trainer.args.eval_strategy, trainer.args.eval_steps = "steps", 1
    trainer.train()
    assert [log["eval_numbers"] for log in trainer.state.log_history if "eval_numbers" in log] == 2 * [found[-1][0]]
    # The Trainer's own evaluation also has each sample once, but not the loss.
    own = make_trainer(rank, folder, kind=ODBTrainer, odb=make_odb(), model=Speaking(), eval_dataset=Samples(ALL))
    own.compute_metrics = judge
    return found, own.evaluate()["eval_numbers"]


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 2])
def test_the_trainer_evaluates_each_sample_once(tmp_path: Path, world_size: int) -> None:
    """Checks: COVER, ONCE. With given shards of 23 and 8, and with one data set divided among ranks."""
    values = get_values(run_ranks(world_size, evaluate_trainer, world_size, tmp_path))
    for runs in zip(*(value[0] for value in values), strict=True):
        check(runs)
    assert all(value[1] == ALL for value in values)


class Told(nn.Module):
    """A model whose loss of a token is the token's number."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor, numbers: object) -> dict[str, torch.Tensor]:
        return {"loss": labels[labels != -100].double().mean() + self.weight}


def test_the_trainers_own_loss_is_a_mean_of_means(tmp_path: Path) -> None:
    """The figures of docs/howto/evaluate.md: four samples of two tokens with a loss of 3, one of eight with a loss of 6."""
    rows = [torch.tensor([3, 3])] * 4 + [torch.tensor([6] * 8)]
    samples = [{"numbers": 0, "input_ids": row, "labels": row} for row in rows]
    found = []
    for evaluation in (None, {}):
        odb = ODBOptions(token_budget=BUDGET_TOKENS, evaluation=evaluation)
        settings = {"train_dataset": samples, "eval_dataset": samples, "per_device_eval_batch_size": 4}
        trainer = make_trainer(0, tmp_path, kind=ODBTrainer, odb=odb, model=Told(), **settings)
        found.append(trainer.evaluate()["eval_loss"])
    assert found == [pytest.approx((4 * 3 + 6) / 5), pytest.approx((8 * 3 + 8 * 6) / 16)] == [3.6, 4.5]


# Lightning ------------------------------------------------------------------------------------------------------------------


class Judged(pl.LightningModule):
    """Evaluates in each of the three ways. Gathers sample numbers with torchmetrics and with this library."""

    def __init__(self) -> None:
        super().__init__()
        self.model = Model()
        self.seen = CatMetric()
        self.gathered: list[int] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return scale_loss(self, self.model(batch["input_ids"], batch["labels"])["loss"])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        info = get_step_info(self, batch_idx)
        loss = self.model(batch["input_ids"], batch["labels"])["loss"]
        self.log("loss", info.scale(loss), batch_size=float(info.local_supervised), sync_dist=True)
        if not info.is_idle:
            self.seen.update(batch["numbers"])
        self.gathered += [int(number) for number in gather_samples(batch["numbers"], info)]

    test_step = validation_step

    def predict_step(self, batch: Any, batch_idx: int) -> None:
        info = get_step_info(self, batch_idx)
        self.gathered += [int(number) for number in gather_samples(batch["numbers"], info)]

    def on_validation_start(self) -> None:
        self.gathered.clear()
        self.seen.reset()

    on_test_start = on_predict_start = on_validation_start

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=LEARNING_RATE)


def evaluate_lightning(rank: int, world_size: int, folder: Path) -> Any:
    module = Judged()
    dataset = make_shard(rank) if world_size > 1 else Samples(ALL)
    with (
        EvaluationLoader(dataset, **nested(**GIVEN)) as loader,
        LightningLoader(dataset, **nested(**GIVEN)) as training,
    ):
        trainer = make_lightning(folder, world_size, callbacks=[training.callback], max_epochs=2)
        found = []
        for evaluate in (trainer.validate, trainer.test):
            (metrics,) = evaluate(module, loader, verbose=False)
            assert sorted(module.seen.compute().int().tolist()) == ALL
            found.append((list(module.gathered), metrics["loss"]))
        trainer.predict(module, [loader])
        found.append((list(module.gathered), found[0][1]))
        trainer.fit(module, training, loader)  # with two batches of validation as a check beforehand
        assert sorted(module.gathered) == ALL
        with pytest.raises(UsageError, match="not an EvaluationLoader"):
            get_step_info(module, 0)
        with pytest.raises(UsageError, match="no batch 99"):
            loader.get_info(99)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 2])
def test_lightning_evaluates_each_sample_once(tmp_path: Path, world_size: int) -> None:
    """Checks: COVER, ONCE. Validation, also during training, tests and predictions."""
    # https://github.com/Lightning-AI/pytorch-lightning/issues/20404
    values = get_values(run_ranks(world_size, evaluate_lightning, world_size, tmp_path))
    for runs in zip(*values, strict=True):
        check(runs)


class Ones(Judged):
    """Its mean is 1 for any weights, and it keeps the sum of the weights."""

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        info = get_step_info(self, batch_idx, dataloader_idx)
        weight = float(info.local_supervised)
        self.log("mean", info.scale(torch.ones((), dtype=torch.float64)), batch_size=weight, sync_dist=True)
        self.log("sum", weight, reduce_fx="sum", sync_dist=True)


@pytest.mark.slow
def test_lightning_weighs_by_totals_that_ranks_do_not_divide(tmp_path: Path) -> None:
    """Lightning averages weights over the ranks, rounded if they are integers. Loaders have names."""

    def evaluate_ones(rank: int) -> list[tuple[float, float]]:
        trainer, found = make_lightning(tmp_path, 2, callbacks=[]), []
        for left_out in range(6):
            with EvaluationLoader(Samples(ALL[left_out:]), **nested(**READ)) as loader:
                # The name of a single loader is not part of the metrics' names.
                (metrics,) = trainer.validate(Ones(), {"one": loader}, verbose=False)
                found.append((metrics["mean"], metrics["sum"]))
        return found

    for value in get_values(run_ranks(2, evaluate_ones)):
        assert {total % 2 for _, total in value} == {0, 1}
        assert [mean for mean, _ in value] == pytest.approx([1] * 6, rel=1e-12)


class Careless(Judged):
    """Does not ask for the step information of a batch."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("loss", self.model(batch["input_ids"], batch["labels"])["loss"], batch_size=len(batch["numbers"]))

    test_step = validation_step

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return batch["numbers"]


def evaluate_carelessly(rank: int, world_size: int, folder: Path) -> dict[str, str]:
    found = {}
    for kind in (ODBDataLoader, EvaluationLoader, LightningLoader):
        for entry in ("validate", "test", "predict", "fit"):
            with (
                kind(make_all(), **nested(**READ)) as loader,
                LightningLoader(make_all(), **nested(**READ)) as training,
            ):
                trainer = make_lightning(folder, world_size, callbacks=[training.callback], max_epochs=1)
                loaders = (training, [training if kind is LightningLoader else loader]) if entry == "fit" else (loader,)
                try:
                    getattr(trainer, entry)(Careless(), *loaders)
                    found[f"{kind.__name__} {entry}"] = "nothing"
                except (UsageError, AttributeError) as error:
                    found[f"{kind.__name__} {entry}"] = str(error)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 2])
def test_lightning_evaluates_on_an_evaluation_loader_that_is_asked_and_on_nothing_else(
    tmp_path: Path, world_size: int
) -> None:
    """On every rank alike, before anything is counted twice, through any entry point."""
    values = get_values(run_ranks(world_size, evaluate_carelessly, world_size, tmp_path))
    for value in values:
        for case, said in value.items():
            kind, entry = case.split()
            wanted = {
                "ODBDataLoader": "pass LightningLoader to train and EvaluationLoader to evaluate",
                "EvaluationLoader": "get_step_info(self, batch_idx) is called for none",
                "LightningLoader": "use EvaluationLoader for anything but training",
            }[kind]
            assert wanted in said, (case, said)
            assert ("the train loader is read to evaluate" in said) is (kind == "LightningLoader" and entry == "fit")
        assert len(value) == 12


@pytest.mark.filterwarnings("ignore")
def test_an_evaluation_of_one_step_that_asks_nobody_is_noticed_by_the_next(tmp_path: Path) -> None:
    trainer = make_lightning(tmp_path, 1, callbacks=[], strategy="auto")
    with EvaluationLoader(Samples([0]), **nested(**READ)) as loader:
        trainer.validate(Careless(), loader, verbose=False)
        with pytest.raises(UsageError, match="is called for none"):
            trainer.validate(Careless(), loader, verbose=False)
        for _ in range(2):
            trainer.validate(Judged(), loader, verbose=False)


def test_an_evaluation_loader_does_not_train(tmp_path: Path) -> None:
    class Unscaled(Judged):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.model(batch["input_ids"], batch["labels"])["loss"]

    trainer = make_lightning(tmp_path, 1, callbacks=[], max_epochs=1, strategy="auto")
    with (
        EvaluationLoader(make_all(), **nested(**READ)) as loader,
        pytest.raises(UsageError, match="to train, use LightningLoader"),
        warnings.catch_warnings(action="ignore"),
    ):
        trainer.fit(Unscaled(), loader)


def test_the_trainer_does_not_evaluate_on_the_loader_of_training(tmp_path: Path) -> None:
    trainer = make_trainer(0, tmp_path, kind=ODBTrainer, odb=make_odb(), model=Speaking(), eval_dataset=Samples(ALL))
    trainer.get_eval_dataloader = lambda *_: trainer.get_train_dataloader()
    with pytest.raises(UsageError, match="reads the training loader"):
        trainer.evaluate()


def test_what_is_of_training_is_refused() -> None:
    for option in ({"loss_scaling": "none"}, {"accumulation_steps": 2}, {"on_idle": "none"}):
        with pytest.raises(UsageError, match="EvaluationLoader"):
            EvaluationLoader(Samples(ALL), token_budget=1, **nested(**option))
    nobody: Any = SimpleNamespace(validating=False, sanity_checking=False, testing=False, predicting=False)
    with pytest.raises(UsageError, match="NoneType"):
        get_step_info(SimpleNamespace(trainer=nobody), 0)  # type: ignore[arg-type]
