"""Finds the properties that a plan breaks, following the text of the rules, not any planner's code. Spec: R13."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from fractions import Fraction
from itertools import chain
from typing import Final, TypeAlias

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
"""The properties an implementation is judged by, each with its rule."""

Faults: TypeAlias = dict[str, str]
"""The first thing wrong for each property broken, in words."""

_NEAR: Final = 1e-9
"""The relative error allowed between a float and the value it stands for."""


def find_faults(problem: Problem, plans: Plans) -> Faults:
    """Returns the properties that a plan breaks."""
    if len(plans) != len(problem.lengths):
        return {"ANSWER": f"ranks in the plan: {len(plans)}, not {len(problem.lengths)}"}
    faults = _check_samples(problem, plans)
    if "HOME" in faults:
        return faults
    faults |= _check_counts(problem, plans) | _check_batches(problem, plans) | _check_order(problem, plans)
    return faults if problem.is_online else faults | _check_empty(problem, plans)


def find_false_words(problem: Problem, found: JudgedPlan, exact: Record) -> Faults:
    """Returns, for each property judged in a planner's statements about its plan, what is wrong, or ""."""
    said = {}
    if problem.mean is not None and (found.weights is not None or found.scales is not None):
        said["WEIGHT"] = _find_false_weight(problem, found)
    if found.restored is not None:
        wanted = [sorted(_list_held([own])) for own in found.plans]
        said["RESTORE"] = "" if found.restored == wanted else f"{found.restored!r:.60}, not {wanted!r:.60}"
    if found.report:
        said["REPORT"] = _find_false_report(problem, found, exact)
    return said


def compute_least(problem: Problem) -> int:
    """Returns a lower bound of the count of any plan. Spec: R13.10."""
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
    """Returns the cost of each micro-batch of each rank. Spec: R13.2."""
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
    """Returns the ranks with their own samples, or None alone if all ranks share them."""
    return [None] if problem.is_dealt else range(len(problem.lengths))


def _check_samples(problem: Problem, plans: Plans) -> Faults:
    faults: Faults = {}
    for home in _list_homes(problem):
        places: dict[int, list[str]] = {}
        for rank, own in enumerate(plans):
            for place, batch in enumerate(own if home in (None, rank) else []):
                for index in batch:
                    places.setdefault(index, []).append(_name(rank, place))
        whose = "" if home is None else f" of rank {home}"
        number = len(problem.get_lengths(home))
        for index, held in places.items():
            if not 0 <= index < number:
                faults.setdefault("HOME", f"{held[0]}: there is no sample {index}{whose}, which has {number}")
            elif len(held) > 1:
                faults.setdefault("ONCE", f"sample {index}{whose} is in {' and in '.join(held)}")
        for index in range(number):
            if index not in places:
                faults.setdefault("COVER", f"sample {index}{whose} is in no micro-batch")
    return faults


def _name(rank: int, place: int) -> str:
    return f"rank {rank}, micro-batch {place}"


def _check_counts(problem: Problem, plans: Plans) -> Faults:
    faults: Faults = {}
    terms = problem.terms
    counts = [len(own) for own in plans]
    for rank, count in enumerate(counts):
        if count != counts[0]:
            faults.setdefault("EQUAL", f"rank 0 has {counts[0]} micro-batches, rank {rank} has {count}")
    at_most = terms.get("at_most")
    for count in counts:
        is_between = terms.get("at_least", 1) <= count and (at_most is None or count <= at_most)
        if not problem.is_online and (count % terms.get("multiple_of", 1) or not is_between):
            faults.setdefault("MULTIPLE", f"{count} micro-batches")
    return faults


def _check_batches(problem: Problem, plans: Plans) -> Faults:
    faults: Faults = {}
    terms = problem.terms
    bounds = {"budget": terms["budget"], **terms.get("limits", {})}
    may_exceed = terms.get("oversize", Oversize.REFUSE) == Oversize.ALONE
    for rank, own in enumerate(plans):
        units = problem.list_units(None if problem.is_dealt else rank)
        unit_of = {index: number for number, unit in enumerate(units) for index in unit}
        for place, batch in enumerate(own):
            inside = {unit_of[index] for index in batch}
            taken = problem.measure(None if problem.is_dealt else rank, batch)
            for name, value in taken.items():
                if value > bounds[name] and not (may_exceed and len(inside) == 1):
                    what = "tokens" if name == "budget" else name
                    faults.setdefault("BUDGET", f"{_name(rank, place)}: {value} of {bounds[name]} {what}")
            for number in sorted(inside):
                if not set(units[number]) <= set(batch):
                    faults.setdefault("TOGETHER", f"{_name(rank, place)}: not all of samples {units[number]!r:.60}")
    if problem.has_homes():
        keys = pick(problem.together or [], None)
        homes = chain.from_iterable({keys[index] for index in _list_held([own])} for own in plans)
        for key, number in Counter(homes).items():
            if number > 1:
                faults.setdefault("TOGETHER", f"samples of the key {key} are on {number} ranks")
    return faults


def _check_order(problem: Problem, plans: Plans) -> Faults:
    """Returns ORDER if an order is requested and micro-batches are in another."""
    for rank, costs in enumerate(compute_costs(problem, plans)):
        falling = sorted(costs, reverse=True)
        match problem.terms.get("order"):
            case BatchOrder.COSTLIEST_FIRST:
                wanted = falling
            case BatchOrder.SMALLEST_AT_ENDS:
                wanted = falling[::2][::-1] + falling[1::2]
            case _:
                wanted = costs
        if costs != wanted:
            return {"ORDER": f"rank {rank}: micro-batches that cost {costs!r:.60}, not {wanted!r:.60}"}
    return {}


def _check_empty(problem: Problem, plans: Plans) -> Faults:
    """Returns NONEMPTY if a rank is idle although it has enough units. If samples are dealt out, all ranks count as one."""
    groups = [[*plans]] if problem.is_dealt and not problem.has_homes() else [[own] for own in plans]
    for rank, group in enumerate(groups):
        held = set(_list_held(group))
        units = problem.list_units(None if problem.is_dealt else rank)
        number = sum(bool(held & set(unit)) for unit in units)
        batches = [batch for own in group for batch in own]
        if sum(map(bool, batches)) < min(len(batches), number):
            who = f"rank {rank}" if len(groups) > 1 else "all ranks"
            return {
                "NONEMPTY": f"{who}: {batches.count([])} of {len(batches)} micro-batches are empty, of {number} units"
            }
    return {}


def compute_weights(problem: Problem) -> list[list[Fraction]]:
    """Returns the weight of each supervised token of each sample, by rank, or in one list if samples are dealt out.

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


def _find_false_weight(problem: Problem, found: JudgedPlan) -> str:
    wanted, ranks = compute_weights(problem), len(problem.lengths)
    for rank, own in enumerate(found.plans):
        weights = wanted[0 if problem.is_dealt else rank]
        tokens = pick(problem.supervised or problem.lengths, None if problem.is_dealt else rank)
        for place, batch in enumerate(own):
            expected = [weights[index] for index in batch]
            if found.weights is not None:
                said = found.weights[rank][place]
                if len(said) != len(batch) or not all(map(_is_near, said, expected)):
                    return f"{_name(rank, place)}: weights {_write(said)}, not {_write(expected)}"
            if found.scales is not None:
                share = sum((weights[index] * tokens[index] for index in batch), Fraction(0))
                if not _is_near(found.scales[rank][place], share * ranks):
                    return f"{_name(rank, place)}: scale {found.scales[rank][place]}, not {share * ranks}"
    return ""


def _write(weights: Sequence[Weight]) -> str:
    return f"{', '.join(map(str, weights)):.60}"


def _is_near(said: Weight, expected: Fraction) -> bool:
    if isinstance(said, Fraction):
        return said == expected
    return math.isclose(said, float(expected), rel_tol=_NEAR, abs_tol=_NEAR**2)


def _find_false_report(problem: Problem, found: JudgedPlan, exact: Record) -> str:
    report = found.report
    wait = compute_wait_of(problem, found.plans)
    count = len(found.plans[0])
    best, least_wait = exact.get("count", count), exact.get("wait", wait)
    tokens = sum(map(sum, problem.lengths))
    fill = tokens / (problem.terms["budget"] * max(1, count) * len(found.plans))
    is_so = {
        "count": (count, report.get("count", count) == count),
        "least": (best, isinstance(best, int) and report.get("least", 0) <= best),
        "wait": (wait, math.isclose(report.get("wait", wait), wait, rel_tol=_NEAR)),
        "least_wait": (
            least_wait,
            isinstance(least_wait, float | int) and report.get("least_wait", 0) <= least_wait + _NEAR,
        ),
        "fill": (fill, math.isclose(report.get("fill", fill), fill, rel_tol=_NEAR)),
    }
    return ", ".join(f"{name} {report.get(name)}, not {value}" for name, (value, so) in is_so.items() if not so)


def _list_held(plans: Iterable[Sequence[Sequence[int]]]) -> list[int]:
    return [index for own in plans for batch in own for index in batch]
