"""The iterator over one epoch: batches to the trainer, with what belongs to each."""

from __future__ import annotations

import warnings
from typing import Self

from odb_ref.torch.epoch import Taken
from odb_ref.torch.info import TABLE, StepInfo, Weighting
from odb_ref.torch.order import Beginning
from odb_ref.torch.outlet import Outlet
from odb_ref.torch.quarantine import BadSampleWarning
from odb_ref.torch.reaper import REAPER
from odb_ref.torch.session import LEAVE_S
from odb_ref.torch.workbench import OnIdle


class EpochIterator:
    """The batches of one epoch of one rank. Dropping it before its end leaves the epoch, on all ranks."""

    def __init__(
        self,
        outlet: Outlet,
        beginning: Beginning,
        *,
        world_size: int,
        weighting: Weighting,
        on_idle: OnIdle,
        len_bound: int | None,
    ) -> None:
        self._outlet = outlet
        self._beginning = beginning
        self._world_size = world_size
        self._weighting = weighting
        self._on_idle = on_idle
        self._len_bound = len_bound

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> object:
        while True:
            try:
                taken = self._outlet.take()
            except Exception:
                REAPER.submit(self._outlet.close)
                raise
            if taken is None:
                REAPER.submit(self._outlet.close)
            self._warn(taken)
            if taken is None:
                raise StopIteration
            if taken.step.is_idle and self._on_idle is OnIdle.SKIP:
                continue
            info = self._outlet.info = self._make_info(taken)
            if taken.batch is not None:
                kept = max(16, 2 * self._weighting.accumulation_steps)
                TABLE.put(taken.batch, info, owner=self._outlet, kept=kept)
            return taken.batch

    def _warn(self, taken: Taken | None) -> None:
        """Warns on the training thread: at most once an epoch of each kind."""
        epoch = self._beginning.start.epoch
        if what := self._outlet.quarantine.take_warning():
            warnings.warn(f"epoch {epoch}: {what}", BadSampleWarning, stacklevel=3)
        if taken is not None and taken.step.number == self._len_bound:
            what = f"epoch {epoch} has more than the {self._len_bound} steps of len_bound"
            warnings.warn(what, RuntimeWarning, stacklevel=3)

    def _make_info(self, taken: Taken) -> StepInfo:
        step, counts = taken.step, taken.step.global_counts
        emitted = self._beginning.emitted_before + taken.emitted_samples
        total = self._beginning.total_samples
        k = self._weighting.accumulation_steps
        return StepInfo(
            loss_scale=self._weighting.compute_scale(step.local, taken.window, self._world_size),
            step=step.number,
            round=step.round,
            epoch=self._beginning.start.epoch,
            is_idle=step.is_idle,
            is_last=taken.is_last,
            is_window_end=taken.is_last or (step.number + 1) % k == 0,
            local_samples=step.local.samples,
            local_tokens=step.local.tokens,
            local_supervised=step.local.supervised,
            padded_tokens=step.padded_tokens,
            local_costs=step.costs,
            global_samples=counts.samples,
            global_tokens=counts.tokens,
            global_supervised=counts.supervised,
            window_supervised=taken.window.supervised,
            emitted_samples=emitted,
            progress=emitted / total if total else None,
            world_size=self._world_size,
            quarantined_samples=self._outlet.quarantine.count,
        )

    def close(self) -> None:
        """Leaves the epoch."""
        self._outlet.leave()

    def __del__(self) -> None:
        outlet = self._outlet
        if not outlet.is_exhausted:
            REAPER.submit(lambda: _abandon(outlet))


def _abandon(outlet: Outlet) -> None:
    TABLE.drop(outlet)
    outlet.retire(LEAVE_S)
