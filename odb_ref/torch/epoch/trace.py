"""The trace of one epoch on one rank, with what it is held to: which samples there were, and which were trained on before."""

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
    """Writes nothing where no trace is asked for."""

    def __init__(self, start: EpochStart, config: Config) -> None:
        self._start = start
        self._config = config
        self._writer: TraceWriter | None = None

    def open(self, quarantine: Quarantine) -> None:
        """Begins the file."""
        start = self._start
        if start.trace is not None:
            origin = make_origin(start, quarantine, self._config.rank)
            self._writer = TraceWriter(
                start.trace, self._config, driver="torch", epoch=start.epoch, workers=start.workers, origin=origin
            )

    def record(self, rank: int, event: Event | Resumed | None, effects: tuple[Effect, ...]) -> None:
        """Writes a transition of the machine, whose observer this is."""
        if self._writer is not None:
            self._writer.record(rank, event, effects, time.monotonic() - self._start.started_s)

    def set_aside(self, places: Iterable[int]) -> None:
        """Writes which samples are set aside, once the machine has begun. Spec: R9.6."""
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

    It does not know how many samples a stream has, nor, inside an update, what the others had drawn of a shared order before
    the epoch was resumed.
    """
    progress, checkpoint = start.progress, start.checkpoint
    others = _find_others(start)
    run = start.run if others or not progress.base else ""
    if start.keys is None or (start.is_shared and checkpoint is not None and checkpoint.taken_steps):
        return Origin(run=run)

    def make(places: Iterable[int]) -> Lot:
        return make_lot(map(start.get_id, places))

    owner, first = None if start.is_shared else rank, start.first_place
    is_known = not (first and start.max_bad)  # with updates nobody knows any more what was set aside before
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
    """Returns what another number of ranks had trained on, where there was one, and the samples have numbers."""
    parts = start.progress.base[-1].parts if start.progress.base else ()
    taken = [key for key in start.taken_before if isinstance(key, int)]
    if not parts or len(taken) < len(start.taken_before):
        return ()
    saved = parts[0].checkpoint
    return (OwnedLot(lot=make_lot(taken), steps=saved.start.planned_steps + saved.taken_steps),)


def compute_trace_path(
    path: str | Path, rank: int, world_size: int, epoch: int, resumed_at: int = 0, *, peer: int = 0
) -> Path:
    """Returns where a rank writes the trace of an epoch: ``{rank}`` and ``{epoch}`` in the name are replaced.

    Without them ``-rank0`` is added where there are several ranks, and ``-epoch1`` from the second epoch on; for the further
    processes of a rank ``-peer1`` in any case. A rank of a group has its number in the job. The rest of an epoch that was saved
    after so many steps does not overwrite its beginning: ``-step36`` is added.
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
"""By the file of a trace, the loader that writes it."""


def claim_trace(path: Path, owner: object) -> None:
    """Notes that a loader writes a trace there.

    Raises: UsageError when another loader does, which is neither closed nor gone: one trace would be lost.
    """
    if _writers.setdefault(path.absolute(), owner) is not owner:
        raise UsageError(
            f"trace: another loader of this process writes {path}; give each a path of its own, or close the one before"
        )


def release_traces(owner: object) -> None:
    """Forgets what a loader writes."""
    for path in [path for path, other in _writers.items() if other is owner]:
        _writers.pop(path, None)
