"""Writes verdicts as text, JUnit XML, JSON or an HTML page."""

from __future__ import annotations

import html
import json
from collections.abc import Sequence
from xml.sax import saxutils

from odb_ref.conformance.asking import make_question
from odb_ref.conformance.judge import RULES
from odb_ref.conformance.running import NOT_ASKED, CaseVerdict


def describe(verdicts: Sequence[CaseVerdict]) -> str:
    """Returns the text report: the broken cases, then a line for each property, and the scores."""
    lines = [
        f"{verdict.case.id}: {', '.join(verdict.faults)}: {verdict.case.comment} {verdict.says}".rstrip()
        for verdict in verdicts
        if verdict.is_broken
    ]
    for name, rule in RULES.items():
        number, broken = count_verdicts(verdicts, name)
        verdict = f"broken in {broken} of {number}" if broken else f"kept in {number}" if number else "not judged"
        lines.append(f"{name:12} {verdict:19} {rule}")
    lines.append(describe_scores(verdicts))
    left = sum(verdict.says == NOT_ASKED for verdict in verdicts)
    if left:
        lines.append(f"{left} cases {NOT_ASKED}")
    asked = [verdict for verdict in verdicts if verdict.is_asked]
    right = len(asked) - sum(verdict.is_broken for verdict in asked)
    lines.append(f"{right} of {len(asked)} cases right, {len(verdicts) - len(asked)} say nothing of this planner")
    return "\n".join(lines)


def count_verdicts(verdicts: Sequence[CaseVerdict], name: str) -> tuple[int, int]:
    """Returns how many cases judged a property, and how many broke it."""
    broken = sum(name in verdict.faults for verdict in verdicts)
    return sum(name in verdict.judged or name in verdict.faults for verdict in verdicts), broken


def compute_scores(verdicts: Sequence[CaseVerdict]) -> tuple[float, float, int]:
    """Returns the mean excess and the mean wait of the plans that broke nothing, and the number of those plans."""
    kept = [verdict for verdict in verdicts if verdict.excess is not None]
    number = max(1, len(kept))
    return (
        sum(verdict.excess or 0 for verdict in kept) / number,
        sum(verdict.wait or 0 for verdict in kept) / number,
        len(kept),
    )


def describe_scores(verdicts: Sequence[CaseVerdict]) -> str:
    """Returns both scores as a sentence."""
    excess, wait, number = compute_scores(verdicts)
    if not number:
        return "no scores: no plan that breaks nothing"
    return f"count over the least {excess:.3f}, wait over the floor {wait:.3f}, both at best 1, over {number} plans"


def write_junit(verdicts: Sequence[CaseVerdict]) -> str:
    """Returns the verdicts as JUnit XML."""

    def render(verdict: CaseVerdict) -> str:
        name = saxutils.quoteattr(verdict.case.id)
        text = saxutils.escape(f"{', '.join(verdict.faults)}: {verdict.case.comment} {verdict.says}".strip())
        if not verdict.is_asked:
            return f"<testcase name={name}><skipped/></testcase>"
        if verdict.is_broken:
            return f"<testcase name={name}><failure>{text}</failure></testcase>"
        return f"<testcase name={name}/>"

    broken = sum(verdict.is_broken for verdict in verdicts)
    skipped = sum(not verdict.is_asked for verdict in verdicts)
    body = "\n".join(map(render, verdicts))
    head = f'name="odb-ref conformance" tests="{len(verdicts)}" failures="{broken}" skipped="{skipped}"'
    return f"<testsuite {head}>\n{body}\n</testsuite>\n"


def write_json(verdicts: Sequence[CaseVerdict]) -> str:
    """Returns the verdicts as a JSON list, one for each case."""
    return json.dumps(
        [
            {
                "id": verdict.case.id,
                "from": verdict.case.origin,
                "judged": sorted(verdict.judged),
                "faults": verdict.faults,
                "says": verdict.says,
                "question": make_question(verdict.case),
                "answer": verdict.answer,
                "excess": verdict.excess,
                "wait": verdict.wait,
            }
            for verdict in verdicts
        ]
    )


def write_html(verdicts: Sequence[CaseVerdict], title: str) -> str:
    """Returns the verdicts as an HTML page: broken cases in red, cases not judged in grey."""
    rows = "\n".join(
        f'<tr style="background:{_choose_colour(verdict)}"><td>{html.escape(verdict.case.id)}</td>'
        f"<td>{', '.join(verdict.faults)}</td><td>{html.escape(verdict.case.comment)}</td>"
        f"<td>{html.escape(verdict.case.origin)}</td><td>{html.escape(verdict.says)}</td></tr>"
        for verdict in verdicts
    )
    head = f"<!doctype html><meta charset=utf-8><title>{html.escape(title)}</title><h1>{html.escape(title)}</h1>"
    scores = f"<p>{html.escape(describe_scores(verdicts))}</p>"
    return f"{head}\n{scores}\n<table>\n<tr><th>case<th>broken<th>what it asks<th>from<th>what was said\n{rows}\n</table>\n"


def _choose_colour(verdict: CaseVerdict) -> str:
    return "#ddd" if not verdict.is_asked else "#fbb" if verdict.is_broken else "#bfb"
