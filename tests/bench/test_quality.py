"""Where batches lose efficiency, and what no rule could save."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
from odb_sim.inputs.lengths import load_lengths
from odb_sim.inputs.workload import build_workload
from odb_sim.studies.runs import Result, run

from odb_ref.core.batching.layouts import Layout
from odb_ref.core.offer import Offer
from tests.bench.quality import (
    BUDGET_TOKENS,
    LONG,
    PADDED,
    PEER,
    Cell,
    Miss,
    _list_missed,
    compute_full_efficiency,
    compute_losses,
    count_fewest_steps,
)
from tests.helpers.simulated import make_run

RANKS = 4


def simulate(**more: object) -> Result:
    return run(make_run("gsm8k", RANKS, RANKS * 64 * 6, budget_tokens=3000, window_samples=64, **more))


def test_the_losses_and_the_efficiency_are_one() -> None:
    for layout in Layout:
        result = simulate(layout=layout)
        losses = compute_losses(result.rows, ranks=RANKS, ramp_rounds=3)
        lost = 1 - result.summary.efficiency
        assert losses.ramp + losses.middle + losses.ending == pytest.approx(lost)
        assert losses.padding + losses.waiting == pytest.approx(lost)
        assert (losses.padding == 0) is (layout is Layout.PACKED)


def test_a_loss_is_counted_where_it_is_made() -> None:
    whole = replace(simulate().rows[0], samples=8, real_tokens=40, padded_tokens=40, critical_tokens=10)
    padded = replace(whole, real_tokens=30)
    waiting = replace(whole, real_tokens=30, padded_tokens=30)
    rows = [replace(row, round=number) for number, row in enumerate((padded, padded, whole, waiting, whole, waiting))]
    losses = compute_losses(rows, ranks=RANKS, ramp_rounds=2)
    assert [losses.ramp, losses.middle, losses.ending] == pytest.approx([20 / 240, 10 / 240, 10 / 240])
    assert [losses.padding, losses.waiting] == pytest.approx([20 / 240, 20 / 240])
    short = compute_losses(rows[:2], ranks=RANKS, ramp_rounds=3)  # the last round is the ending, however early
    assert [short.ramp, short.middle, short.ending] == pytest.approx([10 / 80, 0, 10 / 80])


@pytest.mark.parametrize(
    ("tokens", "ranks", "steps"),
    [([10], 2, 1), ([5, 5, 5, 5], 2, 1), ([5, 5, 5, 5, 1], 2, 2), ([30, 10], 1, 2), ([30, 30, 30], 2, 2)],
)
def test_the_fewest_steps(tokens: list[int], ranks: int, steps: int) -> None:
    assert count_fewest_steps(np.array(tokens), ranks=ranks, budget_tokens=10) == steps


def test_no_rule_and_no_layout_takes_fewer_than_the_fewest_steps() -> None:
    for layout in Layout:
        for policy in ("odb", "paper", "peer", "gmt", "packing"):
            result = simulate(layout=layout, policy=policy)
            tokens = build_workload(load_lengths("gsm8k"), ranks=RANKS, samples=RANKS * 64 * 6).tokens
            assert result.summary.steps >= count_fewest_steps(tokens, ranks=RANKS, budget_tokens=3000)


def test_whole_steps_cost_what_the_last_one_lacks() -> None:
    tokens = np.array([5, 5, 5, 5, 1])
    assert compute_full_efficiency(tokens, ranks=2, budget_tokens=10) == pytest.approx(21 / 40)
    assert compute_full_efficiency(tokens[:4], ranks=2, budget_tokens=10) == 1


@dataclass(frozen=True)
class Singles:
    """A rule with one step for each sample of the rank that has most."""

    name: str = "singles"

    def compute_target(self, agreement: Offer) -> int:
        return agreement.samples_max


def test_efficiency_has_no_bound_that_would_excuse_a_rule() -> None:
    """Steps of single samples waste less than any goal for padded batches allows, but there are many."""
    default, singles = simulate().summary, simulate(rule=Singles(), ramp_rounds=0).summary
    assert singles.excess < default.excess / 3
    assert singles.steps > 10 * default.steps


def test_a_goal_is_missed_by_the_epoch_that_misses_it() -> None:
    summary = run(make_run("gsm8k", 2, 1024, budget_tokens=BUDGET_TOKENS)).summary
    cell = Cell("gsm8k", 2, 256, LONG + 1)
    good, bad = replace(summary, excess=0.1), replace(summary, excess=0.4)
    assert _list_missed({cell: {PADDED.name: good, PEER.name: bad}}) == []
    missed = _list_missed({cell: {PADDED.name: bad, PEER.name: good}})
    assert [miss.cell for miss in missed] == [cell, cell, None]
    assert missed[0] == Miss("gsm8k, 2 x 256, 9 windows: behind the peer, 4.00 of its excess", cell)
