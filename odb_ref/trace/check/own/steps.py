"""Judges a step by its samples and by the counts posted and answered, and the order of a round's steps.

Spec: R2.6, R4.5, R4.8, R4.9, R9.3.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Final

from odb_ref.trace.check.decode import Rows, Settings, TracedStep
from odb_ref.trace.check.own.groups import is_friendly, list_excesses
from odb_ref.trace.check.verdict import Judgement, Property

Counts = list[int] | None

_WORD: Final = 2**64


def judge_step(
    step: TracedStep, group: Rows, settings: Settings, *, due_before: int, counts: tuple[Counts, Counts]
) -> Iterator[Judgement]:
    """Yields what is wrong with a step that holds the samples in ``group``, or with its counts.

    A sample positioned before ``due_before`` is too old for it. ``counts`` are those the rank posted for the step and the sums
    over all ranks it was told; each is None if the trace has none.
    """
    posted, told = counts
    if step.positions and min(step.positions) < due_before and len(group) == len(step.positions):
        yield Property.AGE, f"position {min(step.positions)} was carried for more than {settings.max_age_rounds} rounds"
    for what in list_excesses(group, settings):
        yield Property.BUDGET, what
    padding = settings.compute_tokens(group) - sum(row[2] for row in group)
    if settings.order != "sampler" and padding > settings.most_padding:
        yield Property.BUDGET, f"{padding} tokens of padding, over {settings.most_padding}"
    if not is_friendly(len(step.positions), settings.sizes):
        yield Property.SIZES, f"holds {len(step.positions)} samples, which is not of the sizes {settings.sizes}"
    if posted is not None and len(group) == len(step.positions):
        places = range(2, 4 + len(settings.limits))
        held = [len(group), *(sum(row[place] for row in group if place < len(row)) for place in places)]
        if held != posted:
            yield Property.WEIGHT, f"holds {held}, but posted {posted} (samples, tokens, supervised, costs)"
    if told is not None and step.counts != told:
        yield Property.WEIGHT, f"carries the counts {step.counts}, but was told {told}"


def _hash(number: int) -> int:
    number = (number + 0x9E3779B97F4A7C15) % _WORD
    number = (number ^ (number >> 30)) * 0xBF58476D1CE4E5B9 % _WORD
    number = (number ^ (number >> 27)) * 0x94D049BB133111EB % _WORD
    return number ^ (number >> 31)


def list_places(count: int, seed: int, round_: int) -> list[int]:
    """Returns, for each step of a shuffled round in the order they leave, its place by falling fullness. Spec: R4.9."""
    key = _hash(_hash(seed % _WORD) ^ round_)
    return [place for _, place in sorted((_hash(key ^ place), place) for place in range(count))]


def find_disorder(steps: Sequence[Rows], target: int, round_: int, settings: Settings) -> tuple[int, str]:
    """Returns which of a round's steps is out of order, and why; an empty text means that none is.

    ``steps`` may be fewer than ``target`` if a quota cuts the round. They leave by falling cost, or in an order that becomes
    falling cost when the permutation is undone. In sampler order each step holds later positions than the step before. With a
    cost that is not built in, only idle steps are judged.
    """
    filled = [rows for rows in steps if rows]
    if any(steps[len(filled) :]):
        return len(filled), "is not idle, and a step before it is"
    if settings.order == "sampler":
        spans = [(min(row[1] for row in rows), max(row[1] for row in rows)) for rows in filled]
        for place, (before, after) in enumerate(pairwise(spans), 1):
            if after[0] < before[1]:
                return place, f"holds position {after[0]}, and the step before it {before[1]}"
        return 0, ""
    if settings.attention_tokens is None:
        return 0, ""
    places = list(range(target))
    if settings.order == "shuffled":
        most = target - (len(steps) - len(filled))  # idle steps are left out of the permutation
        places = [place for place in list_places(target, settings.order_seed, round_) if place < most]
    lined = sorted(zip(places, range(len(filled)), filled, strict=False))
    for (_, _, fuller), (_, step, rows) in pairwise(lined):
        more, less = settings.compute_cost(fuller), settings.compute_cost(rows)
        if more < less:
            what = f"{settings.cost} of {less}" if settings.attention_tokens else f"{less} tokens"
            return step, f"has {what}, more than a step of {more} that comes first by the order {settings.order}"
    return 0, ""
