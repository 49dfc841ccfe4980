"""TRL's own trainers, collators and losses, configured by their own arguments, on one and two ranks.

``ODB_TRL_PYTHON`` names the Python of an environment with TRL: ``python -m venv peers && peers/bin/pip install trl``.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integrations.environments import resuming
from tests.integrations.environments.run import run_script

SAMPLES = 31
BUDGETS = {
    "sft": 4 * 20,
    "guarded": 4 * 20,
    "padding_free": 60,
    "dpo": 2 * 4 * 20,
    "guarded_dpo": 2 * 4 * 20,
    "guarded_reward": 160,
}
"""What the arguments have room for if no budget is given."""


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
            # Each sample also counts once in what TRL itself gathers: no replay, whatever a rank holds.
            if not kind.startswith("guarded"):  # it does not gather, and a pass may be repeated
                assert run["logs"]["num_tokens"] == sum(len(text.split()) for text in seen), kind
            assert run["evaluated"].get("eval_loss") == found[0]["evaluated"].get("eval_loss")
    # Each sample of a stream also comes once, over all ranks.
    assert sorted(text for rank in ranks for text in rank["stream"]) == ranks[0]["sft"]["samples"]
    for rank in ranks:
        for kind in ("guarded", "guarded_dpo", "guarded_reward"):
            assert rank[kind]["logs"]["out_of_memory"] == ranks[-1][kind]["failures"] > 0
        packed, unbounded, unpaired, unknown = rank["refused"]
        assert "packing=True fills rows before training" in packed
        assert "pass token_budget=" in unbounded
        assert "loss_type 'sft': this loss is a mean over tokens" in unpaired
        assert "KTOTrainer is not supported" in unknown


@pytest.mark.parametrize("world_size", [1, 2])
def test_the_updates_are_those_of_trl(tmp_path: Path, world_size: int) -> None:
    """Checks: UPDATE, WEIGHT. By default, losses, norms, rates, epochs, tokens and weights are those of its own trainers.

    TRL averages over micro-batches, of 4 and of 3 pairs alike. If one process ends unevenly, a mean over pairs differs.
    """
    ranks = run_script("ODB_TRL_PYTHON", "torch trl", "train_trl.py", tmp_path, world_size, ODB_TASK="compare")
    for kind, (plain, ours) in ranks[0].items():
        (plain_logs, plain_steps, plain_weights), (our_logs, our_steps, our_weights) = plain, ours
        assert our_steps == plain_steps, kind
        assert len(our_logs) == len(plain_logs), kind
        is_alike = kind != "dpo, an uneven end" or world_size == 2  # two ranks fill up an uneven end
        for mine, entry in zip(our_logs, plain_logs, strict=True):
            assert mine == pytest.approx(entry, rel=1e-4 if is_alike else 0.1, abs=1e-6), kind
        assert our_weights == pytest.approx(plain_weights, abs=1e-6 if is_alike else 0.01), kind
        assert is_alike or our_weights != pytest.approx(plain_weights, abs=1e-4)


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_checkpoint_goes_on_where_it_was_saved(tmp_path: Path, world_size: int) -> None:
    """Checks: RESUME, REPLAY. In the middle of either epoch: the same batches, logs and weights, to the last bit."""
    ranks = run_script("ODB_TRL_PYTHON", "torch trl", "train_trl.py", tmp_path, world_size, ODB_TASK="resume")
    for kind in ("sft", "padding_free", "dpo"):
        resuming.check([rank[kind] for rank in ranks])
