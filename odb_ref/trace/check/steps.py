"""What a step must be, given the samples it holds, and what was posted and told of it. Spec: R4.5, R9.3."""

from __future__ import annotations

from collections.abc import Iterator

from odb_ref.trace.check.decode import Rows, Settings, TracedStep
from odb_ref.trace.check.groups import list_excesses
from odb_ref.trace.check.verdict import Judgement, Property

Counts = list[int] | None


def judge_step(
    step: TracedStep, group: Rows, settings: Settings, *, due_before: int, counts: tuple[Counts, Counts]
) -> Iterator[Judgement]:
    """Yields what is wrong with a step of the samples in ``group``: what it holds, or its counts.

    A sample below ``due_before`` is too old for it. ``counts`` are those posted for it and those told of all ranks, None when
    the trace has none.
    """
    posted, told = counts
    if step.positions and min(step.positions) < due_before and len(group) == len(step.positions):
        yield Property.AGE, f"position {min(step.positions)} was carried for more than {settings.max_age_rounds} rounds"
    for what in list_excesses(group, settings):
        yield Property.BUDGET, what
    if posted is not None and len(group) == len(step.positions):
        held = [len(group), sum(row[2] for row in group), sum(row[3] for row in group)]
        if held != posted:
            yield Property.WEIGHT, f"holds {held}, but posted {posted} (samples, tokens, supervised)"
    if told is not None and step.counts != told:
        yield Property.WEIGHT, f"carries the counts {step.counts}, but was told {told}"
