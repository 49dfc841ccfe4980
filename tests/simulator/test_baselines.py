"""The baselines: each plan holds every sample once, keeps the budget, and is what its description says."""

from __future__ import annotations

from itertools import chain

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from odb_sim.baselines.plans import FIXED_SIZE, PLANNERS, compute_batch_size, cut_sorted, pack_best_fit
from odb_sim.inputs.costs import CollectiveCost, Costs, GpuCost, LoaderCost
from odb_sim.inputs.lengths import Lengths, list_bundled_names, load_lengths
from odb_sim.inputs.workload import Sharding, Workload, build_workload
from odb_sim.studies.runs import POLICIES, run

from odb_ref.core.types import Mode
from tests.helpers.commands import get_figures
from tests.helpers.effort import few
from tests.helpers.partitions import count_fewest
from tests.helpers.simulated import make_run


def build(tokens: list[int], ranks: int, sharding: Sharding = Sharding.EVEN, seed: int = 0) -> Workload:
    lengths = np.array(tokens)
    return build_workload(Lengths("test", lengths, lengths), ranks=ranks, sharding=sharding, seed=seed)


def list_batches(workload: Workload, name: str, budget_tokens: int) -> list[list[list[int]]]:
    """Returns the sample indices of each batch of each rank."""
    plans = PLANNERS[name](workload, budget_tokens, 0)
    return [[part.tolist() for part in np.split(plan.order, plan.starts[1:]) if len(part)] for plan in plans]


@st.composite
def cases(draw: st.DrawFn) -> tuple[Workload, int]:
    tokens = draw(st.lists(st.integers(1, 60), min_size=1, max_size=80))
    ranks = draw(st.integers(1, min(9, len(tokens))))
    sharding = draw(st.sampled_from(list(Sharding)))
    return build(tokens, ranks, sharding, draw(st.integers(0, 3))), draw(st.integers(1, 130))


@pytest.mark.parametrize("name", list(PLANNERS))
@settings(max_examples=few(60), deadline=None)
@given(case=cases())
def test_a_plan_holds_every_sample_once_under_the_budget(name: str, case: tuple[Workload, int]) -> None:
    workload, budget_tokens = case
    batches = list_batches(workload, name, budget_tokens)
    assert len(batches) == workload.ranks
    emitted = sorted(index for own in batches for batch in own for index in batch)
    assert emitted == list(range(workload.samples_total))
    for batch in (batch for own in batches for batch in own):
        tokens = workload.tokens[batch]
        size = tokens.sum() if name == "packing" else tokens.max() * len(batch)
        assert len(batch) == 1 or size <= budget_tokens
    if name != "standard":  # which keeps its shards
        assert max(map(len, batches)) - min(map(len, batches)) <= 1, "dealt evenly: ranks idle in the last step only"


@settings(max_examples=few(60), deadline=None)
@given(case=cases())
def test_fixed_batches_have_the_size_they_say(case: tuple[Workload, int]) -> None:
    workload, budget_tokens = case
    size = compute_batch_size(workload, budget_tokens)
    longest = int(workload.tokens.max())
    assert size == 1 or size * longest <= budget_tokens
    assert size == workload.samples_total or budget_tokens < (size + 1) * longest
    for rank, own in enumerate(list_batches(workload, "standard", budget_tokens)):
        assert [len(batch) for batch in own[:-1]] == [size] * (len(own) - 1)
        start = int(workload.offsets[rank])
        assert list(chain.from_iterable(own)) == list(range(start, start + workload.compute_shard_size(rank)))
    sizes = [len(batch) for own in list_batches(workload, "hfg", budget_tokens) for batch in own]
    assert sorted(sizes)[1:] == [size] * (len(sizes) - 1)


@settings(max_examples=few(60), deadline=None)
@given(tokens=st.lists(st.integers(1, 20), min_size=1, max_size=8), budget_tokens=st.integers(1, 60))
def test_the_global_oracle_uses_the_fewest_batches(tokens: list[int], budget_tokens: int) -> None:
    fewest = count_fewest(tokens, lambda batch: len(batch) * max(batch) <= budget_tokens)
    assert len(cut_sorted(sorted(tokens), budget_tokens)) == fewest


def test_grouping_by_length_starts_with_the_longest_and_mixes_mega_batches() -> None:
    workload = build(list(range(1, 1001)), ranks=4)
    batches = list_batches(workload, "hfg", 8000)
    assert workload.tokens[batches[0][0][0]] == 1000
    spans = [int(np.ptp(workload.tokens[batch])) for own in batches for batch in own]
    assert np.median(spans) < 30 < 1000


def test_rebalancing_makes_the_largest_batch_of_a_step_smaller() -> None:
    workload = build_workload(load_lengths("sgd_dialogues"), ranks=8, samples=3200, seed=1)

    def compute_critical(name: str) -> int:
        own = list_batches(workload, name, 8192)
        sizes = [[int(workload.tokens[batch].max()) * len(batch) for batch in batches] for batches in own]
        return sum(map(max, zip(*sizes, strict=True)))

    assert compute_critical("balanced") < 0.8 * compute_critical("standard")


def test_packing_takes_the_best_fitting_room() -> None:
    assert pack_best_fit([6, 5, 4, 5, 9, 3], 10) == [[4], [0, 2], [1, 3], [5]]
    assert pack_best_fit([30, 2], 10) == [[0], [1]]


def test_a_bucket_holds_similar_lengths() -> None:
    workload = build_workload(load_lengths("gsm8k"), ranks=2, seed=1)
    for own in list_batches(workload, "bmt", 4096):
        for batch in own:
            tokens = workload.tokens[batch]
            assert tokens.max() <= tokens.min() * 1.1 + 1


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", list_bundled_names())
def test_every_policy_covers_every_trace(name: str, policy: str) -> None:
    what = make_run(name, 8, 2000, draw=5, policy=policy, budget_tokens=16384, window_samples=64, seed=5)
    summary = run(what).summary
    assert summary.samples_emitted == summary.samples_unique == summary.samples_total == 2000
    assert summary.real_tokens == int(what.workload.tokens.sum())
    assert summary.over_budget_groups == 0
    assert 0 < summary.efficiency <= 1
    assert (summary.batch_size is not None) == (policy in FIXED_SIZE)
    shares = summary.compute_share, summary.data_wait_share, summary.trainer_wait_share, summary.collective_share
    assert sum(shares) == pytest.approx(1)
    assert summary.ending_share == 0
    if policy == "packing":
        assert summary.padding_ratio == 0


@pytest.mark.parametrize("policy", list(PLANNERS))
def test_a_baseline_stops_at_its_quota_and_never_idles(policy: str) -> None:
    settings = {"policy": policy, "budget_tokens": 2048, "mode": Mode.QUOTA, "quota_samples": 40}
    result = run(make_run("gsm8k", 4, 1000, draw=5, sharding=Sharding.UNEVEN, **settings))
    assert sum(row.samples for row in result.rows[:-1]) < 40 <= result.summary.samples_emitted
    assert result.summary.idle_steps == 0
    assert result.summary.samples_unique == result.summary.samples_emitted


def test_times_of_a_plan_follow_from_costs_and_depth() -> None:
    # One rank, batches of one. Loading takes 2 s, computing 3 s and the collective 1 s, so only the first load shows.
    collective = CollectiveCost(fixed_s=1.0)
    loader = LoaderCost(workers=1, sample_s=2.0, per_token_s=0.0, collate_step_s=0.0, collate_per_token_s=0.0)
    gpu = GpuCost(fixed_s=3.0, per_token_s=0.0, per_token2_s=0.0)
    costs = Costs(gpu=gpu, loader=loader, collective=collective)
    result = run(make_run([10] * 6, 1, policy="standard", budget_tokens=10, depth_steps=1, costs=costs))
    assert [row.start_s for row in result.rows] == [0, 6, 10, 14, 18, 22]
    assert result.summary.sim_time_s == 26
    assert result.summary.data_wait_share == pytest.approx(2 / 26)
    assert result.summary.compute_share == pytest.approx(18 / 26)
    assert result.summary.collective_share == pytest.approx(6 / 26)
    assert result.summary.trainer_wait_share == 0


def test_compare_prints_every_policy_and_writes_its_figures(capsys: pytest.CaptureFixture[str]) -> None:
    written = get_figures("compare gsm8k --ranks 4 --token-budget 4096 --samples 800")
    assert [figures["policy"] for figures in written] == list(POLICIES)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines if line.split() and line.split()[0] in POLICIES] == list(POLICIES)
    (standard,) = (line.split() for line in lines if line.startswith(" standard"))
    assert standard[1] == "1.00"
