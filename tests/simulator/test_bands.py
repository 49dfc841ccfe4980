"""Bands: known ones are recovered, what two times share cancels in their ratio, and the promised share lies inside."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from odb_sim.inputs.costs import ASSUMED, CollectiveCost, Costs, GpuCost, LoaderCost, NetworkCost, Ranges
from odb_sim.inputs.lengths import Lengths
from odb_sim.inputs.workload import Sharding
from odb_sim.studies.bands import LENGTHS, Bands, compute_bands, list_uncertain, redraw
from odb_sim.studies.runs import Run, run

from odb_ref.core.errors import UsageError
from tests.helpers import simulated
from tests.simulator_answers.helpers import make_lengths

FREE = Costs(
    gpu=GpuCost(fixed_s=0, per_token_s=1e-4, per_token2_s=0),
    collective=CollectiveCost(fixed_s=0, latency_s=0, transfer_s=0),
    network=NetworkCost(alpha_s=0, beta_s=0),
    loader=LoaderCost(sample_s=0, per_token_s=0, collate_step_s=0, collate_per_token_s=0, receive_sample_s=0),
    ranges=Ranges(rows=(("gpu.per_token_s", 0.8e-4, 1.3e-4),)),
)
"""Only tokens have a cost."""


def make_run(
    costs: Costs = FREE, *, samples: int = 2000, policy: str = "odb", sharding: Sharding = Sharding.EVEN
) -> Run:
    return simulated.make_run(
        make_lengths(samples), 4, policy=policy, budget_tokens=4096, sharding=sharding, costs=costs
    )


def test_the_band_of_what_one_number_governs_is_its_range() -> None:
    band = compute_bands([make_run()], list_uncertain(FREE), draws=0).combine(1.0)
    assert (band.low, band.high) == (pytest.approx(0.8), pytest.approx(1.3))
    assert band.shares == (("gpu.per_token_s", pytest.approx(1.0)),)
    assert "calibrate" in band.explain()


def test_independent_inputs_add_as_squares_and_the_widest_is_named_first() -> None:
    costs = replace(FREE, ranges=Ranges(rows=(("gpu.per_token_s", 0.9e-4, 1.1e-4), ("error", 0.7, 1.4))))
    band = compute_bands([make_run(costs)], list_uncertain(costs), draws=0).combine(1.0)
    assert band.high == pytest.approx(np.exp(np.hypot(np.log(1.1), np.log(1.4))))
    assert band.low == pytest.approx(np.exp(-np.hypot(np.log(0.9), np.log(0.7))))
    assert band.shares[0][0] == "what the cost model leaves out"
    wider = band.widen("the price", 0.5, 2.0, "say yours")
    assert wider.low < band.low < band.high < wider.high
    assert wider.shares[0][0] == "the price"
    assert sum(share for _, share in wider.shares) == pytest.approx(1.0)
    assert band.widen("the price", 1.0, 1.0, "") == band


def test_what_slows_both_leaves_their_ratio_alone() -> None:
    runs = [make_run(), make_run(policy="standard")]
    bands = compute_bands(runs, list_uncertain(FREE), draws=0)
    ratio = bands.combine(-1.0, 1.0)
    assert (ratio.low, ratio.high) == (pytest.approx(1.0), pytest.approx(1.0))
    assert bands.combine(0.0, 1.0).high == pytest.approx(1.3)


def test_epochs_of_other_lengths_lie_within_the_band_as_often_as_it_says() -> None:
    what = make_run(replace(FREE, ranges=Ranges()), samples=1200)
    band = compute_bands([what], [], draws=8).combine(1.0)
    assert band.shares == ((LENGTHS, pytest.approx(1.0)),)
    base = run(what).summary.sim_time_s
    others = [
        run(replace(what, workload=redraw(what.workload, 1200, 1000 + seed))).summary.sim_time_s for seed in range(60)
    ]
    inside = np.mean([base * band.low <= seconds <= base * band.high for seconds in others])
    assert 0.8 <= inside < 1.0


def test_a_single_very_long_sample_does_not_make_the_longest_time_absurd() -> None:
    """Draws hold it no more than four times, so they take that many times as long at most. Without it, they take none."""
    lengths = Lengths("one is long", np.array([7] * 300 + [1_000_000]), np.ones(301, dtype=np.int64))
    what = simulated.make_run(lengths, 4, budget_tokens=4096)
    band = compute_bands([what], []).combine(1.0)
    assert band.low < 0.05
    assert 2 < band.high < 6


def test_a_longer_epoch_is_surer_and_judged_by_a_part() -> None:
    short, long = (
        compute_bands([make_run(replace(FREE, ranges=Ranges()), samples=samples)], [], draws=8).combine(1.0)
        for samples in (1_000, 64_000)
    )
    assert np.log(long.high) < np.log(short.high) / 3


@pytest.mark.parametrize("sharding", [Sharding.EVEN, Sharding.UNEVEN])
def test_a_redrawn_workload_has_as_many_ranks_of_the_same_proportions(sharding: Sharding) -> None:
    before = make_run(samples=3000, sharding=sharding).workload
    after = redraw(before, 300, 5)
    assert (after.ranks, after.samples_total) == (before.ranks, 300)
    for rank in range(before.ranks):
        assert after.compute_shard_size(rank) >= 1
        assert after.compute_shard_size(rank) == pytest.approx(before.compute_shard_size(rank) / 10, abs=2)
    assert set(after.tokens.tolist()) <= set(before.tokens.tolist())


def test_the_defaults_have_assumed_ranges_that_hold_their_values() -> None:
    costs = Costs()
    assert costs.ranges == ASSUMED
    for name, low, high in ASSUMED.rows:
        section, _, number = name.partition(".")
        assert low < getattr(getattr(costs, section), number) < high


@pytest.mark.parametrize(
    "row", [("gpu.x", 1.0, 2.0), ("gpu.per_token_s", 2.0, 1.0), ("error", 0.0, 1.0), ("error", 1.0)]
)
def test_a_range_that_makes_no_sense_is_refused(row: tuple[str, float, float]) -> None:
    with pytest.raises(UsageError, match="row 1"):
        Ranges(rows=(row,))


def test_a_range_stands_once() -> None:
    row = ("gpu.per_token_s", 1.0, 2.0)
    with pytest.raises(UsageError, match=r"gpu\.per_token_s appears twice"):
        Ranges(rows=(row, row))


def test_without_inputs_there_is_no_width() -> None:
    empty = np.zeros((0, 1))
    band = Bands((), empty, empty).combine(1.0)
    assert (band.low, band.high, band.shares, band.explain()) == (1.0, 1.0, (), "")


def test_lengths_that_are_all_alike_leave_nothing_to_the_draw() -> None:
    lengths = Lengths("alike", np.full(800, 100), np.full(800, 100))
    what = simulated.make_run(lengths, 4, budget_tokens=4096, costs=replace(FREE, ranges=Ranges()))
    assert compute_bands([what], []).combine(1.0).high == pytest.approx(1.0, abs=1e-9)
