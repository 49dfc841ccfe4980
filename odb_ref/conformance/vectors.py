"""The cases, read from JSON, one file per property. Spec: R13.

A case is ``{"id", "comment", "from", "kind", "problem", "flags", "expect"}``, with ``"exact"`` if the right answer is known;
``schema.json`` beside the cases defines the rest. The problem of a plan is a `Problem`; that of the online protocol stays JSON,
which the implementation reads.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Final, Literal, TypeAlias

from odb_ref.core.batching.layouts import Layout
from odb_ref.core.errors import UsageError
from odb_ref.plan.terms import SAMPLES, Options, Within

_CHECKOUT: Final = Path(__file__).parents[2] / "spec" / "vectors" / "v1"
VECTORS: Final = _CHECKOUT if _CHECKOUT.is_dir() else Path(__file__).parent / "cases"
"""The folder of the cases, in a checkout or in the installed package."""

Json: TypeAlias = "bool | int | float | str | Sequence[Json] | Mapping[str, Json] | None"
Record: TypeAlias = Mapping[str, Json]
Expect: TypeAlias = Literal["plan", "refuse", "either"]
Column: TypeAlias = list[list[int]]
"""A value for each sample, by rank."""

PLANNED: Final = ("plan_all", "plan_ranks", "epoch")
"""The kinds whose answer is a plan, either for known lengths or for an epoch whose lengths become known on the way."""
ONLINE: Final = "online"
"""Stands for all other kinds, and ``epoch``."""
COLUMNS: Final = ("supervised", "together")


@dataclass(slots=True, kw_only=True)
class Problem:
    """What to plan, as columns by rank. If samples are dealt out, indices continue from rank to rank."""

    lengths: Column
    is_dealt: bool = False
    is_online: bool = False
    supervised: Column | None = None
    together: Column | None = None
    uses: dict[str, Column] = field(default_factory=dict)
    mean: str | None = None
    """The mean for which weights are requested."""
    settings: Record = field(default_factory=dict)
    """The window, rule, order and so on of an epoch."""
    changes: list[Mapping[str, object]] | None = None
    """By rank, the terms in which it differs from the others, or what it is told of the groups of the step."""
    terms: Options

    def get_lengths(self, rank: int | None) -> list[int]:
        """Returns the lengths of a rank's samples, or with None of all samples."""
        return pick(self.lengths, rank)

    def list_tokens(self, rank: int | None, batch: Sequence[int]) -> list[int]:
        """Returns the rounded-up length of each sample of a micro-batch. Spec: R13.2."""
        lengths, whole = self.get_lengths(rank), self.terms.get("pad_to", 1)
        return [-(-lengths[index] // whole) * whole for index in batch]

    def is_padded(self) -> bool:
        """Returns True in the padded layout, where a micro-batch has its number of samples times the longest in tokens."""
        return self.terms.get("layout", Layout.PACKED) == Layout.PADDED

    def measure(self, rank: int | None, batch: Sequence[int]) -> dict[str, int]:
        """Returns how much a micro-batch uses of the budget and of each limit, by name. Spec: R13.2."""
        rows = self.list_tokens(rank, batch)
        found = {"budget": len(rows) * max(rows, default=0) if self.is_padded() else sum(rows)}
        for name in self.terms.get("limits", {}):
            if name in self.uses:
                found[name] = sum(pick(self.uses[name], rank)[index] for index in batch)
            elif name == SAMPLES:
                found[name] = len(rows)
        return found

    def list_units(self, rank: int | None) -> list[list[int]]:
        """Returns the groups of indices that must share a micro-batch. Spec: R13.7."""
        number = len(self.get_lengths(rank))
        if self.together is None or self.terms.get("within", Within.MICRO_BATCH) != Within.MICRO_BATCH:
            return [[index] for index in range(number)]
        found: dict[int, list[int]] = {}
        for index, key in enumerate(pick(self.together, rank)):
            found.setdefault(key, []).append(index)
        return [*found.values()]

    def has_homes(self) -> bool:
        """Returns True when samples are dealt out and those of one key must share a rank."""
        return self.is_dealt and self.together is not None and self.terms.get("within") == Within.RANK


def pick(column: Sequence[Sequence[int]], rank: int | None) -> list[int]:
    """Returns the part of one rank, or with None the whole column."""
    return [*chain.from_iterable(column)] if rank is None else [*column[rank]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A question for an implementation."""

    id: str
    comment: str
    origin: str
    kind: str
    record: Record
    """The question, as JSON."""
    flags: tuple[str, ...]
    expect: Expect
    exact: Record
    """The answer of the model, or the best by an exhaustive search, as far as they are known."""
    twin: str | None
    """For a case to refuse: a case that can be planned, and otherwise differs only in the reason for the refusal."""

    @property
    def problem(self) -> Problem:
        """The problem of a plan. Raises: UsageError when the case is of another kind."""
        if self.kind not in PLANNED:
            raise UsageError(f"case {self.id} is not a problem of a plan")
        return decode(self.record, self.kind)

    @property
    def terms(self) -> frozenset[str]:
        """The kinds and terms that an implementation must claim before it is asked this case."""
        if self.kind not in PLANNED:
            return frozenset({self.kind, ONLINE})
        problem = self.problem
        named = {name for name in ("together", "mean", "changes") if getattr(problem, name) is not None}
        kinds = {self.kind, ONLINE} if problem.is_online else {self.kind}
        return frozenset(kinds | {*problem.terms, *named} - {"budget"})


def decode(record: Record, kind: str) -> Problem:
    """Returns the problem of a record that matches the schema."""
    fields = {name: value for name, value in record.items() if name != "kind"}
    return Problem(is_dealt=kind == "plan_all", is_online=kind == "epoch", **fields)  # type: ignore[arg-type]


def encode(problem: Problem) -> dict[str, Json]:
    """Returns the problem as JSON, with its kind, as the question to one process that knows everything."""
    kind = "plan_all" if problem.is_dealt else "epoch" if problem.is_online else "plan_ranks"
    record: dict[str, Json] = {"kind": kind, "lengths": problem.lengths, "terms": _encode_terms(problem.terms)}
    for name in (*COLUMNS, "mean"):
        if getattr(problem, name) is not None:
            record[name] = getattr(problem, name)
    if problem.changes is not None:
        record["changes"] = [*map(_encode_terms, problem.changes)]
    for name in ("uses", "settings"):
        if getattr(problem, name):
            record[name] = getattr(problem, name)
    return record


def encode_rank(problem: Problem, rank: int) -> dict[str, Json]:
    """Returns the question to one rank as JSON, with that rank's data only."""
    changes = {} if problem.changes is None else _encode_terms(problem.changes[rank])
    groups = changes.pop("group_supervised", None)
    record: dict[str, Json] = {
        "kind": "plan_rank",
        "rank": rank,
        "ranks": len(problem.lengths),
        "lengths": problem.lengths[rank],
        "terms": {**_encode_terms(problem.terms), **changes},
    }
    for name in COLUMNS:
        column: Column | None = getattr(problem, name)
        if column is not None:
            record[name] = column[rank]
    if problem.mean is not None:
        record["mean"] = problem.mean
    if problem.uses:
        record["uses"] = {name: column[rank] for name, column in problem.uses.items() if column[rank]}
    if problem.together is not None and problem.terms.get("within") == Within.STEP:
        record["group_supervised"] = groups or [[key, tokens] for key, tokens in sum_groups(problem).items()]
    return record


def _encode_terms(terms: Mapping[str, object]) -> dict[str, Json]:
    """Returns terms that were read from JSON, as JSON."""
    return {**terms}  # type: ignore[dict-item]


def sum_groups(problem: Problem) -> dict[int, int]:
    """Returns the supervised tokens of each key of ``together``, over all ranks."""
    sums: dict[int, int] = {}
    for keys, own in zip(problem.together or (), problem.supervised or problem.lengths, strict=True):
        for key, tokens in zip(keys, own, strict=True):
            sums[key] = sums.get(key, 0) + tokens
    return sums


def make_case(question: Record) -> Case:
    """Returns a case made of a question alone, in the form a program reads."""
    record = {name: value for name, value in question.items() if name != "kind"}
    kind = str(question["kind"])
    return Case(
        id=kind, comment="", origin="", kind=kind, record=record, flags=(), expect="either", exact={}, twin=None
    )


def read_cases(folder: Path = VECTORS) -> Iterator[Case]:
    """Reads the cases in all files of a folder, ordered by file name."""
    for path in sorted(folder.glob("*.json")):
        if path.name != "schema.json":
            for record in json.loads(path.read_text(encoding="utf-8")):
                yield Case(
                    id=record["id"],
                    comment=record["comment"],
                    origin=record["from"],
                    kind=record["kind"],
                    record=record["problem"],
                    flags=tuple(record["flags"]),
                    expect=record["expect"],
                    exact=record.get("exact", {}),
                    twin=record.get("twin"),
                )
