"""What a trainer learns of a step, and the weight that makes the average over ranks exact. Spec: R4.5 (WEIGHT).

The mean over a batch without a supervised token is 0/0, and no weight makes NaN harmless: DDP would spread it to every rank.
`StepInfo.scale` therefore takes such a loss for zero. ``cross_entropy`` with ``ignore_index`` has a zero gradient there; that
of a mean of your own (``(loss * mask).sum() / mask.sum()``) is NaN whatever becomes of the loss: divide by
``mask.sum().clamp(min=1)``, or give `StepInfo.scale` the logits too.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import torch

from odb_ref.core.batching.weighting import Weighting
from odb_ref.core.errors import UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class StepInfo:
    """What belongs to a batch. ``local_*`` counts this rank's batch, ``global_*`` the step on all ranks."""

    loss_scale: float
    """Multiply the loss by this before ``backward``: see `scale`."""
    step: int
    """Counts the steps of the epoch from 0, alike on all ranks."""
    round: int
    epoch: int
    is_idle: bool
    """True when this rank has nothing to train on: the batch, if any, is a replay with loss scale 0."""
    is_last: bool
    """True for the last step of the epoch, if it is complete: one that is broken off has none, on any rank."""
    is_update_end: bool
    """True when the accumulation window ends with this step: time for the optimizer."""
    update: int
    """Counts the optimizer updates of the epoch from 0."""
    local_samples: int
    local_tokens: int
    local_supervised: int
    padded_tokens: int
    """Tokens of the local batch, padding included, if it is padded to its longest sample, or packed."""
    global_samples: int
    global_tokens: int
    global_supervised: int
    window_supervised: int
    """Supervised tokens of the whole accumulation window, on all ranks."""
    emitted_samples: int
    """Samples of this epoch up to this step, on all ranks."""
    progress: float | None
    """Share of the epoch's samples emitted up to this step, on this rank or on all; None when the total is unknown. Those
    set aside are never emitted: with them it ends below 1, as it does when a quota is met first."""
    world_size: int
    local_costs: tuple[int, ...] = ()
    """What the local batch uses of each further resource: 0 in an idle step, also where the batch is a replay that has some."""
    global_costs: tuple[int, ...] = ()
    """What the step uses of each further resource on all ranks: 0 where no rank has any, the same on every rank. A part of the
    model with collectives of its own (a vision tower) is to run where this is above 0, on every rank."""
    weighting: Weighting = field(default_factory=Weighting)
    """What ``loss_scale`` goes by."""
    quarantined_samples: int = 0
    """Bad samples set aside on this rank in this epoch so far, those read ahead included."""

    def scale(self, loss: torch.Tensor, logits: torch.Tensor | None = None) -> torch.Tensor:
        """Returns the loss times ``loss_scale``, for ``backward``; zero, and still part of the graph, where the batch has
        no mean.

        That is where it holds no supervised token: an idle step, or prompts only. With ``logits``, or any other output of the
        model, a zero weight leaves the loss out of the graph, so that its own gradient does not matter. Spec: R4.5.
        Preserves: WEIGHT.
        """
        if not self.local_supervised:
            if logits is not None and not self.loss_scale:
                loss = logits.sum()
            loss = torch.where(torch.isfinite(loss), loss, torch.zeros_like(loss))
        return loss * self.loss_scale


KEPT_BATCHES: Final = 16


class Reminders:
    """What a loader warns of only once: above all, of a trainer that never asks what belongs to its batches."""

    def __init__(self) -> None:
        self._is_asked = False
        self._is_reminded = False
        self._told: set[str] = set()

    def begin(self) -> None:
        """Starts an epoch."""
        self._is_asked = False

    def note_use(self) -> None:
        """The trainer has asked what belongs to a step."""
        self._is_asked = True

    def check_use(self, steps: int, *, is_due: bool) -> str:
        """Returns what to warn of after so many steps of the epoch whose loss is to be scaled; usually empty.

        A trainer that reads ahead may ask late: it ``is_due`` to have asked at the epoch's end, or when batches are forgotten.
        """
        if self._is_reminded or self._is_asked or not (steps and is_due):
            return ""
        self._is_reminded = True
        return (
            f"the losses of {steps} batches were to be scaled, and pop_step_info was called for none: "
            "info = pop_step_info(batch), then info.scale(loss).backward(); with Loss(scaling='none') there is nothing to scale"
        )

    def is_new(self, text: str) -> bool:
        """Returns True when this was not warned of before."""
        is_new = text not in self._told
        self._told.add(text)
        return is_new


@dataclass(frozen=True, slots=True)
class _Entry:
    """What belongs to a batch, and who is to learn that it was asked for."""

    info: StepInfo
    reminders: Reminders | None

    def take(self) -> StepInfo:
        if self.reminders is not None:
            self.reminders.note_use()
        return self.info


class StepInfoTable:
    """Step information by the identity of its batch, so that no collate_fn and no container has to carry it.

    Entries live until they are popped or their batch is gone. A dict or a list cannot be watched for that, but a tensor in it
    can. A batch without one is kept alive until its owner is gone, or has yielded so many later ones.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._watched: dict[int, tuple[weakref.ref[object], _Entry]] = {}
        self._kept: weakref.WeakKeyDictionary[object, deque[tuple[object, _Entry]]] = weakref.WeakKeyDictionary()

    def put(
        self,
        batch: object,
        info: StepInfo,
        *,
        owner: object,
        kept: int = KEPT_BATCHES,
        reminders: Reminders | None = None,
    ) -> None:
        """Remembers ``info`` for ``batch``, which ``owner`` has yielded."""
        entry = _Entry(info, reminders)
        with self._lock:
            try:
                self._watched[id(batch)] = (weakref.ref(_find_part(batch)), entry)
            except TypeError:
                own = self._kept.setdefault(owner, deque())
                own.append((batch, entry))
                while len(own) > kept:
                    own.popleft()
            if len(self._watched) > 4 * kept:
                self._watched = {key: value for key, value in self._watched.items() if value[0]() is not None}

    def drop(self, owner: object) -> None:
        """Forgets the batches of ``owner``."""
        with self._lock:
            self._kept.pop(owner, None)

    def pop(self, batch: object) -> StepInfo:
        """Returns the information of ``batch``, once.

        Raises: UsageError when there is none.
        """
        with self._lock:
            watched = self._watched.get(id(batch))
            if watched is not None and watched[0]() is _find_part(batch):
                del self._watched[id(batch)]
                return watched[1].take()
            for own in self._kept.values():
                for index, (kept, entry) in enumerate(own):
                    if kept is batch:
                        del own[index]
                        return entry.take()
        raise UsageError(
            "pop_step_info: this object is not a batch of an ODBDataLoader, or its information was taken before; "
            "call it once, before the batch is moved to a device or changed"
        )


def _find_part(batch: object) -> object:
    """Returns the first tensor or array of a dict, list or tuple; else the batch."""
    match batch:
        case dict():
            parts: Iterable[object] = batch.values()
        case list() | tuple():
            parts = batch
        case _:
            return batch
    return next((part for part in parts if isinstance(part, torch.Tensor | np.ndarray)), batch)


TABLE: Final = StepInfoTable()


def pop_step_info(batch: object) -> StepInfo:
    """Returns what belongs to a batch that an `ODBDataLoader` has just yielded; call it once, before the batch is moved or
    replaced.

    Raises: UsageError when the object is no such batch.
    """
    return TABLE.pop(batch)
