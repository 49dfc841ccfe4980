"""The loader's files in a checkpoint."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Final, TypedDict

from transformers.trainer import TRAINER_STATE_NAME

from odb_ref.torch import UsageError

STATE_STEM: Final = "odb_loader_"
"""The prefix of these files' names."""


class SavedLoader(TypedDict):
    """What a checkpoint holds for each rank, in addition to what the Trainer saves."""

    loader: Mapping[str, object]
    progress: Mapping[str, float]
    accepted: Mapping[str, int]


def write_state(folder: Path, state: SavedLoader, rank: int, world_size: int) -> None:
    """Saves a rank's state, and removes files that a larger number of ranks has left in the folder."""
    (folder / f"{STATE_STEM}{rank}.json").write_text(json.dumps(state))
    for path in folder.glob(f"{STATE_STEM}*.json"):
        if _get_rank(path) >= world_size:
            path.unlink(missing_ok=True)


def _get_rank(path: Path) -> int:
    return int(path.stem.removeprefix(STATE_STEM))


def read_updates(folder: Path) -> int | None:
    """Returns the number of updates made before a checkpoint, or None if no Trainer has saved one in this folder."""
    path = folder / TRAINER_STATE_NAME
    made: int | None = json.loads(path.read_text())["global_step"] if path.is_file() else None
    return made


def has_states(folder: Path) -> bool:
    """Returns True if an ODBTrainer has saved a checkpoint in this folder."""
    return any(folder.glob(f"{STATE_STEM}*.json"))


def read_states(folder: Path) -> list[SavedLoader]:
    """Returns each rank's position, progress and accepted budgets.

    Raises: UsageError when the folder holds no such states.
    """
    if not folder.is_dir():
        raise UsageError(f"there is no checkpoint {folder}")
    paths = sorted(folder.glob(f"{STATE_STEM}*.json"), key=_get_rank)
    states: list[SavedLoader] = [json.loads(path.read_text()) for path in paths]
    if not states or any(set(state) != SavedLoader.__required_keys__ for state in states):
        raise UsageError(
            f"{folder} holds no state of an ODBTrainer's loader ({STATE_STEM}0.json, one file for each rank). A plain "
            "Trainer's checkpoint can be resumed with update_samples='plain' over a data set with a length, without "
            "max_samples and intervals; otherwise begin a new training with its weights, without resume_from_checkpoint"
        )
    return states


def check_updates(saved: SavedLoader, update_samples: int | None) -> None:
    """Checks that updates hold the same number of samples as in a checkpoint. The Trainer counts epochs in updates.

    Raises: UsageError when they do not: the Trainer would take another epoch to be next, or end before the last one does.
    """
    before = json.loads(str(saved["loader"]["settings"])).get("update_samples")
    if before != update_samples:
        raise UsageError(
            f"the updates of the checkpoint hold {before or 'various numbers of'} samples, and now "
            f"{update_samples or 'various numbers of'}, so the Trainer, which counts updates, would repeat or leave out "
            "samples. Keep per_device_train_batch_size * gradient_accumulation_steps * ranks (ODBOptions(update_samples=)), or "
            "begin a new training with the checkpoint's weights"
        )
