"""How far training has come, in epochs, samples and tokens: what schedules, progress bars and logs of every framework go by,
and when to evaluate and to save.

In your own loop, as under Accelerate::

    progress = Progress(loader.estimate_steps())
    intervals = Intervals(save_samples=100_000, evaluate_tokens=50_000_000)
    for batch, info in loader.steps():
        ...
        progress.note_step(info)
        if intervals.is_save_due(progress):
            accelerator.save_state(folder)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
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
        self.tokens = 0
        """Tokens trained on, on all ranks, without padding."""
        self._samples_before = 0
        self._tokens_before = 0
        self._update_tokens = 0
        self._has_updated = False
        self._world_size = 0
        self._epoch = -1
        self._updates = 0
        self._begun_at = 0.0
        self._emitted = 0

    def note_step(self, info: StepInfo) -> None:
        """Follows a step, and with the last one of an update the optimizer's update."""
        self._update_tokens += info.global_tokens
        self._has_updated = info.is_update_end
        if info.is_update_end:
            self._note_update(info)

    def _note_update(self, info: StepInfo) -> None:
        self._samples_before, self._tokens_before = self.samples, self.tokens
        self.tokens += self._update_tokens
        self._update_tokens = 0
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

    def has_passed(self, *, samples: int | None = None, tokens: int | None = None) -> bool:
        """Returns whether the last update has reached a multiple of so many samples, or of so many tokens.

        False while an update is under way, so that what is done then is done once, and of whole updates.
        """
        reached = (samples, self._samples_before, self.samples), (tokens, self._tokens_before, self.tokens)
        return self._has_updated and any(every and now // every > before // every for every, before, now in reached)

    def state_dict(self) -> dict[str, float]:
        """Returns what `load_state_dict` takes: plain numbers, on every rank the same."""
        return {name: getattr(self, name) for name in _SAVED}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Goes on from there, on the ranks there are now.

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
    "tokens",
    "_samples_before",
    "_tokens_before",
    "_world_size",
    "_epoch",
    "_updates",
    "_begun_at",
    "_emitted",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Intervals:
    """After how many samples or tokens, of all ranks, to evaluate and to save: with the update that reaches them.

    An update is what an interval can be met to: one that takes more samples than the interval has is evaluated once.

    Raises: UsageError when one is not at least 1.
    """

    evaluate_samples: int | None = None
    evaluate_tokens: int | None = None
    save_samples: int | None = None
    save_tokens: int | None = None

    def __post_init__(self) -> None:
        for field in fields(self):
            value: int | None = getattr(self, field.name)
            if value is not None and value < 1:
                raise UsageError(f"Intervals: {field.name} must be at least 1, got {value}")

    @property
    def evaluates(self) -> bool:
        """True when there is something to evaluate by."""
        return self.evaluate_samples is not None or self.evaluate_tokens is not None

    def is_evaluation_due(self, progress: Progress) -> bool:
        """Returns whether to evaluate now."""
        return progress.has_passed(samples=self.evaluate_samples, tokens=self.evaluate_tokens)

    def is_save_due(self, progress: Progress) -> bool:
        """Returns whether to save now."""
        return progress.has_passed(samples=self.save_samples, tokens=self.save_tokens)
