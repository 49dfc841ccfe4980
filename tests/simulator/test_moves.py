"""How far training departs from the sampler's choice."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from odb_sim.engine.metrics import compute_autocorrelation, sum_moves
from odb_sim.studies.runs import run

from odb_ref.core.batching.layouts import Layout
from odb_ref.core.batching.order import StepOrder
from tests.helpers.simulated import make_run


@given(st.permutations(range(12)), st.lists(st.integers(1, 4), min_size=12, max_size=12))
def test_moves_are_counted_from_the_place_in_the_epoch(positions: list[int], sizes: list[int]) -> None:
    batches, rest = [], positions
    for size in sizes:
        batches.append(rest[:size])
        rest = rest[size:]
    counts = np.array([len(batch) for batch in batches])
    emitted = [position for batch in batches for position in sorted(batch)]
    moved = sum(abs(place - position) for place, position in enumerate(emitted))
    assert sum_moves(np.cumsum(counts) - counts, counts, np.array(positions)) == moved


@pytest.mark.parametrize(
    ("values", "expected"),
    [([], 0.0), ([3.0], 0.0), ([2.0, 2.0], 0.0), ([1.0, 2.0, 3.0, 4.0, 5.0], 0.4), ([1.0, 2.0, 1.0, 2.0], -0.75)],
)
def test_autocorrelation(values: list[float], expected: float) -> None:
    assert compute_autocorrelation(values) == pytest.approx(expected)


def _run(order: StepOrder, layout: Layout = Layout.PADDED, policy: str = "odb") -> tuple[float, float]:
    settings = {"policy": policy, "budget_tokens": 12_288, "order": order, "layout": layout}
    summary = run(make_run("azure_llm_2023_conv", 2, 6000, **settings)).summary
    assert summary.order == ("planned" if policy == "standard" else order)
    return summary.length_autocorrelation, summary.displacement_samples


def test_fullest_first_is_a_curriculum_and_shuffled_is_not() -> None:
    """Checks: ORDER."""
    assert _run(StepOrder.FULLEST)[0] > 0.5
    assert abs(_run(StepOrder.SHUFFLED)[0]) < 0.1


@pytest.mark.parametrize("layout", Layout)
def test_in_sampler_order_no_sample_is_moved(layout: Layout) -> None:
    """Checks: ORDER."""
    assert _run(StepOrder.SAMPLER, layout)[1] == 0
    assert _run(StepOrder.SHUFFLED, layout)[1] > 10
    assert _run(StepOrder.SHUFFLED, policy="standard")[1] == 0
