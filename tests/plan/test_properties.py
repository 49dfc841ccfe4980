"""Plans with all terms, judged by what R13 promises. Spec: R13."""

from __future__ import annotations

from itertools import chain
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, event, given
from hypothesis import strategies as st

from odb_ref.core.errors import UsageError
from odb_ref.plan import Options, Plan, plan_all, plan_ranks
from tests.plan.judge import Problem, find_faults, get_columns, make_plan, problems


def try_plan(problem: Problem) -> Plan:
    try:
        return make_plan(problem)
    except UsageError as error:
        event(f"refused: {str(error).rpartition('sample')[2].lstrip(' 0123456789')[:20]}")
        assume(False)
        raise


@given(problems())
def test_a_plan_breaks_no_property(problem: Problem) -> None:
    """Spec: R13.1, R13.2, R13.3, R13.4, R13.7. Checks: COVER, ONCE, BUDGET."""
    plan = try_plan(problem)
    assert find_faults(problem, [rank.micro_batches for rank in plan.ranks]) == {}
    assert plan.report.least <= plan.count
    assert plan.report.wait is not None
    assert 1 <= plan.report.least_wait <= plan.report.wait + 1e-9


@given(problems(), st.integers(1, 8))
def test_at_most_is_kept_or_refused(problem: Problem, at_most: int) -> None:
    """Spec: R13.4."""
    problem.terms["at_most"] = at_most
    try:
        plan = make_plan(problem)
    except UsageError:
        del problem.terms["at_most"]
        assert try_plan(problem).count > at_most
    else:
        assert plan.count <= at_most


@given(problems())
def test_short_ranks_are_idle_or_refused(problem: Problem) -> None:
    """Spec: R13.4."""
    idle = any(any(rank.is_idle) for rank in try_plan(problem).ranks)
    problem.terms["short"] = "refuse"
    try:
        make_plan(problem)
    except UsageError as error:
        assert idle
        assert "to divide into" in str(error) or "has no sample" in str(error)
    else:
        assert not idle


@given(problems())
def test_outputs_come_back_in_order(problem: Problem) -> None:
    """Spec: R13.1."""
    for rank in try_plan(problem).ranks:
        outputs = [batch or rank.spare for batch in rank.micro_batches]
        assert rank.restore(outputs) == sorted(chain.from_iterable(rank.micro_batches))


def test_outputs_of_idle_micro_batches_are_left_out_wherever_they_stand() -> None:
    rank = plan_ranks([[5, 6], [60] * 3], budget=60, order="smallest_at_ends").ranks[0]
    assert rank.micro_batches == ((), (1,), (0,))
    assert (
        rank.restore([["again"], ["second"], ["first"]])
        == rank.restore([[], ["second"], ["first"]])
        == ["first", "second"]
    )
    with pytest.raises(UsageError, match="micro-batch 1 has 1 samples, but 2 outputs"):
        rank.restore([[], ["second", "first"], ["first"]])
    with pytest.raises(UsageError, match="3 micro-batches, but outputs of 2"):
        rank.restore([["second"], ["first"]])


@given(problems())
def test_what_is_idle_has_something_to_run(problem: Problem) -> None:
    for rank, plan in enumerate(try_plan(problem).ranks):
        columns = get_columns(problem, None if problem.is_dealt else rank)
        lengths, supervised = columns["lengths"], columns.get("supervised") or columns["lengths"]
        assert (plan.spare == ()) == (not lengths)
        if plan.spare:
            keys = columns["together"] if problem.terms.get("within", "micro-batch") == "micro-batch" else None
            held = [index for batch in plan.micro_batches for index in batch] or range(len(lengths))
            units = [{index for index in held if index == one or (keys and keys[index] == keys[one])} for one in held]
            units = [unit for unit in units if any(supervised[index] for index in unit)] or units
            assert {*plan.spare} in units
            assert sum(lengths[index] for index in plan.spare) == min(
                sum(map(lengths.__getitem__, unit)) for unit in units
            )


def test_what_an_idle_micro_batch_runs_has_a_loss_where_any_sample_has() -> None:
    """The mean over no token is NaN, and so is its product with a weight of 0."""
    plan = plan_ranks([[50, 50, 50], [3, 20, 10]], budget=50, supervised=[[49] * 3, [0, 19, 9]])
    assert plan.ranks[1].spare == (2,)


@pytest.mark.parametrize("ranks", [1, 3])
def test_no_samples_at_all(ranks: int) -> None:
    """Spec: R13.4."""
    terms: Options = {"budget": 9, "multiple_of": 2}
    for plan in (lambda **more: plan_all([], ranks=ranks, **more), lambda **more: plan_ranks([[]] * ranks, **more)):
        with pytest.raises(UsageError, match=r"^rank 0 has no sample, so none for an idle micro-batch to run"):
            plan(**terms)
    terms["short"] = "empty"
    for plan in (plan_all([], ranks=ranks, **terms), plan_ranks([[]] * ranks, **terms)):
        assert [rank.micro_batches for rank in plan.ranks] == [((), ())] * ranks
        assert plan.ranks[0].spare == ()
        assert plan.report.wait == 1


REFUSED: list[tuple[Any, dict[str, Any], str]] = [
    ([[5], [5, 99]], {}, "rank 1: sample 1 has 99 tokens, more than the budget of 60: raise the budget"),
    ([[5], [5, 59]], {"pad_to": 16}, "rank 1: sample 1 has 64 tokens, more than the budget of 60"),
    ([[30, 9, 40]], {"together": [[1, 2, 1]]}, "rank 0: sample 0, with those together with it, has 70 tokens"),
    (
        [[5]],
        {"limits": {"patches": 3}, "uses": {"patches": [[4]]}},
        "rank 0: sample 0 uses 4 'patches', more than the limit of 3: raise it",
    ),
    ([[5]], {"limits": {"patches": 3}}, "rank 0: limits say 'patches', but uses do not"),
    ([[5]], {"uses": {"patches": [[4]]}}, "rank 0: uses say 'patches', which no limit bounds"),
    ([[5]], {"limits": {"patches": 3}, "uses": {"patches": [[-1]]}}, "has -1, expected no negative number"),
    ([[0]], {}, "rank 0: sample 0 has the length 0"),
    ([[True]], {}, "rank 0: lengths must be integers"),
    ([[1.5]], {}, "rank 0: lengths must be integers"),
    ([[5]], {"supervised": [[6]]}, "rank 0: sample 0 has 6 supervised tokens of 5"),
    ([[5]], {"supervised": [[1, 2]]}, "rank 0: 1 lengths, but 2 values of supervised"),
    ([[5]], {"supervised": []}, "1 ranks have lengths, but 0 supervised"),
    ([[5]], {"together": [[]]}, "rank 0: 1 lengths, but 0 keys of together"),
    ([[5]], {"together": [[[1]]]}, "rank 0: keys of together must be hashable"),
    ([[5, 5]], {"together": [[float("nan")] * 2]}, "rank 0: keys of together must be equal where samples belong"),
    ([[5]], {"limits": [("samples", 2)]}, "limits must be a mapping of names to numbers"),
    ([[5]], {"limits": None}, "limits must be a mapping of names to numbers"),
    ([[5]], {"limits": {1: 2}}, "limits must be a mapping of names to numbers"),
    ([[5]], {"cost": lambda tokens: 6 - min(tokens, 5) if tokens < 7 else 9}, "cost gives"),
    ([[7]], {"cost": lambda tokens: -1 if tokens == 7 else tokens}, r"rank 0: cost\(7\) is -1"),
    ([[7]], {"cost": lambda tokens: 0.5 if tokens == 7 else tokens}, r"rank 0: cost\(7\) must be an integer"),
    ([[5]], {"layout": "folded"}, "layout must be one of padded, packed, got 'folded'"),
    ([[5]], {"within": "world"}, "within must be one of micro-batch, rank, step"),
    ([[5]], {"oversize": "cut"}, "oversize must be one of refuse, alone"),
    ([[5]], {"short": "hang"}, "short must be one of idle, refuse, empty"),
    ([[5]], {"order": "any"}, "order must be one of costliest_first, smallest_at_ends"),
    ([[5]], {"multiple_of": 0}, "multiple_of must be at least 1, got 0"),
    ([[5]], {"at_least": 1.5}, "at_least must be an integer"),
    (
        [[5, 5]],
        {"limits": {"patches": 3}, "uses": {"patches": [[2, 2]]}, "together": [[1, 1]]},
        "rank 0: sample 0, with those together with it, uses 4 'patches', more than the limit of 3: raise it",
    ),
    (
        [[5]],
        {"at_least": 3, "at_most": 2},
        r"^at_least=3, multiple_of=1 and at_most=2 allow no number of micro-batches$",
    ),
    ([[5]], {"multiple_of": 3, "at_most": 2}, r"^at_least=1, multiple_of=3 and at_most=2 allow no number"),
    ([[60] * 3], {"at_most": 2}, r"^3 micro-batches are needed, more than at_most=2: raise the budget$"),
    ([[5] * 3], {"at_most": 2, "limits": {"samples": 1}}, "more than at_most=2: raise the budget, or a limit"),
    ([5, 6], {}, "rank 0: lengths must be a list, got 5"),
    (None, {}, "lengths must be a list, got None"),
    ([b"567"], {}, "rank 0: lengths must be a list, got b'567'"),
    ([[5, 5], [5]], {"at_least": 2, "short": "refuse"}, "rank 1 has 1 to divide into 2 micro-batches"),
    ([], {}, "lengths are those of each rank: there is none"),
    (np.empty((0, 3), dtype=int), {}, "lengths are those of each rank: there is none"),
    (np.ones((2, 3)), {}, "rank 0: lengths must be integers"),
    ([[5]], {"budget": 0}, "budget must be at least 1"),
    ([[5]], {"buget": 9}, "no such term: buget"),
]


@pytest.mark.parametrize(("lengths", "options", "message"), REFUSED)
def test_nonsense_is_refused(lengths: Any, options: dict[str, Any], message: str) -> None:
    """Spec: R13.2, R13.3, R13.4."""
    with pytest.raises(UsageError, match=message):
        plan_ranks(lengths, **{"budget": 60} | options)


@pytest.mark.parametrize("lengths", [None, 5, b"567"])
def test_lengths_that_are_no_list_are_refused(lengths: Any) -> None:
    with pytest.raises(UsageError, match=r"^lengths must be a list, got "):
        plan_all(lengths, ranks=2, budget=60)


@pytest.mark.parametrize("within", ["rank", "step"])
def test_a_forgotten_column_of_keys_is_missed(within: str) -> None:
    """Spec: R13.7. Each sample would be a key of its own, and stand anywhere."""
    with pytest.raises(UsageError, match=f"^within='{within}' is for samples of one key: give a key for each sample"):
        plan_all([5], ranks=2, budget=60, within=within)
    with pytest.raises(UsageError, match=f"^rank 0: within='{within}' is for samples of one key"):
        plan_ranks([[5]], budget=60, within=within)
    assert plan_all([5, 6], ranks=2, budget=60, within="micro-batch") == plan_all([5, 6], ranks=2, budget=60)


def test_a_plan_needs_a_budget() -> None:
    with pytest.raises(UsageError, match="a plan needs a budget"):
        plan_ranks([[1]])  # type: ignore[call-arg]
