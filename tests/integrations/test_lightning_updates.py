"""Lightning with ``update_samples`` runs like plain Lightning with fixed batches, with the same weights and schedule."""

from __future__ import annotations

import contextlib
import csv
import warnings
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.options import nested
from tests.integrations import require

require("lightning")

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import (
    EarlyStopping,
    GradientAccumulationScheduler,
    ModelCheckpoint,
    OnExceptionCheckpoint,
)
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.tuner import Tuner

from odb_ref.integrations.lightning import LightningLoader, scale_loss
from odb_ref.integrations.progress import Intervals
from odb_ref.torch import UsageError
from tests.integrations.test_lightning import make_trainer, run_ranks
from tests.torch.data import Numbers, Stream, collate
from tests.torch.ranks import get_values, in_a_rank

RANKS, SAMPLES, PER_RANK, ACCUMULATED, EPOCHS = 2, 48, 4, 2, 3
UPDATE = RANKS * PER_RANK * ACCUMULATED


class Module(pl.LightningModule):
    """Every sample counts equally. Records weights and rate of every update."""

    def __init__(self, is_plain: bool) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.model = torch.nn.Sequential(torch.nn.Embedding(32, 6), torch.nn.Linear(6, 32)).double()
        self.is_plain = is_plain
        self.updates: list[list[float]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        logits, labels = self.model(batch["input_ids"]).transpose(1, 2), batch["labels"]
        each = torch.nn.functional.cross_entropy(logits, labels, ignore_index=-100, reduction="none").sum(1)
        loss = (each / (labels != -100).sum(1)).mean()
        return loss if self.is_plain else scale_loss(self, loss)

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        super().optimizer_step(*args, **kwargs)
        (rate,) = (group["lr"] for group in self.optimizers().param_groups)
        self.updates.append([rate, *(float(v) for p in self.model.parameters() for v in p.detach().flatten())])

    def configure_optimizers(self) -> Any:
        self.expected = self.trainer.estimated_stepping_batches
        optimizer = torch.optim.SGD(self.parameters(), lr=0.5, momentum=0.9)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def make_loader(**options: Any) -> LightningLoader:
    settings: dict[str, Any] = {"token_budget": 60, "update_samples": UPDATE, "loss_scaling": "samples"} | options
    return LightningLoader(Numbers(0, SAMPLES), **nested(collate_fn=collate, timeout_s=30, **settings))


def fit(folder: Path, loader: Any, *, resume: str = "", callbacks: Any = (), **settings: Any) -> Any:
    is_ours = isinstance(loader, LightningLoader)
    module = Module(not is_ours)
    callbacks = [*callbacks, *([loader.callback] if is_ours else [])]
    trainer = make_trainer(folder, RANKS, callbacks=callbacks, **{"max_epochs": EPOCHS} | settings)
    trainer.fit(module, loader, ckpt_path=resume or None)
    assert module.expected == trainer.global_step  # the number that a schedule uses
    return module.updates, trainer.global_step


def train_both(rank: int, folder: Path) -> Any:
    data = Numbers(0, SAMPLES)
    sampler: Any = torch.utils.data.DistributedSampler(data, RANKS, rank, shuffle=False)
    plain = torch.utils.data.DataLoader(data, batch_size=PER_RANK, collate_fn=collate, sampler=sampler)
    saving = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=4, save_top_k=-1)
    with make_loader() as loader:
        ours = fit(folder, loader, callbacks=[saving])
    with make_loader(token_budget=45, num_workers=1) as loader:
        resumed = fit(folder, loader, resume=str(folder / "step=4.ckpt"))
    with make_loader() as loader:
        bounded = fit(folder, loader, max_epochs=-1, max_steps=5)
    settings = {"accumulate_grad_batches": ACCUMULATED, "use_distributed_sampler": False}
    return fit(folder, plain, **settings), ours, resumed, bounded


def test_weights_rates_and_counts_are_those_of_plain_lightning(tmp_path: Path) -> None:
    """Checks: UPDATE, WEIGHT, RESUME. After every update, to 1e-9; from a checkpoint inside an epoch; up to ``max_steps``."""
    values = get_values(run_ranks(RANKS, train_both, tmp_path))
    for value in values:
        (plain, steps), ours, resumed, bounded = value
        assert steps == len(plain) == EPOCHS * SAMPLES // UPDATE
        wanted = ((ours, plain, steps), (resumed, plain[4:], steps), (bounded, plain[:5], 5))
        for (found, count), expected, total in wanted:
            assert count == total
            check_same(found, expected, rel=1e-9)


class Logging(Module):
    """Logs the mean loss of each update as ``docs/howto/frameworks/lightning.md`` does."""

    def on_train_start(self) -> None:
        self.total, self.steps = 0.0, self.global_step

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.total += outputs["loss"]
        if self.global_step > self.steps:
            self.log("train_loss", self.total, sync_dist=True, batch_size=1)
            self.on_train_start()


def log_updates(rank: int, folder: Path) -> tuple[list[float], list[list[float]]]:
    module, logger = Logging(False), CSVLogger(folder)
    with make_loader() as loader:
        settings = {"max_epochs": 1, "logger": logger, "log_every_n_steps": 1}
        make_trainer(folder, RANKS, callbacks=[loader.callback], **settings).fit(module, loader)
    rows = [] if rank else [*csv.DictReader((Path(logger.log_dir) / "metrics.csv").open())]
    return [float(row["train_loss"]) for row in rows if row["train_loss"]], module.updates


def test_the_parts_of_its_micro_batches_add_up_to_the_loss_of_an_update(tmp_path: Path) -> None:
    (losses, updates), _ = get_values(run_ranks(RANKS, log_updates, tmp_path))
    assert len(losses) == len(updates) == SAMPLES // UPDATE
    model = Module(True)
    for number, loss in enumerate(losses):
        batch = collate([Numbers(0, SAMPLES)[number * UPDATE + at] for at in range(UPDATE)])
        assert loss == pytest.approx(model.training_step(batch, 0).item(), rel=1e-6)
        torch.nn.utils.vector_to_parameters(torch.tensor(updates[number][1:]).double(), model.model.parameters())


class Failing(Module):
    """Fails in a given batch, or records the samples of each. It asks for no idle batch."""

    def __init__(self, at: int = -1) -> None:
        super().__init__(is_plain=False)
        self.at = at
        self.seen: list[tuple[int, list[int]]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx == self.at:
            raise ValueError("this batch")
        loader = self.trainer.train_dataloader
        info = loader._info
        assert not info.is_idle or loader.loader.update_samples is None
        self.seen.append((info.epoch, list(batch["numbers"])))
        return super().training_step(batch, batch_idx)


class Saving(pl.Callback):
    """Saves when training starts, and before and after each batch, and records after which update."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.saved: dict[str, int] = {}

    def save(self, trainer: Any, *_: Any) -> None:
        path = str(self.folder / f"{len(self.saved)}.ckpt")
        trainer.save_checkpoint(path)
        self.saved[path] = trainer.global_step

    on_train_start = on_train_batch_start = on_train_batch_end = save


def run_alone(
    folder: Path, module: Failing, callbacks: Any, resume: str | None = None, *, accumulated: int = 1, **options: Any
) -> Any:
    """Returns the weights after each update. The callbacks come before the loader's."""
    with make_loader(accumulation_steps=accumulated, **options) as loader:
        settings = {"max_epochs": 2, "accumulate_grad_batches": accumulated}
        trainer = make_trainer(folder, 1, callbacks=[*callbacks, loader.callback], **settings)
        with pytest.raises(ValueError, match="this batch") if module.at >= 0 else contextlib.nullcontext():
            trainer.fit(module, loader, ckpt_path=resume)
    return module.updates


def check_same(found: Any, expected: Any, rel: float = 1e-12) -> None:
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert one == pytest.approx(other, rel=rel, abs=1e-12)


@pytest.mark.parametrize("options", [{"shuffle": True, "seed": 1}, {"update_samples": None, "window": 8}])
@in_a_rank(run_ranks)
def test_a_checkpoint_of_any_moment_goes_on_exactly(options: Any, tmp_path: Path) -> None:
    """Checks: RESUME, ONCE. Also inside an update, and although callbacks save before the loader's sees the batch. No batch is
    made up if an epoch has more batches than the one before.
    """
    saving, whole = Saving(tmp_path), Failing()
    expected = run_alone(tmp_path, whole, [saving], **options)
    assert sorted(number for _, numbers in whole.seen for number in numbers) == sorted(2 * [*range(SAMPLES)])
    for path, step in [*saving.saved.items()][::3]:  # alternately before and after a batch
        check_same(run_alone(tmp_path, Failing(), [], path, **options), expected[step:])
    first, second = (sum(epoch == number for epoch, _ in whole.seen) for number in range(2))
    assert second > first or options.get("update_samples", UPDATE) is None
    for at in (1, first - 1):
        before = run_alone(tmp_path, Failing(at), [OnExceptionCheckpoint(tmp_path, f"broken-{at}")], **options)
        after = run_alone(tmp_path, Failing(), [], str(tmp_path / f"broken-{at}.ckpt"), **options)
        check_same(before + after, expected)


@in_a_rank(run_ranks)
def test_a_checkpoint_inside_an_update_of_the_free_mode_is_warned_of(tmp_path: Path) -> None:
    free = {"update_samples": None, "window": 8, "accumulated": 2}
    for at in (1, 2):
        run_alone(tmp_path, Failing(at), [OnExceptionCheckpoint(tmp_path, f"{at}")], **free)
        with warnings.catch_warnings(record=True, action="always") as caught:
            run_alone(tmp_path, Failing(), [], str(tmp_path / f"{at}.ckpt"), **free)
        assert any("made inside an update" in str(warning.message) for warning in caught) == (at == 1)


class Halved(Failing):
    """Its rate changes with every second update."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.5)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step", "frequency": 2}}


class Repeating(Failing):
    """Its optimizer computes the loss of a batch several times."""

    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters())


class Counting(SingleDeviceStrategy):
    """Steps by a count of its own, as DeepSpeed does."""

    handles_gradient_accumulation = True


FREE = {"update_samples": None}
MISUSED: list[tuple[str, dict[str, Any], dict[str, Any], Any]] = [
    ("accumulate_grad_batches", {"accumulate_grad_batches": 2}, {}, Failing),
    ("limit_train_batches", {"limit_train_batches": 1}, {}, Failing),
    ("limit_train_batches", {"limit_train_batches": 1}, FREE, Failing),
    ("overfit_batches", {"overfit_batches": 2}, FREE, Failing),
    ("val_check_interval", {"val_check_interval": 2}, {}, Failing),
    ("frequency=2", {}, {}, Halved),
    ("frequency=2", {"accumulate_grad_batches": 2}, {**FREE, "accumulation_steps": 2}, Halved),
    ("LBFGS", {}, {}, Repeating),
    ("Counting divides", {"strategy": Counting()}, {}, Failing),
    (
        "Counting divides",
        {"strategy": Counting(), "accumulate_grad_batches": 2},
        {**FREE, "accumulation_steps": 2},
        Failing,
    ),
]


@in_a_rank(run_ranks)
def test_what_counts_micro_batches_is_refused(tmp_path: Path) -> None:
    """Anything else that would train differently from its settings is refused too."""
    scheduled = [
        ("GradientAccumulationScheduler", {"callbacks": [GradientAccumulationScheduler({1: 4})]}, mode, Failing)
        for mode in ({}, FREE)
    ]
    stopping = {"callbacks": [EarlyStopping("loss")]}
    late = ("put loader.callback before it", stopping, {"intervals": Intervals(evaluate_samples=16)}, Failing)
    for wanted, settings, options, kind in [*MISUSED, *scheduled, late]:
        with make_loader(**options) as loader, pytest.raises(UsageError, match=wanted):
            callbacks = [*settings.get("callbacks", []), loader.callback]
            make_trainer(tmp_path, 1, **{"max_epochs": 2} | settings | {"callbacks": callbacks}).fit(kind(), loader)
    with make_loader() as loader, pytest.raises(UsageError, match="Tuner"):
        module: Any = Failing()
        module.lr = 0.1
        Tuner(make_trainer(tmp_path, 1, callbacks=[loader.callback], max_epochs=2)).lr_find(module, loader)


@in_a_rank(run_ranks)
def test_what_changes_nothing_is_allowed(tmp_path: Path) -> None:
    is_timed = not pl.__version__.startswith("2.5")  # since 2.6 evaluations can be due by time
    for settings, options in (
        ({"callbacks": [GradientAccumulationScheduler({0: 1})]}, {}),
        ({"val_check_interval": {"minutes": 5}} if is_timed else {}, {}),
        ({"kind": Halved}, FREE),
        ({"fast_dev_run": 3}, FREE),
    ):
        kind = settings.pop("kind", Failing)
        with make_loader(**options) as loader:
            callbacks = [loader.callback, *settings.get("callbacks", [])]
            trainer = make_trainer(tmp_path, 1, **{"max_epochs": 2} | settings | {"callbacks": callbacks})
            trainer.fit(kind(), loader)
        assert trainer.global_step > 0


class Hooked(Failing):
    """Counts how often gradients are zeroed. Evaluates, and records after which updates it did."""

    def __init__(self, at: int = -1) -> None:
        super().__init__(at)
        self.zeroed = 0
        self.evaluated: list[int] = []

    def on_before_zero_grad(self, optimizer: Any) -> None:
        assert self.zeroed == self.trainer.global_step
        self.zeroed += 1

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.evaluated.append(self.trainer.global_step)
        self.log("value", 1.0)


@in_a_rank(run_ranks)
def test_one_trainer_fits_often(tmp_path: Path) -> None:
    """Checks: ONCE, COVER. Each epoch comes once, and gradients are zeroed once an update. Fits in one Trainer and in several,
    with evaluations of a checkpoint in between.
    """
    seen = [(epoch, number) for epoch in range(4) for number in range(SAMPLES)]

    def note(module: Failing, start: int = 0) -> list[tuple[int, int]]:
        return sorted((epoch, number) for epoch, numbers in module.seen[start:] for number in numbers)

    module, other = Hooked(), torch.utils.data.DataLoader([0])
    saving = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=1, save_top_k=-1)
    with make_loader(shuffle=True) as loader:
        trainer = make_trainer(tmp_path, 1, callbacks=[loader.callback, saving], max_epochs=1)
        trainer.fit(module, loader)
        assert module.zeroed == trainer.global_step == len(module.updates) == 3
        trainer.validate(module, other, ckpt_path=str(tmp_path / "step=1.ckpt"), verbose=False)
        trainer.fit_loop.max_epochs = 2
        trainer.fit(module, loader)
        assert note(module) == seen[: 2 * SAMPLES]
        # The loader in another Trainer, and another loader in the Trainer.
        again = Failing()
        make_trainer(tmp_path, 1, callbacks=[loader.callback], max_epochs=1).fit(again, loader)
        assert note(again) == seen[2 * SAMPLES : 3 * SAMPLES]
    with make_loader(shuffle=True) as fresh:
        trainer.callbacks[trainer.callbacks.index(loader.callback)] = fresh.callback
        trainer.fit_loop.max_epochs, read = 3, len(module.seen)
        trainer.fit(module, fresh)
        assert note(module, read) == seen[2 * SAMPLES : 3 * SAMPLES]
    with make_loader() as broken:
        trainer = make_trainer(tmp_path, 1, callbacks=[broken.callback], max_epochs=1)
        with pytest.raises(ValueError, match="this batch"):
            trainer.fit(Failing(1), broken)
        assert trainer.accumulate_grad_batches == broken.accumulation_steps == 1


@in_a_rank(run_ranks)
def test_a_checkpoint_of_plain_lightning_goes_on_in_its_epoch(tmp_path: Path) -> None:
    plain = torch.utils.data.DataLoader(Numbers(0, SAMPLES), batch_size=UPDATE, collate_fn=collate)
    ends = ModelCheckpoint(tmp_path, filename="{epoch}", save_top_k=-1)
    inside = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=2, save_top_k=-1)
    make_trainer(tmp_path, 1, callbacks=[ends, inside], max_epochs=2).fit(Module(is_plain=True), plain)
    for name, epochs, is_warned in (("epoch=0", {1}, False), ("step=2", {0, 1}, True)):
        module = Failing()
        with warnings.catch_warnings(record=True, action="always") as caught:
            run_alone(tmp_path, module, [], str(tmp_path / f"{name}.ckpt"), shuffle=True)
        assert {epoch for epoch, _ in module.seen} == epochs
        assert any("begins that epoch again" in str(warning.message) for warning in caught) == is_warned


@in_a_rank(run_ranks)
def test_callbacks_that_monitor_act_after_each_evaluation(tmp_path: Path) -> None:
    with make_loader(intervals=Intervals(evaluate_samples=UPDATE)) as loader:
        module, evaluation = Hooked(), torch.utils.data.DataLoader([0])
        saving = ModelCheckpoint(tmp_path, filename="{step}", monitor="value", save_top_k=-1)
        stopping = EarlyStopping("value", patience=3)  # the value never changes
        callbacks, settings = [loader.callback, stopping, saving], {"max_epochs": 3, "num_sanity_val_steps": 0}
        trainer = make_trainer(tmp_path, 1, callbacks=callbacks, **settings)
        trainer.fit(module, loader, evaluation)
    assert module.evaluated == [1, 2, 3, 4]
    assert len(list(tmp_path.glob("*.ckpt"))) == trainer.global_step == 4
    assert trainer.val_check_interval == 1.0
    rest = run_alone(tmp_path, Failing(), [], str(tmp_path / "step=4.ckpt"))
    check_same(module.updates[3:] + rest, run_alone(tmp_path, Failing(), [])[3:])


@in_a_rank(run_ranks)
def test_a_schedule_in_the_free_mode_goes_by_an_estimate(tmp_path: Path) -> None:
    def ask(data: Any, **settings: Any) -> tuple[int, int]:
        """Returns how many updates a module expects if their size is not fixed, and how many there are."""
        with LightningLoader(data, **nested(collate_fn=collate, token_budget=60)) as loader:
            module = Module(False)
            trainer = make_trainer(tmp_path, 1, callbacks=[loader.callback], max_epochs=2, **settings)
            trainer.fit(module, loader)
            return module.expected, trainer.global_step

    expected, steps = ask(Numbers(0, 24))
    assert steps / 1.5 < expected < 1.5 * steps
    assert ask(Stream(0, 24), max_steps=3) == (3, 3)
    with pytest.raises(UsageError, match=r"pass Trainer\(max_steps=\)"):
        ask(Stream(0, 24))
