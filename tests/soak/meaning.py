"""The changes to a trace that may go unnoticed because they have no meaning, each with the reason."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

Line = dict[str, Any]

MEANINGLESS: dict[str, str] = {
    r"header driver": "the name of the program that wrote it decides nothing",
    r"header epoch": "only traces of the run's other epochs could contradict the epoch",
    r"header peer": "only traces of the rank's other peers could contradict its number",
    r"time_s": "when it happened decides nothing, if times do not fall",
}
"""By path in a line."""

UNREAD: dict[str, str] = {
    r"header inputs .*": "what there was, if it is more than was trained on, is compared with that when all of it was read",
    r"samples_read samples \d+ 0": "so are the samples' ids",
}
"""The same for a rank that has not read all its samples."""

ORDER = "ranks did the same, in another order among them"
UNUSED = "of a sample that no step holds, only what the offers count is compared"
LATE = "what a rank is told after it has ended is ignored"
NOTHING = "the same text, or written otherwise"
CAUSE = "a cause that nobody repeats"


def explain(original: bytes, data: bytes) -> Counter[str]:
    """Returns why each change of a mutant that holds has no meaning.

    Raises: ValueError when one is not known to be without meaning.
    """
    one, other = ([json.loads(line) for line in text.splitlines()] for text in (original, data))
    if one == other:
        return Counter([NOTHING])
    reasons: Counter[str] = Counter()
    is_read = _list_read(one) | ({None} if b'"kind":"complete"' in original else set())
    for path in compare(one[0], other[0]):
        part = re.match(r"inputs (\d+)", path)
        is_known = part is None or one[0]["inputs"][int(part[1])]["rank"] in is_read
        reasons[_find(f"header {path}", MEANINGLESS if is_known else MEANINGLESS | UNREAD)] += 1
    for rank in range(one[0]["world_size"]):
        known = MEANINGLESS if rank in is_read else MEANINGLESS | UNREAD
        left, right = ([line for line in lines[1:] if line["rank"] == rank] for lines in (one, other))
        steps = [step for line in left for effect in line["effects"] for step in effect.get("steps", ())]
        emitted = {position for step in steps for position in step["positions"]}
        left, right = _strip(left), _strip(right)
        if len(left) != len(right):
            raise ValueError(f"rank {rank} has {len(right)} records, not {len(left)}")
        for mine, theirs in zip(left, right, strict=True):
            for path in compare(mine, theirs):
                place = (
                    f"{(mine['event'] or {}).get('kind')} {path.removeprefix('event ')}" if path != "time_s" else path
                )
                row = re.fullmatch(r"samples_read samples (\d+) [023]", place)
                if row and mine["event"]["samples"][int(row[1])][1] not in emitted:
                    reasons[UNUSED] += 1
                else:
                    reasons[_find(place, known)] += 1
    if not reasons:
        reasons[ORDER if sorted(map(str, one)) == sorted(map(str, other)) else LATE] += 1
    return reasons


def _list_read(lines: list[Line]) -> set[int | None]:
    """Returns the ranks that have read all their samples."""
    events = [(line["rank"], line["event"] or {}) for line in lines[1:]]
    return {rank for rank, event in events if event.get("is_ended") or event.get("start", {}).get("is_ended")}


def _find(place: str, known: dict[str, str]) -> str:
    for pattern, reason in known.items():
        if re.fullmatch(pattern, place):
            return reason
    raise ValueError(f"{place} was changed")


def _strip(lines: list[Line]) -> list[Line]:
    """Returns the records of a rank without what it received after its end. Steps that it took are part of what it did."""
    kept = []
    has_ended = False
    for line in lines:
        kind = (line["event"] or {}).get("kind")
        if not has_ended or kind == "step_taken":
            kept.append(line)
        has_ended |= any(effect["kind"] == "finish" for effect in line["effects"])
    return kept


def compare(one: Any, other: Any, path: str = "") -> Iterator[str]:
    """Yields the paths at which two values differ."""
    if isinstance(one, dict) and isinstance(other, dict):
        pairs: list[tuple[object, Any, Any]] = [(key, one.get(key), other.get(key)) for key in {*one, *other}]
    elif isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        pairs = [(place, *both) for place, both in enumerate(zip(one, other, strict=True))]
    else:
        if one != other or type(one) is not type(other):
            yield path
        return
    for key, left, right in pairs:
        yield from compare(left, right, f"{path} {key}".strip())
