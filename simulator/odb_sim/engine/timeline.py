"""A timeline for https://ui.perfetto.dev: each rank has a track for its trainer, exchange, collator and reader.

A file name that ends in ``.json`` gets Chrome's trace events, which chrome://tracing and scripts can read too, but the viewer
sorts ranks by how much they did. Any other name gets Perfetto's own format, which keeps ranks and tracks in order.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Final, Literal

from odb_sim.engine.metrics import StepRow

Track = Literal["reader", "collator", "exchange", "trainer"]
TRACKS: Final[tuple[Track, ...]] = ("trainer", "exchange", "collator", "reader")
_MICROSECONDS: Final = 1e6
_NANOSECONDS: Final = 1e9

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
        if Path(path).suffix == ".json":
            self._write_json(Path(path))
            return
        with Path(path).open("wb") as file:
            file.writelines(self.encode_packets())

    def _list_ranks(self) -> list[int]:
        return sorted({span[0] for span in self._spans})

    def _write_json(self, path: Path) -> None:
        with path.open("w", encoding="utf-8") as file:
            file.write('{"displayTimeUnit":"ms","traceEvents":[\n')
            events = [*self._list_names(), *map(_encode_span, self._spans)]
            file.write(",\n".join(json.dumps(event, separators=(",", ":")) for event in events))
            file.write("\n]}\n")

    def _list_names(self) -> list[dict[str, object]]:
        names: list[dict[str, object]] = []
        for rank in self._list_ranks():
            # The viewer appends the number to the name.
            names.append({"ph": "M", "name": "process_name", "pid": rank, "args": {"name": "rank"}})
            names.append({"ph": "M", "name": "process_sort_index", "pid": rank, "args": {"sort_index": rank}})
            for track in TRACKS:
                tid = _compute_tid(rank, track)
                names.append({"ph": "M", "name": "thread_name", "pid": rank, "tid": tid, "args": {"name": track}})
        return names

    def encode_packets(self) -> Iterator[bytes]:
        """Yields packets in Perfetto's format (perfetto_trace.proto): tracks, then a begin and an end for each span."""
        is_first = True
        ranks = self._list_ranks()
        for rank in ranks:
            parent = _compute_uuid(rank, None)
            # The viewer sorts outermost tracks by name.
            name = f"rank {rank:0{len(str(ranks[-1]))}}"
            for descriptor in (
                _encode_track(parent, name, order=rank),
                *(
                    _encode_track(_compute_uuid(rank, track), track, order=place, parent=parent)
                    for place, track in enumerate(TRACKS)
                ),
            ):
                # The first packet of a sequence declares that nothing was lost before it.
                yield _encode_packet(_field(60, descriptor) + (_field(13, 1) if is_first else b""))
                is_first = False
        for rank, track, name, start_s, end_s in self._spans:
            where = _field(11, _compute_uuid(rank, track))
            begin = _field(9, 1) + where + _field(22, track.encode()) + _field(23, name.encode())
            yield _encode_packet(_field(8, round(start_s * _NANOSECONDS)) + _field(11, begin))
            yield _encode_packet(_field(8, round(end_s * _NANOSECONDS)) + _field(11, _field(9, 2) + where))


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


# Protocol buffers --------------------------------------------------------------------------------------------------

_SEQUENCE: Final = 1
_EXPLICIT: Final = 3
"""Children of a track are shown in the order of their ranks."""


def _compute_uuid(rank: int, track: Track | None) -> int:
    return (len(TRACKS) + 1) * rank + (1 if track is None else TRACKS.index(track) + 2)


def _encode_packet(body: bytes) -> bytes:
    return _field(1, body + _field(10, _SEQUENCE))


def _encode_track(uuid: int, name: str, *, order: int, parent: int | None = None) -> bytes:
    place = b"" if parent is None else _field(5, parent)
    return _field(1, uuid) + _field(2, name.encode()) + place + _field(11, _EXPLICIT) + _field(12, order)


def _field(number: int, value: int | bytes) -> bytes:
    if isinstance(value, bytes):
        return _varint(number << 3 | 2) + _varint(len(value)) + value
    return _varint(number << 3) + _varint(value)


def _varint(value: int) -> bytes:
    """Returns the value in bytes of seven bits, the lowest first; all but the last have the high bit set."""
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)
