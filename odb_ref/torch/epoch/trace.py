"""The trace of one epoch on one rank, with the samples it starts from, and those already trained on, to check it against."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Final
from weakref import WeakValueDictionary

from odb_ref.core.config import Config
from odb_ref.core.effects import Effect
from odb_ref.core.errors import UsageError
from odb_ref.core.events import Event
from odb_ref.core.resume import Resumed
from odb_ref.torch.plan.start import EpochStart
from odb_ref.torch.reading.quarantine import Quarantine
from odb_ref.trace.origin import Lot, Origin, OwnedLot, make_lot, place_lot
from odb_ref.trace.writing import TraceWriter


class EpochTrace:
    """The trace of one epoch on one rank. Does nothing if no trace was requested."""

    def __init__(self, start: EpochStart, config: Config) -> None:
        self._start = start
        self._config = config
        self._writer: TraceWriter | None = None

    def open(self, quarantine: Quarantine) -> None:
        """Creates the file."""
        start = self._start
        if start.trace is not None:
            origin = make_origin(start, quarantine, self._config.rank)
            self._writer = TraceWriter(
                start.trace, self._config, driver="torch", epoch=start.epoch, workers=start.workers, origin=origin
            )

    def record(self, rank: int, event: Event | Resumed | None, effects: tuple[Effect, ...]) -> None:
        """Writes a transition. The machine calls this as its observer."""
        if self._writer is not None:
            self._writer.record(rank, event, effects, time.monotonic() - self._start.started_s)

    def set_aside(self, places: Iterable[int]) -> None:
        """Records which samples are set aside, once the machine has begun. Spec: R9.6."""
        if self._writer is not None:
            for place in places:
                self._writer.set_aside(self._config.rank, self._start.get_id(place), place)

    def close(self) -> None:
        """Completes the file."""
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()


def make_origin(start: EpochStart, quarantine: Quarantine, rank: int) -> Origin:
    """Returns what this rank knows of its epoch. Spec: R9.6.

    A rank does not know the length of a stream. Inside an update of a shared order, it does not know either what the others had
    drawn before the epoch was resumed.
    """
    progress, checkpoint = start.progress, start.checkpoint
    others = _find_others(start)
    run = start.run if others or not progress.base else ""
    if start.keys is None or (start.is_shared and checkpoint is not None and checkpoint.taken_steps):
        return Origin(run=run)

    def make(places: Iterable[int]) -> Lot:
        return make_lot(map(start.get_id, places))

    owner, first = None if start.is_shared else rank, start.first_place
    is_known = not (first and start.max_bad)  # with updates, samples set aside earlier are no longer known
    begin = first if start.is_shared or not is_known else 0
    places = range(begin, len(start.keys))
    order = None if progress.gone else place_lot(map(start.get_id, places), begin).digest
    inputs = (OwnedLot(rank=owner, lot=make(places) - make(progress.gone), order=order),)
    if checkpoint is None or not is_known:
        return Origin(run=run, inputs=inputs, before=others)
    read = checkpoint.start.read_samples
    positions = range(read if first else 0, max(read, *(position + 1 for position in checkpoint.taken), 0))
    taken = (quarantine.places.get_place(position) for position in positions if checkpoint.is_taken(position))
    before = OwnedLot(rank=owner, lot=make(chain(range(first), taken)), steps=progress.steps)
    if owner is None:
        lot = sum((other.lot for other in others), before.lot + make(progress.gone))
        return Origin(run=run, inputs=inputs, before=(replace(before, lot=lot),))
    return Origin(run=run, inputs=inputs, before=(before, *others))


def _find_others(start: EpochStart) -> tuple[OwnedLot, ...]:
    """Returns the samples trained on by a job with another number of ranks, if there was one and its samples have numbers."""
    parts = start.progress.base[-1].parts if start.progress.base else ()
    taken = [key for key in start.taken_before if isinstance(key, int)]
    if not parts or len(taken) < len(start.taken_before):
        return ()
    saved = parts[0].checkpoint
    return (OwnedLot(lot=make_lot(taken), steps=saved.start.planned_steps + saved.taken_steps),)


def compute_trace_path(
    path: str | Path, rank: int, world_size: int, epoch: int, resumed_at: int = 0, *, peer: int = 0
) -> Path:
    """Returns the path of a rank's trace of an epoch, with ``{rank}`` and ``{epoch}`` in the name replaced.

    If the name lacks them, ``-rank0`` is added with several ranks, and ``-epoch1`` from the second epoch on. Further processes
    of a rank always get ``-peer1``. A rank of a process group uses its number in the job. The rest of an epoch that was saved
    after 36 steps gets ``-step36``, so that it does not overwrite the beginning.
    """
    path = Path(path)
    name = path.name
    stem, dot, suffix = name.partition(".")
    if "{rank}" not in name and world_size > 1:
        stem += "-rank{rank}"
    if peer:
        stem += f"-peer{peer}"
    if "{epoch}" not in name and epoch:
        stem += "-epoch{epoch}"
    if resumed_at:
        stem += f"-step{resumed_at}"
    name = f"{stem}{dot}{suffix}".replace("{rank}", str(rank)).replace("{epoch}", str(epoch))
    return path.with_name(name)


_writers: Final[WeakValueDictionary[Path, object]] = WeakValueDictionary()
"""Maps the path of a trace to the loader that writes it."""


def claim_trace(path: Path, owner: object) -> None:
    """Registers a loader as the writer of a trace.

    Raises: UsageError when another loader, which is neither closed nor collected, writes it: one trace would be lost.
    """
    if _writers.setdefault(path.absolute(), owner) is not owner:
        raise UsageError(
            f"trace: another loader in this process writes to {path}; give each its own path, or close the other loader first"
        )


def release_traces(owner: object) -> None:
    """Releases all traces of a loader."""
    for path in [path for path, other in _writers.items() if other is owner]:
        _writers.pop(path, None)
