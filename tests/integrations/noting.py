"""What a rank notes of a training, by hand or in a Trainer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from odb_ref.integrations.hf import STEP_INFO, ODBTrainer


@dataclass
class Log:
    """One rank's record of a training, by update."""

    updates: list[list[int]] = field(default_factory=list)
    """The sample numbers."""
    losses: list[float] = field(default_factory=list)
    """The part of each update's loss from this rank's batches. Their mean over the ranks is the loss."""
    weights: list[float] = field(default_factory=list)
    numbers: list[int] = field(default_factory=list)
    loss: float = 0.0

    def note(self, numbers: Any, info: Any, loss: Any) -> int:
        """Returns the updates so far if this batch ends one, else 0. It is equal on all ranks."""
        self.numbers += [] if info.is_idle else numbers.tolist()
        self.loss += loss.item()
        if not info.is_update_end:
            return 0
        self.updates.append(self.numbers)
        self.losses.append(self.loss)
        self.numbers, self.loss = [], 0.0
        return len(self.updates)


class NotingTrainer(ODBTrainer):
    """Records the samples of each update, and the part of its loss."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.noted = Log()

    def note(self, inputs: Any, compute: Callable[[], Any]) -> Any:
        """Returns the loss that is computed without the sample numbers of a batch."""
        numbers, info = inputs.pop("numbers"), inputs.get(STEP_INFO)
        loss = compute()
        if info is not None:  # otherwise it evaluates
            self.noted.note(numbers, info, info.scale(loss.detach()))
        return loss

    def compute_loss(self, model: Any, inputs: Any, **kwargs: Any) -> Any:
        return self.note(inputs, lambda: super(NotingTrainer, self).compute_loss(model, inputs, **kwargs))
