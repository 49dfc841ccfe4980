"""What must hold of any two epochs that differ in one thing, whatever the figures are."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
from odb_sim.engine.metrics import Summary
from odb_sim.engine.updates import GlobalBatch
from odb_sim.inputs.costs import RANGED, CollectiveCost, Costs, LoaderCost, NetworkCost
from odb_sim.inputs.lengths import Lengths
from odb_sim.inputs.workload import Sharding, build_workload
from odb_sim.studies.bands import scale_steps
from odb_sim.studies.runs import POLICIES, Run, is_rule, run

from odb_ref.core.batching.layouts import Layout


def draw_run(policy: str, seed: int) -> Run:
    """Returns a run whose times depend on every number of the cost model."""
    choose, random_ = random.Random(seed), np.random.default_rng(seed)
    tokens = np.clip(random_.lognormal(5, choose.choice([0, 1, 2]), choose.choice([9, 60, 200])), 1, 9000).astype(int)
    sharding, ranks = choose.choice(list(Sharding)), choose.choice([1, 2, 4])
    costs = Costs(
        collective=CollectiveCost(latency_s=1e-3, hidden_s=0.3, each_step=choose.random() < 0.5),
        network=NetworkCost(alpha_s=choose.choice([1e-4, 0.1])),
        loader=LoaderCost(workers=choose.choice([1, 3]), sample_s=choose.choice([1e-3, 0.05]), receive_sample_s=1e-3),
    )
    updates = choose.choice([{}, {"update_samples": 8}, {"global_batch": GlobalBatch(samples=16)}])
    return Run(
        workload=build_workload(Lengths("drawn", tokens, tokens), ranks=ranks, sharding=sharding, seed=seed),
        policy=policy,
        sharding=sharding,
        budget_tokens=choose.choice([500, 4000]),
        window_samples=choose.choice([4, 64]),
        depth_steps=choose.choice([1, 3]),
        layout=choose.choice(list(Layout)) if is_rule(policy) else Layout.PADDED,
        costs=costs,
        **updates,
    )


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("seed", range(4))
def test_what_is_faster_or_larger_makes_no_epoch_longer(policy: str, seed: int) -> None:
    what = draw_run(policy, seed)
    costs, before = what.costs, run(what).summary

    def vary(section: str, name: str, factor: float) -> Run:
        part = getattr(costs, section)
        changed = replace(part, **{name: type(getattr(part, name))(getattr(part, name) * factor)})
        return replace(what, costs=replace(costs, **{section: changed}))

    faster = {name: vary(*name.split("."), factor=0.5) for name in RANGED}
    faster |= {name: vary("loader", name, 2) for name in ("workers", "prefetch_factor")}
    faster |= {"depth": replace(what, depth_steps=what.depth_steps + 1)}
    faster |= {"no meeting": replace(what, costs=replace(costs, collective=replace(costs.collective, each_step=False)))}
    for name, other in faster.items():
        assert run(other).summary.sim_time_s <= before.sim_time_s * (1 + 1e-9), name


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("seed", range(4))
def test_twice_the_times_are_twice_the_epoch_and_its_parts_are_the_whole(policy: str, seed: int) -> None:
    what = draw_run(policy, seed)
    slower = scale_steps(what.costs, 2.0)
    for name in ("network", "loader"):
        part = getattr(slower, name)
        times = [item.partition(".")[2] for item in RANGED if item.startswith(name)]
        slower = replace(slower, **{name: replace(part, **{time: 2 * getattr(part, time) for time in times})})
    result, twice = run(what), run(replace(what, costs=slower)).summary

    def drop_times(summary: Summary) -> dict[str, object]:
        return {name: item for name, item in summary.to_json().items() if not name.endswith(("_s", "_share"))}

    assert drop_times(twice) == drop_times(result.summary)
    assert twice.sim_time_s == pytest.approx(2 * result.summary.sim_time_s)
    assert result.summary.sim_time_s == pytest.approx(sum(row.end_s - row.start_s for row in result.rows))
    for row in result.rows:
        parts = row.data_wait_s + row.compute_s + row.sync_wait_s + row.collective_s
        assert parts == pytest.approx(what.workload.ranks * (row.end_s - row.start_s))
