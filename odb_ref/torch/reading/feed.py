"""The keys of an epoch, in the order in which they are read."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from odb_ref.torch.reading.datasets import KeyChunk
from odb_ref.torch.reading.service import ReadPlan


@dataclass(slots=True)
class _Part:
    """Samples that are wanted at the same time: places and keys, and how many were not taken yet."""

    items: Iterator[tuple[int, object]]
    left: int
    chunks: int = 0
    """How many are still taken before their size is computed again: one for each reader."""
    size: int = 0


class KeyFeed:
    """The keys of an epoch, in chunks: those known when it begins, then those drawn. One thread adds, another takes.

    Samples that are wanted at the same time, such as the ``first`` of those known, are shared out among so many ``readers``;
    without any, chunks are as large as they may be.
    """

    def __init__(self, plan: ReadPlan, readers: int | None = None, first: int = 0) -> None:
        self._seed = plan.seed
        self._parts: deque[_Part] = deque()
        """A chunk holds samples of one."""
        self._is_closed = not plan.is_drawn
        self._readers = readers
        self.added = 0
        """How many samples were added."""
        self._asked = known = len(plan.places)
        """How many samples are wanted by now: those an epoch begins with, and what was drawn since."""
        if plan.keys is not None:
            items = zip(plan.places, plan.keys, strict=True)
            self._append(items, min(first if readers else 0, known))
            self._append(items, known - self.added)

    def add(self, items: Sequence[tuple[int, object]], count: int) -> None:
        """Adds places and keys; so many samples are asked for, added now or before, and do not wait for what is read ahead."""
        self._asked += count
        cut = max(0, self._asked - self.added)
        for part in (items[:cut], items[cut:]):
            self._append(iter(part), len(part))

    def _append(self, items: Iterator[tuple[int, object]], count: int) -> None:
        self.added += count
        self._parts.append(_Part(items, count))

    def close(self) -> None:
        """Nothing more is added."""
        self._is_closed = True

    def take(self, most: int) -> KeyChunk | None:
        """Returns the next chunk of at most so many, an empty one while nothing is drawn; None when nothing more comes.

        Where they are shared out, chunks are equally large, and so many that all readers are done at about the same time.
        """
        is_closed = self._is_closed  # first: what was added before it was closed is not lost
        while self._parts and not self._parts[0].left:
            self._parts.popleft()
        if not self._parts:
            return None if is_closed else KeyChunk(self._seed, [])
        part = self._parts[0]
        if not part.chunks:
            part.chunks = readers = self._readers or 1
            turns = -(-part.left // (most * readers))
            part.size = -(-part.left // (turns * readers)) if self._readers else most
        part.chunks -= 1
        size = min(part.size, part.left)
        part.left -= size
        return KeyChunk(self._seed, list(islice(part.items, size)))
