"""Who did what when, as a Chrome trace-event file: open it in https://ui.perfetto.dev or chrome://tracing.

Each rank is a process with a track for its reader, collator, exchange and trainer.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final, Literal

Track = Literal["reader", "collator", "exchange", "trainer"]
TRACKS: Final[tuple[Track, ...]] = ("trainer", "exchange", "collator", "reader")
_MICROSECONDS: Final = 1e6


Span = tuple[int, Track, str, float, float]
"""Rank, track, name, start and end in seconds."""


class Timeline:
    """Collects spans of simulated time, of the first ``ranks`` ranks or of all, and writes them."""

    __slots__ = ("_ranks", "_spans")

    def __init__(self, ranks: int | None = None) -> None:
        self._ranks = ranks
        self._spans: list[Span] = []

    def add(self, rank: int, track: Track, name: str, start_s: float, end_s: float) -> None:
        """Adds a span to a track of ``rank``; an empty one is left out."""
        if end_s > start_s and (self._ranks is None or rank < self._ranks):
            self._spans.append((rank, track, name, start_s, end_s))

    def list_spans(self, ranks: int | None = None) -> list[Span]:
        """The spans of the first ``ranks`` ranks, or of all, in the order they were added."""
        return [span for span in self._spans if ranks is None or span[0] < ranks]

    def write(self, path: str | Path) -> None:
        """Writes the trace events: names of ranks and tracks first, then the spans in the order they were added."""
        with Path(path).open("w", encoding="utf-8") as file:
            file.write('{"displayTimeUnit":"ms","traceEvents":[\n')
            events = [*self._list_names(), *map(_encode_span, self._spans)]
            file.write(",\n".join(json.dumps(event, separators=(",", ":")) for event in events))
            file.write("\n]}\n")

    def _list_names(self) -> list[dict[str, object]]:
        names: list[dict[str, object]] = []
        for rank in sorted({span[0] for span in self._spans}):
            names.append({"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank}"}})
            names.append({"ph": "M", "name": "process_sort_index", "pid": rank, "args": {"sort_index": rank}})
            for tid, track in enumerate(TRACKS):
                names.append({"ph": "M", "name": "thread_name", "pid": rank, "tid": tid, "args": {"name": track}})
        return names


def _encode_span(span: Span) -> dict[str, object]:
    rank, track, name, start_s, end_s = span
    start_us = round(start_s * _MICROSECONDS, 3)
    return {
        "ph": "X",
        "name": name,
        "cat": track,
        "pid": rank,
        "tid": TRACKS.index(track),
        "ts": start_us,
        "dur": round(end_s * _MICROSECONDS - start_us, 3),
    }
