"""Checks by definition the counts of steps, and whether the weights made from them give the requested mean (WEIGHT).

Counts are summed here from the samples' own fields, not by the core. Each sample has its own loss, the same for every token
that carries loss. The losses of all batches of an update, weighted, added up and averaged over ranks as a trainer does, must
equal the mean over those tokens, or over samples.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from functools import lru_cache
from itertools import product
from math import isclose
from typing import Final

from odb_ref.core.batching.weighting import LossReduction, LossScaling, Weighting
from odb_ref.core.effects import Deliver, Effect
from odb_ref.core.events import Event
from odb_ref.core.resume import Resumed
from odb_ref.core.types import ZERO_COUNTS, Group, Step, StepCounts
from odb_sim.explore.bounds import Bounds
from odb_sim.explore.rank import ExploredRank
from odb_sim.explore.violation import Breach

_MOST_STEPS: Final = 1_000
"""The most steps of an update, if there are that many; half of all updates have at most its square root."""
_KINDS: Final = tuple(product((LossScaling.EXACT, LossScaling.SAMPLES), LossReduction, (False, True)))


class WeightJudge:
    """Collects the steps that ranks are handed, then finds updates with wrong weights. Passes everything on to ``observer``."""

    def __init__(
        self, ranks: int, observer: Callable[[int, Event | Resumed | None, Sequence[Effect], float], None]
    ) -> None:
        self._ranks, self._observer = ranks, observer
        self._steps: defaultdict[int, list[Step]] = defaultdict(list)

    def observe(self, rank: int, event: Event | Resumed | None, effects: Sequence[Effect], seconds: float) -> None:
        """Notes the steps that a rank is handed, and calls the observer."""
        self._observer(rank, event, effects, seconds)
        for effect in effects:
            if isinstance(effect, Deliver):
                self._steps[effect.step.number].append(effect.step)

    def find_wrong(self) -> str:
        """Returns a description of the first update with wrong weights, or an empty text."""
        return _find_wrong([held for _, held in sorted(self._steps.items()) if len(held) == self._ranks], self._ranks)


def check_counts(bounds: Bounds, ranks: Sequence[ExploredRank]) -> None:
    """Checks that every step's global counts are the sums over the ranks, that some rank has a sample in it, and its weights.

    Raises: Breach.
    """
    steps = tuple(zip(*(rank.taken for rank in ranks), strict=True))
    for number, held in enumerate(steps):
        samples = [sample for step in held for sample in step.group]
        counts = StepCounts(
            len(samples),
            sum(sample.length for sample in samples),
            sum(sample.supervised for sample in samples),
            tuple(sum(sample.costs[place] for sample in samples) for place in range(len(bounds.limits))),
        )
        if any(step.global_counts != counts for step in held):
            raise Breach("WEIGHT", f"step {number} holds {counts}, the ranks are told {held[0].global_counts}")
        if not counts.samples:
            raise Breach("TERM", f"step {number} is idle on every rank")
    if wrong := _find_wrong_once(steps):
        raise Breach("WEIGHT", wrong)


@lru_cache(maxsize=1_000)
def _find_wrong_once(steps: tuple[tuple[Step, ...], ...]) -> str:
    """Returns `_find_wrong`, cached because most schedules of a world end with the same steps."""
    return _find_wrong(steps, len(steps[0])) if steps else ""


def _find_wrong(steps: Sequence[Sequence[Step]], ranks: int) -> str:
    """Returns a description of the first update with wrong weights, or an empty text. Updates have random numbers of steps, and
    each is weighted in every way.
    """
    draw = random.Random(len(steps))
    begin = 0
    while begin < len(steps):
        size = int(min(_MOST_STEPS, len(steps)) ** draw.random())
        update = steps[begin : begin + size]
        for scaling, reduction, is_divided in _KINDS:
            weighting = Weighting(
                scaling=scaling, reduction=reduction, accumulation_steps=len(update), is_divided_by_steps=is_divided
            )
            if wrong := _describe_wrong(weighting, update, ranks):
                return wrong
        begin += size
    return ""


def _describe_wrong(weighting: Weighting, update: Sequence[Sequence[Step]], ranks: int) -> str:
    counts = sum((held[0].global_counts for held in update), ZERO_COUNTS)
    by_tokens = weighting.scaling is LossScaling.EXACT
    divisor = ranks * (len(update) if weighting.is_divided_by_steps else 1)
    made = total = size = Fraction(0)
    for group, (supervised, loss) in _iterate_batches(update):
        local = StepCounts(len(group), 0, supervised)
        mean = Fraction(loss, supervised) if supervised else Fraction(0)
        weight = Fraction(weighting.compute_scale(local, counts, ranks))
        made += weight * (mean if weighting.reduction is LossReduction.MEAN else loss) / divisor
        held = supervised if by_tokens else len(group)
        total, size = total + mean * held, size + held
    expected = total / size if size else Fraction(0)
    if isclose(made, expected, rel_tol=1e-9):
        return ""
    kind = f"{weighting.scaling}, of the {weighting.reduction}{', divided' if weighting.is_divided_by_steps else ''}"
    first = f"step {update[0][0].number}"
    return f"weights ({kind}) of {len(update)} steps from {first} make {float(made)}, the mean is {float(expected)}"


def _iterate_batches(update: Sequence[Sequence[Step]]) -> Iterator[tuple[Group, tuple[int, int]]]:
    """Yields the group of each rank in each step, with how many of its tokens carry loss and the sum of their losses."""
    for step in (step for held in update for step in held):
        losses = [(sample.supervised, sample.supervised * (1 + sample.id % 97)) for sample in step.group]
        yield step.group, (sum(count for count, _ in losses), sum(loss for _, loss in losses))
