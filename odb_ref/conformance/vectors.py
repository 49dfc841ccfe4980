"""The cases: read from JSON, one file a subject. Spec: R13.

A case is ``{"id", "comment", "from", "kind", "problem", "flags", "expect"}``. ``kind`` is ``"plan_all"`` or ``"plan_ranks"``;
``expect`` is ``"plan"``, ``"refuse"`` (on every rank), or ``"either"`` (``flags`` say why); ``schema.json`` says the rest.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, NotRequired, TypeAlias, TypedDict

from odb_ref.conformance.judge import Problem
from odb_ref.plan import Options

VECTORS: Final = Path(__file__).parents[2] / "spec" / "vectors" / "v1"
"""Where the cases are, in a checkout."""

Expect: TypeAlias = Literal["plan", "refuse", "either"]


class ProblemRecord(TypedDict):
    """A problem in JSON: see `Problem`."""

    lengths: list[list[int]]
    supervised: NotRequired[list[list[int]]]
    together: NotRequired[list[list[int]]]
    uses: NotRequired[dict[str, list[list[int]]]]
    terms: Options
    kind: NotRequired[str]


class CaseRecord(TypedDict):
    """A case in JSON."""

    id: str
    comment: str
    kind: str
    problem: ProblemRecord
    flags: list[str]
    expect: Expect


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A question for a planner."""

    id: str
    comment: str
    problem: Problem
    flags: tuple[str, ...]
    expect: Expect

    @property
    def terms(self) -> frozenset[str]:
        """What a planner must know to be asked this."""
        problem = self.problem
        wanted = {"plan_all" if problem.is_dealt else "plan_ranks", *problem.terms}
        if problem.together is not None:
            wanted.add("together")
        return frozenset(wanted - {"budget"})


def decode(record: ProblemRecord, kind: str) -> Problem:
    """Returns the problem of a record."""
    return Problem(
        lengths=record["lengths"],
        is_dealt=kind == "plan_all",
        supervised=record.get("supervised"),
        together=record.get("together"),
        uses=record.get("uses", {}),
        terms=record["terms"],
    )


def encode(problem: Problem) -> ProblemRecord:
    """Returns the record of a problem, with its kind: what a program is asked."""
    record: ProblemRecord = {
        "kind": "plan_all" if problem.is_dealt else "plan_ranks",
        "lengths": problem.lengths,
        "terms": problem.terms,
    }
    if problem.supervised is not None:
        record["supervised"] = problem.supervised
    if problem.together is not None:
        record["together"] = problem.together
    if problem.uses:
        record["uses"] = problem.uses
    return record


def read_cases(folder: Path = VECTORS) -> Iterator[Case]:
    """Reads the cases of all files of a folder, by name."""
    for path in sorted(folder.glob("plan*.json")):
        records: list[CaseRecord] = json.loads(path.read_text())
        for record in records:
            yield Case(
                id=record["id"],
                comment=record["comment"],
                problem=decode(record["problem"], record["kind"]),
                flags=tuple(record["flags"]),
                expect=record["expect"],
            )
