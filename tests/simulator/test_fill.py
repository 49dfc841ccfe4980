"""The maps of ranks and steps are the same from every driver, add up to the run's figures, and are bounded."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from odb_sim.engine.fill import MOST_CELLS, MOST_LENGTHS, MOST_RANKS, Fill, FillMap, choose_ranks, choose_steps
from odb_sim.engine.metrics import Summary
from odb_sim.engine.updates import EVERY_STEP, GlobalBatch
from odb_sim.inputs.workload import Sharding
from odb_sim.reports.charts import describe_map
from odb_sim.studies.runs import Driver, Run, run

from tests.helpers.simulated import make_run


def build_run(policy: str, *, ranks: int = 6, samples: int = 900, sharding: Sharding = Sharding.UNEVEN) -> Run:
    settings = {"policy": policy, "budget_tokens": 6000, "window_samples": 64, "sharding": sharding}
    return make_run("mm_mix_real", ranks, samples, **settings)


def draw(what: Run) -> tuple[FillMap, Summary]:
    fill = Fill(what.workload.ranks)
    summary = run(what, fill=fill).summary
    return fill.build(what.policy, what.budget_tokens), summary


@pytest.mark.parametrize("sharding", list(Sharding))
@pytest.mark.parametrize("goal", [None, 100])
def test_both_drivers_tell_the_same(sharding: Sharding, goal: int | None) -> None:
    what = replace(build_run("odb", sharding=sharding), global_batch=GlobalBatch(samples=goal))
    rounds, _ = draw(replace(what, driver=Driver.ROUNDS))
    events, _ = draw(replace(what, driver=Driver.EVENTS))
    assert rounds == events
    assert len(rounds.columns) > 10


@pytest.mark.parametrize("policy", ["odb", "peer", "standard", "balanced", "packing"])
def test_batches_and_waits_add_up_to_the_figures_of_the_run(policy: str) -> None:
    drawn, summary = draw(replace(build_run(policy), global_batch=EVERY_STEP))
    cells = [cell for column in drawn.columns for cell in column.cells]
    assert drawn.steps_total == len(drawn.columns) == summary.steps
    assert sum(cell.samples for cell in cells) == summary.samples_emitted
    assert sum(cell.real for cell in cells) == summary.real_tokens
    assert sum(cell.padded for cell in cells) == summary.padded_tokens
    assert sum(cell.samples == 0 for cell in cells) == summary.idle_steps
    waited_s = summary.trainer_wait_share * summary.ranks * summary.sim_time_s
    assert sum(cell.wait_ms for cell in cells) / 1000 == pytest.approx(waited_s, rel=1e-3)
    for column in drawn.columns:
        assert column.waited_for is not None
        assert column.cells[column.waited_for].wait_ms == 0
        for cell in column.cells:
            whole = cell.samples <= MOST_LENGTHS
            assert len(cell.lengths) == min(cell.samples, MOST_LENGTHS)
            assert sum(cell.lengths) == cell.real if whole else sum(cell.lengths) < cell.real
            if policy != "packing" and cell.samples:
                assert cell.padded == cell.samples * cell.lengths[0]


def test_a_map_is_bounded_whatever_the_run() -> None:
    drawn, summary = draw(build_run("standard", ranks=100, samples=30_000, sharding=Sharding.EVEN))
    assert summary.steps > 100
    assert len(drawn.ranks) == MOST_RANKS
    assert len(drawn.ranks) * len(drawn.columns) <= MOST_CELLS
    assert (drawn.ranks[0], drawn.ranks[-1]) == (0, 99)
    steps = [column.step for column in drawn.columns]
    assert (steps[0], steps[-1]) == (0, summary.steps - 1)
    assert steps == sorted(set(steps))
    assert sum(after - before > 1 for before, after in itertools.pairwise(steps)) == 2
    assert len(drawn.shorten(640).columns) == 9
    assert "64 of 100 ranks; of these, " in describe_map(drawn)


@pytest.mark.parametrize("ranks", [1, 2, 64, 65, 5000])
def test_the_ranks_asked_for_are_among_those_shown(ranks: int) -> None:
    for most in (1, 4, 64):
        chosen = choose_ranks(ranks, most, also={ranks // 2})
        assert len(chosen) == min(ranks, most)
        assert ranks // 2 in chosen
        assert list(chosen) == sorted(set(chosen))


def test_few_steps_are_all_chosen_and_of_many_the_ends_and_the_middle() -> None:
    assert choose_steps(5, 9) == [0, 1, 2, 3, 4]
    assert choose_steps(100, 6) == [0, 1, 49, 50, 98, 99]
    assert choose_steps(100, 2) == [98, 99]
