"""A timeline for https://ui.perfetto.dev: each rank has a track for its trainer, exchange, collator and reader.

The file holds Chrome's trace events, which chrome://tracing and scripts can read too.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Final, Literal

from odb_sim.engine.metrics import StepRow

Track = Literal["reader", "collator", "exchange", "trainer"]
TRACKS: Final[tuple[Track, ...]] = ("trainer", "exchange", "collator", "reader")
_MICROSECONDS: Final = 1e6

Span = tuple[int, Track, str, float, float]
"""Rank, track, name, start and end in seconds."""


_STEPS_BEFORE: Final = 8


def choose_fault_begin(rows: Sequence[StepRow], fault_s: float) -> float:
    """Returns the time, in seconds, from which to show a fault, so that the last steps that begin before it are included."""
    before = [row.start_s for row in rows if row.start_s < fault_s][-_STEPS_BEFORE:]
    return before[0] if before else 0.0


class Timeline:
    """Collects spans of simulated time, of ``ranks`` or (None) of all, and writes them."""

    __slots__ = ("_ranks", "_spans")

    def __init__(self, ranks: Collection[int] | None = None) -> None:
        self._ranks = ranks
        self._spans: list[Span] = []

    def add(self, rank: int, track: Track, name: str, start_s: float, end_s: float) -> None:
        """Adds a span to a track of ``rank``, unless it is empty."""
        if end_s > start_s and (self._ranks is None or rank in self._ranks):
            self._spans.append((rank, track, name, start_s, end_s))

    def list_spans(self, ranks: Collection[int]) -> list[Span]:
        """Returns the spans of ``ranks``, in the order they were added."""
        return [span for span in self._spans if span[0] in ranks]

    def write(self, path: str | Path) -> None:
        """Writes the names of ranks and tracks, then the spans in the order they were added."""
        with Path(path).open("w", encoding="utf-8") as file:
            file.write('{"displayTimeUnit":"ms","traceEvents":[\n')
            events = [*self._list_names(), *map(_encode_span, self._spans)]
            file.write(",\n".join(json.dumps(event, separators=(",", ":")) for event in events))
            file.write("\n]}\n")

    def _list_names(self) -> list[dict[str, object]]:
        names: list[dict[str, object]] = []
        for rank in sorted({span[0] for span in self._spans}):
            # The viewer appends the number to the name. Without an index it sorts ranks by how much they did.
            names.append({"ph": "M", "name": "process_name", "pid": rank, "args": {"name": "rank"}})
            names.append({"ph": "M", "name": "process_sort_index", "pid": rank, "args": {"sort_index": rank}})
            for place, track in enumerate(TRACKS):
                tid = _compute_tid(rank, track)
                names.append({"ph": "M", "name": "thread_name", "pid": rank, "tid": tid, "args": {"name": track}})
                index = {"sort_index": place}
                names.append({"ph": "M", "name": "thread_sort_index", "pid": rank, "tid": tid, "args": index})
        return names


def _compute_tid(rank: int, track: Track) -> int:
    # Never 0 or the rank's own number, which the viewer takes for main threads whatever their names.
    return 10 * (rank + 1) + TRACKS.index(track) + 1


def _encode_span(span: Span) -> dict[str, object]:
    rank, track, name, start_s, end_s = span
    start_us = round(start_s * _MICROSECONDS, 3)
    return {
        "ph": "X",
        "name": name,
        "cat": track,
        "pid": rank,
        "tid": _compute_tid(rank, track),
        "ts": start_us,
        "dur": round(end_s * _MICROSECONDS - start_us, 3),
    }
