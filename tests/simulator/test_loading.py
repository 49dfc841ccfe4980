"""The model of a loader: computed by hand, as properties, and its batches beside those of real loaders."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from odb_sim.engine.loading import CHUNK_SAMPLES, WindowReader, Workers
from odb_sim.inputs.costs import NO_COLLECTIVE, Costs, GpuCost, LoaderCost
from odb_sim.inputs.lengths import Lengths
from odb_sim.inputs.workload import Workload, build_workload
from odb_sim.studies.runs import Run, run

from tests.helpers.effort import few


def make_loader(workers: int, prefetch_factor: int = 2, **costs: float) -> LoaderCost:
    nothing = {"per_token_s": 0.0, "collate_step_s": 0.0, "collate_per_token_s": 0.0, "receive_sample_s": 0.0}
    return LoaderCost(workers=workers, prefetch_factor=prefetch_factor, **{**nothing, "sample_s": 1.0, **costs})


def make_workload(samples: int, ranks: int = 1) -> Workload:
    tokens = np.full(samples, 10)
    return build_workload(Lengths("test", tokens, tokens), ranks=ranks)


def test_workers_take_turns_and_what_is_fetched_ahead_is_bounded() -> None:
    workers = Workers(make_loader(2, 1))
    assert [workers.take(1.0, 0.0) for _ in range(4)] == [1, 1, 2, 2], "two at a time"
    assert workers.take(1.0, 10.0) == 10, "was given out when the third was taken"
    assert workers.take(5.0, 10.0) == 10, "given out at 2, ready at 7"
    assert workers.take(1.0, 10.0) == 11, "given out when the fifth was taken"


def test_a_slow_item_holds_up_those_behind_it() -> None:
    workers = Workers(make_loader(2, 2))
    assert [workers.take(seconds, 0.0) for seconds in (5, 1, 1, 1)] == [5, 5, 6, 6]


def test_a_window_waits_for_the_chunk_of_the_sample_behind_it() -> None:
    reader = WindowReader(make_loader(1), make_workload(64).tokens, 2)
    assert reader.read(15, 0.0) == 16
    assert reader.read(1, 16.0) == 32, "sample 16, the seventeenth, is in the second chunk"
    assert reader.read(100, 40.0) == 64, "two chunks more were fetched ahead meanwhile"


def test_half_a_window_is_read_ahead_and_no_more() -> None:
    for window, ready_s in ((64, 100.0), (256, 100.0)):
        reader = WindowReader(make_loader(1, 1), make_workload(10 * window).tokens, window)
        first_s = reader.read(window, 0.0)
        # Half a window is ready, and the worker has one more chunk.
        asked_s = first_s + 10 * window
        assert reader.read(window // 2 - 1, asked_s) == asked_s
        assert reader.read(window, asked_s) > asked_s + ready_s / 4


@settings(max_examples=few(60), deadline=None)
@given(
    workers=st.integers(1, 5),
    prefetch=st.integers(1, 3),
    reads=st.lists(st.tuples(st.integers(1, 60), st.sampled_from([0.0, 1.0, 50.0])), min_size=1, max_size=12),
    window=st.integers(1, 64),
)
def test_no_sample_is_there_before_it_is_read_nor_later_than_by_one_worker(
    workers: int, prefetch: int, reads: list[tuple[int, float]], window: int
) -> None:
    total = sum(count for count, _ in reads)
    reader = WindowReader(make_loader(workers, prefetch), make_workload(total).tokens, window)
    one = WindowReader(make_loader(1, 1), make_workload(total).tokens, window)
    now = now_one = 0.0
    read = 0
    for count, pause_s in reads:
        read += count
        now, now_one = reader.read(count, now + pause_s), one.read(count, now_one + pause_s)
        assert now >= read / workers / 2 - CHUNK_SAMPLES or now >= read / workers
        assert now <= now_one + 1e-9


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["standard", "hfg", "gmt", "peer", "odb", "paper"])
def test_every_policy_s_loader_reads_faster_with_more_workers(policy: str) -> None:
    gpu = GpuCost(fixed_s=0.0, per_token_s=0.0, per_token2_s=0.0)
    rates = []
    for workers in (1, 2, 4):
        costs = Costs(gpu=gpu, collective=NO_COLLECTIVE, loader=make_loader(workers, sample_s=0.01))
        what = Run(workload=make_workload(4000, 2), policy=policy, budget_tokens=160, window_samples=128, costs=costs)
        rates.append(run(what).summary.samples_per_s)
    assert rates[1] / rates[0] == pytest.approx(2, rel=0.1)
    assert rates[2] / rates[0] == pytest.approx(4, rel=0.2)


def test_collating_is_shared_by_workers_of_a_plain_loader_and_not_by_ours() -> None:
    gpu = GpuCost(fixed_s=0.0, per_token_s=0.0, per_token2_s=0.0)
    rates = {}
    for policy in ("standard", "odb"):
        for workers in (1, 4):
            loader = make_loader(workers, sample_s=0.0, collate_step_s=0.1)
            costs = Costs(gpu=gpu, collective=NO_COLLECTIVE, loader=loader)
            what = Run(workload=make_workload(4000), policy=policy, budget_tokens=160, window_samples=128, costs=costs)
            rates[policy, workers] = run(what).summary.samples_per_s
    assert rates["standard", 4] / rates["standard", 1] == pytest.approx(4, rel=0.05)
    assert rates["odb", 4] / rates["odb", 1] == pytest.approx(1, rel=0.01)


@pytest.mark.slow
@pytest.mark.timeout(200)
@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("kind", ["plain", "ours"])
def test_a_real_loader_makes_the_batches_that_the_model_makes(kind: str, workers: int) -> None:
    """``python -m tests.bench --only model`` measures its speed."""
    pytest.importorskip("torch")
    from tests.bench.model import Case, build_workload, measure, predict

    case, workload = Case(kind=kind, workers=workers, waits_for="loader"), build_workload()
    epoch = measure(case, workload, is_asleep=False)
    _, predicted = predict(case, workload, epoch)
    assert epoch.samples == predicted
