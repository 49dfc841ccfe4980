"""The iterators over one epoch. They hand batches to the trainer, each with its `StepInfo`."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Generic, NoReturn, Self, SupportsIndex, cast

from odb_ref.core.errors import UsageError
from odb_ref.torch.batches import Batch
from odb_ref.torch.epoch.delivery import Delivery
from odb_ref.torch.epoch.info import StepInfo
from odb_ref.torch.epoch.session import CLEANUP, LEAVE_S
from odb_ref.torch.reading.quarantine import BadSampleWarning


class _Unique:
    """Forbids copies: dropping a copy would leave the epoch."""

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        raise UsageError(
            "the iterator over an epoch cannot be copied or pickled: each step is handed out once. state_dict of its loader "
            "carries its place over"
        )


class EpochIterator(_Unique, Generic[Batch]):
    """Yields the batches of one epoch on one rank. Dropping it before its end leaves the epoch, on all ranks.

    It keeps its loader alive. If the loader is closed or begins another epoch, the next batch raises a UsageError.
    """

    def __init__(self, loader: object, delivery: Delivery, len_bound: int | None, *, told: set[str]) -> None:
        self._told = told
        """Warnings that the loader has already issued; each is issued once."""
        self._loader: object = loader
        self._put_off: Warning | None = None
        """A warning that the user has turned into an error. Raised after its batch, which would be lost otherwise."""
        self._delivery = delivery
        self._len_bound = len_bound
        self._is_reading = False

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Batch:
        batch, info = self.read()
        if not info.is_idle and info.loss_scale != 1.0:
            self._warn_once(
                "the losses of these batches must be scaled, and plain iteration does not provide the factor: use "
                "`for batch, info in loader.steps()` and info.scale(loss).backward(), or pass Loss(scaling='none')"
            )
        return batch

    def read(self) -> tuple[Batch, StepInfo]:
        """Returns the next batch and its `StepInfo`.

        Raises: StopIteration when the epoch is complete, JobError when it has ended early, UsageError when the iterator has
        lost it, when it is already reading a step, or when a step was lost because Ctrl-C or a signal handler's exception came
        while it was handed out.
        """
        delivery, first = self._delivery, None
        if self._is_reading:
            raise UsageError(
                "this iterator is already asked for a step, by another thread or by a caller of this function, such as a "
                "collate_fn: ask for one step at a time"
            )
        try:
            self._is_reading = True
            delivery.check_whole()
            first = delivery.next_step
            batch, info = self._take()
            # Made by collate_fn. It is None only with on_idle="none", and then the caller's type must allow that.
            return cast(Batch, batch), info
        except BaseException as error:
            if first not in (None, delivery.next_step):
                delivery.lost = f"step {first} was lost when {type(error).__name__} came while it was handed out"
                self.close()
            raise
        finally:
            self._is_reading = False

    def _take(self) -> tuple[object, StepInfo]:
        if self._put_off is not None:
            warning, self._put_off = self._put_off, None
            raise warning
        try:
            taken = self._delivery.take()
        except Exception:
            CLEANUP.submit(self._delivery.driver.close)
            raise
        if taken is None:
            CLEANUP.submit(self._delivery.driver.close)
            self._warn(None)
            raise StopIteration
        try:
            self._warn(taken[1].step)
        except Warning as warning:
            self._put_off = warning
        return taken

    def _warn(self, step: int | None) -> None:
        """Issues warnings on the training thread, each at most once per epoch or loader."""
        epoch = self._delivery.driver.start.epoch
        if what := self._delivery.driver.quarantine.take_warning():
            warnings.warn(f"epoch {epoch}: {what}", BadSampleWarning, stacklevel=5)
        while self._delivery.driver.warnings:
            self._warn_once(self._delivery.driver.warnings.popleft(), stacklevel=6)
        if step is not None and step == self._len_bound:
            what = f"epoch {epoch} has more than the {self._len_bound} steps of len_bound"
            warnings.warn(what, RuntimeWarning, stacklevel=5)

    def _warn_once(self, what: str, *, stacklevel: int = 3) -> None:
        if what not in self._told:
            self._told.add(what)
            warnings.warn(what, RuntimeWarning, stacklevel=stacklevel)

    def close(self) -> None:
        """Leaves the epoch."""
        self._delivery.leave()

    def __del__(self) -> None:
        delivery = self._delivery
        if not delivery.is_exhausted:
            CLEANUP.submit(lambda: delivery.leave_and_close(LEAVE_S))


class StepIterator(_Unique, Iterator[tuple[Batch, StepInfo]]):
    """Yields the steps of one epoch on one rank: a batch and its `StepInfo`. Dropping it before its end leaves the epoch."""

    def __init__(self, epoch: EpochIterator[Batch]) -> None:
        self._epoch = epoch

    def __next__(self) -> tuple[Batch, StepInfo]:
        return self._epoch.read()

    def close(self) -> None:
        """Leaves the epoch."""
        self._epoch.close()
