"""The benchmarks' own arithmetic and judges: a check that cannot fail would show nothing."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch")

from tests.bench import cases, speed
from tests.bench.launch import Rank, launch
from tests.bench.report import Spread, compute_ratios, format_number

pytestmark = pytest.mark.torch


def make_rank(numbers: list[int], *, steps: int = 3, exit_status: int | None = 0, **more: Any) -> Rank:
    data = {"numbers": numbers, "steps": steps, "error": None, "seconds": 1.0, **more}
    return Rank(exit_status=exit_status, data=data, error="", seconds=2.0)


SPEC: dict[str, Any] = {"shards": [2, 1]}


def test_coverage_is_right_when_every_sample_came_once_in_equal_steps() -> None:
    assert cases.judge_coverage(SPEC, [make_rank([0, 1]), make_rank([2])]).is_right


@pytest.mark.parametrize(
    ("ranks", "told"),
    [
        ([make_rank([0, 1]), make_rank([])], "1 lost"),
        ([make_rank([0, 1]), make_rank([2, 1])], "1 twice"),
        ([make_rank([0, 1]), make_rank([2], steps=2)], "steps 3/2"),
        ([make_rank([0, 1]), make_rank([2], exit_status=None)], "rank 1 hangs at exit"),
        ([make_rank([0, 1]), make_rank([2], exit_status=1)], "rank 1 exits with 1"),
        ([make_rank([0, 1]), make_rank([2], error="JobError: no")], "rank 1: JobError: no"),
    ],
)
def test_coverage_is_wrong_and_says_why(ranks: list[Rank], told: str) -> None:
    outcome = cases.judge_coverage(SPEC, ranks)
    assert not outcome.is_right
    assert told in outcome.text


def test_weights_must_average_to_one() -> None:
    ranks = [make_rank([0, 1], scales=[0.5], groups=[2]), make_rank([2], scales=[1.5], groups=[1])]
    assert cases.judge_counts(SPEC, ranks).is_right
    ranks[1] = make_rank([2], scales=[1.4], groups=[1])
    assert not cases.judge_counts(SPEC, ranks).is_right


def test_blame_needs_rank_and_cause_on_every_rank() -> None:
    spec = {"shards": [2, 1], "fault": {"rank": 1, "cause": "broken"}}
    told, untold = make_rank([], error="rank 1 failed: broken"), make_rank([], error="a process exited: broken")
    assert cases.judge_blame(spec, [told, told]).is_right
    assert not cases.judge_blame(spec, [untold, told]).is_right


def test_gradients_must_be_near() -> None:
    assert cases.judge_gradient(SPEC, [make_rank([], errors=[1e-15, 1e-16])]).is_right
    assert not cases.judge_gradient(SPEC, [make_rank([], errors=[1e-15, 1e-3])]).is_right
    assert not cases.judge_gradient(SPEC, [make_rank([], errors=[])]).is_right


def test_a_spread_and_its_ratios() -> None:
    assert Spread.of([3.0, 1.0, 2.0]) == Spread(1.0, 2.0, 3.0)
    assert compute_ratios([2.0, 9.0], [1.0, 3.0]) == Spread(2.0, 2.5, 3.0)
    assert compute_ratios([], []) is None
    assert str(Spread(1.0, 1.5, 2.0)) == "1.5 (1 to 2)"
    assert [format_number(value) for value in (0.12345, 12.345, 1234.5, 4000)] == ["0.123", "12.3", "1,234", "4,000"]


def test_extrapolation_is_a_line_through_two_worlds() -> None:
    runs = {2: speed.Runs("peer", 2, bytes=[30.0]), 4: speed.Runs("peer", 4, bytes=[50.0])}
    assert speed.extrapolate(runs) == [(512, 5130.0), (4096, 40970.0)]


@pytest.mark.parametrize("transport", ["reduce", "gather"])
def test_the_formula_for_bytes_is_what_two_ranks_measure(transport: str) -> None:
    spec = {"transport": transport, "rounds": 10, "steps": 16}
    for rank in launch("exchange", spec, ranks=2, limit_s=60):
        assert rank.data is not None, rank.error
        assert rank.data["collectives"] == 2
        assert rank.data["bytes"] == speed.compute_round_bytes(transport, 2, 16)
