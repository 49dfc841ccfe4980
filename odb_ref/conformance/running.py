"""Putting all cases to a planner, and the verdicts: kept, broken, or not claimed. Spec: R13."""

from __future__ import annotations

import html
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from xml.sax import saxutils

from odb_ref.conformance.judge import RULES, compute_least, find_faults
from odb_ref.conformance.planners import Answer, Ask
from odb_ref.conformance.vectors import Case
from odb_ref.core.batching.cost import choose_cost
from odb_ref.plan.quality import compute_wait


@dataclass(frozen=True, slots=True, kw_only=True)
class CaseVerdict:
    """What became of a case."""

    case: Case
    faults: tuple[str, ...] = ()
    """The properties that the planner broke."""
    says: str = ""
    is_claimed: bool = True
    """False where the planner does not know a term of the case: then it was not asked."""
    excess: float | None = None
    """Its count over the least that any plan has."""
    wait: float | None = None
    """What its steps cost over the mean rank's sum."""

    @property
    def is_broken(self) -> bool:
        """True when a property was broken."""
        return bool(self.faults)


def run_cases(
    cases: Iterable[Case], ask: Ask, ask_elsewhere: Sequence[Ask] = (), unclaimed: frozenset[str] = frozenset()
) -> list[CaseVerdict]:
    """Returns the verdict of each case. ``ask_elsewhere`` asks the same planner in processes with other hash seeds."""
    return [
        CaseVerdict(case=case, is_claimed=False) if case.terms & unclaimed else judge(case, ask, ask_elsewhere)
        for case in cases
    ]


def judge(case: Case, ask: Ask, ask_elsewhere: Sequence[Ask] = ()) -> CaseVerdict:
    """Returns the verdict of a case that the planner claims."""
    answer = ask(case.problem)
    faults = set()
    if answer.is_stuck:
        faults.add("TERMINATION")
    if answer.is_divided:
        faults.add("AGREE")
    if case.expect != "either" and answer.is_plan != (case.expect == "plan"):
        faults.add("EXPECT")
    if not answer.is_plan:
        return CaseVerdict(case=case, faults=tuple(sorted(faults)), says="; ".join(dict.fromkeys(answer.refusals)))
    faults |= find_faults(case.problem, answer.plans)
    again = [other(case.problem) for other in (ask, *ask_elsewhere)]
    if any(_freeze(other) != _freeze(answer) for other in again):
        faults.add("DETERMINISM")
    excess, wait = (
        (None, None)
        if faults
        else (
            len(answer.plans[0]) / compute_least(case.problem),
            _compute_wait(case, answer),
        )
    )
    return CaseVerdict(case=case, faults=tuple(sorted(faults)), excess=excess, wait=wait)


def _freeze(answer: Answer) -> list[list[list[int]]]:
    return [[[*batch] for batch in own] for own in answer.plans]


def _compute_wait(case: Case, answer: Answer) -> float:
    problem = case.problem
    cost = choose_cost(problem.terms.get("cost") or "tokens").of_tokens
    is_padded = problem.terms.get("layout") == "padded"
    costs = []
    for rank, own in enumerate(answer.plans):
        lengths = problem.get_lengths(None if problem.is_dealt else rank)
        batches = [[cost(lengths[index]) for index in batch] for batch in own]
        costs.append([len(batch) * max(batch, default=0) if is_padded else sum(batch) for batch in batches])
    return compute_wait(costs)


def describe(verdicts: Sequence[CaseVerdict]) -> str:
    """Returns what a person reads: the cases that were broken, then a line for each property."""
    lines = [
        f"{verdict.case.id}: {', '.join(verdict.faults)}: {verdict.case.comment} {verdict.says}".rstrip()
        for verdict in verdicts
        if verdict.is_broken
    ]
    asked = [verdict for verdict in verdicts if verdict.is_claimed]
    for name, rule in RULES.items():
        broken = sum(name in verdict.faults for verdict in asked)
        lines.append(f"{name:12} {f'broken in {broken}' if broken else 'kept':14} {rule}")
    kept = [verdict for verdict in asked if verdict.excess is not None]
    if kept:
        excess = sum(verdict.excess or 0 for verdict in kept) / len(kept)
        wait = sum(verdict.wait or 0 for verdict in kept) / len(kept)
        lines.append(f"count over the least {excess:.3f}, wait {wait:.3f}, both at best 1, over {len(kept)} plans")
    broken = sum(verdict.is_broken for verdict in asked)
    lines.append(f"{len(asked) - broken} of {len(asked)} cases right, {len(verdicts) - len(asked)} not claimed")
    return "\n".join(lines)


def write_junit(verdicts: Sequence[CaseVerdict]) -> str:
    """Returns the verdicts as JUnit has them."""

    def render(verdict: CaseVerdict) -> str:
        name = saxutils.quoteattr(verdict.case.id)
        text = saxutils.escape(f"{', '.join(verdict.faults)}: {verdict.case.comment} {verdict.says}".strip())
        if not verdict.is_claimed:
            return f"<testcase name={name}><skipped/></testcase>"
        if verdict.is_broken:
            return f"<testcase name={name}><failure>{text}</failure></testcase>"
        return f"<testcase name={name}/>"

    broken = sum(verdict.is_broken for verdict in verdicts)
    body = "\n".join(map(render, verdicts))
    return f'<testsuite name="odb-ref conformance" tests="{len(verdicts)}" failures="{broken}">\n{body}\n</testsuite>\n'


def write_html(verdicts: Sequence[CaseVerdict], title: str) -> str:
    """Returns the verdicts as a page: red what was broken, grey what is not claimed."""
    colours: Callable[[CaseVerdict], str] = lambda verdict: (  # noqa: E731
        "#ddd" if not verdict.is_claimed else "#fbb" if verdict.is_broken else "#bfb"
    )
    rows = "\n".join(
        f'<tr style="background:{colours(verdict)}"><td>{html.escape(verdict.case.id)}</td>'
        f"<td>{', '.join(verdict.faults)}</td><td>{html.escape(verdict.case.comment)}</td>"
        f"<td>{html.escape(verdict.says)}</td></tr>"
        for verdict in verdicts
    )
    head = f"<!doctype html><meta charset=utf-8><title>{html.escape(title)}</title><h1>{html.escape(title)}</h1>"
    return f"{head}\n<table>\n<tr><th>case<th>broken<th>what it asks<th>what was said\n{rows}\n</table>\n"
