"""Which epoch is read next, and from where: at its beginning, or where a saved state stands."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace

from odb_ref.core.errors import UsageError
from odb_ref.torch.plan.order import Beginning, Order, choose_progress, make_beginning
from odb_ref.torch.plan.state import START, EpochProgress, EpochState


class Schedule:
    """The epochs of one loader. ``settings`` say what decides the batches, to know whether rounds can be formed again."""

    def __init__(self, order: Order, settings: str, *, quota: int | None, read_ahead: int, max_bad: float) -> None:
        self._order = order
        self._settings = settings
        self._quota = quota
        self._read_ahead = read_ahead
        self._max_bad = max_bad
        self.epoch = 0
        """The epoch that is read next."""
        self.beginning: Beginning | None = None
        """Where the present or last epoch began."""
        self._loaded: tuple[EpochState, ...] = ()
        self._digest = ""
        """Of the keys of the epoch under way, once it has been asked for: listing them again takes time."""

    def load(self, states: Sequence[Mapping[str, object]]) -> None:
        """Goes on from this rank's saved state, or from those of all ranks, when the next epoch begins.

        Raises: UsageError when these are no such states.
        """
        if not states:
            raise UsageError("load_state_dict: no state")
        self._loaded = tuple(map(EpochState.from_dict, states))
        self.epoch = self._loaded[0].epoch

    def _get_loaded(self) -> tuple[EpochState, ...]:
        """Returns the states to go on from; none when another epoch was chosen since."""
        return self._loaded if self._loaded and self._loaded[0].epoch == self.epoch else ()

    def plan(self, rank: int, world_size: int) -> Beginning:
        """Returns where the next epoch begins on this rank.

        Raises: UsageError when the states to go on from do not fit.
        """
        return make_beginning(
            self._order,
            self.epoch,
            rank,
            world_size,
            loaded=self._get_loaded(),
            settings=self._settings,
            quota=self._quota,
            read_ahead=self._read_ahead,
            max_bad=self._max_bad,
        )

    def begin(self, beginning: Beginning) -> None:
        """Notes that an epoch has begun. Warns of a loaded state that is not of this one, and is dropped."""
        left = next((state for state in self._loaded if state.epoch != self.epoch and state.progress != START), None)
        if left is not None:
            warnings.warn(
                f"epoch {self.epoch} begins, as set_epoch has it: the state that was loaded is dropped, which stands in epoch "
                f"{left.epoch} after {left.progress.steps} steps",
                RuntimeWarning,
                stacklevel=4,
            )
        self.beginning, self.epoch = beginning, beginning.start.epoch + 1
        self._loaded, self._digest = (), ""

    def compute_state(self, rank: int, world_size: int, progress: EpochProgress | None) -> EpochState:
        """Returns what to save: ``progress`` is where the epoch under way stands on this rank; None between two epochs."""
        state = EpochState(
            epoch=self.epoch,
            world_size=world_size,
            rank=rank,
            settings=self._settings,
            order=self._order.description,
        )
        if self._loaded:
            loaded = self._get_loaded()
            keys = next((saved.keys for saved in loaded if self._order.is_auto or saved.rank == rank), "")
            return replace(
                state, keys=keys, progress=choose_progress(self._order, rank, world_size, loaded, self._settings)
            )
        if progress is None or self.beginning is None:
            return state
        start = self.beginning.start
        self._digest = self._digest or self._order.compute_digest(start)
        return replace(state, epoch=start.epoch, keys=self._digest, progress=progress)
