"""How far training has come, in epochs: what schedules, progress bars and logs of every framework go by."""

from __future__ import annotations

from odb_ref.torch import StepInfo


class Progress:
    """Counts updates and samples of an epoch as they are made, and says how many updates all epochs will have taken.

    It begins with an estimate, corrects it by the share of the epoch's samples seen so far, and continues with what an epoch
    has really taken.
    """

    def __init__(self, updates_per_epoch: float, *, accumulation_steps: int = 1) -> None:
        self.updates_per_epoch = updates_per_epoch
        """The present estimate: that of the beginning until some of the epoch is known."""
        self.epochs = 0.0
        """Epochs trained on, the share of the present one included."""
        self.coverage = 0.0
        """The share of the present epoch's samples that was trained on."""
        self.is_exact = False
        """True when it is known how many samples the epoch has, so that ``coverage`` is not an estimate."""
        self.samples = 0
        """Samples trained on, on all ranks; where nobody knows how many an epoch has, since training began in this process."""
        self._accumulation_steps = accumulation_steps
        self._epoch: int | None = None
        self._updates = 0
        self._begun_at = 0.0
        self._emitted = 0

    def note_update(self, info: StepInfo) -> None:
        """Follows an optimizer update whose last step is ``info``'s."""
        if info.epoch != self._epoch:
            self._begin(info)
        self._updates += 1
        self.is_exact = info.progress is not None
        if info.progress:
            total = round(info.emitted_samples / info.progress)
            self.samples = info.epoch * total + info.emitted_samples
        else:
            self.samples += info.emitted_samples - self._emitted
        self._emitted = info.emitted_samples
        if info.is_last:
            self.coverage = 1.0
        elif info.progress is not None:
            self.coverage = info.progress
        else:
            # Nobody knows the total: less than all of it, by the best estimate there is.
            self.coverage = min(self._updates / self.updates_per_epoch, 1 - 1 / (1 + self._updates))
        self.epochs = info.epoch + self.coverage
        share = self.epochs - self._begun_at
        if info.is_last or (info.progress is not None and share >= _KNOWN):
            self.updates_per_epoch = self._updates / share

    def _begin(self, info: StepInfo) -> None:
        """Begins an epoch, or goes on in the middle of one."""
        self._epoch, self._updates = info.epoch, 0
        self._emitted, before = 0, 0.0
        if info.step >= self._accumulation_steps:  # resumed
            self._emitted = info.emitted_samples - info.global_samples
            before = self._emitted / info.emitted_samples * info.progress if info.progress else 0.0
        self._begun_at, self.coverage = info.epoch + before, before


_KNOWN = 0.1
"""The share of an epoch from which on its own pace says more than the estimate: the first windows of an epoch are smaller."""
