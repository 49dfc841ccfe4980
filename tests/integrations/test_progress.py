"""Schedules, progress and coverage: the updates of an epoch are estimated and corrected, but never decide a rate."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.integrations import require

require("transformers")

import torch
from odb_sim.inputs.lengths import load_lengths
from torch.utils.data import Dataset
from transformers import Trainer

from odb_ref.integrations.hf import STEP_INFO, ODBOptions, enable
from odb_ref.integrations.progress import Intervals, Progress
from odb_ref.torch import ODBDataLoader, StepInfo, UsageError
from tests.helpers.options import nested
from tests.integrations.arguments import make_odb
from tests.integrations.common import BUDGET_TOKENS, OPTIONS, SIZES, Samples, find_due, run_ranks
from tests.integrations.noting import NotingTrainer
from tests.integrations.test_hf import GIVEN, make_trainer
from tests.torch.data import Numbers, Stream
from tests.torch.ranks import get_values


class Lengths(Dataset[Any]):
    """Samples of the lengths of a real data set."""

    def __init__(self, count: int) -> None:
        self.lengths = load_lengths("mm_mix_real").tokens[:count].tolist()
        self.reads = 0

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> dict[str, Any]:
        self.reads += 1
        return {"input_ids": torch.zeros(self.lengths[index], dtype=torch.int8)}


def count(rank: int, shard: str) -> Any:
    dataset = Lengths(2000 if shard == "auto" else 800 + 800 * rank)
    options = {"token_budget": 8192, "window": 256, "loss_scaling": "none", "shard": shard, "shuffle": True}
    with ODBDataLoader(dataset, **nested(collate_fn=len, timeout_s=30, **options)) as loader:
        before = torch.get_rng_state()
        estimate, reads = loader.estimate_steps(256), dataset.reads
        assert torch.equal(before, torch.get_rng_state())
        progress = Progress(estimate)
        guesses = []
        for _, info in loader.steps():
            progress.note_step(info)
            guesses.append(progress.updates_per_epoch)
        ends = progress.epochs, progress.coverage, progress.samples
        return estimate, reads, len(guesses), guesses, ends, sum(1 for _ in loader.steps())


@pytest.mark.parametrize("shard", ["auto", "given"])
def test_the_steps_of_an_epoch_are_estimated_from_some_lengths_and_corrected(shard: str) -> None:
    """The estimate is within 10 % before the epoch and in its second half, and within 1 % before the second epoch."""
    values = get_values(run_ranks(2, count, shard))
    estimates, reads, steps, guesses, ends, second = zip(*values, strict=True)
    assert len(set(estimates)) == len(set(steps)) == 1
    assert sum(reads) == (256 if shard == "auto" else 512)
    assert abs(estimates[0] / steps[0] - 1) < 0.1
    for guess in guesses:
        assert guess[-1] == steps[0]
        assert abs(guess[-1] - second[0]) <= max(1, 0.01 * second[0])  # one step, or a hundredth
        if shard == "auto":
            assert all(abs(late / steps[0] - 1) < 0.1 for late in guess[steps[0] // 2 :])
    print(f"{shard}: estimated {estimates[0]}, taken {steps[0]}, in the second epoch {second[0]}")
    assert {end[:2] for end in ends} == {(1.0, 1.0)}
    assert {end[2] for end in ends} == {2000 if shard == "auto" else 2400}


def test_a_stream_and_an_order_of_ones_own_are_not_read_for_an_estimate() -> None:
    for dataset, options in ((Stream(0, 9), {}), (Numbers(0, 9), {"sampler": [1, 2]})):
        with (
            ODBDataLoader(dataset, token_budget=9, **nested(**options)) as loader,
            pytest.raises(UsageError, match="a map-style data set without a sampler of your own"),
        ):
            loader.estimate_steps()


def test_progress_goes_on_in_the_middle_of_an_epoch() -> None:
    """From any update, also if the number of samples is unknown, and on another number of ranks."""
    options = OPTIONS | {"shuffle": True, "collate_fn": len, "loss_scaling": "none"}
    with ODBDataLoader(Samples(range(sum(SIZES))), token_budget=BUDGET_TOKENS, **nested(**options)) as loader:
        known = [info for _ in range(2) for _, info in loader.steps()]
    unknown = [replace(info, progress=None) for info in known]
    per_epoch = sum(info.epoch == 0 for info in known)
    for infos in (known, unknown):
        whole, states = Progress(3), []
        for info in infos:
            whole.note_step(info)
            states.append(whole.state_dict())
        assert (whole.epochs, whole.coverage, whole.samples) == (2.0, 1.0, 2 * sum(SIZES))
        assert whole.updates_per_epoch == len(infos) - per_epoch
        for begin in range(1, len(infos)):
            resumed = Progress(5)
            resumed.load_state_dict(json.loads(json.dumps(states[begin - 1])))
            for info, state in zip(infos[begin:], states[begin:], strict=True):
                resumed.note_step(info)
                assert resumed.state_dict() == state
    # In the middle of the second epoch two ranks take over.
    middle = per_epoch + 4
    wider = Progress(5)
    wider.load_state_dict(states[middle - 1])
    before = wider.epochs
    for info in unknown[middle:]:
        wider.note_step(replace(info, world_size=2))
        assert before < wider.epochs <= 2
        before = wider.epochs
    assert (wider.epochs, wider.samples) == (2.0, 2 * sum(SIZES))
    with pytest.raises(UsageError, match="not a state of Progress"):
        wider.load_state_dict({"epochs": 1.0})


# The Trainer -------------------------------------------------------------------------------------------------------------


def train(folder: Path, **settings: Any) -> Any:
    odb = settings.pop("odb")
    resume = settings.pop("resume", None)
    trainer = make_trainer(0, folder, kind=Plain, odb=odb, lr_scheduler_type="linear", **settings)
    assert type(trainer).__mro__[1] is Trainer
    enable(trainer, odb)
    trainer.train(resume_from_checkpoint=resume and str(folder / resume))
    history = trainer.state.log_history
    rates = [(entry["epoch"], entry["learning_rate"]) for entry in history if "learning_rate" in entry]
    coverage = [entry["train_coverage"] for entry in history if "loss" in entry]
    state = trainer.state
    return rates, coverage, (state.global_step, state.max_steps, state.epoch), history[-1]


class Plain(Trainer):  # type: ignore[misc]
    """A third party's Trainer that knows nothing of an `ODBTrainer`."""

    def __init__(self, *args: Any, odb: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        inputs.pop("numbers")
        return super().compute_loss(model, inputs, *args, **kwargs)


def train_all(rank: int, folder: Path) -> Any:
    own = make_odb()
    wrong = replace(own, updates_per_epoch=2)
    return [
        train(folder, odb=wrong, num_train_epochs=2),
        train(folder, odb=own, num_train_epochs=1.5, gradient_accumulation_steps=2),
        train(folder, odb=replace(own, max_samples=40), num_train_epochs=9),
        train(folder, odb=wrong, num_train_epochs=2, save_strategy="steps", save_steps=5),
        train(folder, odb=wrong, num_train_epochs=2, resume="checkpoint-5"),
    ]


def test_a_schedule_goes_by_the_samples_and_ends_with_the_training(tmp_path: Path) -> None:
    """With a guess of 2 updates for 11, none of them has a rate of 0. Epochs may end in the middle, or at a sample count."""
    # https://github.com/axolotl-ai-cloud/axolotl/issues/3152
    (value,) = get_values(run_ranks(1, train_all, tmp_path))
    samples = sum(SIZES)
    guessed, broken, counted, saved, resumed = value
    for rates, coverage, (steps, bound, epoch), last in (guessed, broken, counted):
        assert bound == steps == len(rates)
        assert all(rate > 0 for _, rate in rates)
        assert sorted(rates, key=lambda entry: -entry[1]) == rates
        assert all(abs(at % 1 - share) < 1e-9 or share == 1 for (at, _), share in zip(rates, coverage, strict=True))
        end = 40 / samples if last is counted[3] else (1.5 if last is broken[3] else 2)
        assert end <= epoch < end + 0.3
        # The rate of an update is what the schedule gives for the samples seen before it.
        for (before, _), (_, rate) in pairwise(rates):
            assert rate == pytest.approx(0.3 * (1 - before / end), abs=1e-9)
        assert last["train_samples_per_second"] == pytest.approx(epoch * samples / last["train_runtime"], rel=0.01)
    assert saved[0] == guessed[0]
    assert resumed[0] == guessed[0]
    made, last = (2 - resumed[0][4][0]) * samples, resumed[3]
    assert last["train_samples_per_second"] == pytest.approx(made / last["train_runtime"], rel=0.01)


# By samples and by tokens ------------------------------------------------------------------------------------------------

INTERVALS = Intervals(evaluate_samples=10, save_tokens=150)


def train_by_samples(rank: int, folder: Path) -> Any:

    class Noting(NotingTrainer):
        infos: tuple[StepInfo, ...] = ()

        def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            self.infos += (inputs[STEP_INFO],)
            return super().training_step(model, inputs, *args, **kwargs)

    def train(resume: int = 0) -> Any:
        odb = replace(GIVEN, intervals=INTERVALS)
        settings: dict[str, Any] = {"num_train_epochs": 2, "gradient_accumulation_steps": 2}
        trainer = make_trainer(rank, folder, kind=Noting, odb=odb, eval_dataset=Samples([1, 2]), **settings)
        trainer.train(resume_from_checkpoint=str(folder / f"checkpoint-{resume}") if resume else None)
        evaluated = [entry["step"] for entry in trainer.state.log_history if "eval_loss" in entry]
        return trainer.infos, evaluated, trainer.progress.samples, trainer.progress.tokens

    whole = train()
    saved = sorted(int(path.name.removeprefix("checkpoint-")) for path in folder.glob("checkpoint-*"))
    return whole, saved, train(saved[1])


def test_it_evaluates_and_saves_by_samples_and_by_tokens(tmp_path: Path) -> None:
    """At the update that reaches them, on all ranks, and after a checkpoint at the same points as without it."""
    values = get_values(run_ranks(len(SIZES), train_by_samples, tmp_path))
    for (infos, evaluated, samples, tokens), saved, (rest, again, *ends) in values:
        wanted, kept = find_due(infos, samples=10, tokens=150)
        assert (evaluated, saved) == (wanted, kept)
        assert len(evaluated) >= 4 and len(saved) >= 3 and evaluated != saved
        assert (samples, tokens) == (2 * sum(SIZES), sum(info.global_tokens for info in infos))
        # The earlier logs are in the checkpoint.
        assert (again, ends) == (evaluated, [samples, tokens])
        assert len(rest) == len(infos) - 2 * saved[1]
    with pytest.raises(UsageError, match="save_tokens must be at least 1"):
        Intervals(save_tokens=0)


def test_settings_of_a_file_are_options() -> None:
    found = ODBOptions.from_settings({"token_budget": 90, "window": 4, "intervals": {"save_samples": 3}})
    assert found == ODBOptions(token_budget=90, loader=nested(window=4), intervals=Intervals(save_samples=3))
