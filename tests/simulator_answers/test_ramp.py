"""The cost of an early first step to an epoch: by default less than one step in a hundred. Spec: R2.3, R3.3."""

from __future__ import annotations

import numpy as np
import pytest
from odb_sim.inputs.lengths import list_bundled_names, load_lengths
from odb_sim.studies.runs import Driver, run

from odb_ref.core.batching.layouts import Layout
from tests.helpers.simulated import make_run

WINDOW = 256
RANKS = (2, 8)


def count_steps(windows: float, layout: Layout, ramp: int | None) -> int:
    """Returns the steps of all epochs of ``windows`` windows, with batches of 8 on average. None is the default ramp."""
    steps = 0
    for name in list_bundled_names():
        lengths = load_lengths(name)
        budget = int(max(np.quantile(lengths.tokens, 0.99), 8 * np.mean(lengths.tokens)))
        for ranks in RANKS:
            samples = int(windows * WINDOW * ranks)
            settings = {"budget_tokens": budget, "window_samples": WINDOW, "layout": layout, "ramp_rounds": ramp}
            steps += run(make_run(lengths, ranks, samples, driver=Driver.ROUNDS, **settings)).summary.steps
    return steps


@pytest.mark.slow
@pytest.mark.parametrize("layout", Layout)
@pytest.mark.parametrize("windows", [0.5, 1, 2, 4])
def test_the_ramp_costs_less_than_a_step_in_a_hundred(windows: float, layout: Layout) -> None:
    without, usual = (count_steps(windows, layout, ramp) for ramp in (0, None))
    assert usual <= 1.01 * without


def test_it_did_cost_more_when_all_that_a_small_window_holds_was_grouped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("odb_ref.core.rounds.RAMP_SHARE", 1)
    assert count_steps(2, Layout.PADDED, None) > 1.02 * count_steps(2, Layout.PADDED, 0)
