"""What is wrong with a plan, by the property it breaks: from R13's words, not from any planner's code. Spec: R13."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Final, TypeAlias

from odb_ref.core.batching.layouts import Layout
from odb_ref.plan.terms import SAMPLES, Options, Oversize, Within

Plans: TypeAlias = Sequence[Sequence[Sequence[int]]]
"""For each rank and micro-batch the indices: of the rank's samples, or of all where they are dealt out."""

RULES: Final = {
    "COVER": "R13.1: every sample is in a micro-batch",
    "ONCE": "R13.1: no sample is in two",
    "HOME": "R13.1: of a rank that may have it",
    "EQUAL": "R13.1: every rank has as many micro-batches",
    "BUDGET": "R13.2: each within the budget and all limits; R13.3: but a unit that travels alone",
    "MULTIPLE": "R13.4: as many as multiple_of, at_least and at_most say",
    "NONEMPTY": "R13.4: none is empty while its rank has units for it",
    "TOGETHER": "R13.7: samples of one key are where `within` says",
    "DETERMINISM": "R13.1: the same again, and in another process with another hash seed",
    "AGREE": "R13.11: all ranks plan, or all refuse",
    "TERMINATION": "R13.11: no rank is left in the exchange",
    "EXPECT": "the case says whether there is a plan",
}
"""What a planner is judged by, and where it stands."""


@dataclass(slots=True, kw_only=True)
class Problem:
    """What is to be planned: columns by rank. Where samples are dealt out, indices go on from rank to rank."""

    lengths: list[list[int]]
    is_dealt: bool = False
    supervised: list[list[int]] | None = None
    together: list[list[int]] | None = None
    uses: dict[str, list[list[int]]] = field(default_factory=dict)
    terms: Options

    def get_lengths(self, rank: int | None) -> list[int]:
        """Returns the lengths of a rank's samples; with None of all."""
        return pick(self.lengths, rank)

    def measure(self, rank: int | None, batch: Sequence[int]) -> dict[str, int]:
        """Returns what a micro-batch takes of all that is bounded, by name. Spec: R13.2."""
        lengths, whole = self.get_lengths(rank), self.terms.get("pad_to", 1)
        rows = [-(-lengths[index] // whole) * whole for index in batch]
        is_padded = self.terms.get("layout", Layout.PACKED) == Layout.PADDED
        found = {"budget": len(rows) * max(rows, default=0) if is_padded else sum(rows)}
        for name in self.terms.get("limits", {}):
            if name in self.uses:
                found[name] = sum(pick(self.uses[name], rank)[index] for index in batch)
            elif name == SAMPLES:
                found[name] = len(rows)
        return found

    def list_units(self, rank: int | None) -> list[list[int]]:
        """Returns the indices that share a micro-batch. Spec: R13.7."""
        number = len(self.get_lengths(rank))
        if self.together is None or self.terms.get("within", Within.MICRO_BATCH) != Within.MICRO_BATCH:
            return [[index] for index in range(number)]
        found: dict[int, list[int]] = {}
        for index, key in enumerate(pick(self.together, rank)):
            found.setdefault(key, []).append(index)
        return [*found.values()]


def pick(column: Sequence[Sequence[int]], rank: int | None) -> list[int]:
    """Returns the part of one rank, or with None all of it."""
    return [*chain.from_iterable(column)] if rank is None else [*column[rank]]


def find_faults(problem: Problem, plans: Plans) -> set[str]:
    """Returns the properties that a plan breaks."""
    faults = _check_samples(problem, plans)
    if "HOME" in faults:
        return faults
    return faults | _check_counts(problem, plans) | _check_batches(problem, plans) | _check_empty(problem, plans)


def compute_least(problem: Problem) -> int:
    """Returns a count that every plan has at least. Spec: R13.10."""
    terms, least = problem.terms, 0
    bounds = {"budget": terms["budget"], **terms.get("limits", {})}
    for rank in [None] if problem.is_dealt else range(len(problem.lengths)):
        taken = [problem.measure(rank, unit) for unit in problem.list_units(rank)]
        others = [one for one in taken if all(value <= bounds[name] for name, value in one.items())]
        shares = [-(-sum(one[name] for one in others) // bound) for name, bound in bounds.items()]
        halves = [sum(2 * one[name] > bound for one in others) for name, bound in bounds.items()]
        number = len(taken) - len(others) + max(*shares, *halves)
        least = max(least, -(-number // len(problem.lengths)) if rank is None else number)
    multiple = terms.get("multiple_of", 1)
    return -(-max(least, terms.get("at_least", 1)) // multiple) * multiple


def _check_samples(problem: Problem, plans: Plans) -> set[str]:
    if len(plans) != len(problem.lengths):
        return {"HOME"}
    faults = set()
    for rank in [None] if problem.is_dealt else range(len(plans)):
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
        if count % terms.get("multiple_of", 1) or not is_between:
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
    if problem.is_dealt and problem.together is not None and terms.get("within") == Within.RANK:
        keys = pick(problem.together, None)
        homes = chain.from_iterable({keys[index] for index in _list_held([own])} for own in plans)
        if max(Counter(homes).values(), default=0) > 1:
            faults.add("TOGETHER")
    return faults


def _check_empty(problem: Problem, plans: Plans) -> set[str]:
    """Returns NONEMPTY where a rank is idle although it has units enough; where samples are dealt out, all ranks together."""
    groups = [[own] for own in plans]
    if problem.is_dealt and not (problem.together is not None and problem.terms.get("within") == Within.RANK):
        groups = [[*plans]]
    for rank, group in enumerate(groups):
        held = set(_list_held(group))
        units = problem.list_units(None if problem.is_dealt else rank)
        number = sum(bool(held & set(unit)) for unit in units)
        batches = [batch for own in group for batch in own]
        if sum(map(bool, batches)) < min(len(batches), number):
            return {"NONEMPTY"}
    return set()


def _list_held(plans: Iterable[Sequence[Sequence[int]]]) -> list[int]:
    return [index for own in plans for batch in own for index in batch]
