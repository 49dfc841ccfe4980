"""The Hugging Face Trainer over gloo: exact weights after several updates, every sample once an epoch, and checkpoints."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.integrations import require

require("transformers")

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from odb_ref.integrations.hf import ODBTrainer
from odb_ref.torch import JobError, UsageError
from tests.integrations.arguments import PLAIN, make_arguments, make_odb
from tests.integrations.common import (
    LEARNING_RATE,
    SIZES,
    STEPS,
    Model,
    Samples,
    check_coverage,
    check_runs,
    check_weights,
    collate,
    get_weights,
    make_all,
    make_shard,
    run_ranks,
)
from tests.integrations.noting import NotingTrainer
from tests.torch.ranks import get_values, in_a_rank

GIVEN = make_odb({"updates_per_epoch": 3}, shard="given")
AUTO = make_odb({"updates_per_epoch": 30})


def make_trainer(
    rank: int, folder: Path, *, kind: Any = NotingTrainer, pretend: Callable[[], None] | None = None, **settings: Any
) -> Any:
    """Returns a trainer on this rank's samples. ``pretend`` is called once its arguments have looked for devices."""
    names = ("odb", "model", "data_collator", "train_dataset", "eval_dataset")
    arguments = {name: settings.pop(name) for name in names if name in settings}
    odb = arguments.setdefault("odb", GIVEN)
    # The seed gives an order of 11 steps, all with supervised tokens, in whose first epoch rank 1 has a batch above `MOST`.
    defaults = PLAIN | {"data_seed": 3, "learning_rate": LEARNING_RATE, "num_train_epochs": 1, "logging_steps": 1}
    args = make_arguments(folder, **defaults | {"remove_unused_columns": False} | settings)
    if pretend is not None:
        pretend()
    dataset = make_shard(rank) if odb.loader.get("shard") == "given" else make_all()
    return kind(**{"model": Model(), "args": args, "train_dataset": dataset, "data_collator": collate} | arguments)


def train(rank: int, folder: Path, *, resume: str | None = None, **settings: Any) -> Any:
    trainer = make_trainer(rank, folder, **settings)
    trainer.train(resume_from_checkpoint=resume and str(folder / resume))
    losses = [entry[key] for entry in trainer.state.log_history for key in ("loss", "eval_loss") if key in entry]
    run = trainer.noted.updates, get_weights(trainer.model)
    return run, trainer.state.global_step, trainer.state.epoch, losses


def make_llama() -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    return LlamaForCausalLM(LlamaConfig(vocab_size=32, attn_implementation="eager", **sizes))


def train_all(rank: int, folder: Path) -> Any:
    return [
        train(rank, folder, eval_dataset=Samples([1, 2, 3, 4]), eval_strategy="steps", eval_steps=5),
        # The first epoch ends within a window, after 11 steps.
        train(rank, folder, gradient_accumulation_steps=2, num_train_epochs=2),
        # Takes the Trainer's token count, if there is one, and divides by it.
        train(rank, folder, model=make_llama(), gradient_accumulation_steps=2, max_steps=4, dataloader_num_workers=1),
    ]


def test_the_weights_are_those_of_one_process_on_the_union(tmp_path: Path) -> None:
    """Checks: WEIGHT, COVER, ALIGN. Uneven shards, masked labels, a batch without a label, windows of 1 and 2, two epochs,
    evaluation in between."""
    # https://github.com/huggingface/transformers/pull/34242
    values = get_values(run_ranks(len(SIZES), train_all, tmp_path))
    whole, windows, llama = zip(*values, strict=True)
    for epochs, variant in ((1, whole), (2, windows)):
        runs = [run for run, *_ in variant]
        check_runs(runs, epochs)
        # Trained to the end of the epochs, although the estimate was 3 updates in each.
        assert {(steps, epoch) for _, steps, epoch, _ in variant} == {(len(runs[0][0]), epochs)}
    assert [steps for _, steps, *_ in llama] == [4, 4]
    check_weights([run for run, *_ in llama], make_llama(), precision=1e-4)
    # The logged loss is the mean over all ranks' supervised tokens for every update, near that of a uniform guess. Evaluations
    # are logged after 5 and 10, and after the last if transformers (not before 5) adds one.
    assert {len(losses) - STEPS for *_, losses in whole} <= {2, 3}
    assert all(3.2 < loss < 3.8 for _, _, _, losses in (*whole, *windows, *llama) for loss in losses)


def train_unlogged(rank: int, folder: Path) -> Any:
    found = []
    for settings in ({"logging_steps": 1}, {"logging_steps": 1000}, {"logging_steps": 1000, "max_steps": 7}):
        trainer = make_trainer(rank, folder, **settings)
        result = trainer.train()
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        found.append((result.training_loss, result.metrics["train_loss"], losses, trainer.state.global_step))
    return found


def test_the_loss_of_the_whole_training_is_that_of_all_ranks(tmp_path: Path) -> None:
    """This holds however rarely it is logged."""
    values = get_values(run_ranks(len(SIZES), train_unlogged, tmp_path))
    for each, seldom, bounded in values:
        assert [steps for *_, steps in (each, seldom, bounded)] == [STEPS, STEPS, 7]
        # Before version 5 the Trainer rounds what it logs, and nothing else.
        rounding = 5e-5 if all(loss == round(loss, 4) for loss in each[2]) else 0.0
        assert each[0] == pytest.approx(sum(each[2]) / STEPS, rel=1e-6, abs=rounding)
        assert seldom[0] == seldom[1] == pytest.approx(each[0], rel=1e-6)
        assert bounded[0] == pytest.approx(sum(each[2][:7]) / 7, rel=1e-6, abs=rounding)


def save_and_resume(rank: int, folder: Path) -> Any:
    settings = {"gradient_accumulation_steps": 2, "num_train_epochs": 2, "save_strategy": "steps", "save_steps": 4}
    shared = {"odb": AUTO, "save_strategy": "steps", "save_steps": 2, "max_steps": 2}
    checkpoints = (None, "checkpoint-4", "checkpoint-8", "checkpoint-12")
    found = [train(rank, folder / "given", resume=checkpoint, **settings) for checkpoint in checkpoints]
    said = "8 steps into its epoch, which is not a multiple of gradient_accumulation_steps=3"
    with pytest.raises(UsageError, match=said):
        train(rank, folder / "given", resume="checkpoint-4", gradient_accumulation_steps=3)
    return [*found, train(rank, folder / "auto", **shared)]


def test_a_checkpoint_goes_on_where_it_was_saved(tmp_path: Path) -> None:
    """Checks: RESUME, ONCE, COVER, REPLAY. In the first and the second epoch, after its end, and on one rank instead of two."""
    values = get_values(run_ranks(len(SIZES), save_and_resume, tmp_path))
    for whole, from_4, from_8, from_12, _ in values:
        (updates, weights), *rest = whole
        assert len(updates) == 2 * -(-STEPS // 2) == 12
        assert from_4 == ((updates[4:], weights), *rest)
        assert from_8 == ((updates[8:], weights), *rest)
        assert from_12[0] == ([], weights)
    first = [value[-1][0] for value in values]
    (alone,) = get_values(run_ranks(1, partial(train, resume="checkpoint-2", odb=AUTO), tmp_path / "auto"))
    check_coverage([*first, alone[0]])


class Unscaled(NotingTrainer):
    loss_is_scaled_for_ga = False


class Counting(ODBTrainer):
    get_batch_samples = Trainer.get_batch_samples


class Accepting(Model):
    accepts_loss_kwargs = True


def supervise_all(samples: list[dict[str, Any]]) -> dict[str, Any]:
    batch = collate(samples)
    return batch | {"labels": batch["input_ids"].clone()}


HAS_STRATEGIES = "train_sampling_strategy" in TrainingArguments.__dataclass_fields__
GROUPED = {"train_sampling_strategy": "group_by_length"} if HAS_STRATEGIES else {"group_by_length": True}
MISTAKES: dict[str, dict[str, Any]] = {
    "normalised twice: ODBTrainer needs loss_is_scaled_for_ga": {"kind": Unscaled},
    "normalised twice: do not override ODBTrainer's get_batch_samples": {"kind": Counting, "model": Accepting()},
    "or pass Loss(supervised_fn=)": {"data_collator": supervise_all},
    "ODBOptions(updates_per_epoch=...)": {"odb": make_odb(sampler=list(range(sum(SIZES))))},
    "lower ODBOptions.token_budget": {"auto_find_batch_size": True},
    "orders samples for fixed batches": GROUPED,
    "there is no checkpoint": {"resume": "checkpoint-1"},
}


@in_a_rank(run_ranks)
def test_what_would_normalise_twice_or_wrongly_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="normalise twice"):
        make_odb(trainer_divides_loss=True)
    for said, mistake in MISTAKES.items():
        with pytest.raises((UsageError, JobError), match=re.escape(said)):
            train(0, tmp_path, **mistake)
