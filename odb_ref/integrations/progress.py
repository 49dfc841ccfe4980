"""The progress of training in epochs, samples and tokens, for the schedules, progress bars and logs of every framework, and for
the decision when to evaluate and to save.

In your own loop, for example under Accelerate::

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
    """Counts updates and samples while an epoch runs, and estimates how many updates each epoch takes.

    The estimate starts with a given value, is corrected by the share of the epoch's samples seen so far, and then follows the
    epochs that were measured. Schedules depend on it, so it is saved with a checkpoint.
    """

    def __init__(self, updates_per_epoch: float) -> None:
        self.updates_per_epoch = updates_per_epoch
        """The present estimate: the initial one until enough of an epoch is known."""
        self.epochs = 0.0
        """Epochs trained on, including the share of the present one."""
        self.coverage = 0.0
        """The share of the present epoch's samples that was trained on."""
        self.is_exact = False
        """True if the number of samples in the epoch is known, so that ``coverage`` is not an estimate."""
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
        """Follows a step; the last step of an update also counts the update."""
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
        if self._world_size not in (0, info.world_size):  # resumed with other ranks, which make other steps
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
            # The total is unknown. Use the best estimate, but never all of the epoch.
            begun = self._begun_at - info.epoch
            self.coverage = min(begun + self._updates / self.updates_per_epoch, 1 - (1 - begun) / (1 + self._updates))
        self.epochs = info.epoch + self.coverage
        share = self.epochs - self._begun_at
        if info.is_last or (info.progress is not None and share >= _KNOWN):
            self.updates_per_epoch = self._updates / share

    def has_passed(self, *, samples: int | None = None, tokens: int | None = None) -> bool:
        """Returns whether the last update has reached a multiple of ``samples`` samples, or of ``tokens`` tokens.

        False inside an update, so that the caller acts once, after whole updates.
        """
        reached = (samples, self._samples_before, self.samples), (tokens, self._tokens_before, self.tokens)
        return self._has_updated and any(every and now // every > before // every for every, before, now in reached)

    def state_dict(self) -> dict[str, float]:
        """Returns plain numbers for `load_state_dict`, the same on every rank."""
        return {name: value for name, value in vars(self).items() if name not in _OF_UPDATE}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Resumes from a saved state, on the present ranks. Raises: UsageError when it is not such a state."""
        if state.keys() != self.state_dict().keys():
            raise UsageError(f"not a state of Progress: {sorted(state)}")
        vars(self).update(state)


_KNOWN: Final = 0.1
"""From this share of an epoch on, its own pace is better than the estimate. Before, its first windows are still smaller."""

_OF_UPDATE: Final = ("_update_tokens", "_has_updated")
"""Attributes that are not saved, because they count only inside an update."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Intervals:
    """After how many samples or tokens, over all ranks, to evaluate and to save: with the update that reaches them.

    Intervals are met only at the end of updates. An update that spans several intervals triggers one evaluation.

    Raises: UsageError when an interval is below 1.
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
        """True if an interval for evaluations is set."""
        return self.evaluate_samples is not None or self.evaluate_tokens is not None

    def is_evaluation_due(self, progress: Progress) -> bool:
        """Returns whether to evaluate now."""
        return progress.has_passed(samples=self.evaluate_samples, tokens=self.evaluate_tokens)

    def is_save_due(self, progress: Progress) -> bool:
        """Returns whether to save now."""
        return progress.has_passed(samples=self.save_samples, tokens=self.save_tokens)
