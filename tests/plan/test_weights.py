"""Weights as exact fractions: the sum over all ranks' micro-batches is the mean over the whole optimizer step. Spec: R13.9."""

from __future__ import annotations

from fractions import Fraction
from itertools import chain

import pytest
from hypothesis import given
from hypothesis import strategies as st

from odb_ref.core.errors import UsageError
from odb_ref.plan import Mean, plan_rank
from tests.plan.judge import Problem, problems
from tests.plan.test_properties import try_plan
from tests.plan.worlds import plan_in_world


def compute_gradient(rank: int, index: int, token: int) -> Fraction:
    """Returns the gradient of one token's loss for one parameter, an arbitrary number, so that no two places are alike."""
    return Fraction((7 * rank + 11 * index + 13 * token) % 101 + 1, 1 + (rank + index + token) % 17)


def list_gradients(rank: int, index: int, supervised: int) -> list[Fraction]:
    return [compute_gradient(rank, index, token) for token in range(supervised)]


def mean(values: list[Fraction]) -> Fraction:
    return sum(values, Fraction(0)) / len(values) if values else Fraction(0)


def compute_mean_gradient(problem: Problem, kind: str) -> Fraction:
    """Returns the result of one process for all samples, computed in the simplest way."""
    tokens: list[list[Fraction]] = []
    keys = []
    for rank, lengths in enumerate(problem.lengths):
        for index, length in enumerate(lengths):
            supervised = length if problem.supervised is None else problem.supervised[rank][index]
            key = (rank, index) if problem.together is None else problem.together[rank][index]
            is_shared = problem.is_dealt or problem.terms.get("within") == "step" or problem.together is None
            tokens.append(list_gradients(rank, index, supervised))
            keys.append(key if is_shared else (rank, key))
    match kind:
        case "token-mean":
            return mean([*chain.from_iterable(tokens)])
        case "sequence-mean":
            return mean([sum(own, Fraction(0)) for own in tokens if own])
        case "sequence-mean-token-mean":
            return mean([mean(own) for own in tokens if own])
        case _:
            groups: dict[object, list[Fraction]] = {}
            for key, own in zip(keys, tokens, strict=True):
                groups.setdefault(key, []).extend(own)
            return mean([mean(own) for own in groups.values() if own])


def find_sample(problem: Problem, rank: int, index: int) -> tuple[int, int]:
    """Returns the original rank and index of a sample."""
    if not problem.is_dealt:
        return rank, index
    for home, lengths in enumerate(problem.lengths):
        if index < len(lengths):
            return home, index
        index -= len(lengths)
    raise AssertionError


@given(problems(), st.sampled_from([*Mean]))
def test_the_gradient_is_that_of_the_mean_over_the_whole(problem: Problem, kind: Mean) -> None:
    """Spec: R13.9. Checks: WEIGHT. Exact, in fractions."""
    plan = try_plan(problem)
    found = Fraction(0)
    shares = Fraction(0)
    for rank, own in enumerate(plan.ranks):
        weights = own.weights(kind)
        for batch, of_samples, share in zip(own.micro_batches, weights.samples, weights.batches, strict=True):
            tokens = []
            for index, weight in zip(batch, of_samples, strict=True):
                home, place = find_sample(problem, rank, index)
                given_ = problem.lengths if problem.supervised is None else problem.supervised
                gradients = list_gradients(home, place, given_[home][place])
                found += weight * sum(gradients)
                tokens += gradients
            shares += share
            if len({weight for weight in of_samples if weight}) == 1:  # then the factor for the mean is enough
                alike = max(of_samples)
                assert share * mean(tokens) == alike * sum(tokens, Fraction(0))
        assert weights.scales == tuple(float(share * len(plan.ranks)) for share in weights.batches)
    assert found == compute_mean_gradient(problem, kind)
    if kind is not Mean.SEQUENCE and plan.ranks[0].totals.supervised:
        assert shares == 1


@given(problems(is_dealt=False))
def test_ranks_that_plan_alone_weigh_as_one_place_does(problem: Problem) -> None:
    """Spec: R13.9, R13.11."""
    plan = try_plan(problem)
    for mine, theirs in zip(plan_in_world(problem), plan.ranks, strict=True):
        for kind in Mean:
            assert mine.weights(kind) == theirs.weights(kind)
        assert mine.totals == theirs.totals


def test_a_group_counts_once_however_long_its_samples() -> None:
    plan = plan_rank([30, 10, 20], supervised=[30, 10, 0], together=["a", "a", "b"], within="rank", budget=60)
    assert plan.micro_batches == ((0, 1, 2),)
    assert plan.weights("group-mean").samples == ((Fraction(1, 40), Fraction(1, 40), Fraction(0)),)
    assert plan.weights("sequence-mean-token-mean").samples == ((Fraction(1, 60), Fraction(1, 20), Fraction(0)),)
    assert plan.weights("sequence-mean").batches == (20,)
    assert plan.weights().scales == (1.0,)


def test_there_is_no_other_mean() -> None:
    with pytest.raises(UsageError, match="mean must be one of token-mean, sequence-mean"):
        plan_rank([3], budget=9).weights("median")
