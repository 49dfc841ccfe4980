"""On every shipped trace the delivered steps keep ALIGN, ONCE, COVER and BUDGET, and the figures match them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from functools import cache

import pytest
from odb_sim.inputs.lengths import list_bundled_names, load_lengths
from odb_sim.inputs.workload import Sharding, build_workload
from odb_sim.studies.runs import Result, Run, run

from odb_ref.core.effects import Deliver, Effect
from odb_ref.core.events import Event
from odb_ref.core.types import Mode, Step

BUDGET_TOKENS = 4096
load_once = cache(load_lengths)


class Delivered:
    """An observer that records what each rank's consumer received."""

    def __init__(self) -> None:
        self.steps: dict[int, list[Step]] = defaultdict(list)

    def __call__(self, rank: int, event: Event | None, effects: Sequence[Effect], time_s: float) -> None:
        self.steps[rank].extend(effect.step for effect in effects if isinstance(effect, Deliver))


def simulate(name: str, ranks: int, sharding: Sharding, policy: str, mode: Mode, **more: int | None):
    samples = max(3 * ranks, 240)
    workload = build_workload(load_once(name), ranks=ranks, sharding=sharding, samples=samples, seed=3)
    what = Run(
        workload=workload,
        policy=policy,
        budget_tokens=BUDGET_TOKENS,
        window_samples=16,
        depth_steps=2,
        mode=mode,
        sharding=sharding,
        seed=3,
        **more,
    )
    delivered = Delivered()
    return workload, run(what, observer=delivered), delivered.steps


@pytest.mark.slow
@pytest.mark.parametrize("mode", list(Mode))
@pytest.mark.parametrize("policy", ["odb", "paper"])
@pytest.mark.parametrize("sharding", list(Sharding))
@pytest.mark.parametrize("ranks", [1, 2, 8, 64])
@pytest.mark.parametrize("name", list_bundled_names())
def test_every_trace_keeps_the_properties(name: str, ranks: int, sharding: Sharding, policy: str, mode: Mode) -> None:
    workload, result, steps = simulate(name, ranks, sharding, policy, mode)
    numbers = [[step.number for step in steps[rank]] for rank in range(ranks)]
    assert numbers[0] == list(range(result.summary.steps))
    assert all(other == numbers[0] for other in numbers), "ALIGN"
    emitted = []
    for rank in range(ranks):
        ids = [sample.id for step in steps[rank] for sample in step.group]
        shard = workload.ids[workload.compute_span(rank, 0, workload.samples_total)].tolist()
        assert len(ids) == len(set(ids)), "ONCE"
        if sharding is not Sharding.SHARED:  # there a rank has no samples of its own, and those of all are judged below
            assert set(ids) <= set(shard), "ONCE"
            assert mode is not Mode.JOIN or sorted(ids) == sorted(shard), "COVER"
        emitted += ids
        for step in steps[rank]:
            longest = max((sample.length for sample in step.group), default=0)
            assert len(step.group) <= 1 or longest * len(step.group) <= BUDGET_TOKENS, "BUDGET"
            assert mode is Mode.JOIN or step.group, "a quota run never idles"
    assert len(emitted) == len(set(emitted)), "ONCE"
    assert mode is not Mode.JOIN or sorted(emitted) == sorted(workload.ids.tolist()), "COVER"
    check_figures(result, steps, emitted)


def check_figures(result: Result, steps: dict[int, list[Step]], emitted: list[int]) -> None:
    summary = result.summary
    groups = [[step.group for step in steps[rank]] for rank in range(summary.ranks)]
    padded = [[len(group) * max((s.length for s in group), default=0) for group in row] for row in groups]
    real = [sum(sample.length for group in row for sample in group) for row in groups]
    critical = sum(max(column) for column in zip(*padded, strict=True))
    assert summary.samples_emitted == len(emitted)
    assert summary.samples_unique == len(set(emitted))
    assert summary.real_tokens == sum(real)
    assert summary.padded_tokens == sum(map(sum, padded))
    assert summary.critical_tokens == critical
    assert summary.idle_steps == sum(not group for row in groups for group in row)
    assert summary.oversize_groups == sum(tokens > BUDGET_TOKENS for row in padded for tokens in row)
    assert summary.over_budget_groups == 0
    assert summary.padding_ratio == pytest.approx(1 - sum(real) / sum(map(sum, padded)))
    assert summary.efficiency == pytest.approx(sum(real) / (summary.ranks * critical))
    assert summary.excess == pytest.approx(critical / max(real) - 1)
    assert len(result.rows) == summary.steps
    shares = summary.compute_share, summary.data_wait_share, summary.trainer_wait_share, summary.collective_share
    assert sum(shares) == pytest.approx(1)
    assert summary.sim_time_s == result.rows[-1].end_s > 0


@pytest.mark.parametrize("policy", ["odb", "paper", "standard"])
def test_a_quota_is_met_by_the_first_step_that_can(policy: str) -> None:
    _, result, _ = simulate("gsm8k", 4, Sharding.EVEN, policy, Mode.QUOTA, quota_samples=100)
    before = sum(row.samples for row in result.rows[:-1])
    assert before < 100 <= before + result.rows[-1].samples


def test_fixed_batches_in_quota_mode_stop_at_the_first_dry_rank() -> None:
    workload, result, _ = simulate("gsm8k", 8, Sharding.UNEVEN, "standard", Mode.QUOTA)
    smallest = min(workload.compute_shard_size(rank) for rank in range(8))
    assert result.summary.steps == -(-smallest // result.summary.batch_size)
    assert result.summary.idle_steps == 0
