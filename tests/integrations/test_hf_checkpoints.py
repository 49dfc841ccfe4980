"""Checkpoints that the Hugging Face Trainer saves at any hook. A resumed run equals one that was not stopped. Spec: R10."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.integrations import require

require("transformers")

from transformers import Trainer, TrainerCallback

from odb_ref.integrations.hf import ODBOptions, enable
from odb_ref.integrations.hf.saving import read_states
from odb_ref.integrations.hf.versions import HAS_TOKEN_COUNT
from odb_ref.torch import UsageError
from tests.integrations.arguments import make_arguments
from tests.integrations.common import run_each, run_ranks
from tests.integrations.test_hf_updates import Texts, collate, make_model
from tests.torch.ranks import get_values

MODES = {"updates": ODBOptions(token_budget=80), "free": ODBOptions(token_budget=80, update_samples=None)}
HOOKS = ("on_step_begin", "on_substep_end", "on_pre_optimizer_step", "on_optimizer_step", "on_step_end")
AT = 3
"""The number of updates before a run is stopped. An epoch has more."""


class Stop(TrainerCallback):
    """Ends training at a hook, and asks for a checkpoint, or saves one at once, as a Trainer does after SIGTERM."""

    def __init__(self, hook: str, trainer: Any = None) -> None:
        setattr(self, hook, self.stop)
        self.trainer = trainer

    def stop(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        if state.global_step < AT or control.should_training_stop:
            return
        control.should_training_stop = True
        if self.trainer is None:
            control.should_save = True
        else:
            self.trainer._save_checkpoint(model, trial=None)


def make_trainer(folder: Path, mode: str | None, **settings: Any) -> Any:
    """Returns a Trainer, which is a plain one without a mode."""
    defaults = {
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 3,
        "num_train_epochs": 1,
        "learning_rate": 0.01,
    }
    args = make_arguments(folder, **defaults | settings)
    trainer = Trainer(model=make_model(), args=args, train_dataset=Texts(45), data_collator=collate)
    return trainer if mode is None else enable(trainer, MODES[mode])


def compare_weights(one: Any, other: Any) -> float:
    """Returns the largest difference between the weights of two trainers."""
    pairs = zip(one.model.parameters(), other.model.parameters(), strict=True)
    return max(float((mine - yours).abs().max()) for mine, yours in pairs)


def stop_and_resume(rank: int, folder: Path, mode: str, hook: str, is_direct: bool) -> tuple[float, int]:
    """Returns the difference of the weights between a resumed run and one that was not stopped, and its updates."""
    whole = make_trainer(folder / "whole", mode)
    whole.train()
    first = make_trainer(folder / "parts", mode)
    first.add_callback(Stop(hook, first if is_direct else None))
    first.train()
    (checkpoint,) = (folder / "parts").glob("checkpoint-*")
    second = make_trainer(folder / "parts", mode)
    second.train(resume_from_checkpoint=str(checkpoint))
    return compare_weights(whole, second), second.state.global_step - whole.state.global_step


CASES = [(mode, hook, False) for mode in MODES for hook in HOOKS]
CASES += [(mode, hook, True) for mode in MODES for hook in ("on_step_begin", "on_pre_optimizer_step", "on_step_end")]


def test_a_run_stopped_at_any_hook_is_resumed_where_it_was(tmp_path: Path) -> None:
    """Checks: ONCE, COVER. An update that was read but not made is not in the checkpoint."""
    cases = [(tmp_path / str(number), *case) for number, case in enumerate(CASES)]
    found = [get_values(results)[0] for results in run_each(1, stop_and_resume, cases)]
    assert dict(zip(CASES, found, strict=True)) == dict.fromkeys(CASES, (0, 0))


def go_on_alone(rank: int, folder: Path) -> list[Any]:
    """Returns the state of a run that resumes from two ranks' checkpoint, and the state in the checkpoint."""
    trainer = make_trainer(folder, "updates", gradient_accumulation_steps=6)
    (checkpoint,) = folder.glob("checkpoint-*")
    trainer.add_callback(Stop("on_step_begin"))
    trainer.train(resume_from_checkpoint=str(checkpoint))
    return read_states(checkpoint)


def stop(rank: int, folder: Path) -> None:
    trainer = make_trainer(folder, "updates")
    trainer.add_callback(Stop("on_step_end"))
    trainer.train()


def test_a_checkpoint_saved_at_once_by_another_number_of_ranks_can_be_resumed(tmp_path: Path) -> None:
    """Files of the earlier ranks are gone. 45 samples are listed as the 48 that two ranks share evenly."""
    get_values(run_ranks(2, stop, tmp_path))
    (states,) = get_values(run_ranks(1, go_on_alone, tmp_path))
    assert len(states) == 1


@pytest.mark.parametrize("changed", [{"gradient_accumulation_steps": 6}, {"per_device_train_batch_size": 4}])
def test_an_epoch_does_not_go_on_with_other_updates(tmp_path: Path, changed: dict[str, int]) -> None:
    """Checks: COVER. With updates of twice the samples the Trainer takes the 5th of 8 for one after the epoch's last. The rest
    of the epoch would not be trained on."""
    if "per_device_train_batch_size" in changed and not HAS_TOKEN_COUNT:
        pytest.skip("an earlier Trainer keeps the batch size of the checkpoint")
    make_trainer(tmp_path, "updates", save_strategy="steps", save_steps=5, max_steps=5).train()
    with pytest.raises(UsageError, match="update_samples cannot change within an epoch"):
        make_trainer(tmp_path, "updates", **changed).train(resume_from_checkpoint=True)


def test_the_next_epoch_does_not_begin_with_other_updates(tmp_path: Path) -> None:
    """The Trainer would count to another epoch, or end before the last one does."""
    trainer = make_trainer(tmp_path, "updates", save_strategy="epoch", num_train_epochs=1)
    trainer.train()
    again = make_trainer(tmp_path, "updates", gradient_accumulation_steps=6, num_train_epochs=2)
    with pytest.raises(UsageError, match=r"updates of the checkpoint hold \d+ samples, and now \d+, so the Trainer"):
        again.train(resume_from_checkpoint=True)


def test_a_checkpoint_that_is_not_there_is_told_from_one_without_a_loader(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, "updates")
    with pytest.raises(UsageError, match="there is no checkpoint"):
        trainer.train(resume_from_checkpoint=str(tmp_path / "none"))
    with pytest.raises(UsageError, match="holds no state of an ODBTrainer's"):
        trainer.train(resume_from_checkpoint=str(tmp_path))


def go_on_from_plain(rank: int, folder: Path) -> list[tuple[float, bool]]:
    """Returns for each checkpoint the difference of our final weights from the plain Trainer's, and whether both logged equal
    epochs and rates.
    """
    settings = {"num_train_epochs": 2, "logging_steps": 1, "max_grad_norm": 0.5}
    plain = make_trainer(folder, None, save_strategy="steps", save_steps=1, **settings)
    plain.train()
    found = []
    for at in (3, 8, 11)[: 3 if plain.args.world_size == 1 else 1]:
        trainer = make_trainer(folder / "ours", "updates", **settings)
        said = f"plain Trainer's checkpoint: training continues after its {at} updates"
        with pytest.warns(RuntimeWarning, match=said):
            trainer.train(resume_from_checkpoint=str(folder / f"checkpoint-{at}"))
        logs = [
            [(e["epoch"], e["learning_rate"]) for e in one.state.log_history if "loss" in e] for one in (plain, trainer)
        ]
        found.append((compare_weights(plain, trainer), logs[0] == logs[1]))
    return found


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_plain_trainers_checkpoint_goes_on_as_the_plain_run(tmp_path: Path, world_size: int) -> None:
    """Checks: UPDATE, COVER. Inside the first epoch of eight updates, at its end, and inside the second. It was refused."""
    for found in get_values(run_ranks(world_size, go_on_from_plain, tmp_path)):
        assert all(error < 1e-6 and is_same for error, is_same in found)


def test_a_plain_trainers_checkpoint_is_refused_where_its_place_cannot_be_told(tmp_path: Path) -> None:
    make_trainer(tmp_path, None, save_strategy="steps", save_steps=3, max_steps=3).train()
    with pytest.raises(
        UsageError, match=r"resumed with update_samples='plain' over .* begin a new training with its weights"
    ):
        make_trainer(tmp_path, "free").train(resume_from_checkpoint=True)


def test_a_trial_keeps_its_checkpoints_by_itself(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, "updates", save_strategy="steps", save_steps=4)
    trainer._get_output_dir = lambda trial: str(tmp_path / "run-0")
    trainer.train()
    assert {path.parent.parent for path in tmp_path.rglob("odb_loader_0.json")} == {tmp_path / "run-0"}


def test_the_arguments_are_the_users(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, "updates", save_strategy="steps", save_steps=4)
    trainer.train()
    assert not trainer.args.ignore_data_skip
    trainer.args.ignore_data_skip = True
    with pytest.warns(RuntimeWarning, match="ignore_data_skip=True has no effect"):
        trainer.train(resume_from_checkpoint=True)
    assert trainer.args.ignore_data_skip
