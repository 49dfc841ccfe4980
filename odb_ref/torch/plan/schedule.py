"""Chooses the next epoch to read, and where to start: at its beginning, or from a saved state."""

from __future__ import annotations

import json
import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from odb_ref.core.errors import UsageError
from odb_ref.torch.plan.order import Order
from odb_ref.torch.plan.seal import check_states
from odb_ref.torch.plan.start import EpochStart
from odb_ref.torch.plan.state import START, EpochProgress, EpochState, begin_inside, check_moment, join_states
from odb_ref.torch.reading.seeding import Use, compute_seed

_OF_USER: Final = {
    "budget_tokens": "token_budget",
    "window_samples": "window",
    "quota_samples": "quota",
    "rule": "policy",
    "samples": "samples of the data set",
}
"""Maps settings to the names that users know."""


class Schedule:
    """The epochs of one loader. ``settings`` determine the batches; if they are unchanged, rounds can be formed again."""

    def __init__(self, order: Order, settings: str, *, quota: int | None, read_ahead: int, max_bad: float) -> None:
        self._order = order
        self._settings = settings
        self._quota = quota
        self._read_ahead = read_ahead
        self._max_bad = max_bad
        self.epoch = 0
        """The next epoch to read."""
        self.start: EpochStart | None = None
        """The start of the present or last epoch."""
        self._loaded: tuple[EpochState, ...] = ()
        self._digest = ""
        """The digest of the current epoch's keys, once computed, because listing keys again takes time."""

    def load(self, given: object) -> tuple[EpochState, ...]:
        """Makes the next epoch resume from this rank's saved state, or from the states of all ranks. Returns these.

        Raises: UsageError when they are not valid states.
        """
        found = set(map(EpochState.from_dict, check_states(given)))  # peers of one rank save equal states
        states = tuple(sorted(found, key=lambda state: state.rank))
        if not states:
            raise UsageError("load_state_dict: the list of states is empty")
        check_moment(states)
        self._loaded, self.epoch = states, states[0].epoch
        return states

    def _get_loaded(self) -> tuple[EpochState, ...]:
        """Returns the loaded states, or nothing if another epoch was chosen since."""
        return self._loaded if self._loaded and self._loaded[0].epoch == self.epoch else ()

    def plan(self, rank: int, world_size: int) -> EpochStart:
        """Returns where the next epoch begins on this rank, or where the loaded states stand.

        Raises: UsageError when the states do not fit.
        """
        order, epoch = self._order, self.epoch
        progress = self._choose_progress(rank, world_size)
        keys: Sequence[object] | None = None
        total, listed = None, ""
        before: list[object] = []
        if not order.is_iterable:
            keys, total, before, listed = order.compute_keys(epoch, rank, world_size, progress.base)
            if self._quota is not None and len(before) >= self._quota:
                keys = []  # the quota was met before the number of ranks changed: there is nothing left to read
        updates = order.update_samples
        # Ranks that are given their samples may have different seeds. An order that is not shuffled is the same in each epoch.
        decisive = order.seed if order.is_auto else 0, epoch if order.is_shuffled or not order.is_auto else 0
        start = EpochStart(
            keys=keys,
            samples=self._count_samples(),
            listed=listed,
            progress=progress,
            first_place=order.compute_first_place(progress, rank, world_size),
            seed=compute_seed(Use.EPOCH, order.seed, epoch, rank, len(progress.base)),
            order_seed=compute_seed(Use.ORDER, *decisive),
            read_ahead=self._read_ahead if updates is None else max(1, updates // world_size // 2),
            max_bad=self._max_bad,
            quota_samples=None if self._quota is None else max(1, self._quota - len(before)),
            epoch=epoch,
            is_shared=order.is_shared,
            total_samples=total,
            taken_before=tuple(before),
        )
        self._check_keys(start, rank)
        return start

    def _count_samples(self) -> int:
        return self._order.count_samples() if self._order.is_auto else 0

    def begin(self, start: EpochStart, accumulation_steps: int) -> None:
        """Notes that an epoch has begun. Warns if a loaded state belongs to another epoch and is dropped, or if it was saved
        inside an update of ``accumulation_steps`` steps that does not go on.
        """
        others = [state for state in self._loaded if state.epoch != self.epoch]
        left = next((state for state in others if state.epoch > self.epoch or state.progress != START), None)
        if left is not None:
            warnings.warn(
                f"set_epoch has chosen epoch {self.epoch}, so the loaded state is dropped: it was saved in epoch {left.epoch} "
                f"after {left.progress.steps} steps",
                RuntimeWarning,
                stacklevel=4,
            )
        loaded = self._get_loaded()
        taken = loaded[0].progress.steps % accumulation_steps if loaded else 0
        if taken and start.progress.base != loaded[0].progress.base and start.keys:  # without keys, the epoch had ended
            warnings.warn(
                f"the loaded state was saved after {taken} of the {accumulation_steps} steps of an update, and ranks or "
                "settings have changed since, so a new update begins, with other weights. Do not restore gradients saved "
                "with this state. To lose none, save at the end of an update (info.is_update_end)",
                RuntimeWarning,
                stacklevel=4,
            )
        self.start, self.epoch = start, start.epoch + 1
        self._loaded, self._digest = (), ""

    def compute_state(self, rank: int, world_size: int, progress: EpochProgress | None) -> EpochState:
        """Returns the state to save. ``progress`` is this rank's position in the current epoch, or None between epochs."""
        resumed = self._choose_progress(rank, world_size) if self._loaded else None  # first: the order follows theirs
        state = EpochState(
            epoch=self.epoch,
            world_size=world_size,
            rank=rank,
            settings=self._settings,
            order=self._order.describe(self._count_samples()),
        )
        if resumed is not None:
            return replace(state, keys=self._find_saved_keys(rank), progress=resumed)
        if progress is None or self.start is None:
            return state
        self._digest = self._digest or self._order.compute_digest(self.start)
        order = self._order.describe(self.start.samples)  # the data set may have grown since
        return replace(state, epoch=self.start.epoch, order=order, keys=self._digest, progress=progress)

    def _find_saved_keys(self, rank: int) -> str:
        return next((saved.keys for saved in self._get_loaded() if self._order.is_auto or saved.rank == rank), "")

    def _check_keys(self, start: EpochStart, rank: int) -> None:
        """Compares the keys with those of the saved state. Spec: R10.4. Preserves: RESUME.

        Raises: UsageError when other keys are listed than when the state was saved, or in another order.
        """
        if start.progress == START:
            return  # nothing was taken, so any order is fine
        saved = self._find_saved_keys(rank)
        if saved and saved != (found := self._order.compute_digest(start)):
            whose = "the order of the samples" if self._order.is_auto else "the sampler, or the order of the data set,"
            raise UsageError(
                f"load_state_dict: {whose} has changed since the state was saved ({_describe_keys(saved)}, now "
                f"{_describe_keys(found)}), so samples would be repeated and others lost. List the same keys in the same order "
                "(if the sampler keeps a state, restore it first), or begin an epoch without a state"
            )

    def _check_order(self, saved: EpochState) -> None:
        """Compares the settings of the order with those of the saved state. Spec: R10.5.

        Raises: UsageError when they differ.
        """
        now = self._order.describe(self._count_samples())
        if saved.order == now:
            return
        what = "; ".join(_describe_changes(saved.order, now))
        text = f"load_state_dict: the order of samples has changed since the state was saved ({what})"
        if saved.progress == START:
            text += (
                f"; to begin epoch {saved.epoch} with the new order, call set_epoch({saved.epoch}) and load no state"
            )
        raise UsageError(text)

    def _choose_progress(self, rank: int, world_size: int) -> EpochProgress:
        """Returns the position from which ``rank`` continues. Raises: UsageError when the loaded states do not fit."""
        order, loaded = self._order, self._get_loaded()
        if not loaded:
            order.follow(None, world_size)
            return START
        first = loaded[0]
        mine = next((state for state in loaded if state.rank == rank), None)
        saved = mine or first
        order.follow(saved.order, max(saved.world_size, world_size))
        self._check_order(saved)
        if all(state.progress == START for state in loaded):
            order.follow(None, world_size)
            return START  # saved between two epochs: the next one uses the present settings
        changes = _describe_changes(first.settings, self._settings)
        has_updates = order.is_auto and order.update_samples is not None
        is_between = has_updates and saved.progress.is_between_updates  # then the states of all ranks are equal
        if first.world_size == world_size and not changes:
            if mine is None and not is_between:
                given = ", ".join(str(state.rank) for state in loaded)
                raise UsageError(f"load_state_dict: rank {rank} was not given its own state, only that of rank {given}")
            return saved.progress
        if first.world_size != world_size:
            changes.insert(0, f"ranks: saved {first.world_size}, now {world_size}")
        what = "; ".join(changes)
        if not order.is_auto:
            raise UsageError(
                "load_state_dict: if each rank is given its own samples, an epoch can be resumed only with the number of "
                f"ranks and the settings that it was saved with ({what})"
            )
        # A state saved between two updates counts in updates only.
        if json.loads(first.settings).get("update_samples") != order.update_samples:
            raise UsageError(
                f"load_state_dict: update_samples cannot change within an epoch ({what}): change it between epochs"
            )
        if len(loaded) < first.world_size and not is_between:
            raise UsageError(
                f"load_state_dict: ranks or settings have changed ({what}), so the states of all ranks are needed, as a list"
            )
        if order.update_samples is not None:
            return begin_inside(loaded, order.update_samples, rank, world_size, is_shared=order.is_shared)
        return EpochProgress(base=join_states(loaded))


def _describe_keys(keys: str) -> str:
    count, _, digest = keys.partition(":")
    return f"{count} keys with digest {digest}" if keys else "no keys"


def _describe_changes(saved: str, now: str) -> list[str]:
    """Returns the differences between two sets of settings (JSON objects): name, saved value and present value."""
    before, after = json.loads(saved), json.loads(now)
    return [
        f"{_OF_USER.get(name, name)}: saved {before.get(name)!r}, now {after.get(name)!r}"
        for name in sorted({**before, **after})
        if before.get(name) != after.get(name)
    ]
