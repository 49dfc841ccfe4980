"""Weights: a trainer that averages weighted losses gets the intended mean, whatever it divides by."""

from __future__ import annotations

import random
from fractions import Fraction
from itertools import product

import pytest

from odb_ref.core.batching.weighting import LossReduction, LossScaling, Weighting
from odb_ref.core.types import ZERO_COUNTS, StepCounts
from tests.helpers.effort import few
from tests.helpers.sizes import draw_size


@pytest.mark.parametrize("is_divided", [False, True])
@pytest.mark.parametrize("reduction", LossReduction)
@pytest.mark.parametrize("scaling", [LossScaling.EXACT, LossScaling.SAMPLES])
def test_weighted_losses_average_to_the_mean(scaling: LossScaling, reduction: LossReduction, is_divided: bool) -> None:
    """Spec: R4.5. Checks: WEIGHT. Batches that idle, or lack supervised tokens, of any size; updates of any number of steps."""
    draw = random.Random(f"{scaling} {reduction} {is_divided}")
    for _ in range(few(60)):
        ranks, steps = draw_size(draw, 100, 1), draw_size(draw, 2**20, 1)
        weighting = Weighting(
            scaling=scaling, reduction=reduction, accumulation_steps=steps, is_divided_by_steps=is_divided
        )
        batches = []
        for _ in range(draw_size(draw, 9, 1)):
            samples = draw_size(draw, 2**12)
            tokens = samples and draw_size(draw, 2**42)
            batches.append((StepCounts(samples, tokens, tokens and draw_size(draw, tokens)), draw_size(draw, 50, 1)))
        update = sum((counts for counts, _ in batches), ZERO_COUNTS)
        average = total = Fraction(0)
        for counts, mean in batches:
            loss = mean * (counts.supervised if reduction is LossReduction.SUM else bool(counts.supervised))
            weight = Fraction(weighting.compute_scale(counts, update, ranks))
            average += weight * loss / ranks / (steps if is_divided else 1)
            size = counts.supervised if scaling is LossScaling.EXACT else counts.samples * bool(counts.supervised)
            total += mean * size
        size = update.supervised if scaling is LossScaling.EXACT else update.samples
        assert float(average) == pytest.approx(float(total / max(1, size)), rel=1e-9), (weighting, ranks, batches)


def test_what_is_weighed_by_others_weighs_one() -> None:
    """Spec: R4.5. An idle step weighs nothing, with any scaling."""
    none = Weighting(scaling=LossScaling.NONE, accumulation_steps=8, is_divided_by_steps=True)
    assert none.compute_scale(StepCounts(2, 10, 6), StepCounts(9, 50, 30), 2) == 1.0
    for scaling, reduction in product(LossScaling, LossReduction):
        weighting = Weighting(scaling=scaling, reduction=reduction)
        assert weighting.compute_scale(ZERO_COUNTS, StepCounts(9, 50, 30), 2) == 0.0
