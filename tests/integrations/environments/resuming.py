"""A training that saves on the way, and one resumed from its checkpoints, which must do the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

SETTINGS: dict[str, Any] = {
    "num_train_epochs": 2,
    "save_strategy": "steps",
    "save_steps": 1,
    "optim": "adamw_torch",
    "lr_scheduler_type": "linear",
    "learning_rate": 0.05,
}
"""An optimizer with a memory and a falling rate, which must both be resumed."""
OF_A_PROCESS = ("runtime", "per_second", "num_tokens", "train_loss")
"""Suffixes of logged values that are not compared: times, the tokens that TRL counts from 0 in each process, and the mean loss
of the updates of one process, which `check` compares separately."""


def describe(trainer: Any, batches: list[list[str]]) -> dict[str, Any]:
    """Returns a record of a training: the samples of its batches, its logs, and its final weights."""
    weights = torch.cat([parameter.detach().flatten() for parameter in trainer.model.parameters()])
    logs = [
        {key: value for key, value in entry.items() if not key.endswith(OF_A_PROCESS)}
        for entry in trainer.state.log_history
    ]
    mean = trainer.state.log_history[-1]["train_loss"]
    return {"batches": batches, "logs": logs, "weights": weights.tolist(), "train_loss": mean}


def go_on(train: Callable[[str | None], dict[str, Any]]) -> dict[str, Any]:
    """Runs a whole training, and one resumed from the middle of each epoch. ``train`` gets the checkpoint's name."""
    whole = train(None)
    steps = pick_middles(whole["logs"])
    return {"whole": whole, "steps": steps, "parts": [train(f"checkpoint-{step}") for step in steps]}


def pick_middles(logs: list[dict[str, Any]]) -> list[int]:
    """Returns for each of two epochs an update inside it that is not its last."""
    epochs = {entry["step"]: entry["epoch"] for entry in logs if "loss" in entry}
    return [[step for step, at in epochs.items() if epoch < at < epoch + 1][-1] for epoch in (0, 1)]


def check(found: list[dict[str, Any]], steps_an_update: int = 1) -> None:
    """Checks that each rank's resumed parts equal the rest of its whole training, to the last bit."""
    for rank in found:
        whole = rank["whole"]
        assert len(rank["parts"]) == len(rank["steps"])
        for step, part in zip(rank["steps"], rank["parts"], strict=True):
            assert part["batches"] == whole["batches"][step * steps_an_update :]
            assert part["batches"]
            # A Trainer continues the logs of its checkpoint.
            assert part["logs"] == whole["logs"][-len(part["logs"]) :]
            assert len(part["logs"]) >= len(part["batches"]) / steps_an_update
            assert part["weights"] == whole["weights"]
            if "train_loss" in part:
                losses = [entry["loss"] for entry in part["logs"][step:] if "loss" in entry]
                # An earlier Trainer (5.6) divides by all updates, although it sums only those of its own process.
                counts = (len(losses), step + len(losses))
                assert any(part["train_loss"] == pytest.approx(sum(losses) / count, rel=1e-6) for count in counts)
