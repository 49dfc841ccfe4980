"""The stages of the verification of a rule.

========  ========================================================================================================
language  read before it runs: the rule computes with integers alone, so it is a function of the agreement, and ends
bounds    of every agreement the target lies within the bounds of R3.3: proved, or refuted by an agreement
name      the name distinguishes the rule from shipped ones and from itself with other parameters
========  ========================================================================================================

The properties of the protocol are proved for every rule that keeps its bounds (`proofs/README.md`), so no world need be tried.
"""

from __future__ import annotations

import ast
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import fields, is_dataclass, replace
from functools import partial
from types import CodeType, FrameType
from typing import TYPE_CHECKING, Final

from odb_ref.core.batching.rules import RULES, TargetRule, compute_bounds
from odb_ref.core.errors import describe_given
from odb_ref.core.offer import NONE, Offer
from odb_sim.inputs.rules import describe_error
from odb_sim.verify.language import Judged
from odb_sim.verify.symbolic import Number, Paths, Truth, UndecidedError
from odb_sim.verify.variants import iterate_changes
from odb_sim.verify.verdict import BOUNDS, Finding, Stage

if TYPE_CHECKING:
    from _typeshed import TraceFunction

Answer = int | str
"""A target, or a text that says why there is none."""

PURE: Final = "RULE-PURE"
NAME: Final = "RULE-NAME"
_SHOWN: Final = ("round_min", "samples_min", "samples_max", "groups_min", "groups_max", "due_max", "budget_min")


NOT_LOOKED_AT: Final = ("whether the core is the one that the theorems are about: odb-ref verify --core",)
"""The things about which no verdict on a rule says anything."""


def verify(judged: Judged) -> Iterator[Stage]:
    """Yields the stages in order, each as soon as it is done."""
    ranges = "all of its file: it computes with integers alone, so it is a function of the agreement, and ends"
    lines = judged.tree.body[-1].end_lineno or 0
    yield Stage(name="language", covered=f"{lines} lines", ranges=ranges, properties=(PURE,), seconds=0, findings=())
    yield check_bounds(judged)
    yield check_name(judged)


def describe_agreement(agreement: Offer) -> str:
    """Returns the fields of an agreement that a rule may use, in one line."""
    values = {name: getattr(agreement, name) for name in _SHOWN}
    return ", ".join(f"{name}={'NONE' if value == NONE else value}" for name, value in values.items())


def check_bounds(judged: Judged) -> Stage:
    """Proves that the rule stays within its bounds, or finds an agreement on which it does not. Spec: R3.3."""
    rule, examples = judged.rule, list[Offer]()

    def look() -> Finding | None:
        paths = Paths()
        for found in paths.follow(lambda agreement: (rule.compute_target(agreement), *compute_bounds(agreement))):
            match found:
                case (Number() | int() as answer, Number() | int() as low, Number() | int() as high) if not isinstance(
                    answer, Truth | bool
                ):
                    case = paths.find_agreement(answer < low, answer > high, is_small=True)
                case _:  # it raises, or answers with something else
                    case = paths.find_agreement(True, is_small=True)
            if case is not None:
                return _find(BOUNDS, _describe_breach(case, ask(rule, case)), case)
            examples.extend(filter(None, [paths.find_agreement(True)]))
        return None

    stage = _judge("bounds", BOUNDS, look)
    if stage.findings or stage.skipped:
        return stage
    missed = _find_missed_lines(judged, examples)
    lines = f"; none leads to line {', '.join(map(str, missed))}" if missed else ""
    covered, ranges = f"proved on {len(examples)} paths", f"every agreement there can be, by a proof{lines}"
    return replace(stage, covered=covered, ranges=ranges)


def ask(rule: TargetRule, agreement: Offer) -> Answer:
    """Returns the rule's answer."""
    try:
        answer: object = rule.compute_target(agreement)
    except Exception as error:
        return f"raises {describe_error(error)}"
    return answer if type(answer) is int else f"answers {describe_given(answer)}, a {type(answer).__name__}, not an int"


def _describe_breach(agreement: Offer, answer: Answer) -> str:
    low, high = compute_bounds(agreement)
    if isinstance(answer, str):
        return f"the rule {answer}"
    return "" if low <= answer <= high else f"the rule answers {describe_given(answer)}, outside {low}..{high}"


def check_name(judged: Judged) -> Stage:
    """Looks for a rule of the same name that answers differently. Ranks compare rules by name only (R1.4)."""
    rule, tried = judged.rule, list[str]()
    if not isinstance(rule.name, str) or not rule.name:
        finding = Finding(property=NAME, detail=f"its name is {rule.name!r}, which is not a word", case="its name")
        return _judge("name", NAME, lambda: finding)

    def look() -> Finding | None:
        for title, other in _iterate_others(judged):
            tried.append(title)
            if other.name == rule.name and (case := _find_difference(rule, other)) is not None:
                ours, theirs = ask(rule, case), ask(other, case)
                told = f"{title} is called {rule.name!r} too, and answers {theirs} in place of {ours}"
                return _find(NAME, told if ours != theirs else "", case)
        return None

    stage = _judge("name", NAME, look)
    ranges = (
        "of every agreement, against the shipped rules, the other rules of its file, and its own class with each parameter "
        "changed (a number by 1, and to some multiples) or two numbers at once"
    )
    return replace(stage, covered=f"{len(tried)} other rules", ranges=ranges)


def _find_difference(rule: TargetRule, other: TargetRule) -> Offer | None:
    paths = Paths()

    def compute(agreement: Offer) -> tuple[object, object]:
        return rule.compute_target(agreement), other.compute_target(agreement)

    for found in paths.follow(compute):
        if isinstance(found, tuple) and (case := paths.find_agreement(found[0] != found[1], is_small=True)) is not None:
            return case
    return None  # where one of them raises, nobody trains on


def _iterate_others(judged: Judged) -> Iterator[tuple[str, TargetRule]]:
    """Yields the shipped rules, the other rules of the file, and the rule with other parameters."""
    rule, kind = judged.rule, type(judged.rule)
    yield from ((f"the shipped rule {name}", other) for name, other in RULES.items() if type(other) is not kind)
    for title, found in vars(sys.modules[kind.__module__]).items():
        if found is not rule:
            yield from ((title, other) for other in _make(found))
    made: object = rule
    if is_dataclass(made) and not isinstance(made, type):
        given = {item.name: getattr(made, item.name) for item in fields(made) if item.init and item.name != "name"}
        for change in iterate_changes(given, words=_list_words(judged.tree)):
            title = ", ".join(f"{name}={describe_given(value)}" for name, value in change.items())
            yield from ((f"the rule with {title}", other) for other in _make(partial(replace, made, **change)))


def _make(found: object) -> Iterator[TargetRule]:
    """Yields the rule that is found or made, unless it is refused, is not a rule, or its name cannot be computed."""
    with suppress(Exception):
        made = found() if isinstance(found, type | partial) else found
        if isinstance(made, TargetRule) and made.name:  # from Python 3.12 on the first does not compute the name
            yield made


def _list_words(tree: ast.Module) -> list[str]:
    """Returns the strings in the rule's file, which may be other values of a parameter."""
    found = (node.value for node in ast.walk(tree) if isinstance(node, ast.Constant))
    return sorted({word for word in found if isinstance(word, str)})


def _find(property_: str, detail: str, agreement: Offer) -> Finding:
    if not detail:
        raise UndecidedError(f"Z3 and Python disagree about {describe_agreement(agreement)}")
    return Finding(property=property_, detail=detail, case=f"agreement {describe_agreement(agreement)}")


def _judge(name: str, property_: str, look: Callable[[], Finding | None]) -> Stage:
    began = time.perf_counter()
    finding, skipped = None, ""
    try:
        finding = look()
    except UndecidedError as error:
        skipped = str(error)
    findings = () if finding is None else (finding,)
    seconds = time.perf_counter() - began
    return Stage(name=name, covered="", properties=(property_,), seconds=seconds, findings=findings, skipped=skipped)


def _find_missed_lines(judged: Judged, agreements: Sequence[Offer]) -> list[int]:
    """Returns the lines, in the functions that the rule enters, to which none of the agreements leads."""
    left: dict[CodeType, set[int]] = {}

    def trace(frame: FrameType, event: str, value: object) -> TraceFunction | None:
        code = frame.f_code
        if code.co_filename != judged.path:
            return None
        lines = {line for _, _, line in code.co_lines() if line not in (None, code.co_firstlineno)}
        left.setdefault(code, lines).discard(frame.f_lineno)
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        for agreement in agreements:
            ask(judged.rule, agreement)
    finally:
        sys.settrace(before)
    return sorted(set().union(*left.values()))
