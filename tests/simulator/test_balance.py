"""Steps balanced by the time they take need less of it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from odb_sim.inputs.costs import Costs, GpuCost
from odb_sim.studies.runs import run

from odb_ref.core.batching.cost import get_cost
from odb_ref.core.batching.layouts import Layout
from tests.helpers.simulated import make_run

EQUAL_TOKENS = 2000
GPU = GpuCost(fixed_s=0.0, per_token_s=1e-4, per_token2_s=1e-4 / EQUAL_TOKENS)


@pytest.mark.parametrize("layout", Layout)
def test_steps_that_are_alike_in_cost_take_less_time(layout: Layout) -> None:
    """Spec: R2.7. The same number of steps of the same samples, with attention that is half of the work at 2,000 tokens."""
    what = make_run("azure_llm_2023_code", 8, budget_tokens=16_384, layout=layout, costs=Costs(gpu=GPU))
    by_tokens, by_cost = (
        run(replace(what, cost=get_cost(name))).summary for name in ("tokens", f"attention/{EQUAL_TOKENS}")
    )
    assert by_cost.sim_time_s < 0.85 * by_tokens.sim_time_s
    assert by_cost.steps == by_tokens.steps
    assert (by_tokens.cost, by_cost.cost) == ("tokens", f"attention/{EQUAL_TOKENS}")
