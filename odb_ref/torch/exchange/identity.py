"""Which loader is which: what the ranks compare before they exchange anything, and what their errors name."""

from __future__ import annotations

import contextlib
import sys
import threading
import weakref
from collections import Counter
from collections.abc import Sized
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch.distributed as dist

from odb_ref.core.errors import UsageError

_OURS: Final = ("odb_ref", "typing")
"""Packages whose code may stand between the user's line and the constructor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderIdentity:
    """What the ranks of a loader compare, and what their errors name. Spec: R18, R18.1."""

    made_at: str
    """File and line, without the folder, which may differ between hosts."""
    ordinal: int
    """How many loaders this process had made there before, in the generation."""
    data: str
    """Of a data set that all ranks have in common; empty where each is given its own."""
    group: str = ""
    budget_tokens: int = 0

    def is_of(self, other: LoaderIdentity) -> bool:
        """Returns True when ``other`` may be the same loader on another rank; settings are compared later (R7.3)."""
        is_same = (self.name, self.group) == (other.name, other.group)
        return is_same and (self.data == other.data or not (self.data and other.data))

    @property
    def name(self) -> str:
        """What tells it from others of the process."""
        return f"{self.made_at}#{self.ordinal}"

    def __str__(self) -> str:
        number = "" if not self.ordinal else f", number {self.ordinal + 1} of this line"
        group = f", group {self.group}" if self.group else ""
        data = f", {self.data}" if self.data else ""
        return f"the loader made at {self.made_at} (token_budget={self.budget_tokens}{data}{group}{number})"


def describe_crossed(rank: int, ours: object, other: int, theirs: object) -> str:
    """Returns the cause of an end: two ranks of the job are in different loaders."""
    return f"the ranks iterate over different loaders: rank {rank} over {ours}, rank {other} over {theirs}"


class _Generation:
    """One life of the job's process group: from `init_process_group` to `destroy_process_group`."""

    def __init__(self, world: dist.ProcessGroup | None) -> None:
        self.world = None if world is None else weakref.ref(world)
        self.made: Counter[str] = Counter()
        """How many loaders were made at each line."""
        self.met: Counter[tuple[int, ...]] = Counter()
        """How many exchanges these processes have had: it says which key of the store the next one meets at."""

    def is_of(self, world: dist.ProcessGroup | None) -> bool:
        if self.world is None or world is None:  # not by `is` alone: a world that is gone is None too
            return self.world is None and world is None
        return self.world() is world


_lock: Final = threading.Lock()
_present: Final = [_Generation(None)]


def get_generation() -> _Generation:
    """Returns the present one."""
    world = dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
    with _lock:
        if not _present[0].is_of(world):
            _present[0] = _Generation(world)
        return _present[0]


@dataclass(frozen=True, slots=True)
class LoaderOrigin:
    """Where and when a loader was made."""

    made_at: str
    ordinal: int
    generation: _Generation

    def check(self) -> None:
        """Checks that the process group is still the one that the loader was made under; one made before any may be used.

        Spec: R18.3.
        Raises: UsageError.
        """
        if self.generation.world is not None and self.generation is not get_generation():
            raise UsageError(
                f"the loader made at {self.made_at} is of an old generation: torch.distributed was shut down or started "
                "again since, and its ranks may not be those of now; make a new loader"
            )

    def identify(self, data: object, group: str, budget_tokens: int) -> LoaderIdentity:
        """Returns what the ranks compare. ``data`` is the data set where all ranks have the same one, else None."""
        return LoaderIdentity(
            made_at=self.made_at,
            ordinal=self.ordinal,
            data="" if data is None else _describe(data),
            group=group,
            budget_tokens=budget_tokens,
        )


def note_origin() -> LoaderOrigin:
    """Returns where the loader under construction is made: the innermost line of the call that is not this library's."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _OURS:
        frame = frame.f_back
    made_at = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
    generation = get_generation()
    with _lock:
        generation.made[made_at] += 1
        return LoaderOrigin(made_at, generation.made[made_at] - 1, generation)


def _describe(data: object) -> str:
    size = ""
    with contextlib.suppress(Exception):  # one that raises is found out when the epoch begins, on all ranks
        size = f" of {len(data)} samples" if isinstance(data, Sized) else ""
    return f"{type(data).__name__}{size}"
