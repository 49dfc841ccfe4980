"""Problems with all terms, for the judge of the conformance kit."""

from __future__ import annotations

from typing import Any, cast

from hypothesis import strategies as st

from odb_ref.conformance.judge import find_faults
from odb_ref.conformance.vectors import Problem, pick
from odb_ref.plan import Options, Plan, plan_all, plan_ranks

__all__ = ["BUDGET", "Problem", "compute_cost", "find_faults", "get_columns", "make_plan", "problems"]


def get_columns(problem: Problem, rank: int | None = None) -> dict[str, Any]:
    """Returns the arguments of one rank, or with None of all samples together."""
    return {
        "lengths": pick(problem.lengths, rank),
        "supervised": None if problem.supervised is None else pick(problem.supervised, rank),
        "together": None if problem.together is None else pick(problem.together, rank),
        "uses": {name: pick(column, rank) for name, column in problem.uses.items()},
    }


def make_plan(problem: Problem) -> Plan:
    if problem.is_dealt:
        return plan_all(**get_columns(problem), ranks=len(problem.lengths), **problem.terms)
    return plan_ranks(
        problem.lengths, supervised=problem.supervised, together=problem.together, uses=problem.uses, **problem.terms
    )


def compute_cost(tokens: int) -> int:
    """Returns a cost of attention and the rest, at the scale of the problems below."""
    return tokens + tokens**2 // 16


BUDGET = 60


@st.composite
def problems(draw: st.DrawFn, *, is_dealt: bool | None = None) -> Problem:
    """Draws problems with all terms, most of which can be planned."""
    ranks = draw(st.integers(1, 5))
    top = draw(st.sampled_from([7, 20, BUDGET]))
    lengths = [draw(st.lists(st.integers(1, top), max_size=24)) for _ in range(ranks)]
    terms: dict[str, Any] = {
        "budget": BUDGET,
        "layout": draw(st.sampled_from(["packed", "padded"])),
        "multiple_of": draw(st.integers(1, 4)),
        "at_least": draw(st.integers(1, 6)),
        "order": draw(st.sampled_from(["costliest_first", "smallest_at_ends"])),
        "short": draw(st.sampled_from(["idle", "empty"])),
    }
    if draw(st.booleans()):
        terms["cost"] = compute_cost
    if draw(st.booleans()):
        terms["pad_to"] = draw(st.sampled_from([2, 4]))
    if draw(st.booleans()):
        terms["oversize"] = "alone"
        lengths[0] += draw(st.lists(st.integers(1, 3 * BUDGET), max_size=3))
    is_dealt = draw(st.booleans()) if is_dealt is None else is_dealt
    problem = Problem(lengths=lengths, is_dealt=is_dealt, terms=cast(Options, terms))
    if draw(st.booleans()):
        terms["limits"] = {"samples": draw(st.integers(1, 6))}
        if draw(st.booleans()):
            terms["limits"]["patches"] = 10
            problem.uses["patches"] = [
                draw(st.lists(st.integers(0, 10), min_size=n, max_size=n)) for n in map(len, lengths)
            ]
    if draw(st.booleans()):
        terms["within"] = draw(st.sampled_from(["micro-batch", "rank", "step"]))
        problem.together = [draw(st.lists(st.integers(0, 9), min_size=n, max_size=n)) for n in map(len, lengths)]
    if draw(st.booleans()):
        problem.supervised = [[draw(st.integers(0, length)) for length in own] for own in lengths]
    return problem
