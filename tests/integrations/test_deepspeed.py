"""DeepSpeed's ZeRO on uneven ranks, to the very end, with its own loop, Accelerate and the Trainer.

``ODB_DEEPSPEED_PYTHON`` names the Python of an environment with DeepSpeed:
``python -m venv ds && ds/bin/pip install torch deepspeed transformers accelerate pytest``.
"""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from packaging.version import Version

from odb_ref.integrations.deepspeed import backward
from odb_ref.torch import Batching, Loss, ODBDataLoader, UsageError
from tests.helpers.capture import capture
from tests.integrations.common import SIZES, STEPS, Model, check_coverage, check_weights, join, train_alone
from tests.integrations.environments import resuming
from tests.integrations.environments.run import run_script

PRECISION = 1e-5
"""ZeRO keeps its weights in single precision, whatever the model's precision."""


VARIABLE = "ODB_DEEPSPEED_PYTHON"


@cache
def list_stages() -> str:
    """Returns the stages that are right on processors with any loader. Stage 3 read what it had not received before 0.19.8."""
    asked = "from importlib.metadata import version; print(version('deepspeed'))"
    python = os.environ.get(VARIABLE)
    is_old = python and Version(capture([python, "-c", asked], check=True).stdout) < Version("0.19.8")
    return "12" if is_old else "123"


def run(script: str, folder: Path, ranks: int, **environment: str) -> list[Any]:
    packages = "torch deepspeed transformers accelerate pytest"
    environment = {"ODB_STAGES": list_stages()} | environment
    return run_script(VARIABLE, packages, script, folder, ranks, **environment)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(
    "kinds", ["plain,windows,plain updates", "accelerate,trainer", "accelerate updates,trainer updates"]
)
def test_the_weights_are_those_of_one_process_on_the_union(tmp_path: Path, kinds: str, ranks: int) -> None:
    """Checks: WEIGHT, COVER, ALIGN, UPDATE. Stages 1, 2 and 3, including each update's loss. One of two ranks idles from the
    middle of the epoch on. An update holds the samples that it should, and we print no warning."""
    # https://github.com/modelscope/ms-swift/issues/8102
    found = run("train_deepspeed.py", tmp_path, ranks, ODB_KINDS=kinds)
    # The model of these tests does not take num_items_in_batch.
    for rank in found:
        assert [text for text in rank.pop("said") if "is not passed num_items_in_batch" not in text] == []
    for kind in kinds.split(","):
        for stage in list_stages():
            numbers, losses, weights = zip(*(rank[f"{kind} {stage}"] for rank in found), strict=True)
            updates = [join(update) for update in zip(*numbers, strict=True)]
            if "updates" in kind:
                assert [len(update) for update in updates] == [8, 8, 8, 7]
                assert "trainer" in kind or sorted(updates[1]) == [*range(8, 16)]
            elif ranks == len(SIZES):
                count = STEPS if kind == "plain" else -(-STEPS // 2)
                assert [len(updates) for updates in numbers] == [count] * ranks, (kind, stage)
            runs = list(zip(numbers, weights, strict=True))
            check_coverage(runs)
            check_weights(runs, Model(), precision=PRECISION)
            wanted = train_alone(Model(), updates)
            assert [sum(parts) / ranks for parts in zip(*losses, strict=True)] == pytest.approx(wanted, rel=PRECISION)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("kind", ["plain", "accelerate", "trainer", "trainer updates"])
def test_a_checkpoint_goes_on_where_it_was_saved(tmp_path: Path, kind: str, ranks: int) -> None:
    """Checks: RESUME, REPLAY. Stages 1, 2 and 3, in the middle of an epoch: the same batches, losses and weights, to the last
    bit."""
    found = run("resume_deepspeed.py", tmp_path, ranks, ODB_KIND=kind)
    for stage in list_stages():
        resuming.check([rank[stage] for rank in found], 1 if "trainer" in kind else 2)


@pytest.mark.parametrize("ranks", [1, 2])
def test_stages_1_and_2_read_each_others_checkpoints_and_stage_3_its_own(tmp_path: Path, ranks: int) -> None:
    """Checks: RESUME. DeepSpeed itself refuses a change from or to stage 3, without a message."""
    for found in run("resume_deepspeed.py", tmp_path, ranks, ODB_KIND="stages"):
        assert len(found) == len(list_stages()) * (len(list_stages()) - 1)
        for change, run_on in found.items():
            if "3" in change:
                assert run_on == {"stopped": ""}, change
                continue
            whole, part = run_on["whole"], run_on["part"]
            assert part["batches"], change
            assert part["batches"] == whole["batches"][-len(part["batches"]) :], change
            assert part["weights"] == pytest.approx(whole["weights"], abs=PRECISION), change


def test_an_engine_that_counts_other_batches_to_an_update_is_to_count_none() -> None:
    """With update_samples the loader takes no accumulation_steps, so the same number in both would also be refused."""
    engine: Any = SimpleNamespace(gradient_accumulation_steps=lambda: 4)
    with (
        ODBDataLoader(
            [torch.ones(3)] * 8,
            token_budget=30,
            update_samples=8,
            batching=Batching(length_fn=len),
            loss=Loss(scaling="samples"),
        ) as loader,
        pytest.raises(UsageError, match="set gradient_accumulation_steps to 1 in DeepSpeed's configuration"),
    ):
        for _, info in loader.steps():
            backward(engine, torch.zeros(()), info)


REFUSED = {
    "plain: other steps in the configuration": "gradient_accumulation_steps=4, but the loader has accumulation_steps=2",
    "plain: batch sizes that imply other steps": "gradient_accumulation_steps=4, but the loader has accumulation_steps=2",
    "plain: the loader as training_data": "must be a torch Dataset",
    "accelerate: steps in the configuration": "leave it at 1 and pass update_samples to the ODBDataLoader",
    "accelerate: told to expect a division": "Loss(is_divided_by_trainer=True) is wrong with Accelerate",
    "accelerate: an automatic batch size": "set an integer value in `train_micro_batch_size_per_gpu`",
    "trainer: other steps in the configuration": "ds gradient_accumulation_steps=4 vs hf gradient_accumulation_steps=2",
    "trainer: a batch size of the whole job": "ds train_batch_size=7 vs hf",
    "trainer: other clipping": "ds gradient_clipping=1.0 vs hf max_grad_norm=0",
    "trainer: a schedule in the configuration": "remove scheduler from it and set lr_scheduler_type=",
}
REFUSED_ON_SEVERAL = {
    "plain: other ranks": "averages gradients over 2 ranks, but the loader's weights are for 1",
    "accelerate: a schedule in the configuration": "schedule take 2 steps in each update",
}


@pytest.mark.parametrize(("stage", "ranks"), [(1, 1), (2, 2), (3, 2)])
def test_a_newcomers_mistake_is_right_or_refused_on_every_rank(tmp_path: Path, stage: int, ranks: int) -> None:
    """Checks: WEIGHT, COVER. Nothing is silently wrong: weights and schedules are as they should be, or a message says what to
    do."""
    wanted = REFUSED | (REFUSED_ON_SEVERAL if ranks > 1 else {})
    if str(stage) not in list_stages():
        pytest.skip("before 0.19.8, DeepSpeed is wrong on processors at stage 3, with any loader")
    for found in run("mistakes_deepspeed.py", tmp_path, ranks, ODB_STAGES=str(stage)):
        assert len(found) == 28
        for case, said in found.items():
            assert said == "right" or wanted.get(case, "nothing") in said, (case, said)
            assert (said == "right") == (case not in wanted), (case, said)
