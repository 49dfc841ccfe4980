"""How far training has come, in epochs: what schedules, progress bars and logs of every framework go by."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from odb_ref.torch import StepInfo, UsageError


class Progress:
    """Counts updates and samples of an epoch as they are made, and says how many updates all epochs will have taken.

    It begins with an estimate, corrects it by the share of the epoch's samples seen so far, and continues with what an epoch
    has really taken. A schedule goes by it, so it is saved with a checkpoint.
    """

    def __init__(self, updates_per_epoch: float) -> None:
        self.updates_per_epoch = updates_per_epoch
        """The present estimate: that of the beginning until some of the epoch is known."""
        self.epochs = 0.0
        """Epochs trained on, the share of the present one included."""
        self.coverage = 0.0
        """The share of the present epoch's samples that was trained on."""
        self.is_exact = False
        """True when it is known how many samples the epoch has, so that ``coverage`` is not an estimate."""
        self.samples = 0
        """Samples trained on, on all ranks."""
        self._world_size = 0
        self._epoch = -1
        self._updates = 0
        self._begun_at = 0.0
        self._emitted = 0

    def note_update(self, info: StepInfo) -> None:
        """Follows an optimizer update whose last step is ``info``'s."""
        if info.epoch != self._epoch:
            self._epoch, self._begun_at = info.epoch, float(info.epoch)
            self._updates = self._emitted = 0
        if self._world_size not in (0, info.world_size):  # resumed: other ranks, other steps
            self.updates_per_epoch *= self._world_size / info.world_size
            self._updates, self._begun_at = 0, self.epochs
        self._world_size = info.world_size
        self._updates += 1
        self.is_exact = info.progress is not None
        self.samples += info.emitted_samples - self._emitted
        self._emitted = info.emitted_samples
        if info.is_last:
            self.coverage = 1.0
        elif info.progress is not None:
            self.coverage = info.progress
        else:
            # Nobody knows the total: less than all of it, by the best estimate there is.
            begun = self._begun_at - info.epoch
            self.coverage = min(begun + self._updates / self.updates_per_epoch, 1 - (1 - begun) / (1 + self._updates))
        self.epochs = info.epoch + self.coverage
        share = self.epochs - self._begun_at
        if info.is_last or (info.progress is not None and share >= _KNOWN):
            self.updates_per_epoch = self._updates / share

    def state_dict(self) -> dict[str, float]:
        """Returns what `load_state_dict` takes: plain numbers, on every rank the same."""
        return {name: getattr(self, name) for name in _SAVED}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Goes on from there, on as many ranks as there are now.

        Raises: UsageError when this is no such state.
        """
        if set(state) != set(_SAVED):
            raise UsageError(f"this is not how far a training has come: {sorted(state)}")
        for name, value in state.items():
            setattr(self, name, value)


_KNOWN: Final = 0.1
"""The share of an epoch from which on its own pace says more than the estimate: the first windows of an epoch are smaller."""

_SAVED: Final = (
    "updates_per_epoch",
    "epochs",
    "coverage",
    "is_exact",
    "samples",
    "_world_size",
    "_epoch",
    "_updates",
    "_begun_at",
    "_emitted",
)
