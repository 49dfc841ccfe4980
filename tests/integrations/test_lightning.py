"""Lightning over gloo: exact weights after several updates, every sample once an epoch, and checkpoints."""

from __future__ import annotations

import functools
import logging
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.integrations import require

require("lightning")

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Checkpoint, ModelCheckpoint, RichProgressBar, TQDMProgressBar
from lightning.pytorch.strategies import DDPStrategy, FSDPStrategy

from odb_ref.integrations.lightning import IntervalCheckpoint, LightningLoader, scale_loss
from odb_ref.integrations.lightning_evaluation import get_step_info
from odb_ref.integrations.progress import Intervals
from odb_ref.torch import ODBDataLoader, StepInfo, UsageError
from tests.helpers.options import nested
from tests.integrations.common import (
    BUDGET_TOKENS,
    LEARNING_RATE,
    OPTIONS,
    SIZES,
    STEPS,
    Model,
    check_coverage,
    check_runs,
    collate,
    find_due,
    get_weights,
    make_all,
    make_shard,
    set_environment,
)
from tests.torch import ranks
from tests.torch.ranks import get_values, in_a_rank


class Module(pl.LightningModule):
    """Records the samples of each update."""

    def __init__(self) -> None:
        super().__init__()
        self.model = Model()
        self.updates: list[list[int]] = []
        self.numbers: list[int] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = scale_loss(self, self.model(batch["input_ids"], batch["labels"])["loss"])
        info = self.trainer.train_dataloader._info
        self.numbers += [] if info.is_idle else batch["numbers"].tolist()
        return loss

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.updates.append(self.numbers)
        self.numbers = []

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=LEARNING_RATE)


def make_loader(rank: int | None, steps: int, **options: Any) -> LightningLoader:
    """Returns a loader of this rank's shard, or, without a rank, of all samples, which the loader divides among ranks."""
    dataset = make_all() if rank is None else make_shard(rank)
    shard = {} if rank is None else {"shard": "given"}
    return LightningLoader(
        dataset,
        token_budget=BUDGET_TOKENS,
        **nested(accumulation_steps=steps, collate_fn=collate, **(OPTIONS | shard | options)),
    )


def make_trainer(folder: Path, world_size: int, **settings: Any) -> Any:
    defaults = {
        "default_root_dir": folder,
        "accelerator": "cpu",
        "devices": world_size,
        "strategy": DDPStrategy(process_group_backend="gloo"),
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": any(isinstance(item, Checkpoint) for item in settings["callbacks"]),
    }
    return pl.Trainer(**(defaults | settings))


def train(
    rank: int,
    folder: Path,
    steps: int,
    *,
    world_size: int = len(SIZES),
    loader: Any = None,
    resume: str = "",
    **settings: Any,
) -> Any:
    module = Module()
    with loader or make_loader(rank, steps) as batches:
        callbacks = [batches.callback, *settings.pop("callbacks", ())]
        trainer = make_trainer(folder, world_size, accumulate_grad_batches=steps, callbacks=callbacks, **settings)
        trainer.fit(module, batches, ckpt_path=str(folder / resume) if resume else None)
    return (module.updates, get_weights(module.model)), trainer.global_step


def prepare(rank: int, world_size: int) -> None:
    set_environment(rank, world_size)
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


run_ranks = functools.partial(ranks.run_ranks, prepare=prepare, timeout_s=200)


def train_all(rank: int, folder: Path) -> Any:
    return [train(rank, folder, 1, max_epochs=1), train(rank, folder, 2, max_epochs=2)]


def test_the_weights_are_those_of_one_process_on_the_union(tmp_path: Path) -> None:
    """Checks: WEIGHT, COVER, ALIGN. Uneven shards, masked labels, a batch without a label, windows of 1 and 2, two epochs."""
    # https://github.com/Lightning-AI/pytorch-lightning/issues/20404
    values = get_values(run_ranks(len(SIZES), train_all, tmp_path))
    for epochs, variant in zip((1, 2), zip(*values, strict=True), strict=True):
        runs = [run for run, _ in variant]
        check_runs(runs, epochs)
        assert {steps for _, steps in variant} == {len(runs[0][0])} == {epochs * -(-STEPS // epochs)}


def test_lightning_refuses_fsdp_1_on_processors() -> None:
    """Lightning runs nothing else in its place. This message is all that is known of it: docs/howto/frameworks/lightning.md."""
    with pytest.raises(ValueError, match="The strategy `fsdp` requires a GPU accelerator"):
        pl.Trainer(accelerator="cpu", devices=2, strategy=FSDPStrategy(), logger=False)


SAVED = {"step=4": 4, "step=6": 6, "end-step=6": 6, "step=8": 8}
"""Checkpoints and their updates: within the first epoch, at its last batch, after its end, within the second."""


def make_checkpoints(folder: Path, every: int) -> Any:
    return ModelCheckpoint(dirpath=folder, filename="{step}", every_n_train_steps=every, save_top_k=-1)


def save_and_resume(rank: int, folder: Path) -> Any:
    at_end = ModelCheckpoint(dirpath=folder, filename="end-{step}", save_on_train_epoch_end=True, save_top_k=-1)
    whole = train(rank, folder, 2, max_epochs=2, callbacks=[make_checkpoints(folder, 2), at_end])
    parts = [train(rank, folder, 2, max_epochs=2, resume=f"{name}.ckpt") for name in SAVED]
    auto = folder / "auto"
    shared = train(rank, auto, 1, loader=make_loader(None, 1), max_steps=3, callbacks=[make_checkpoints(auto, 3)])
    return whole, parts, shared


def resume_alone(rank: int, folder: Path) -> Any:
    loader = make_loader(None, 1)
    return train(rank, folder / "auto", 1, world_size=1, loader=loader, max_epochs=1, resume="step=3.ckpt")


def test_a_checkpoint_goes_on_where_it_was_saved(tmp_path: Path) -> None:
    """Checks: RESUME, ONCE, COVER, REPLAY. Even though Lightning has read ahead, and on one rank instead of two."""
    values = get_values(run_ranks(len(SIZES), save_and_resume, tmp_path))
    for ((updates, weights), steps), parts, _ in values:
        for saved, part in zip(SAVED.values(), parts, strict=True):
            assert part == ((updates[saved:], weights), steps)
    first = [value[-1][0] for value in values]
    (alone,) = get_values(run_ranks(1, resume_alone, tmp_path))
    check_coverage([*first, alone[0]])


INTERVALS = Intervals(evaluate_samples=10, save_tokens=150)


class Watched(Module):
    """Records after which updates it was evaluated, and what was logged and shown in the meantime."""

    def __init__(self) -> None:
        super().__init__()
        self.infos: list[StepInfo] = []
        self.evaluated: list[int] = []
        self.shown: list[tuple[float, int]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.infos.append(self.trainer.train_dataloader._info)
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.evaluated.append(self.trainer.global_step)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        bar, total = self.trainer.progress_bar_callback, 0
        if isinstance(bar, TQDMProgressBar):
            total = bar.train_progress_bar.total if bar.is_enabled else 0
        elif bar.progress is not None:
            (total,) = (task.total for task in bar.progress.tasks if task.id == bar.train_progress_bar_id)
        self.shown.append((float(self.trainer.callback_metrics.get("train_coverage", 0.0)), total))


def watch(rank: int, folder: Path) -> Any:
    found = []
    for bar, resume in ((TQDMProgressBar(), ""), (RichProgressBar(), "first")):
        module, evaluation = Watched(), torch.utils.data.DataLoader([0])
        with make_loader(None, 2, intervals=INTERVALS) as loader:
            callbacks = [IntervalCheckpoint(loader, folder), loader.callback, bar]
            settings = {"num_sanity_val_steps": 0, "accumulate_grad_batches": 2, "max_epochs": 2}
            trainer = make_trainer(folder, len(SIZES), callbacks=callbacks, enable_progress_bar=True, **settings)
            saved = sorted(folder.glob("samples=*.ckpt"), key=lambda path: int(path.stem.partition("=")[2]))
            trainer.fit(module, loader, evaluation, ckpt_path=saved[1] if resume else None)
            found.append((module.infos, module.evaluated, module.shown, loader.progress.samples, len(saved)))
    return found


def test_it_evaluates_and_saves_by_samples_and_shows_how_far_it_is(tmp_path: Path) -> None:
    """On all ranks at the same update, also after a checkpoint. At the end, the bar's end is the epoch's."""
    values = get_values(run_ranks(len(SIZES), watch, tmp_path))
    for rank, ((infos, evaluated, shown, samples, _), (rest, again, shown_again, *ends)) in enumerate(values):
        wanted, kept = find_due(infos, samples=10, tokens=150)
        per_epoch = -(-sum(info.epoch == 0 for info in infos) // 2)
        assert evaluated == sorted({*wanted, per_epoch, -(-len(infos) // 2)})
        assert samples == ends[0] == 2 * sum(SIZES)
        assert ends[1] == len(kept) >= 3
        assert len(rest) == len(infos) - 2 * kept[1]
        assert again == [step for step in evaluated if step > kept[1]]
        for read, seen in ((infos, shown), (rest, shown_again)):
            assert all(
                abs(share - info.progress) < 1e-6
                for info, (share, _) in zip(read, seen, strict=True)
                if info.is_update_end
            )
            # Rich makes its bar after the first batch of a resumed epoch.
            for info, (_, total) in list(zip(read, seen, strict=True))[read is rest :]:
                at_end = info.is_last and info.is_update_end
                assert rank > 0 or (total == info.step + 1 if at_end else info.step + 1 < total <= 2 * len(infos))


class Forgetful(Module):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.model(batch["input_ids"], batch["labels"])["loss"]


class Twice(Module):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return scale_loss(self, super().training_step(batch, batch_idx))


class Manual(Module):
    automatic_optimization = False


class Asking(Module):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return get_step_info(self, batch_idx)


@in_a_rank(run_ranks)
def test_what_would_normalise_twice_or_wrongly_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="Lightning always divides"):
        make_loader(0, 1, trainer_divides_loss=True)
    make = functools.partial(make_trainer, tmp_path, 1, max_epochs=1)
    for module, steps, is_followed, said in (
        (Module(), 2, True, r"accumulate_grad_batches=1.*accumulation_steps=2"),
        (Module(), 1, False, r"callbacks=\[loader.callback\]"),
        (Forgetful(), 1, True, r"must return scale_loss\(self, loss\)"),
        (Forgetful(), 1, False, r"read only by Trainer\(callbacks=\[loader.callback\]\)"),
        (Twice(), 1, True, "its loss was scaled before"),
        (Manual(), 1, True, "use an ODBDataLoader in a loop of your own"),
        (Asking(), 1, True, "in training_step call scale_loss"),
    ):
        with make_loader(0, steps) as loader, pytest.raises(UsageError, match=said):
            make(callbacks=[loader.callback] if is_followed else []).fit(module, loader)
    plain = ODBDataLoader(make_shard(0), token_budget=BUDGET_TOKENS, collate_fn=collate)
    with plain, pytest.raises(UsageError, match="not a LightningLoader"):
        make(callbacks=[]).fit(Module(), plain)
    said = r"which is a dict: pass the loader itself to fit\(\)"
    with make_loader(0, 1) as loader, pytest.raises(UsageError, match=said):
        make(callbacks=[loader.callback]).fit(Module(), {"texts": loader})


def test_an_epoch_begun_again_before_training_is_the_same() -> None:
    with make_loader(None, 1, shuffle=True) as loader:
        loader.trainer = SimpleNamespace(callbacks=[loader.callback], training=True)
        first = next(iter(loader))["numbers"].tolist()
        assert next(iter(loader))["numbers"].tolist() == first
        loader.begin_step(0, 0, lambda: True)
        assert loader._info.epoch == 0
        assert next(iter(loader))["numbers"].tolist() != first
