"""LLaMA-Factory's own stages, started with its own settings, on one and two ranks.

``ODB_LLAMAFACTORY_PYTHON`` names the Python of an environment with it: ``python -m venv lf && lf/bin/pip install ...``.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.integrations.environments import resuming
from tests.integrations.environments.run import run_script

FREE = {"odb_update_samples": None, "odb_window": 12, "odb_timeout_s": 30}
"""Free mode, with updates that one process can train on again."""


def run(folder: Path, stage: str, ranks: int, *, is_plain: bool = False, **settings: Any) -> list[Any]:
    environment = {"ODB_STAGE": stage, "ODB_SETTINGS": json.dumps(settings)} | ({"ODB_PLAIN": "1"} if is_plain else {})
    script = "train_llamafactory.py"
    return run_script("ODB_LLAMAFACTORY_PYTHON", "llamafactory pytest", script, folder, ranks, **environment)


@pytest.mark.parametrize(
    ("stage", "ranks", "budget", "settings"),
    [
        ("sft", 2, 4 * 24, {"gradient_accumulation_steps": 2}),
        ("sft", 1, 64, {"odb_token_budget": 64, "disable_shuffling": True}),
        ("pt", 1, 4 * 24, {"packing": False}),
        ("dpo", 1, 2 * 4 * 24, {}),
        ("dpo", 2, 2 * 4 * 24, {"pref_loss": "orpo", "odb_survives_out_of_memory": True}),
    ],
)
def test_a_stage_trains_on_whole_samples_with_the_loss_of_one_process(
    tmp_path: Path, stage: str, ranks: int, budget: int, settings: dict[str, Any]
) -> None:
    """Checks: WEIGHT, COVER, BUDGET. The padding of its collators counts. A pair is two rows, even if a step runs out of
    memory."""
    found = run(tmp_path, stage, ranks, **FREE, **settings)
    seen = [sample for run in found for batch in run["batches"] for sample in batch]
    assert sorted(seen) == found[0]["samples"]
    assert len(seen) == 31
    for rank in found:
        assert max(rank["rows"]) <= budget
        assert rank["error"] < 1e-4
        assert rank["epoch"] == 1.0
        assert rank["failures"][1] == found[-1]["failures"][0]
    assert bool(found[-1]["failures"][0]) == ("odb_survives_out_of_memory" in settings)


LOGGED = (
    "loss",
    "grad_norm",
    "learning_rate",
    "epoch",
    "step",
    "rewards/margins",
    "rewards/accuracies",
    "logps/chosen",
)
"""What is logged about updates. ``logits/*`` are means over padding too."""


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(
    ("stage", "settings"),
    [
        ("sft", {"gradient_accumulation_steps": 2}),
        ("pt", {"packing": False}),
        ("dpo", {}),
        ("dpo", {"gradient_accumulation_steps": 2, "max_samples": 24}),  # gives all micro-batches equally many pairs
    ],
)
def test_the_updates_are_those_of_llamafactory(
    tmp_path: Path, stage: str, ranks: int, settings: dict[str, Any]
) -> None:
    """Checks: UPDATE, WEIGHT. By default, losses, rates, epochs and weights are those of LLaMA-Factory itself."""
    settings = settings | {"save_strategy": "epoch", "num_train_epochs": 2, "lr_scheduler_type": "linear"}
    found = []
    for is_plain in (True, False):
        folder = tmp_path / f"plain-{is_plain}"
        folder.mkdir()
        found.append(run(folder, stage, ranks, is_plain=is_plain, **settings)[0])
    plain, ours = found
    assert len(ours["logs"]) == len(plain["logs"])
    for mine, entry in zip(ours["logs"], plain["logs"], strict=True):
        kept = [{key: value for key, value in one.items() if key in LOGGED} for one in (mine, entry)]
        assert kept[0] == pytest.approx(kept[1], rel=1e-4, abs=1e-6)
    assert ours["weights"] == pytest.approx(plain["weights"], abs=1e-6)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(
    ("stage", "settings"), [("sft", {"gradient_accumulation_steps": 2}), ("pt", {"packing": False}), ("dpo", {})]
)
def test_a_checkpoint_goes_on_where_it_was_saved(
    tmp_path: Path, stage: str, ranks: int, settings: dict[str, Any]
) -> None:
    """Checks: RESUME, REPLAY. In the middle of an epoch: the same updates, logs and weights, to the last bit."""
    settings = resuming.SETTINGS | settings
    whole = run(tmp_path, stage, ranks, **settings)
    step = resuming.pick_middles(whole[0]["logs"])[0]
    checkpoint = str(tmp_path / f"out-{stage}" / f"checkpoint-{step}")
    parts = run(tmp_path, stage, ranks, **settings, resume_from_checkpoint=checkpoint)
    found = [{"whole": one, "steps": [step], "parts": [part]} for one, part in zip(whole, parts, strict=True)]
    resuming.check(found)


def test_what_packs_beforehand_and_what_is_not_known_is_refused(tmp_path: Path) -> None:
    ((packing, pretraining, stage, bco),) = run(tmp_path, "refused", 1)
    assert packing == pretraining
    assert "set packing: false" in packing
    assert stage == "stage 'rm' is not supported: use one of pt, sft, dpo"
    assert "pref_bco_weight: its baseline is a running mean over the batches of all ranks" in bco
