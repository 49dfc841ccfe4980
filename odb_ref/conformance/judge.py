"""What is wrong with a plan, by the property it breaks: from the rules' words, not from any planner's code. Spec: R13."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from fractions import Fraction
from itertools import chain
from typing import Final

from odb_ref.conformance.answers import JudgedPlan, Plans, Weight
from odb_ref.conformance.vectors import Problem, Record, pick
from odb_ref.core.batching.cost import choose_cost
from odb_ref.plan.outcome import Mean
from odb_ref.plan.quality import compute_wait
from odb_ref.plan.terms import BatchOrder, Oversize, Within

RULES: Final = {
    "COVER": "R13.1: every sample is in a micro-batch",
    "ONCE": "R13.1: no sample is in two",
    "HOME": "R13.1: of a rank that may have it",
    "EQUAL": "R13.1: every rank has as many micro-batches",
    "RESTORE": "R13.1: outputs come back in the order of the samples",
    "DETERMINISM": "R13.1: the same again, and in another process with another hash seed",
    "BUDGET": "R13.2: each within the budget and all limits; R13.3: but a unit that travels alone",
    "EXPECT": "R13.3, R13.4: there is a plan, or a refusal, as the case says",
    "MULTIPLE": "R13.4: the number that multiple_of, at_least and at_most allow",
    "NONEMPTY": "R13.4: none is empty while its rank has units for it",
    "TOGETHER": "R13.7: samples of one key are where `within` says",
    "ORDER": "R13.8: they are run in the order that was asked for",
    "WEIGHT": "R13.9: the weights make the mean that was asked for",
    "REPORT": "R13.10: what is said of the plan is so",
    "AGREE": "R13.11: all ranks plan, or all refuse with the same words",
    "TERMINATION": "R13.11: no rank is left in the exchange, and an answer comes in time",
    "ANSWER": "an answer is a plan or a refusal, and nobody ends on the way",
    "EXACT": "the answer is the model's",
}
"""What an implementation is judged by, and where it stands."""

_NEAR: Final = 1e-9
"""How far a float may be from the fraction that it stands for."""


def find_faults(problem: Problem, plans: Plans) -> set[str]:
    """Returns the properties that a plan breaks."""
    faults = _check_samples(problem, plans)
    if "HOME" in faults:
        return faults
    faults |= _check_counts(problem, plans) | _check_batches(problem, plans) | _check_order(problem, plans)
    return faults if problem.is_online else faults | _check_empty(problem, plans)


def find_false_words(problem: Problem, found: JudgedPlan, exact: Record) -> tuple[set[str], set[str]]:
    """Returns which properties of what a planner says of its plan were judged, and those that it breaks."""
    judged, faults = set(), set()
    if problem.mean is not None and (found.weights is not None or found.scales is not None):
        judged.add("WEIGHT")
        if not _has_weights(problem, found):
            faults.add("WEIGHT")
    if found.restored is not None:
        judged.add("RESTORE")
        if [[*own] for own in found.restored] != [sorted(_list_held([own])) for own in found.plans]:
            faults.add("RESTORE")
    if found.report:
        judged.add("REPORT")
        if not _is_reported(problem, found, exact):
            faults.add("REPORT")
    return judged, faults


def compute_least(problem: Problem) -> int:
    """Returns a count that every plan has at least. Spec: R13.10."""
    terms, least = problem.terms, 0
    bounds = {"budget": terms["budget"], **terms.get("limits", {})}
    for rank in _list_homes(problem):
        taken = [problem.measure(rank, unit) for unit in problem.list_units(rank)]
        others = [one for one in taken if all(value <= bounds[name] for name, value in one.items())]
        shares = [-(-sum(one[name] for one in others) // bound) for name, bound in bounds.items()]
        halves = [sum(2 * one[name] > bound for one in others) for name, bound in bounds.items()]
        number = len(taken) - len(others) + max(*shares, *halves)
        least = max(least, -(-number // len(problem.lengths)) if rank is None else number)
    multiple = terms.get("multiple_of", 1)
    return -(-max(least, terms.get("at_least", 1)) // multiple) * multiple


def compute_costs(problem: Problem, plans: Plans) -> list[list[int]]:
    """Returns what each micro-batch of each rank costs. Spec: R13.2."""
    cost = choose_cost(problem.terms.get("cost") or "tokens").of_tokens
    found = []
    for rank, own in enumerate(plans):
        rows = [
            [cost(tokens) for tokens in problem.list_tokens(None if problem.is_dealt else rank, batch)] for batch in own
        ]
        found.append([len(batch) * max(batch, default=0) if problem.is_padded() else sum(batch) for batch in rows])
    return found


def compute_wait_of(problem: Problem, plans: Plans) -> float:
    """Returns the wait of a plan. Spec: R13.10."""
    return compute_wait(compute_costs(problem, plans))


def _list_homes(problem: Problem) -> Sequence[int | None]:
    """Returns the ranks whose samples are their own; None stands for all of them together."""
    return [None] if problem.is_dealt else range(len(problem.lengths))


def _check_samples(problem: Problem, plans: Plans) -> set[str]:
    if len(plans) != len(problem.lengths):
        return {"HOME"}
    faults = set()
    for rank in _list_homes(problem):
        held = _list_held(plans if rank is None else [plans[rank]])
        whole = set(range(len(problem.get_lengths(rank))))
        if set(held) - whole:
            faults.add("HOME")
        if whole - set(held):
            faults.add("COVER")
        if len(held) > len(set(held)):
            faults.add("ONCE")
    return faults


def _check_counts(problem: Problem, plans: Plans) -> set[str]:
    faults, terms = set(), problem.terms
    counts = {len(own) for own in plans}
    if len(counts) > 1:
        faults.add("EQUAL")
    at_most = terms.get("at_most")
    for count in counts:
        is_between = terms.get("at_least", 1) <= count and (at_most is None or count <= at_most)
        if not problem.is_online and (count % terms.get("multiple_of", 1) or not is_between):
            faults.add("MULTIPLE")
    return faults


def _check_batches(problem: Problem, plans: Plans) -> set[str]:
    faults, terms = set(), problem.terms
    bounds = {"budget": terms["budget"], **terms.get("limits", {})}
    may_exceed = terms.get("oversize", Oversize.REFUSE) == Oversize.ALONE
    for rank, own in enumerate(plans):
        units = problem.list_units(None if problem.is_dealt else rank)
        unit_of = {index: number for number, unit in enumerate(units) for index in unit}
        for batch in own:
            inside = {unit_of[index] for index in batch}
            taken = problem.measure(None if problem.is_dealt else rank, batch)
            exceeds = any(value > bounds[name] for name, value in taken.items())
            if exceeds and not (may_exceed and len(inside) == 1):
                faults.add("BUDGET")
            if any(not set(units[number]) <= set(batch) for number in inside):
                faults.add("TOGETHER")
    if problem.has_homes():
        keys = pick(problem.together or [], None)
        homes = chain.from_iterable({keys[index] for index in _list_held([own])} for own in plans)
        if max(Counter(homes).values(), default=0) > 1:
            faults.add("TOGETHER")
    return faults


def _check_order(problem: Problem, plans: Plans) -> set[str]:
    """Returns ORDER where the order is asked for, and micro-batches are in another."""
    for costs in compute_costs(problem, plans):
        falling = sorted(costs, reverse=True)
        match problem.terms.get("order"):
            case BatchOrder.COSTLIEST_FIRST:
                wanted = falling
            case BatchOrder.SMALLEST_AT_ENDS:
                wanted = falling[::2][::-1] + falling[1::2]
            case _:
                wanted = costs
        if costs != wanted:
            return {"ORDER"}
    return set()


def _check_empty(problem: Problem, plans: Plans) -> set[str]:
    """Returns NONEMPTY where a rank is idle although it has units enough; where samples are dealt out, all ranks together."""
    groups = [[*plans]] if problem.is_dealt and not problem.has_homes() else [[own] for own in plans]
    for rank, group in enumerate(groups):
        held = set(_list_held(group))
        units = problem.list_units(None if problem.is_dealt else rank)
        number = sum(bool(held & set(unit)) for unit in units)
        batches = [batch for own in group for batch in own]
        if sum(map(bool, batches)) < min(len(batches), number):
            return {"NONEMPTY"}
    return set()


def compute_weights(problem: Problem) -> list[list[Fraction]]:
    """Returns what each supervised token of each sample weighs, by rank, or all in one where they are dealt out.

    Spec: R13.9.
    """
    homes = _list_homes(problem)
    supervised = [pick(problem.supervised or problem.lengths, rank) for rank in homes]
    alone = [[(rank, index) for index in range(len(own))] for rank, own in zip(homes, supervised, strict=True)]
    keys: list[list[tuple[int | None, int]]] = alone
    if problem.together is not None:
        is_shared = problem.terms.get("within") == Within.STEP
        keys = [[(None if is_shared else rank, key) for key in pick(problem.together, rank)] for rank in homes]
    sums: Counter[tuple[int | None, int]] = Counter()
    for group, tokens in zip(chain.from_iterable(keys), chain.from_iterable(supervised), strict=True):
        sums[group] += tokens
    sequences = sum(tokens > 0 for tokens in chain.from_iterable(supervised))
    groups = sum(tokens > 0 for tokens in sums.values())

    def weigh(tokens: int, key: tuple[int | None, int]) -> Fraction:
        match problem.mean:
            case _ if not tokens:
                return Fraction(0)
            case Mean.TOKEN:
                return Fraction(1, sums.total())
            case Mean.SEQUENCE:
                return Fraction(1, sequences)
            case Mean.SEQUENCE_TOKEN:
                return Fraction(1, sequences * tokens)
            case _:
                return Fraction(1, groups * sums[key])

    return [[*map(weigh, own, group)] for own, group in zip(supervised, keys, strict=True)]


def _has_weights(problem: Problem, found: JudgedPlan) -> bool:
    wanted, ranks = compute_weights(problem), len(problem.lengths)
    for rank, own in enumerate(found.plans):
        weights = wanted[0 if problem.is_dealt else rank]
        tokens = pick(problem.supervised or problem.lengths, None if problem.is_dealt else rank)
        for place, batch in enumerate(own):
            expected = [weights[index] for index in batch]
            if found.weights is not None:
                said = found.weights[rank][place]
                if len(said) != len(batch) or not all(map(_is_near, said, expected)):
                    return False
            if found.scales is not None:
                share = sum((weights[index] * tokens[index] for index in batch), Fraction(0))
                if not _is_near(found.scales[rank][place], share * ranks):
                    return False
    return True


def _is_near(said: Weight, expected: Fraction) -> bool:
    if isinstance(said, Fraction):
        return said == expected
    return math.isclose(said, float(expected), rel_tol=_NEAR, abs_tol=_NEAR**2)


def _is_reported(problem: Problem, found: JudgedPlan, exact: Record) -> bool:
    report = found.report
    wait = compute_wait_of(problem, found.plans)
    count = len(found.plans[0])
    best, least_wait = exact.get("count", count), exact.get("wait", wait)
    tokens = sum(map(sum, problem.lengths))
    fill = tokens / (problem.terms["budget"] * max(1, count) * len(found.plans))
    return all(
        (
            report.get("count", count) == count,
            isinstance(best, int) and report.get("least", 0) <= best,
            math.isclose(report.get("wait", wait), wait, rel_tol=_NEAR),
            isinstance(least_wait, float | int) and report.get("least_wait", 0) <= least_wait + _NEAR,
            math.isclose(report.get("fill", fill), fill, rel_tol=_NEAR),
        )
    )


def _list_held(plans: Iterable[Sequence[Sequence[int]]]) -> list[int]:
    return [index for own in plans for batch in own for index in batch]
