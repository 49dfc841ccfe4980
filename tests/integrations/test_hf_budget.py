"""The Trainer with a budget that changes: by step, by a metric, and when memory runs out and a step is halved."""

from __future__ import annotations

import json
import math
import os
import random
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.integrations import require

require("transformers")
require("accelerate")

import torch

from odb_ref.integrations.hf import STEP_INFO, ODBOptions, ODBTrainer
from odb_ref.integrations.progress import Intervals
from odb_ref.torch import UsageError
from odb_ref.torch.loop import MemoryFit, count_pairs, split_pairs
from odb_ref.trace.check import check_traces
from tests.integrations.arguments import make_odb
from tests.integrations.common import (
    BUDGET_TOKENS,
    SIZES,
    Samples,
    check_runs,
    check_weights,
    get_weights,
    join,
    run_each,
    run_ranks,
)
from tests.integrations.noting import Log
from tests.integrations.test_hf import make_llama, make_trainer
from tests.integrations.test_sharded import get_whole, make_sharded_trainer, pretend
from tests.torch import pairs
from tests.torch.ranks import get_values, in_a_rank
from tests.torch.test_step_guard import FailingBackward, limited_memory

pytestmark = pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")

MOST = 40
"""The tokens, in several samples, that a rank can hold."""
SURVIVING = {"updates_per_epoch": 3, "survives_out_of_memory": True, "checks_loss": False}
"""Without the check of the loss, whose failures would be counted too."""
ALONE, GUARDED = make_odb(SURVIVING), make_odb(SURVIVING, shard="given")
FIT = MemoryFit(points=(), base_bytes=0, bytes_per_token=1, limit_bytes=1000, threshold=0.9, token_budget=BUDGET_TOKENS)


class Failing(ODBTrainer):
    """Runs out of memory at four points in a step, and records what each step received."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.choose = random.Random(self.args.process_index)
        self.injected = 0
        self.noted = Log()
        self.sizes: list[tuple[int, int, int]] = []
        """By step: the epoch, its round, and the tokens of the batch if it has several samples."""

    def has_too_little(self, samples: int, tokens: int) -> bool:
        """Returns whether a pass should fail."""
        return self.args.process_index == 1 and samples > 1 and tokens > MOST

    def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        info, numbers = inputs[STEP_INFO], inputs["numbers"]
        loss = super().training_step(model, inputs, *args, **kwargs)
        self.noted.note(numbers, info, loss)
        self.sizes.append((info.epoch, info.round, info.padded_tokens if info.local_samples > 1 else 0))
        return loss

    def compute_loss(self, model: Any, inputs: Any, **kwargs: Any) -> Any:
        numbers, place = inputs.pop("numbers"), ""
        samples = len(numbers)
        if STEP_INFO in inputs and self.odb.survives_out_of_memory:
            # Other ranks may not be at the same pass, so gathering concerns only this rank.
            assert torch.equal(self.accelerator.gather_for_metrics(numbers), numbers)
            assert self.accelerator.gather(numbers.sum()).shape == (1,)
        if self.has_too_little(samples, inputs["input_ids"].numel()):
            place = self.choose.choice(["before", "after", "backward", "middle"])
            self.injected += 1
        if place == "before":
            raise torch.OutOfMemoryError("CUDA out of memory: injected")
        hook = None
        if place == "middle":
            # In the backward pass, when the gradients of later layers have already been added.
            layer = next(item for item in model.modules() if isinstance(item, torch.nn.Linear))
            hook = layer.register_forward_pre_hook(lambda _, inputs: (FailingBackward.apply(inputs[0]),))
        try:
            loss = super().compute_loss(model, inputs, **kwargs)
        finally:
            if hook is not None:
                hook.remove()
        if place == "after":
            raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: injected")
        return FailingBackward.apply(loss) if place == "backward" else loss


class Unlucky(Failing):
    """Fails on any rank, by chance, to the very end. Its budget stays."""

    def has_too_little(self, samples: int, tokens: int) -> bool:
        return samples > 1 and self.choose.random() < 0.5

    def accept(self, *_: Any) -> None:
        """Keeps the budget."""

    _accept = accept


def train(rank: int, folder: Path, **settings: Any) -> Any:
    odb = ALONE if os.environ["WORLD_SIZE"] == "1" else GUARDED
    trainer = make_trainer(rank, folder, **({"kind": Failing, "odb": odb} | settings))
    trainer.train()
    assert trainer.noted.numbers == []
    counts = [entry["out_of_memory"] for entry in trainer.state.log_history if "loss" in entry]
    return (trainer.noted.updates, get_weights(trainer.model)), trainer.injected, counts, trainer.sizes


def get_largest(sizes: list[tuple[int, int, int]], *, epoch: int, rounds: int = 0) -> int:
    """Returns the tokens of an epoch's largest batch after some rounds. In the first a rank uses the budget it accepts."""
    return max(tokens for of, number, tokens in sizes if of == epoch and number >= rounds)


VARIANTS: list[dict[str, Any]] = [
    {"num_train_epochs": 2},
    {"kind": Unlucky, "num_train_epochs": 2},
    {"kind": Unlucky, "num_train_epochs": 2, "gradient_accumulation_steps": 3},
]


def train_all(rank: int, folder: Path) -> Any:
    llama = {"model": make_llama(), "kind": Unlucky, "max_steps": 8}
    return [train(rank, folder, **settings) for settings in (*VARIANTS, llama)]


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [2, 1])
def test_batches_that_do_not_fit_go_in_halves_and_change_no_weight(tmp_path: Path, world_size: int) -> None:
    """Checks: WEIGHT, ONCE, COVER. What one rank cannot hold becomes the budget of all, and then fails no more."""
    values = get_values(run_ranks(world_size, train_all, tmp_path))
    for number, variant in enumerate(zip(*values, strict=True)):
        runs, injected, counts, sizes = zip(*variant, strict=True)
        total = sum(injected)
        # Counted over all ranks, and equal in every rank's logs.
        assert all(count == counts[0] and count[-1] == total for count in counts)
        if number < len(VARIANTS):
            check_runs(runs, 2)
        else:
            check_weights(runs, make_llama(), precision=1e-4)
        if number:
            assert total > 1
        elif world_size > 1:
            assert injected[0] == 0 < injected[1]
            for rank, own in enumerate(sizes):
                assert get_largest(own, epoch=1, rounds=rank == 0) <= MOST
        else:
            assert total == 0


class Hopeless(Failing):
    """Holds nothing on one rank."""

    def has_too_little(self, samples: int, tokens: int) -> bool:
        return self.args.process_index == 1


def test_a_sample_that_does_not_fit_alone_ends_training_on_every_rank(tmp_path: Path) -> None:
    results = run_ranks(len(SIZES), partial(train, kind=Hopeless), tmp_path)
    assert [result.error for result in results] == ["JobError", "OutOfMemoryError"], results
    assert "does not fit alone" in results[1].text


# Pairs -----------------------------------------------------------------------------------------------------------------------

PAIRED = SURVIVING | {"token_budget": 150}


class CheckedUnlucky(Unlucky):
    """Checks what each pass receives. Fails by chance, to the end."""

    def compute_loss(self, model: Any, inputs: Any, **kwargs: Any) -> Any:
        pairs.check_pairs(inputs)
        inputs.pop("names")
        return super().compute_loss(model, inputs, **kwargs)


def make_paired(folder: Path, options: dict[str, Any], **settings: Any) -> Any:
    samples = [pairs.make_pair(number) for number in range(SIZES[0])]
    settings |= {"model": pairs.Preference(), "train_dataset": samples, "data_collator": pairs.collate}
    return make_trainer(0, folder, kind=CheckedUnlucky, odb=make_odb(PAIRED | options, shard="given"), **settings)


@in_a_rank(run_ranks)
def test_pairs_that_do_not_fit_go_in_halves_and_change_no_weight(tmp_path: Path) -> None:
    """Checks: WEIGHT, ONCE, COVER."""
    options = {"split": split_pairs, "count": count_pairs}
    trainer = make_paired(tmp_path, options, num_train_epochs=2, gradient_accumulation_steps=3)
    trainer.train()
    noted = trainer.noted
    assert noted.numbers == []
    assert sorted(join(noted.updates)) == sorted([*range(SIZES[0])] * 2)
    run = noted.updates, get_weights(trainer.model)
    check_weights([run], pairs.Preference(), compute_loss=pairs.compute_loss)
    counts = [entry["out_of_memory"] for entry in trainer.state.log_history if "loss" in entry]
    assert counts[-1] == trainer.injected > 1


@in_a_rank(run_ranks)
def test_pairs_whose_layout_nobody_has_said_are_refused_in_the_first_step(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"pass split_pairs and count_pairs of odb_ref.torch.loop"):
        make_paired(tmp_path, {}).train()


# If a rank cannot be helped -----------------------------------------------------------------------------------------------


def train_sharded(rank: int, folder: Path) -> Any:
    for version, name in ((1, "FSDP"), (2, "FSDP 2")):
        with pytest.raises(UsageError, match=f"sharded by {name}, whose collectives run inside the forward pass"):
            make_sharded_trainer(rank, folder, version, odb=GUARDED, pretend=pretend).train()
    odb = replace(GUARDED, memory=FIT)

    class Splitting(Failing):
        def has_too_little(self, samples: int, tokens: int) -> bool:
            assert not (self.args.process_index == 1 and samples > 1 and tokens > 30)
            return False

    trainer = make_sharded_trainer(
        rank, folder, 2, kind=Splitting, odb=odb, pretend=pretend, gradient_accumulation_steps=2
    )
    with limited_memory(lambda: 30.0 if rank == 1 else math.inf):
        trainer.train()
    return trainer.noted.updates, get_whole(trainer.model_wrapped)


def test_a_sharded_model_is_refused_by_name_or_tries_beforehand(tmp_path: Path) -> None:
    # https://github.com/pytorch/torchtitan/issues/1329
    runs = get_values(run_ranks(len(SIZES), train_sharded, tmp_path))
    check_runs(runs)


@in_a_rank(run_ranks)
def test_what_cannot_be_halved_is_refused_before_it_fails(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"a packed row \(layout='packed'\) can be halved only"):
        train(0, tmp_path, odb=make_odb(SURVIVING, layout="packed"))


# Budgets that follow measurements -----------------------------------------------------------------------------------------


class Adapting(Failing):
    """Never runs out of memory."""

    def has_too_little(self, samples: int, tokens: int) -> bool:
        return False


class Halving:
    """Halves the budget at the first evaluation, on one rank only, and raises it again at the fourth."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.seen: list[tuple[float, int]] = []

    def __call__(self, metrics: dict[str, float], current: int) -> int | None:
        self.seen.append((metrics["eval_loss"], current))
        if self.rank == 0:
            return None
        return {1: BUDGET_TOKENS // 2, 4: 10 * BUDGET_TOKENS}.get(len(self.seen))


def grow(step: int, current: int) -> int:
    """Returns the budget of a step."""
    return min(BUDGET_TOKENS, 20 + 4 * step)


def adapt(rank: int, folder: Path, workers: int, is_by_metric: bool) -> Any:
    choose = Halving(rank)
    loader: dict[str, Any] = {"ramp_rounds": 0, "window": 8, "trace": str(folder / "t.ndjson")}
    more: dict[str, Any] = {}
    if is_by_metric:
        more = {"intervals": Intervals(evaluate_samples=25), "budget_from_metrics": choose}
    else:
        loader["budget_schedule"] = grow
    odb = make_odb(more, **loader)
    settings: dict[str, Any] = {"eval_dataset": Samples([1, 2, 3]), "num_train_epochs": 5 if is_by_metric else 2}
    trainer = make_trainer(rank, folder, kind=Adapting, odb=odb, dataloader_num_workers=workers, **settings)
    trainer.train()
    assert trainer.noted.numbers == []
    return (trainer.noted.updates, get_weights(trainer.model)), trainer.sizes, choose.seen


def test_a_budget_by_the_step_or_by_a_metric_is_the_same_on_all_ranks(tmp_path: Path) -> None:
    """Spec: R15.2, R15.3, R15.4. Checks: BUDGET, COVER, WEIGHT, REPLAY. By step, with and without workers. What a rank's metric
    asks for applies on both."""
    cases = [(tmp_path / str(number), *case) for number, case in enumerate(((0, True), (0, False), (2, False)))]
    for folder, *_ in cases:
        folder.mkdir()
    by_metric, *by_step = map(get_values, run_each(len(SIZES), adapt, cases))
    for (folder, _, is_by_metric), found in zip(cases, (by_metric, *by_step), strict=True):
        runs = [run for run, _, _ in found]
        check_runs(runs, 5 if is_by_metric else 2)
        # The checker checks that all ranks form the same rounds under the same budget.
        verdict = check_traces(sorted(folder.glob("*.ndjson")))
        assert verdict.is_ok, verdict
    seen = [calls for _, _, calls in by_metric]
    assert [loss for loss, _ in seen[0]] == [loss for loss, _ in seen[1]]
    assert len(seen[0]) == 5 * sum(SIZES) // 25
    assert [current for _, current in seen[0]] == [BUDGET_TOKENS] * len(seen[0])
    assert [current for _, current in seen[1]][:5] == [BUDGET_TOKENS, *[BUDGET_TOKENS // 2] * 3, 10 * BUDGET_TOKENS]
    for rank, (_, sizes, _) in enumerate(by_metric):
        # Asked for within the first epoch, and dropped in the fourth.
        assert get_largest(sizes, epoch=2, rounds=rank == 0) <= BUDGET_TOKENS // 2
        assert max(get_largest(sizes, epoch=0), get_largest(sizes, epoch=4)) > BUDGET_TOKENS // 2
    (_, sizes, _), _ = by_step[0]
    assert all(tokens <= grow(step, 0) for step, (*_, tokens) in enumerate(sizes))
    assert max(tokens for *_, tokens in sizes) > BUDGET_TOKENS // 2
    assert by_step[0] == by_step[1]


def lower_once(metrics: dict[str, float], current: int) -> int:
    """Returns half of the initial budget."""
    return min(current, BUDGET_TOKENS // 2)


@in_a_rank(run_ranks)
def test_a_budget_that_was_lowered_is_lowered_after_a_checkpoint(tmp_path: Path) -> None:
    """Spec: R15.5. Checks: RESUME, REPLAY."""
    intervals = Intervals(evaluate_samples=20, save_samples=20)
    odb = make_odb({"intervals": intervals, "budget_from_metrics": lower_once})

    def train_on(odb: ODBOptions, checkpoint: Path | None) -> tuple[list[list[int]], list[float]]:
        settings: dict[str, Any] = {"eval_dataset": Samples([1, 2, 3]), "num_train_epochs": 3}
        trainer = make_trainer(0, tmp_path, kind=Adapting, odb=odb, **settings)
        trainer.train(resume_from_checkpoint=checkpoint and str(checkpoint))
        assert trainer.accepted_budget == BUDGET_TOKENS // 2
        return trainer.noted.updates, get_weights(trainer.model)

    updates, weights = train_on(odb, None)
    _, saved, *_ = sorted(tmp_path.glob("checkpoint-*"), key=lambda path: int(path.name.rpartition("-")[2]))
    accepted = json.loads((saved / "odb_loader_0.json").read_text())["accepted"]
    assert accepted == {"metrics": BUDGET_TOKENS // 2}
    rest, again = train_on(replace(odb, budget_from_metrics=None), saved)
    assert 0 < len(rest) < len(updates) - 2
    assert (rest, again) == (updates[-len(rest) :], weights)
