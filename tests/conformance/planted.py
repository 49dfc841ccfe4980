"""Planners with one defect each, made of ours: what a judge must find, and nothing else."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from odb_ref.conformance.judge import Problem, find_faults
from odb_ref.conformance.planners import Exchange, plan_here, plan_there
from odb_ref.plan import plan_rank

Batches = list[list[list[int]]]


def thaw(plans: Any) -> Batches:
    return [[[*batch] for batch in own] for own in plans]


def change(problem: Problem, **columns: Any) -> Problem:
    """The problem with other columns or terms."""
    terms = {**problem.terms, **columns.pop("terms", {})}
    fields = {name: getattr(problem, name) for name in Problem.__slots__} | columns
    return Problem(**fields | {"terms": terms})


def take_first(problem: Problem, plan: Batches, tries: Callable[[Batches], list[Batches]], wanted: str) -> Batches:
    """The first of the plans tried that breaks what is wanted, and that only; the plan as it is where none does."""
    for other in tries(plan):
        if find_faults(problem, other) == {wanted}:
            return other
    return plan


def exceed_the_budget(problem: Problem) -> Batches:
    plan_here(problem)
    return thaw(plan_here(change(problem, terms={"budget": problem.terms["budget"] + 1})))


def list_without_one(plan: Batches) -> list[Batches]:
    found = []
    for rank, own in enumerate(plan):
        for place, batch in enumerate(own):
            other = thaw(plan)
            other[rank][place] = batch[:-1]
            found.append(other)
    return found


def drop_a_sample(problem: Problem) -> Batches:
    return take_first(problem, thaw(plan_here(problem)), list_without_one, "COVER")


def list_with_one_twice(plan: Batches) -> list[Batches]:
    found = []
    for rank, own in enumerate(plan):
        for index in [index for batch in own for index in batch]:
            for place in range(len(own)):
                other = thaw(plan)
                other[rank][place].append(index)
                found.append(other)
    return found


def repeat_a_sample(problem: Problem) -> Batches:
    return take_first(problem, thaw(plan_here(problem)), list_with_one_twice, "ONCE")


def take_anothers(problem: Problem) -> Batches:
    """A rank has a sample that it does not hold."""

    def list_with_foreign(plan: Batches) -> list[Batches]:
        other = thaw(plan)
        other[0][0].append(sum(map(len, problem.lengths)))
        return [other]

    return take_first(problem, thaw(plan_here(problem)), list_with_foreign, "HOME")


def forget_to_synchronise(problem: Problem) -> Batches:
    """One rank has a micro-batch more, an empty one."""

    def list_longer(plan: Batches) -> list[Batches]:
        found = []
        for rank in range(len(plan)):
            other = thaw(plan)
            other[rank].append([])
            found.append(other)
        return found

    return take_first(problem, thaw(plan_here(problem)), list_longer, "EQUAL")


def forget_the_multiple(problem: Problem) -> Batches:
    plan_here(problem)
    return thaw(plan_here(change(problem, terms={"multiple_of": 1, "at_least": 1})))


def list_merged(plan: Batches) -> list[Batches]:
    found = []
    for rank, own in enumerate(plan):
        for first in range(len(own)):
            for second in range(first):
                if own[first] and own[second]:
                    other = thaw(plan)
                    other[rank][second] += other[rank][first]
                    other[rank][first] = []
                    found.append(other)
    return found


def leave_one_empty(problem: Problem) -> Batches:
    return take_first(problem, thaw(plan_here(problem)), list_merged, "NONEMPTY")


def part_what_belongs_together(problem: Problem) -> Batches:
    plan = thaw(plan_here(problem))
    if problem.together is None:
        return plan
    return take_first(problem, plan, lambda _: [thaw(plan_here(change(problem, together=None)))], "TOGETHER")


def order_by_hash(problem: Problem) -> Batches:
    plan = thaw(plan_here(problem))
    for own in plan:
        own.sort(key=lambda batch: (not batch, hash(str(batch))))
    return plan


def refuse_who_is_short(problem: Problem) -> Batches:
    plan = thaw(plan_here(problem))
    if any(not batch for own in plan for batch in own):
        raise ValueError("too few samples")
    return plan


IN_ONE_PLACE = {
    "BUDGET": exceed_the_budget,
    "COVER": drop_a_sample,
    "ONCE": repeat_a_sample,
    "HOME": take_anothers,
    "EQUAL": forget_to_synchronise,
    "MULTIPLE": forget_the_multiple,
    "NONEMPTY": leave_one_empty,
    "TOGETHER": part_what_belongs_together,
    "DETERMINISM": order_by_hash,
    "EXPECT": refuse_who_is_short,
}


def raise_before_the_exchange(problem: Problem, rank: int, exchange: Exchange) -> Sequence[Sequence[int]]:
    if max(problem.lengths[rank], default=0) > problem.terms["budget"] and problem.terms.get("oversize") != "alone":
        raise ValueError("too long")
    return plan_there(problem, rank, exchange)


def refuse_alone(problem: Problem, rank: int, exchange: Exchange) -> Sequence[Sequence[int]]:
    """The exchange takes place, but only the rank that has the long sample refuses."""
    try:
        return plan_there(problem, rank, exchange)
    except ValueError as error:
        if ": sample" in str(error) and f"rank {rank}:" not in str(error):
            return []
        raise


def count_alone(problem: Problem, rank: int, exchange: Exchange) -> Sequence[Sequence[int]]:
    """All agree, and then each goes by its own count."""
    agreed = plan_there(problem, rank, exchange)
    alone = plan_rank(
        problem.lengths[rank],
        together=None if problem.together is None else problem.together[rank],
        uses={name: column[rank] for name, column in problem.uses.items()},
        **{**problem.terms, "short": "idle"},
    ).micro_batches
    return alone if len(alone) < len(agreed) else agreed


ON_RANKS = {"TERMINATION": raise_before_the_exchange, "AGREE": refuse_alone, "EQUAL": count_alone}
