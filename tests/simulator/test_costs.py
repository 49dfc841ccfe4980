"""The cost models: their formulas, the measured table, and that nonsense is refused."""

from __future__ import annotations

from math import inf

import numpy as np
import pytest
from odb_sim.inputs.costs import (
    LARGEST_S,
    Algorithm,
    CollectiveCost,
    Costs,
    GpuCost,
    LoaderCost,
    NetworkCost,
    PricedTransport,
    StepTable,
)

from odb_ref.core.errors import UsageError


def test_a_step_costs_what_the_formula_says() -> None:
    gpu = GpuCost(fixed_s=1.0, per_token_s=0.1, per_token2_s=0.01)
    for costs in (gpu, Costs(gpu=gpu)):
        many = costs.compute_steps_s(np.array([[20, 0]]), np.array([[2 * 10**2, 0]]))
        assert many.tolist() == [[pytest.approx(1.0 + 20 * 0.1 + 2 * 10**2 * 0.01), 1.0]]


def test_a_table_is_followed_between_below_and_above_its_rows() -> None:
    table = StepTable(rows=((10, 1.0), (20, 3.0), (40, 4.0)))
    costs = Costs(gpu=GpuCost(fixed_s=0.25), step_table=table)
    expected = {1: 1.0, 10: 1.0, 15: 2.0, 20: 3.0, 30: 3.5, 40: 4.0, 60: 5.0}
    tokens = np.array([[0, *expected], [0, *reversed(expected)]])
    seconds = costs.compute_steps_s(tokens, tokens)
    assert seconds.tolist() == [[0.25, *expected.values()], [0.25, *reversed(expected.values())]]


@pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf"), 1e308, LARGEST_S * 1.01])
@pytest.mark.parametrize(
    ("model", "names"),
    [
        (GpuCost, ["fixed_s", "per_token_s", "per_token2_s"]),
        (CollectiveCost, ["fixed_s", "latency_s", "transfer_s", "hidden_s"]),
        (NetworkCost, ["alpha_s", "beta_s"]),
        (LoaderCost, ["sample_s", "per_token_s", "collate_step_s", "collate_per_token_s", "receive_sample_s"]),
    ],
)
def test_a_cost_is_a_number_of_at_least_0_and_at_most_a_day(model: type, names: list[str], value: float) -> None:
    said = "is .*: more than a day" if LARGEST_S < value < inf else "must be a number of at least 0"
    for name in names:
        with pytest.raises(UsageError, match=rf"{model.__name__}\.{name} {said}"):
            model(**{name: value})
    with pytest.raises(UsageError, match=r"StepTable\.rows: row 2 is"):
        StepTable(rows=((1, 0.1), (2, value)))


def test_a_reduction_grows_with_the_logarithm_and_a_gathering_with_the_ranks() -> None:
    reduce = NetworkCost(alpha_s=1.0, beta_s=0.0)
    gather = NetworkCost(alpha_s=1.0, beta_s=0.0, transport=PricedTransport.GATHER)
    assert [reduce.compute_offer_s(ranks) for ranks in (1, 2, 8, 9, 1024)] == [0, 2, 6, 8, 20]
    assert [gather.compute_offer_s(ranks) for ranks in (1, 2, 8, 9, 1024)] == [0, 1, 7, 8, 1023]
    byte = NetworkCost(alpha_s=0.0, beta_s=1.0)
    assert byte.compute_counts_s(2, 5) == 2 * 5 * 3 * 8


def test_a_batch_is_read_and_collated_by_one_worker_and_windows_are_collated_by_one_process() -> None:
    loader = LoaderCost(
        workers=4,
        sample_s=1.0,
        per_token_s=0.1,
        collate_step_s=2.0,
        collate_per_token_s=0.01,
        receive_sample_s=0.5,
    )
    samples, real, padded = np.array([[0, 1, 3]]), np.array([[0, 10, 20]]), np.array([[0, 10, 30]])
    assert loader.compute_plain_s(samples, real, padded).tolist() == [[0, pytest.approx(4.1), pytest.approx(7.3)]]
    assert loader.compute_collate_s(8, 100, 0) == pytest.approx(17)
    assert loader.compute_collate_s(8, 100, 10) == pytest.approx(22)


def test_a_collective_grows_with_the_ranks_by_its_algorithm() -> None:
    tree = CollectiveCost(fixed_s=1.0, latency_s=0.1, transfer_s=0.0)
    ring = CollectiveCost(fixed_s=1.0, latency_s=0.1, transfer_s=0.0, algorithm=Algorithm.RING)
    assert [tree.compute_s(ranks) for ranks in (1, 2, 8, 9)] == [1.0, *map(pytest.approx, (1.2, 1.6, 1.8))]
    assert [ring.compute_s(ranks) for ranks in (1, 2, 8, 9)] == [1.0, *map(pytest.approx, (1.2, 2.4, 2.6))]
    data = CollectiveCost(fixed_s=0.0, latency_s=0.0, transfer_s=1.0)
    assert [data.compute_s(ranks) for ranks in (1, 2, 8)] == [0, 1, 1.75]
