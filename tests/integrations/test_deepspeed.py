"""DeepSpeed's ZeRO over uneven ranks, to the very end: its own loop, Accelerate, and the Trainer.

``ODB_DEEPSPEED_PYTHON`` names the Python of an environment with DeepSpeed:
``python -m venv ds && ds/bin/pip install torch deepspeed transformers accelerate pytest``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from tests.integrations.common import SIZES, STEPS, Model, check_coverage, check_weights
from tests.integrations.environments import resuming
from tests.integrations.environments.run import run_script

pytestmark = pytest.mark.torch

PRECISION = 1e-5
"""ZeRO keeps its weights in single precision, whatever the model's."""


def run(script: str, folder: Path, ranks: int, **environment: str) -> list[Any]:
    packages = "torch deepspeed transformers accelerate pytest"
    return run_script("ODB_DEEPSPEED_PYTHON", packages, script, folder, ranks, **environment)


@pytest.mark.parametrize(("kinds", "updates"), [("plain,windows", (11, 6)), ("accelerate,trainer", (6, 6))])
def test_the_weights_are_those_of_one_process_on_the_union(
    tmp_path: Path, kinds: str, updates: tuple[int, int]
) -> None:
    """Checks: WEIGHT, COVER, ALIGN. Stages 1, 2 and 3; one rank idles from the middle of the epoch on."""
    # https://github.com/modelscope/ms-swift/issues/8102
    found = run("train_deepspeed.py", tmp_path, len(SIZES), ODB_KINDS=kinds)
    assert updates[0] in (STEPS, -(-STEPS // 2))
    for kind, count in zip(kinds.split(","), updates, strict=True):
        for stage in (1, 2, 3):
            runs = [rank[f"{kind} {stage}"] for rank in found]
            assert [len(numbers) for numbers, _ in runs] == [count] * len(SIZES), (kind, stage)
            check_coverage(runs)
            check_weights(runs, Model(), precision=PRECISION)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("kind", ["plain", "accelerate", "trainer"])
def test_a_checkpoint_goes_on_where_it_was_saved(tmp_path: Path, kind: str, ranks: int) -> None:
    """Checks: RESUME, REPLAY. Stages 1, 2 and 3, in the middle of an epoch: the same batches, losses and weights, to the last
    bit."""
    found = run("resume_deepspeed.py", tmp_path, ranks, ODB_KIND=kind)
    for stage in "123":
        resuming.check([rank[stage] for rank in found], 1 if kind == "trainer" else 2)
