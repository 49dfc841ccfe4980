"""The described peer beside the real one, batch by batch, if it is installed, and the facts in the description."""

from __future__ import annotations

import importlib.util
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from odb_sim.baselines.peer import align, form_groups, plan_peer
from odb_sim.inputs.workload import Sharding, Workload
from odb_sim.studies.runs import run

from tests.helpers.effort import few
from tests.helpers.simulated import make_run

BUDGET_TOKENS = 8192
WINDOW_SAMPLES = 64


def build(shards: list[list[int]]) -> Workload:
    tokens = np.array([length for shard in shards for length in shard])
    nothing = np.empty((len(tokens), 0), dtype=np.int64)
    return Workload("test", np.arange(len(tokens)), tokens, tokens, nothing, np.cumsum([0, *map(len, shards)]))


def list_batches(workload: Workload, budget_tokens: int, window_samples: int) -> list[list[list[int]]]:
    plans = plan_peer(workload, budget_tokens, window_samples, seed=0)
    return [[part.tolist() for part in np.split(plan.order, plan.starts[1:]) if len(part)] for plan in plans]


def list_real_batches(shards: list[list[int]]) -> list[list[list[int]]]:
    """Returns the sample numbers of each batch of each rank of the real peer, run as a user would run it."""
    from tests.bench.data import compute_shards
    from tests.bench.launch import launch

    sizes = [len(shard) for shard in shards]
    assert compute_shards("mm_mix_real", sizes) == shards
    spec: dict[str, Any] = {"kind": "peer", "trace": "mm_mix_real", "shards": sizes, "budget": BUDGET_TOKENS}
    ranks = launch("epoch", {**spec, "window": WINDOW_SAMPLES, "workers": 1}, ranks=len(sizes), limit_s=200)
    found = []
    for rank in ranks:
        assert rank.data is not None, rank.error
        assert rank.data["error"] is None
        numbers = iter(rank.data["numbers"])
        found.append([[next(numbers) for _ in range(count)] for count in rank.data["groups"]])
    return found


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [[900], [400, 400]])
@pytest.mark.skipif(
    importlib.util.find_spec("odb") is None, reason="no peer: pip install online-dynamic-batching==0.1.2"
)
def test_the_real_peer_makes_the_same_batches_on_even_shards(sizes: list[int]) -> None:
    pytest.importorskip("torch")
    from tests.bench.data import compute_shards

    shards = compute_shards("mm_mix_real", sizes)
    described = list_batches(build(shards), BUDGET_TOKENS, WINDOW_SAMPLES)
    real = list_real_batches(shards)
    assert [len(own) for own in real] == [len(own) for own in described]
    for ours, theirs in zip(described, real, strict=True):
        # In another order, because the order inside a round is shuffled.
        assert Counter(tuple(sorted(batch)) for batch in ours) == Counter(tuple(sorted(batch)) for batch in theirs)


@st.composite
def cases(draw: st.DrawFn) -> tuple[Workload, int, int]:
    tokens = draw(st.lists(st.integers(1, 60), min_size=1, max_size=80))
    ranks = draw(st.integers(1, min(6, len(tokens))))
    workload = make_run(tokens, ranks, sharding=draw(st.sampled_from(list(Sharding))), budget_tokens=1).workload
    return workload, draw(st.integers(1, 130)), draw(st.integers(1, 40))


@settings(max_examples=few(80), deadline=None)
@given(case=cases())
def test_no_sample_is_emitted_twice_or_over_the_budget(case: tuple[Workload, int, int]) -> None:
    workload, budget_tokens, window_samples = case
    batches = list_batches(workload, budget_tokens, window_samples)
    for rank, own in enumerate(batches):
        emitted = [sample for batch in own for sample in batch]
        assert len(set(emitted)) == len(emitted)
        assert set(emitted) <= set(range(workload.offsets[rank], workload.offsets[rank + 1]))
        for batch in own:
            assert len(batch) == 1 or max(workload.tokens[batch]) * len(batch) <= budget_tokens
    sizes = np.diff(workload.offsets)
    if sizes.min() == sizes.max():
        assert sum(len(batch) for own in batches for batch in own) == workload.samples_total
        assert len({len(own) for own in batches}) == 1


def test_the_first_group_is_a_single_sample_and_the_next_follow_the_last_length() -> None:
    lengths = [100, 90, 40, 30, 20, 10, 10]
    assert form_groups(range(7), lengths, 200) == [[0], [1, 2], [3, 4, 6, 5]]
    assert form_groups([], lengths, 200) == []


def test_singles_are_split_off_the_longest_group_that_has_two() -> None:
    assert align([[0], [1, 2, 3], [4, 5]], 5) == ([[0], [1], [2], [3], [4, 5]], [])
    assert align([[0], [1, 2], [3, 4, 5], [6]], 2) == ([[3, 4, 5], [1, 2]][::-1], [0, 6])


def test_what_is_left_over_without_a_new_sample_is_lost() -> None:
    """On uneven shards a rank without further input can hold samples for which no rank makes a step."""
    uneven = build([[50] * 40, [1] * 39])
    lost = [40 - sum(map(len, own)) for own in list_batches(uneven, 50, 8)]
    assert lost[0] > 0


def test_a_run_of_the_peer_has_its_figures() -> None:
    what = make_run([100, 200, 300, 400] * 50, 2, policy="peer", budget_tokens=2000, window_samples=32)
    summary = run(what).summary
    assert summary.samples_unique == summary.samples_total == 200
    assert summary.rounds == 0
    assert summary.batch_size is None
    wider = run(replace(what, window_samples=100)).summary
    assert wider.steps != summary.steps
