"""The arithmetic and the judges of the benchmarks: a check that cannot fail would show nothing."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from odb_ref.core.peers import POST_SIZE
from odb_ref.core.types import Sample
from tests.bench import cases, core, model, process
from tests.bench.launch import Rank, launch
from tests.bench.report import Spread, compute_ratios, format_number


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


@pytest.mark.slow
@pytest.mark.parametrize(("transport", "messages"), [("reduce", 1), ("gather", 2)])
def test_a_round_of_two_ranks_sends_no_more_than_its_offer_and_its_counts(transport: str, messages: int) -> None:
    spec = {"transport": transport, "flags": 3, "steps": 16}
    ranks = launch("exchange", spec, ranks=2, limit_s=60)
    assert all(rank.data for rank in ranks), ranks
    most = max(rank.data["bytes"] for rank in ranks if rank.data)
    least = 8 * messages * (POST_SIZE + 3 + 3 * 16)
    assert least <= most <= least + 64  # the headers of the messages


def make_finding(predicted: float, *, are_batches_equal: bool = True, late: float = 0.0) -> model.Finding:
    case = model.Case(kind="ours", workers=1, waits_for="loader")
    return model.Finding(case, 40, are_batches_equal, measured=100.0, predicted=predicted, late=late)


def test_the_model_is_judged_by_the_median_and_by_any_batch_that_differs() -> None:
    findings = [make_finding(140.0), make_finding(104.0), make_finding(90.0)]
    assert model.choose_median(findings) == findings[1]
    assert findings[1].verdict == ""
    assert findings[0].verdict == "WRONG"
    findings.append(make_finding(100.0, are_batches_equal=False))
    assert model.choose_median(findings) == findings[3]
    assert findings[3].verdict == "WRONG"


def test_a_busy_machine_is_not_the_model_s_fault_but_wrong_batches_are() -> None:
    assert make_finding(140.0, late=0.5).verdict == "too busy to say"
    assert make_finding(104.0, late=0.5).verdict == ""
    assert make_finding(140.0, are_batches_equal=False, late=0.5).verdict == "WRONG"


def test_the_model_is_told_what_the_sleeps_came_to() -> None:
    case, workload = model.Case(kind="plain", workers=1, waits_for="both"), model.build_workload(80)
    epoch = model.Epoch(taken_s=[], samples=[], late_s=0.0, collate_s=model.COLLATE_S, step_s=0.025)
    rates = []
    for late_s, step_s in ((0.0, 0.025), (0.01, 0.025), (0.0, 1.0)):
        times, samples = model.predict(case, workload, replace(epoch, late_s=late_s, step_s=step_s))
        assert samples == [model.BATCH_SAMPLES] * 10
        rates.append((times[-1] - times[0]) / 9)
    read_s = model.BATCH_SAMPLES * model.SAMPLE_S + model.COLLATE_S
    tokens_s = model.PER_TOKEN_S * int(workload.tokens[model.BATCH_SAMPLES :].sum()) / 9
    assert rates == pytest.approx([read_s + tokens_s, read_s + tokens_s + model.BATCH_SAMPLES * 0.01, 1.0])


def test_the_core_by_itself_emits_every_sample_once_or_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    shard = tuple(Sample(place, place, length, length) for place, length in enumerate([900, 40, 3000, 7] * 50))
    seconds, steps = core.run_epoch(shard)
    assert seconds > 0
    assert 17 <= steps < 200  # 197,350 tokens, 12,288 in a step
    told = core._answer
    monkeypatch.setattr(core, "_answer", lambda effect, shard, read: told(effect, shard[:-1], read))
    with pytest.raises(RuntimeError, match="199 samples came of 200"):
        core.run_epoch(shard)


def test_the_clock_tells_waiting_for_the_lock_from_waiting_for_nothing() -> None:
    turns = process._calibrate(0.01)
    alone, rival = (process._control(kind, turns) for kind in ("alone", "rival"))
    # About 0.001 and 0.4 on an idle machine. Other work during this test blurs both.
    assert rival["lock_wait_s"] > 0.08 * rival["python_s"]
    assert alone["lock_wait_s"] < 0.5 * rival["lock_wait_s"]
