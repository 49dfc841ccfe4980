"""Ranks that plan by exchange get the plans of `plan_ranks` with one all-gather, and no rank is left waiting. Spec: R13.11."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from odb_ref.core.errors import PeerError, UsageError
from odb_ref.plan import MESSAGE_SIZE, attention, plan_rank
from tests.helpers.capture import capture
from tests.plan.judge import Problem, make_plan, problems
from tests.plan.worlds import plan_in_world


@settings(max_examples=60)
@given(problems(is_dealt=False))
def test_ranks_plan_what_one_place_plans_and_refuse_in_its_words(problem: Problem) -> None:
    """Spec: R13.1, R13.11. One exchange, of the usual number of integers."""
    found = plan_in_world(problem)
    try:
        plans = make_plan(problem).ranks
    except UsageError as error:
        assert [str(item) for item in found] == [str(error)] * len(found)
        assert {type(item) for item in found} == {UsageError}
    else:
        alone = replace(plans[0].report, wait=None)
        assert found == [replace(plan, report=alone) for plan in plans]


def break_cost(tokens: int) -> int:
    return tokens if tokens in (1, 2, 1_000, 100_000) else 1 // 0


CANNOT: list[tuple[dict[str, Any], str]] = [
    (
        {"lengths": [9, 99]},
        "rank {}: sample 1 has 99 tokens, more than the budget of 60: raise the budget, or say oversize='alone'",
    ),
    ({"lengths": [9, 0]}, "rank {}: sample 1 has the length 0, expected at least 1"),
    ({"lengths": [9, 2**80]}, f"rank {{}}: sample 1 has {2**80} tokens, more than the budget of 60"),
    ({"lengths": ["nine"]}, "rank {}: lengths must be integers: 'str' object"),
    ({"lengths": None}, "rank {}: lengths must be a list, got None"),
    ({"together": 5}, "rank {}: together must be a list, got 5"),
    ({"supervised": [1]}, "rank {}: 3 lengths, but 1 values of supervised"),
    ({"supervised": [99, 1, 1]}, "rank {}: sample 0 has 99 supervised tokens of 7"),
    (
        {"together": [1, 1, 2], "lengths": [40, 40, 1]},
        "rank {}: sample 0, with those together with it, has 80 tokens, more",
    ),
    (
        {"together": [1, 1, 2], "within": "step"},
        "rank {}: group_supervised and within='step' need each other: it says what",
    ),
    (
        {"group_supervised": {}},
        "rank {}: group_supervised and within='step' need each other: it says what the keys have on all",
    ),
    (
        {"together": [1, 1, 2], "within": "step", "group_supervised": {1: 14, 2: 9}},
        "rank {}: key 1 has 15 supervised tokens here, more than group_supervised says",
    ),
    ({"within": "rank"}, "rank {}: within='rank' is for samples of one key: give a key for each sample as together"),
    (
        {"together": [1, 1, 2], "within": "step", "group_supervised": {1: 15.0, 2: 9}},
        "rank {}: group_supervised must be integers: 'float' object",
    ),
    ({"together": [[1], 1, 2]}, "rank {}: keys of together must be hashable: "),
    ({"cost": break_cost}, "rank {}: ZeroDivisionError: "),
    ({"layout": "folded"}, "rank {}: layout must be one of padded, packed, got 'folded'"),
    ({"layout": "\u00e9" * 400}, "rank {}: layout must be one of padded, packed, got '" + "\u00e9" * 90),
    ({"budget": 2**70}, "rank {}: budget must be at most 4611686018427387903, got"),
    ({"lengths": [2**62] * 3, "oversize": "alone"}, "rank {}: a number of this plan exceeds 64 bits"),
    ({"buget": 9}, "rank {}: no such term: buget"),
    (
        {"limits": {"patches": 3}, "uses": {"patches": [1, 4, 1]}},
        "rank {}: sample 1 uses 4 'patches', more than the limit of 3",
    ),
]


def get_refusal(found: list[Any]) -> str:
    """Returns the words in which all ranks refuse."""
    assert {type(item) for item in found} == {UsageError}, found
    (words,) = {str(item) for item in found}
    return words


@pytest.mark.parametrize("culprit", [0, 2])
@pytest.mark.parametrize(("change", "message"), CANNOT)
def test_whoever_cannot_plan_all_refuse_alike_and_nobody_waits(
    culprit: int, change: dict[str, Any], message: str
) -> None:
    """Spec: R13.11."""
    problem = Problem(lengths=[[7, 8, 9]] * 3, terms={"budget": 60})
    found = plan_in_world(problem, changes=[change if rank == culprit else {} for rank in range(3)])
    words = get_refusal(found)
    assert words.startswith(message.format(culprit))
    assert found[culprit].__cause__ is not None
    assert len(words.encode()) < 300


DIFFERENT: list[tuple[dict[str, Any], str]] = [
    ({"budget": 50}, "budget differs: 60 on rank 0, 50 on rank 1"),
    ({"layout": "padded"}, "layout differs: 'packed' on rank 0, 'padded' on rank 1"),
    ({"cost": attention(hidden_size=64)}, "cost differs: one with the digest"),
    ({"limits": {"samples": 4}}, "limits differs: one with the digest"),
    ({"multiple_of": 2}, "multiple_of differs: 1 on rank 0, 2 on rank 1"),
    ({"at_least": 2}, "at_least differs: 1 on rank 0, 2 on rank 1"),
    ({"at_most": 2}, "at_most differs: None on rank 0, 2 on rank 1"),
    ({"pad_to": 2}, "pad_to differs: 1 on rank 0, 2 on rank 1"),
    ({"within": "rank", "together": [1, 2, 3]}, "within differs: 'micro-batch' on rank 0, 'rank' on rank 1"),
    ({"oversize": "alone"}, "oversize differs: 'refuse' on rank 0, 'alone' on rank 1"),
    ({"short": "refuse"}, "short differs: 'idle' on rank 0, 'refuse' on rank 1"),
    ({"order": "smallest_at_ends"}, "order differs: 'costliest_first' on rank 0, 'smallest_at_ends' on rank 1"),
]


@pytest.mark.parametrize(("change", "message"), DIFFERENT)
def test_a_term_that_differs_is_named_on_every_rank(change: dict[str, Any], message: str) -> None:
    """Spec: R13.11."""
    found = plan_in_world(Problem(lengths=[[7, 8, 9]] * 2, terms={"budget": 60}), changes=[{}, change])
    assert get_refusal(found).startswith(message)


@pytest.mark.parametrize(
    "change", [{1: 22, 2: 27}, {1: 26, 2: 22}, {1: 22, 2: 26, 3: 1}, {1: 21, 2: 26, 3: 1}, {1: 23, 2: 26, 3: -1}]
)
def test_ranks_that_count_the_tokens_of_a_key_otherwise_are_told(change: dict[int, int]) -> None:
    """Spec: R13.11. The counts must be the sum over all ranks, key by key, even if all ranks count alike."""
    problem = Problem(lengths=[[7, 8, 9]] * 2, together=[[1, 1, 2], [1, 2, 2]], terms={"budget": 60, "within": "step"})
    for culprits in ((0,), (1,), (0, 1)):
        changes = [{"group_supervised": change} if rank in culprits else {} for rank in range(2)]
        words = get_refusal(plan_in_world(problem, changes=changes))
        assert words.startswith(f"group_supervised of rank {culprits[0]} is not the sum")
    assert [type(item).__name__ for item in plan_in_world(problem)] == ["RankPlan"] * 2


def test_a_rank_with_too_few_is_named_by_all() -> None:
    """Spec: R13.4, R13.11."""
    found = plan_in_world(Problem(lengths=[[60] * 3, [9], [9] * 3], terms={"budget": 60, "short": "refuse"}))
    assert get_refusal(found) == "rank 1 has 1 to divide into 3 micro-batches: say short='idle'"
    found = plan_in_world(Problem(lengths=[[60] * 3, [9]], terms={"budget": 60, "at_most": 2}))
    assert get_refusal(found) == "3 micro-batches are needed, more than at_most=2: raise the budget"


@pytest.mark.parametrize("terms", [{}, {"multiple_of": 2}, {"layout": "padded"}])
def test_a_rank_with_nothing_to_run_is_named_by_all_unless_all_say_that_it_can(terms: dict[str, Any]) -> None:
    """Spec: R13.4, R13.11. It would be alone in its error, and the others in their next collective."""
    problem = Problem(lengths=[[60] * 3, [], [9]], terms={"budget": 60} | terms)
    words = "rank 1 has no sample, so none for an idle micro-batch to run: give it one, or say short='empty' if it can"
    assert get_refusal(plan_in_world(problem)) == f"{words} run something else"
    with pytest.raises(UsageError, match=f"^{words} run something else$"):
        make_plan(problem)
    problem.terms["short"] = "empty"
    assert [item.micro_batches for item in plan_in_world(problem)] == [
        rank.micro_batches for rank in make_plan(problem).ranks
    ]
    assert all(plan_in_world(problem)[1].is_idle)


@given(st.lists(st.integers(1, 60), min_size=1, max_size=20))
def test_a_rank_asks_once_and_says_as_much_whatever_it_has(lengths: list[int]) -> None:
    """Spec: R13.11."""
    asked = []

    def exchange(message: list[int]) -> Sequence[Sequence[int]]:
        asked.append(message)
        return [message]

    plan_rank(lengths, budget=60, exchange=exchange)
    assert [len(message) for message in asked] == [MESSAGE_SIZE]
    assert all(type(value) is int and abs(value) < 2**63 for value in asked[0])


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (lambda own: None, "did not give back what this rank gave"),
        (lambda own: own, "did not give back what this rank gave"),
        (lambda own: [], "did not give back what this rank gave"),
        (lambda own: [[0] * len(own)], "did not give back what this rank gave"),
        (lambda own: [own, own[:-1]], "rank 1 sent no message of a plan of this format"),
        (lambda own: [own, [own[0] + 1, *own[1:]]], "rank 1 sent no message of a plan of this format"),
    ],
)
def test_an_exchange_that_is_none_is_named(answer: Any, message: str) -> None:
    """Spec: R13.11."""
    with pytest.raises(PeerError, match=message):
        plan_rank([5], budget=60, exchange=answer)


@pytest.mark.parametrize("kind", [np.array, torch.tensor])
def test_an_exchange_may_give_back_integers_of_any_library(kind: Any) -> None:
    """Spec: R13.9. Weights are fractions, with numbers beyond 64 bits."""
    terms: Any = {"budget": 200_000, "together": [index % 100 for index in range(200)], "within": "rank"}
    expected = plan_rank(LENGTHS, **terms)
    plan = plan_rank(LENGTHS, **terms, exchange=lambda own: kind([own]))
    assert plan == expected
    assert plan.weights("group-mean") == expected.weights("group-mean")


SCRIPT = """
from odb_ref.plan import attention, plan_all, plan_ranks
from tests.plan.test_agreement import LENGTHS
keys = [f"prompt {length % 13}" for length in LENGTHS]
for within in ("micro-batch", "rank"):
    plan = plan_all(LENGTHS, ranks=4, budget=20_000, together=keys, within=within, cost=attention(hidden_size=64))
    print([rank.micro_batches for rank in plan.ranks])
    print([rank.weights("group-mean").batches for rank in plan.ranks])
"""
LENGTHS = [(37 * number * number + 11) % 997 + 1 for number in range(200)]


def test_another_process_with_another_hash_seed_plans_the_same() -> None:
    """Spec: R13.1. Checks: REPLAY."""

    def run(seed: str) -> str:
        environment = os.environ | {"PYTHONHASHSEED": seed}
        done = capture([sys.executable, "-c", SCRIPT], env=environment, check=True)
        return done.stdout

    first = run("1")
    assert first == run("2")
    assert first.count("\n") == 4


def test_the_world_tells_who_is_left_waiting() -> None:
    """The check can fail: a rank that raises before its exchange leaves the others waiting in it."""

    def plan_badly(lengths: list[int], *, exchange: Any, budget: int, **_: Any) -> Any:
        if max(lengths) > budget:
            raise UsageError("too long")
        exchange([1])

    found = plan_in_world(Problem(lengths=[[7], [99], [7]], terms={"budget": 60}), plan_badly)
    assert [type(item).__name__ for item in found] == ["StuckError", "UsageError", "StuckError"]
