"""Puts all cases to an implementation and makes the verdicts: kept, broken, or not asked. Spec: R13."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest

from odb_ref.conformance.answers import Answer, AnswerError, read_plan
from odb_ref.conformance.asking import Ask
from odb_ref.conformance.judge import Faults, compute_least, compute_wait_of, find_false_words, find_faults
from odb_ref.conformance.vectors import PLANNED, Case, Json, encode
from odb_ref.plan.terms import Oversize

_OF_PLANS = frozenset({"COVER", "ONCE", "HOME", "EQUAL", "BUDGET"})
_OF_KNOWN_LENGTHS = frozenset({"MULTIPLE", "NONEMPTY", "TOGETHER"})
FAILING = "failing"
"""Left unclaimed by a planner that does not refuse a sample that is too long."""
_IS_NOT_THE_BEST = "not-the-best"
"""Flags a case in which the plan by the rules is not the best one, which is known."""
NOT_ASKED = "not asked: too many answers did not come in time"
"""The verdict on the remaining cases."""
_PATIENCE = 3
"""The number of answers that may come too late before no more cases are asked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CaseVerdict:
    """The verdict on one case."""

    case: Case
    judged: frozenset[str] = frozenset()
    """The properties judged; empty if the case was not asked, or its verdict shows nothing."""
    faults: tuple[str, ...] = ()
    """The properties broken."""
    says: str = ""
    """What was wrong, or what the planner said."""
    answer: Json = None
    """The planner's answer, or its refusal."""
    excess: float | None = None
    """The plan's count divided by the least one known to suffice, or else by a lower bound of all plans."""
    wait: float | None = None
    """The plan's wait divided by the least one known, or else by 1."""

    @property
    def is_broken(self) -> bool:
        """True when a property was broken."""
        return bool(self.faults)

    @property
    def is_asked(self) -> bool:
        """True when the case was judged."""
        return bool(self.judged)


@dataclass(frozen=True, slots=True, kw_only=True)
class Judging:
    """How to ask and judge an implementation."""

    ask: Ask
    elsewhere: Sequence[Ask] = ()
    """The same implementation in other processes, with other hash seeds."""
    unclaimed: frozenset[str] = frozenset()
    """The kinds, terms and cases that the implementation does not claim, and perhaps `FAILING`."""
    has_ranks: bool = False
    """True when ranks plan alone and exchange messages."""
    is_exact: bool = False
    """True when an answer must equal the model's, if that is known."""


def run_cases(cases: Iterable[Case], judging: Judging) -> list[CaseVerdict]:
    """Returns the verdict on each case. With ranks, a case to plan is also asked once for each of the
    first four ranks, with that rank failing, unless `FAILING` is unclaimed.
    """
    verdicts = []
    late = 0
    for case in cases:
        if (case.terms | {case.id}) & judging.unclaimed or not _can_be_asked(case, judging):
            verdicts.append(CaseVerdict(case=case))
            continue
        for asked in [case, *_list_failing(case)] if judging.has_ranks and FAILING not in judging.unclaimed else [case]:
            if late >= _PATIENCE:
                verdicts.append(CaseVerdict(case=asked, says=NOT_ASKED))
                continue
            verdicts.append(judge(asked, judging))
            late += "in time" in verdicts[-1].says or "no answer in" in verdicts[-1].says
    return _doubt_who_always_refuses(verdicts)


def _can_be_asked(case: Case, judging: Judging) -> bool:
    if judging.has_ranks:
        return case.kind == "plan_ranks"
    return case.kind not in PLANNED or case.problem.changes is None


def _list_failing(case: Case) -> list[Case]:
    """Returns variants of the case in which one rank (of the first four) has a sample that is too long. Spec: R13.11."""
    problem = case.problem
    if case.expect != "plan" or problem.terms.get("oversize") == Oversize.ALONE or len(problem.lengths) < 2:
        return []
    found = []
    for culprit in range(min(len(problem.lengths), 4)):
        lengths = [
            [*own, problem.terms["budget"] + 1] if rank == culprit else own for rank, own in enumerate(problem.lengths)
        ]
        failing = replace(
            problem,
            lengths=lengths,
            supervised=problem.supervised and _extend(problem.supervised, culprit, 0),
            together=problem.together and _extend(problem.together, culprit, -1),
            uses={name: _extend(column, culprit, 0) for name, column in problem.uses.items()},
        )
        record = {name: value for name, value in encode(failing).items() if name != "kind"}
        comment = f"{case.comment} Here rank {culprit} has a sample that is too long."
        found.append(
            replace(case, id=f"{case.id}-failing-{culprit}", comment=comment, record=record, expect="refuse", exact={})
        )
    return found


def _extend(column: list[list[int]], culprit: int, value: int) -> list[list[int]]:
    return [[*own, value] if rank == culprit else own for rank, own in enumerate(column)]


def _doubt_who_always_refuses(verdicts: Sequence[CaseVerdict]) -> list[CaseVerdict]:
    """Returns the verdicts. A right refusal counts as not judged if the planner also fails the twin, which it should plan."""
    broken = {verdict.case.id for verdict in verdicts if "EXPECT" in verdict.faults or "ANSWER" in verdict.faults}
    found = []
    for verdict in verdicts:
        twin = verdict.case.twin or verdict.case.id.partition("-failing-")[0]
        if verdict.case.expect == "refuse" and twin != verdict.case.id and twin in broken and not verdict.is_broken:
            verdict = CaseVerdict(case=verdict.case, says=f"says nothing: {twin} is refused too")  # noqa: PLW2901
        found.append(verdict)
    return found


def judge(case: Case, judging: Judging) -> CaseVerdict:
    """Returns the verdict on a claimed case."""
    answer = judging.ask(case)
    said = answer.said if answer.is_plan else {"refused": "; ".join(filter(None, (*answer.refusals, answer.problem)))}
    try:
        said = json.loads(json.dumps(said, default=str))
    except (TypeError, ValueError, RecursionError):  # no answer at all
        said = repr(type(said))
    return replace(_judge(case, judging, answer), answer=said)


def _judge(case: Case, judging: Judging, answer: Answer) -> CaseVerdict:
    judged = {"EXPECT", "ANSWER", "TERMINATION"} | ({"AGREE"} if judging.has_ranks else set())
    faults: set[str] = set()
    if answer.is_stuck:
        faults.add("TERMINATION")
    if answer.is_divided:
        faults.add("AGREE")
    if answer.problem:
        faults.add("ANSWER")
    if not faults and case.expect != "either" and answer.is_plan != (case.expect == "plan"):
        faults.add("EXPECT")
    says = "; ".join(filter(None, (*dict.fromkeys(answer.refusals), answer.problem)))
    if not answer.is_plan:
        return CaseVerdict(case=case, judged=frozenset(judged), faults=tuple(sorted(faults)), says=says)
    if judging.elsewhere:
        judged.add("DETERMINISM")
        once = _freeze(answer)
        for other in judging.elsewhere:
            again = other(case)
            if again.is_stuck or again.problem:
                faults.add("TERMINATION" if again.is_stuck else "ANSWER")
                says = f"asked again: {'; '.join(filter(None, (*again.refusals, again.problem)))}"
            elif _freeze(again) != once:
                faults.add("DETERMINISM")
                says = _contrast(once, _freeze(again))
    if case.kind not in PLANNED:
        judged.add("EXACT")
        if _freeze(answer) != _freeze(Answer(said=case.exact["answer"])):
            faults.add("EXACT")
            says = f"{json.dumps(answer.said):.120}, not {json.dumps(case.exact['answer']):.120}"
        return CaseVerdict(case=case, judged=frozenset(judged), faults=tuple(sorted(faults)), says=says)
    return _judge_plan(case, answer, judged, dict.fromkeys(faults, says), is_exact=judging.is_exact)


def _judge_plan(case: Case, answer: Answer, judged: set[str], faults: Faults, *, is_exact: bool) -> CaseVerdict:
    problem = case.problem
    try:
        found = read_plan(answer.said)
    except AnswerError as error:
        return CaseVerdict(case=case, judged=frozenset(judged), faults=("ANSWER",), says=str(error))
    judged |= _OF_PLANS if problem.is_online else _OF_PLANS | _OF_KNOWN_LENGTHS
    if "order" in problem.terms:
        judged.add("ORDER")
    faults |= find_faults(problem, found.plans)
    excess, wait = None, None
    if not faults.keys() & {"ANSWER", "HOME", "COVER", "ONCE", "EQUAL"}:
        words = find_false_words(problem, found, case.exact)
        judged |= words.keys()
        faults |= {name: text for name, text in words.items() if text}
        count, costs = len(found.plans[0]), compute_wait_of(problem, found.plans)
        known = {"plan": found.plans, "count": count, "wait": costs}
        known["least_wait"] = found.report.get("least_wait", case.exact.get("least_wait"))  # judged only if reported
        differs = [name for name, value in case.exact.items() if not _is_same(value, known.get(name))]
        if is_exact and case.exact and _IS_NOT_THE_BEST not in case.flags:
            judged.add("EXACT")
            if differs:
                faults["EXACT"] = ", ".join(f"{name} {known.get(name)}, not {case.exact[name]}" for name in differs)
        best_count, best_wait = case.exact.get("count"), case.exact.get("wait")
        if not faults.keys() - {"EXACT"}:
            excess = count / (best_count if isinstance(best_count, int) else compute_least(problem))
            wait = costs / (best_wait if isinstance(best_wait, float | int) else 1)
    says = "; ".join(dict.fromkeys(filter(None, faults.values())))
    return CaseVerdict(
        case=case, judged=frozenset(judged), faults=tuple(sorted(faults)), says=says, excess=excess, wait=wait
    )


def _is_same(expected: object, found: object) -> bool:
    if isinstance(expected, float) and isinstance(found, float):
        return abs(expected - found) < 1e-9
    return expected == found


def _freeze(answer: Answer) -> str:
    said = answer.said if answer.is_plan else "; ".join(answer.refusals)
    try:
        return json.dumps(said, sort_keys=True, default=str)
    except (TypeError, ValueError, RecursionError):  # not JSON: keys of several types, or a value that contains itself
        return type(said).__name__


def _contrast(once: str, again: str) -> str:
    """Returns where two answers differ first."""
    pairs = zip_longest(once, again)
    first = max(0, next(place for place, (here, there) in enumerate(pairs) if here != there) - 20)
    dots, part = "... " if first else "", slice(first, first + 60)
    return f"first {dots}{once[part]}, and asked again {dots}{again[part]}"
