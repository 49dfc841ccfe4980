"""The answers of an implementation: a plan with its weights and report, a refusal, or neither."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import TypeAlias

from odb_ref.conformance.vectors import Json
from odb_ref.core.errors import UsageError

Plans: TypeAlias = list[list[list[int]]]
"""By rank and micro-batch, the indices of the rank's samples, or of all samples if they are dealt out."""
Weight: TypeAlias = Fraction | float


class AnswerError(UsageError):
    """The answer is neither a plan nor a refusal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgedPlan:
    """A plan, and what its planner states about it. Parts left out are not judged."""

    plans: Plans
    weights: list[list[list[Weight]]] | None = None
    """For each micro-batch, by sample: the weight of the loss of each supervised token."""
    scales: list[list[Weight]] | None = None
    """For each micro-batch: the sum of its tokens' weights, times the number of ranks."""
    restored: list[list[int]] | None = None
    """For each rank: its indices, restored to sample order as the outputs of micro-batches are."""
    report: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The result of a question."""

    said: Json = None
    """The answer in one piece. If ranks plan alone, the parts of all ranks are put together."""
    refusals: tuple[str, ...] = ()
    """The messages of those that refused."""
    is_stuck: bool = False
    """True when a rank was left in the exchange, or no answer came in time."""
    is_divided: bool = False
    """True when some ranks planned and others refused, or refusals differ in words."""
    problem: str = ""
    """Why the result is not an answer at all."""

    @property
    def is_plan(self) -> bool:
        """True when no planner refused, hung or ended."""
        return not (self.refusals or self.is_stuck or self.problem)


def read_plan(said: Json) -> JudgedPlan:
    """Returns the plan for all ranks. ``said`` is the plan itself, or an object with ``"plan"`` and more about it.

    Raises: AnswerError when it is something else.
    """
    whole = said if isinstance(said, Mapping) else {"plan": said}
    plans = [[[*map(_read_index, _items(batch))] for batch in _items(own)] for own in _items(whole.get("plan"))]
    weights: list[list[list[Weight]]] | None = None
    scales: list[list[Weight]] | None = None
    restored: list[list[int]] | None = None
    if whole.get("weights") is not None:
        weights = [[[*map(_read_weight, _items(batch))] for batch in _items(own)] for own in _items(whole["weights"])]
    if whole.get("scales") is not None:
        scales = [[*map(_read_weight, _items(own))] for own in _items(whole["scales"])]
    if whole.get("restored") is not None:
        restored = [[*map(_read_index, _items(own))] for own in _items(whole["restored"])]
    report = whole.get("report") or {}
    if not isinstance(report, Mapping):
        raise AnswerError(f"a report is an object, got {report!r}")
    for name, rows in (("weights", weights), ("scales", scales)):
        if rows is not None and [len(own) for own in rows] != [len(own) for own in plans]:
            raise AnswerError(f"{name} do not have one entry for each micro-batch of the plan")
    return JudgedPlan(
        plans=plans,
        weights=weights,
        scales=scales,
        restored=restored,
        report={name: float(_read_weight(value)) for name, value in report.items() if value is not None},
    )


def _items(value: Json) -> Iterator[Json]:
    if isinstance(value, str | Mapping) or not isinstance(value, Sequence):
        raise AnswerError(f"expected a list, got {value!r}")
    yield from value


def _read_index(value: Json) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise AnswerError(f"an index is an integer, got {value!r}")
    return value


def _read_weight(value: Json) -> Weight:
    try:
        if isinstance(value, str):
            return Fraction(value)
        if isinstance(value, int | float) and not isinstance(value, bool):
            return Fraction(value) if isinstance(value, int) else value
    except (ValueError, ZeroDivisionError):
        pass
    raise AnswerError(f"a weight is a number or a fraction such as '1/12', got {value!r}")
