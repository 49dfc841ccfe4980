"""Identifies loaders: what ranks compare before they exchange anything, and what their errors name."""

from __future__ import annotations

import contextlib
import hashlib
import json
import sys
import threading
import weakref
from collections import Counter
from collections.abc import Iterator, Mapping, Sized
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from types import BuiltinFunctionType, FunctionType
from typing import Final

import numpy as np
import torch
import torch.distributed as dist
from torch.utils.data import Dataset

from odb_ref.core.errors import UsageError

_OURS: Final = ("odb_ref", "typing")
"""Packages whose frames may lie between the user's line and the constructor."""

_OF_RANK: Final = frozenset(
    ("rank", "local_rank", "global_rank", "node_rank", "process_index", "local_process_index", "pid", "device", "seed")
)
"""Names of attributes that may differ between ranks that read one data set."""
TYPE: Final = "type()"
SIZE: Final = "len()"
"""The names of these two facts, chosen so that no attribute can have them."""
_MOST: Final = 32
"""How many attributes are compared, and how many numbers of an array."""
_MOST_BYTES: Final = 2**28
_MOST_ITEMS: Final = 2**20
"""Larger arrays and longer lists are not compared, because that takes seconds; an array may be backed by a file."""
_PLAIN: Final = (bool, int, float, complex, str, bytes, range, set, frozenset)
"""Types whose values are compared by ``==``. Their subclasses are not, because they may hold more than the value."""
_OF_PICKLE: Final = ("__reduce_ex__", "__reduce__", "__getstate__")

_NAME_IT: Final = "pass Protocol(name=...), the same on all ranks"


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderIdentity:
    """Identifies a loader: equal on all of its ranks, and different from any other loader. Spec: R18, R18.1."""

    name: str
    """The user's name for it, otherwise the line that made it, without the folder, which may differ between hosts."""
    ordinal: int
    """How many otherwise equal loaders the process has begun before, in the present generation."""
    facts: Mapping[str, str] = field(default_factory=dict)
    """Facts that distinguish its data set, if all ranks have the same or another loader from this line has not begun yet. Empty
    if the user names the loader."""
    is_common: bool
    """True if all ranks have the same data set."""
    group: str = ""
    made_at: str = field(compare=False)
    budget_tokens: int = field(default=0, compare=False)
    """Compared later, together with all settings (R7.3)."""

    def is_of(self, other: LoaderIdentity) -> bool:
        """Returns True if ``other`` is the same loader on another rank, as far as it is compared here.

        If only one of the two claims that all ranks have one data set, the comparison of settings reports it (R7.3).
        """
        if self.is_common == other.is_common:
            return self == other
        return (self.name, self.group) == (other.name, other.group)

    @property
    def label(self) -> str:
        """A short text that distinguishes it from the other loaders of the process."""
        return f"{self.name}#{self.ordinal}"

    def __str__(self) -> str:
        name = "" if self.name == self.made_at else f" {self.name!r}"
        number = "" if not self.ordinal else f", number {self.ordinal + 1} of these"
        group = f", group {self.group}" if self.group else ""
        size = f" of {self.facts[SIZE]} samples" if SIZE in self.facts else ""
        data = f", {self.facts[TYPE]}{size}" if self.facts else ""
        return f"the loader{name} made at {self.made_at} (token_budget={self.budget_tokens}{data}{group}{number})"

    def describe_difference(self, other: LoaderIdentity) -> str:
        """Returns how the data sets of two loaders with the same name differ. Empty if the names differ, or nothing does."""
        names = [
            name for name in sorted({**self.facts, **other.facts}) if self.facts.get(name) != other.facts.get(name)
        ]
        if self.name != other.name or not names:
            return ""
        return f": their data sets differ in {', '.join(names)}. If they are one loader, {_NAME_IT}"


def describe_crossed(rank: str, ours: object, other: str, theirs: object) -> str:
    """Returns the error message for two ranks of the job that are in different loaders."""
    return (
        f"the ranks iterate over different loaders, but must begin loaders in the same order: {rank} over {ours}, {other} over "
        f"{theirs}"
    )


class _Generation:
    """One life of the job's process group, from `init_process_group` to `destroy_process_group`."""

    def __init__(self, world: dist.ProcessGroup | None) -> None:
        self.world = None if world is None else weakref.ref(world)
        self.waiting: weakref.WeakSet[LoaderOrigin] = weakref.WeakSet()
        """Loaders that were made but have not begun."""
        self.begun: Counter[str] = Counter()
        """For each combination of what ranks compare, the number of loaders begun."""
        self.met: Counter[tuple[int, ...]] = Counter()
        """For each set of processes, the number of exchanges begun. It selects the store keys for the next one."""

    def is_of(self, world: dist.ProcessGroup | None) -> bool:
        if self.world is None or world is None:  # `is` alone is not enough: a collected group is None too
            return self.world is None and world is None
        return self.world() is world


_lock: Final = threading.Lock()
_present: Final = [_Generation(None)]


def get_generation() -> _Generation:
    """Returns the present generation."""
    world = dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
    with _lock:
        if not _present[0].is_of(world):
            _present[0] = _Generation(world)
        return _present[0]


class LoaderOrigin:
    """Where, when and over which data a loader was made. The loader owns it."""

    def __init__(self, name: str | None, data: object) -> None:
        self.made_at = _find_line()
        self.name = name or self.made_at
        self._is_named = name is not None
        self._data = data
        self._has_begun = False
        self._generation = get_generation()
        self._generation.waiting.add(self)

    def check(self) -> None:
        """Checks that the process group is still the one under which the loader began or, before that, was made.

        A loader made before there was a process group may begin under the first one. Spec: R18.3.
        Raises: UsageError.
        """
        if self._generation is get_generation() or not (self._has_begun or self._generation.world is not None):
            return
        raise UsageError(
            f"the loader made at {self.made_at} is stale: torch.distributed was started or shut down since then, so its ranks "
            "may have changed. Make a new loader"
        )

    def begin(self, group: str, budget_tokens: int, *, is_common: bool, is_alone: bool) -> LoaderIdentity:
        """Binds the loader, which now begins, to the present generation. Returns the identity for ranks to compare.

        ``is_common`` means that all ranks have the same data set, ``is_alone`` that there is no other rank.

        Raises: UsageError when nothing distinguishes it from a loader not yet begun, which other ranks may begin at this time.
        """
        self._generation, self._has_begun = (generation := get_generation()), True
        others = [] if is_alone else [other for other in generation.waiting if self._is_like(other)]
        generation.waiting.discard(self)
        is_told = not (self._is_named or is_alone) and (is_common or bool(others))
        facts = list_facts(self._data, is_sized=is_common) if is_told else {}
        for other in others:
            if self._is_named or list_facts(other._data, is_sized=is_common) == facts:
                which = f"called {self.name!r}" if self._is_named else f"made at {self.made_at}"
                raise UsageError(
                    f"two loaders {which} read different data sets, and neither has begun, so other ranks cannot tell which "
                    "one begins now. Give each its own Protocol(name=...), the same on all ranks"
                )
        key = json.dumps([self.name, facts, group])
        generation.begun[key] += 1
        return LoaderIdentity(
            name=self.name,
            ordinal=generation.begun[key] - 1,
            facts=facts,
            is_common=is_common,
            group=group,
            made_at=self.made_at,
            budget_tokens=budget_tokens,
        )

    def _is_like(self, other: LoaderOrigin) -> bool:
        """Returns True for another loader of the same name, unless it reads the same data: then their order does not matter."""
        return other is not self and other.name == self.name and not is_same(self._data, other._data)

    def retire(self) -> None:
        """Notes that the loader will not begin."""
        self._generation.waiting.discard(self)


def _find_line() -> str:
    """Returns the file and line that makes the loader: the innermost frame outside this library."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _OURS:
        frame = frame.f_back
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"


def list_facts(data: object, *, is_sized: bool = False, depth: int = 3) -> dict[str, str]:
    """Returns facts that distinguish a data set without reading a sample: its type, and digests of its public attributes, by
    name, if they are plain values, functions or data in turn. A digest reveals nothing, so it may be sent. Spec: R18.1.

    ``is_sized`` adds the number of samples.
    """
    items = [("its items", data)] if isinstance(data, list | tuple | np.ndarray | torch.Tensor) else []
    found = {TYPE: type(data).__name__}
    with contextlib.suppress(Exception):  # a failing len() shows up on all ranks when the epoch begins
        found |= {SIZE: str(len(data))} if is_sized and isinstance(data, Sized) else {}
    for name, value in [*items, *getattr(data, "__dict__", {}).items()][:_MOST]:
        # A dict is often a cache of samples. A file opened when first used is None on ranks that have not read a sample.
        if name.startswith("_") or name in _OF_RANK or value is None or isinstance(value, dict):
            continue
        with contextlib.suppress(Exception):  # an array of an unknown kind
            if (text := _describe(value, depth)) is not None:
                found[name] = hashlib.blake2b(text.encode(), digest_size=4).hexdigest()
    return found


def _describe(value: object, depth: int) -> str | None:
    """Returns a text that is the same in every process with such a value, or None if there is no such text."""
    match value:
        case None | bool() | int() | float() | complex() | str() | bytes() | range() | PurePath():
            return repr(value)
        case np.generic():
            return repr(value.item())
        case FunctionType() | BuiltinFunctionType() | type():
            return value.__qualname__
        case np.ndarray() | torch.Tensor():
            ends = (value[:2], value[-2:]) if value.ndim else (value,)
            numbers = [_describe(part.reshape(-1)[:_MOST].tolist(), depth) for part in ends]
            return f"{value.dtype} {tuple(value.shape)} {numbers}"
        case list() | tuple():
            size = len(value)
            places = range(size) if size <= _MOST else (0, size // 3, 2 * size // 3, size - 1)
            return f"{size} {[_describe(value[place], depth - 1) for place in places] if depth else None}"
        case dict():
            pairs = list(value.items())[:_MOST] if depth else []
            return f"{len(value)} {[(_describe(name, 0), _describe(item, depth - 1)) for name, item in pairs]}"
        case Dataset() if depth:
            return f"{type(value).__name__} {list_facts(value, depth=depth - 1)}"
        case _:
            return None


def is_same(one: object, other: object) -> bool:
    """Returns True if two data sets of this process hold the same data, public and private, to the last number. Spec: R18.1."""
    with contextlib.suppress(Exception):  # data that cannot be taken apart or compared
        return _is_same(one, other, 12)
    return False


def _is_same(one: object, other: object, depth: int) -> bool:
    kind = type(one)
    if one is other or kind is not type(other) or not depth:
        return one is other
    match one, other:
        case np.ndarray(), np.ndarray():
            return one.nbytes <= _MOST_BYTES and one.dtype == other.dtype and np.array_equal(one, other)
        case torch.Tensor(), torch.Tensor():
            return one.nbytes <= _MOST_BYTES and one.dtype == other.dtype and torch.equal(one, other)
        case list() | tuple(), list() | tuple() if kind in (list, tuple):
            pairs = zip(one, other, strict=False)
            return len(one) == len(other) <= _MOST_ITEMS and all(_is_same(mine, its, depth - 1) for mine, its in pairs)
        case dict(), dict() if kind is dict:
            return one.keys() == other.keys() and all(_is_same(one[key], other[key], depth - 1) for key in one)
        case _ if kind in _PLAIN or isinstance(one, PurePath | np.generic):
            return bool(one == other)
        case _ if all(getattr(kind, name) is getattr(object, name) for name in _OF_PICKLE):
            return _is_same(_list_parts(one), _list_parts(other), depth - 1)
    return False


def _list_parts(value: object) -> list[object]:
    """Returns what pickle would store of an object whose class uses pickle's defaults.

    Raises: TypeError when the object cannot be pickled, for example because it holds a lock or an open file.
    """
    return [list(part) if isinstance(part, Iterator) else part for part in object.__reduce_ex__(value, 2)[1:]]
