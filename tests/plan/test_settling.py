"""Results of settling for many samples. `tests.proofs.test_plan` compares few samples with the proved model. Spec: R13.5."""

from __future__ import annotations

import random

import pytest
from odb_sim.inputs.lengths import list_bundled_names, load_lengths

from odb_ref.plan import attention, plan_all, plan_rank

BUDGET = 16_384


def test_one_that_is_empty_has_nothing_to_give() -> None:
    """Spec: R13.5. There are more units than are exchanged, but fewer than micro-batches."""
    assert plan_rank([1] * 32_769, budget=60, at_least=32_770).count == 32_770


@pytest.mark.slow
@pytest.mark.parametrize("name", list_bundled_names())
def test_real_lengths_take_the_fewest_steps_and_wait_no_longer_than_they_must(name: str) -> None:
    """Spec: R13.10. Several draws of every trace, few ranks and many, by tokens and by attention."""
    lengths = [min(int(length), BUDGET) for length in load_lengths(name).tokens]
    for draw in range(3):
        drawn = random.Random(f"{name}{draw}").sample(lengths, min(2_048, len(lengths)))
        for number, ranks in ((2_048, 8), (2_048, 64), (512, 8), (256, 64)):
            for cost, most in ((None, 1.02), (attention(hidden_size=4_096), 1.03)):
                report = plan_all(drawn[:number], ranks=ranks, budget=BUDGET, cost=cost).report
                assert report.count == report.least
                assert report.wait is not None
                assert report.wait <= most * report.least_wait


def test_what_the_greedy_misses_evening_out_finds() -> None:
    """Spec: R13.4. With 23.994 budgets of short samples, the greedy leaves one over, and so does best fit."""
    lengths = [min(int(length), BUDGET) for length in load_lengths("gsm8k").tokens]
    drawn = random.Random("gsm8k2").sample(lengths, 2_048)
    assert plan_rank(drawn, budget=BUDGET).count == 24
