"""On every shipped trace the run keeps every property, by its own trace, and the figures match what ranks receive."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from odb_sim.inputs.lengths import list_bundled_names
from odb_sim.inputs.workload import Sharding
from odb_sim.studies.runs import Result, Run, run

from odb_ref.core.effects import Deliver, Effect
from odb_ref.core.events import Event
from odb_ref.core.types import Group, Mode
from odb_ref.trace.check import check_traces
from tests.helpers.simulated import make_run

BUDGET_TOKENS = 4096


def build(name: str, ranks: int, sharding: Sharding, policy: str, mode: Mode, **more: int | None) -> Run:
    settings = {"sharding": sharding, "policy": policy, "mode": mode, "budget_tokens": BUDGET_TOKENS, **more}
    return make_run(name, ranks, max(3 * ranks, 240), draw=3, window_samples=16, depth_steps=2, seed=3, **settings)


@pytest.mark.slow
@pytest.mark.parametrize("mode", list(Mode))
@pytest.mark.parametrize("policy", ["odb", "paper"])
@pytest.mark.parametrize("sharding", list(Sharding))
@pytest.mark.parametrize("ranks", [1, 2, 8, 64])
@pytest.mark.parametrize("name", list_bundled_names())
def test_every_trace_keeps_the_properties(
    name: str, ranks: int, sharding: Sharding, policy: str, mode: Mode, tmp_path: Path
) -> None:
    what = build(name, ranks, sharding, policy, mode)
    groups: list[list[Group]] = [[] for _ in range(ranks)]
    with what.open_trace(tmp_path / "t") as writer:

        def observe(rank: int, event: Event | None, effects: Sequence[Effect], time_s: float) -> None:
            writer.record(rank, event, effects, time_s)
            groups[rank].extend(effect.step.group for effect in effects if isinstance(effect, Deliver))

        result = run(what, observer=observe)
    assert check_traces([tmp_path / "t"]).violations == ()
    check_figures(result, groups)


def check_figures(result: Result, groups: list[list[Group]]) -> None:
    """Compares the figures of a run with the groups that each rank received."""
    summary = result.summary
    emitted = [sample.id for row in groups for group in row for sample in group]
    padded = [[len(group) * max((s.length for s in group), default=0) for group in row] for row in groups]
    real = [sum(sample.length for group in row for sample in group) for row in groups]
    critical = sum(max(column) for column in zip(*padded, strict=True))
    assert summary.samples_emitted == len(emitted)
    assert summary.samples_unique == len(set(emitted))
    assert summary.real_tokens == sum(real)
    assert summary.padded_tokens == sum(map(sum, padded))
    assert summary.critical_tokens == critical
    assert summary.idle_steps == sum(not group for row in groups for group in row)
    assert summary.mode == Mode.JOIN or not summary.idle_steps, "a quota run never idles"
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
    result = run(build("gsm8k", 4, Sharding.EVEN, policy, Mode.QUOTA, quota_samples=100))
    before = sum(row.samples for row in result.rows[:-1])
    assert before < 100 <= before + result.rows[-1].samples


def test_fixed_batches_in_quota_mode_stop_at_the_first_dry_rank() -> None:
    what = build("gsm8k", 8, Sharding.UNEVEN, "standard", Mode.QUOTA)
    result, smallest = run(what), min(what.workload.compute_shard_size(rank) for rank in range(8))
    assert result.summary.steps == -(-smallest // result.summary.batch_size)
    assert result.summary.idle_steps == 0
