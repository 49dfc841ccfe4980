"""TRL's own trainers, collators and losses, configured by their own arguments, on one and two ranks.

``ODB_TRL_PYTHON`` names the Python of an environment with TRL: ``python -m venv peers && peers/bin/pip install trl``.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integrations.environments import resuming
from tests.integrations.environments.run import run_script

pytestmark = pytest.mark.torch

SAMPLES = 31
BUDGETS = {
    "sft": 4 * 20,
    "guarded": 4 * 20,
    "padding_free": 60,
    "dpo": 2 * 4 * 20,
    "guarded_dpo": 2 * 4 * 20,
    "guarded_reward": 160,
}
"""What the arguments have room for, where no budget is given."""


@pytest.mark.parametrize("world_size", [1, 2])
def test_trl_trains_on_whole_samples_with_the_loss_of_one_process(tmp_path: Path, world_size: int) -> None:
    """Checks: WEIGHT, COVER, BUDGET. Fine-tuning, also with steps that run out of memory, and padding-free over accumulation
    windows, and preference pairs."""
    # https://github.com/NVIDIA-NeMo/RL/issues/719
    ranks = run_script("ODB_TRL_PYTHON", "torch trl", "train_trl.py", tmp_path, world_size)
    for kind, budget in BUDGETS.items():
        found = [rank[kind] for rank in ranks]
        seen = [sample for run in found for batch in run["batches"] for sample in batch]
        assert sorted(seen) == found[0]["samples"], kind
        assert len(seen) == SAMPLES
        for run in found:
            assert all(rows <= budget for rows in run["rows"]), kind
            assert run["error"] < 1e-4, kind
            assert run["epoch"] == 1.0
            # Each sample counts once in what TRL gathers by itself too: no replay, whatever a rank holds.
            if not kind.startswith("guarded"):  # it gathers from nobody, and a pass may be repeated
                assert run["logs"]["num_tokens"] == sum(len(text.split()) for text in seen), kind
            assert run["evaluated"].get("eval_loss") == found[0]["evaluated"].get("eval_loss")
    # Each sample of a stream once, too, over all ranks.
    assert sorted(text for rank in ranks for text in rank["stream"]) == ranks[0]["sft"]["samples"]
    for rank in ranks:
        for kind in ("guarded", "guarded_dpo", "guarded_reward"):
            assert rank[kind]["logs"]["out_of_memory"] == ranks[-1][kind]["failures"] > 0
        packed, unbounded, unpaired, unknown = rank["refused"]
        assert "packing=True fills rows before training" in packed
        assert "pass token_budget=" in unbounded
        assert "loss_type 'sft': this loss is a mean over tokens" in unpaired
        assert "KTOTrainer is not configured here" in unknown


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_checkpoint_goes_on_where_it_was_saved(tmp_path: Path, world_size: int) -> None:
    """Checks: RESUME, REPLAY. In the middle of either epoch: the same batches, logs and weights, to the last bit."""
    ranks = run_script("ODB_TRL_PYTHON", "torch trl", "train_trl.py", tmp_path, world_size, ODB_TASK="resume")
    for kind, steps_an_update in {"sft": 1, "padding_free": 2, "dpo": 1}.items():
        resuming.check([rank[kind] for rank in ranks], steps_an_update)
