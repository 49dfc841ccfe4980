"""Micro-batches of known lengths: seconds computed by hand, what dealing saves, and a bound that no plan beats."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from odb_sim.inputs.costs import NO_COLLECTIVE, CollectiveCost, Costs, GpuCost, StepTable
from odb_sim.inputs.lengths import Lengths
from odb_sim.studies.micro_batches import WaysToDivide, divide

from odb_ref.core.batching.cost import TOKENS
from odb_ref.plan.terms import Options
from tests.helpers.commands import get_answer, refuse, tell
from tests.helpers.effort import few

PLAIN = Costs(gpu=GpuCost(fixed_s=0.5, per_token_s=0.01, per_token2_s=0), collective=NO_COLLECTIVE)


def ask(tokens: list[int], ranks: int, options: Options, costs: Costs = PLAIN, **more: object) -> WaysToDivide:
    lengths = Lengths("test", np.array(tokens), np.array(tokens))
    return divide(lengths, ranks=ranks, costs=costs, options=options, balance=TOKENS, **more)  # type: ignore[arg-type]


def test_seconds_are_those_of_the_slowest_rank() -> None:
    """Rank 0 has 600 tokens, two full micro-batches. Rank 1 has 100, and an idle micro-batch."""
    outcome = ask([300, 300, 50, 50], 2, {"budget": 300})
    stay, dealt = outcome.stay, outcome.dealt
    assert (stay.micro_batches, stay.least) == (2, 2)
    assert stay.step_s == pytest.approx(2 * (0.5 + 3.0))
    assert stay.wait_s == pytest.approx(7.0 - (7.0 + 2 * 0.5 + 1.0) / 2)
    # Dealt out, each rank has a long sample and a short one. No two long ones share a micro-batch of 300.
    assert dealt.step_s == pytest.approx(2 * 0.5 + 3.0 + 0.5)
    assert dealt.wait_s == pytest.approx(0)
    assert outcome.saved_s == pytest.approx(2.5)
    assert outcome.bound_s == pytest.approx(2 * 0.5 + 3.5)
    assert outcome.left_s == pytest.approx(0)


def test_the_collective_ends_a_step_once() -> None:
    costs = Costs(gpu=PLAIN.gpu, collective=CollectiveCost(fixed_s=10.0, latency_s=0, transfer_s=0))
    outcome, without = (ask([300, 300, 50, 50], 2, {"budget": 300}, each) for each in (costs, PLAIN))
    assert outcome.stay.step_s == pytest.approx(without.stay.step_s + 10)
    assert outcome.bound_s == pytest.approx(without.bound_s + 10)


def test_ranks_meet_where_the_cost_model_says() -> None:
    """Ranks with 300 + 100 and 200 + 200 tokens, in micro-batches of 300, by falling tokens, wait only inside the step."""
    meeting = replace(PLAIN, collective=replace(NO_COLLECTIVE, each_step=True))
    inside, at_the_end = (ask([300, 100, 200, 200], 2, {"budget": 300}, costs).stay for costs in (meeting, PLAIN))
    assert inside.step_s == pytest.approx(2 * 0.5 + 3 + 2)
    assert inside.wait == pytest.approx(6 / 5)
    assert at_the_end.step_s == pytest.approx(2 * 0.5 + 4)
    assert (at_the_end.wait_s, at_the_end.wait) == (0, 1)


def test_what_is_padded_is_paid_for() -> None:
    """Lengths rounded up by --pad-to take as long as the rounded ones. The fill counts real tokens."""
    tokens = [130, 10, 20, 250]
    padded, plain = ask(tokens, 2, {"budget": 256, "pad_to": 128}), ask([256, 128, 128, 256], 2, {"budget": 256})
    for one, other in ((padded.stay, plain.stay), (padded.dealt, plain.dealt)):
        assert (one.step_s, one.wait_s) == (other.step_s, other.wait_s)
        assert one.fill < other.fill
        assert one.wait == pytest.approx(one.step_s / (one.step_s - one.wait_s))
    assert padded.bound_s == plain.bound_s


def test_groups_that_stay_together_bound_what_dealing_saves() -> None:
    tokens = [300, 300, 300, 20, 20, 20]
    groups = np.array([1, 1, 1, 2, 2, 2])
    free, tied = ask(tokens, 2, {"budget": 300}), ask(tokens, 2, {"budget": 300}, groups=groups)
    anywhere = ask(tokens, 2, {"budget": 300, "within": "step"}, groups=groups)
    assert free.dealt.step_s < tied.dealt.step_s == pytest.approx(tied.stay.step_s)
    assert free.bound_s < tied.bound_s <= tied.dealt.step_s
    assert anywhere.dealt.step_s == pytest.approx(free.dealt.step_s)


QUADRATIC = Costs(gpu=GpuCost(fixed_s=0.05, per_token_s=1e-3, per_token2_s=1e-6))
FLOOR = replace(QUADRATIC, gpu=replace(QUADRATIC.gpu, floor_s=0.2))
TABLES = [
    StepTable(rows=rows)
    for rows in (
        ((250.0, 1.9), (280.0, 2.0), (300.0, 2.1)),  # measured with full batches only
        ((10.0, 0.5), (100.0, 0.6), (280.0, 4.0)),  # a growing cost per token
        ((10.0, 2.0), (100.0, 1.5), (250.0, 0.01)),  # falling, to nothing
        ((400.0, 0.01), (500.0, 7.0)),  # cheaper than an idle one
    )
]
MEETING = replace(QUADRATIC, collective=CollectiveCost(each_step=True))
MODELS = [PLAIN, QUADRATIC, MEETING, FLOOR, *(replace(QUADRATIC, step_table=table) for table in TABLES)]


def test_the_bound_is_what_full_micro_batches_take() -> None:
    """Sixteen samples of 100 tokens are eight full micro-batches, four on each of two ranks: nothing can be better."""
    for costs in (
        QUADRATIC,
        FLOOR,
        replace(FLOOR, gpu=replace(FLOOR.gpu, floor_s=2.0)),
        replace(PLAIN, step_table=TABLES[0]),
    ):
        outcome = ask([100] * 16, 2, {"budget": 200}, costs)
        assert outcome.bound_s == pytest.approx(outcome.dealt.step_s, rel=0.25 if costs.step_table.rows else 1e-9)
        assert outcome.left_s >= -1e-9


@settings(max_examples=few(120), deadline=None)
@given(
    st.sampled_from(MODELS),
    st.lists(st.integers(1, 300), min_size=8, max_size=60),
    st.integers(1, 4),
    st.sampled_from(["packed", "padded"]),
    st.booleans(),
    st.data(),
)
def test_no_plan_is_below_the_bound(
    costs: Costs, tokens: list[int], ranks: int, layout: str, has_groups: bool, data: st.DataObject
) -> None:
    groups = None
    if has_groups:
        groups = np.array(data.draw(st.lists(st.integers(0, 9), min_size=len(tokens), max_size=len(tokens))))
    terms: Options = {"budget": data.draw(st.sampled_from([300, 120])), "layout": layout, "oversize": "alone"}
    terms["within"] = data.draw(st.sampled_from(["rank", "micro-batch"]))
    outcome = ask(tokens, ranks, terms, costs, groups=groups)
    least_s = min(outcome.dealt.step_s, outcome.stay.step_s if groups is None else outcome.dealt.step_s)
    assert outcome.bound_s <= least_s * (1 + 1e-9)
    for way in (outcome.stay, outcome.dealt):
        assert -1e-9 <= way.wait_s < way.step_s
        assert way.micro_batches >= way.least


def test_several_steps_are_averaged_and_what_is_left_over_is_left_out() -> None:
    tokens = [300, 300, 50, 50, 300, 300, 50, 50, 7]
    one, two = ask(tokens[:4], 2, {"budget": 300}), ask(tokens, 2, {"budget": 300}, step_samples=4)
    assert (two.steps, two.samples) == (2, 8)
    assert two.stay == one.stay


def test_what_is_balanced_follows_the_cost_model() -> None:
    assert Costs().balance.name == "attention/60000"
    assert PLAIN.balance == TOKENS


def test_groups_that_staying_splits_are_counted_and_no_loss_is_called_a_saving(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    csv = tmp_path / "l.csv"
    csv.write_text("total_tokens,prompt\n" + "900,0\n" * 4 + "9,1\n9,2\n9,2\n9,3\n")
    command = ["micro-batches", str(csv), "--ranks", "4", "--budget", "1000"]
    figures, said = get_answer(capsys, command, "--groups", "prompt")
    assert figures["split_groups"] == 2
    assert figures["saved_s"] < 0
    assert "Where the samples stay, which splits 2.0 groups over ranks, a step takes" in said
    assert "No plan that keeps groups together takes less than" in said
    assert "Dealing them out (samples of one prompt in one rank) takes" in said
    assert " s more (" in said.partition("Dealing")[2].partition("No plan")[0]
    assert "saves -" not in said
    said = tell(capsys, command)
    assert "splits" not in said
    assert "No plan takes less" in said
    assert "say with --groups" in refuse(capsys, [*command, "--within", "micro-batch"])


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    csv = tmp_path / "l.csv"
    csv.write_text(
        "total_tokens,prompt\n" + "".join(f"{tokens},{n // 3}\n" for n, tokens in enumerate([900, 40, 60] * 20))
    )
    command = ["micro-batches", str(csv), "--ranks", "4", "--budget", "1000"]
    figures, said = get_answer(capsys, command, "--groups", "prompt", "--step-samples", "24")
    assert "2 optimizer steps of 24 samples" in said
    assert "12 samples left over" in said
    assert "(samples of one prompt in one rank)" in said
    assert [way["way"] for way in figures["ways"]] == ["samples stay", "dealt out"]
    assert figures["saved_s"] == pytest.approx(figures["ways"][0]["step_s"] - figures["ways"][1]["step_s"])
    for wrong, why in (
        (["--budget", "800"], "raise the budget, or say --oversize alone"),
        (["--groups", "nothing"], "no column nothing"),
        (["--step-samples", "99"], "there are 60 samples"),
        (["--step-samples", "3"], "each needs at least one"),
        (["--cost", "nonsense"], "nonsense"),
        (["--budget", "899"], "has 900 tokens, more than the budget of 899"),
    ):
        assert why in refuse(capsys, [*command, *wrong])
