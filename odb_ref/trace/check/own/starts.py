"""Judges the start of a resumed epoch: whether a rank can have saved it. Spec: R10.6."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from odb_ref.trace.check.decode import Settings
from odb_ref.trace.check.verdict import Judgement, Property
from odb_ref.trace.format import TracedStart


def judge_start(settings: Settings, start: TracedStart) -> Iterator[Judgement]:
    """Yields violations if no rank can have saved this start."""
    round_, read, marks = start.round, start.read_samples, start.marks
    planned, emitted = start.planned_steps, start.global_samples
    drawn = (start.draw.first, start.draw.count, start.draw.end)
    # An epoch of updates may go on inside its first one (R16.6).
    is_untouched = round_ == 0 and settings.update_samples is None
    faults = {
        "a number is below 0": min(round_, read, planned) < 0,
        f"{read} samples are read before round 0": round_ == 0 and read > 0,
        f"{planned} steps with {emitted} samples are planned before round 0": is_untouched and bool(planned or emitted),
        f"{planned} steps are planned with {emitted} samples": emitted < planned,
        f"{len(marks)} marks in round {round_}": len(marks) > max(0, round_),
        f"the marks do not rise to {read}": bool(marks) and marks[-1] != read,
        "the marks fall": any(after < before for before, after in pairwise((0, *marks))),
        "a draw is named, but each rank has its own source": settings.shared_samples is None and drawn != (0, 0, 0),
    }
    for fault, is_found in faults.items():
        if is_found:
            yield Property.RESUME, f"is resumed at a start that no rank can have saved: {fault}"
