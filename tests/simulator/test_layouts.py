"""The packed layout in whole runs: every sample once, no padding, fuller steps; groups near the fewest on shipped traces."""

from __future__ import annotations

import numpy as np
import pytest
from odb_sim.inputs.lengths import list_bundled_names, load_lengths
from odb_sim.studies.runs import run

from odb_ref.core.batching.grouping import compute_rows
from odb_ref.core.batching.layouts import Layout
from odb_ref.core.types import Sample
from tests.helpers.simulated import make_run

BUDGET_TOKENS = 12_288


@pytest.mark.parametrize("name", list_bundled_names())
@pytest.mark.parametrize("window", [256, 512])
def test_packed_windows_make_nearly_the_fewest_groups(name: str, window: int) -> None:
    lengths = np.random.default_rng(0).choice(load_lengths(name).tokens, (6, window)).tolist()
    made = needed = 0
    for row in lengths:
        made += len(compute_rows([Sample(i, i, length, 0) for i, length in enumerate(row)], BUDGET_TOKENS))
        within = [length for length in row if length <= BUDGET_TOKENS]
        needed += len(row) - len(within) + -(-sum(within) // BUDGET_TOKENS)
    assert made <= 1.02 * needed


@pytest.mark.parametrize("name", ["mm_mix_real", "azure_llm_2023_code"])
def test_packed_steps_are_fuller_and_hold_no_padding(name: str) -> None:
    padded, packed = (
        run(make_run(name, 8, 8000, draw=3, budget_tokens=BUDGET_TOKENS, layout=layout)).summary
        for layout in (Layout.PADDED, Layout.PACKED)
    )
    assert (padded.layout, packed.layout) == ("padded", "packed")
    assert packed.padding_ratio == 0 < padded.padding_ratio
    assert packed.samples_unique == packed.samples_emitted == padded.samples_emitted == 8000
    assert packed.over_budget_groups == 0
    assert packed.efficiency > padded.efficiency
    assert packed.tokens_per_s > padded.tokens_per_s


def test_a_baseline_says_its_own_layout() -> None:
    runs = {
        policy: run(make_run("gsm8k", 2, 500, policy=policy, budget_tokens=2000, layout=Layout.PACKED)).summary.layout
        for policy in ("standard", "packing", "paper")
    }
    assert runs == {"standard": "padded", "packing": "packed", "paper": "packed"}
