"""Micro-batches of samples whose lengths are known, as reinforcement learning has them: planned at once. Spec: R13.

No window, no rounds: a rank has all its samples of an optimizer step, and cuts them into as many micro-batches as every other
rank. Only that number needs the other ranks. The micro-batches are those of the layout, under the tightest bound that the
number allows, so that the most expensive one costs as little as the layout's grouping can make it.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import TypeAlias

from odb_ref.core.batching.alignment import align
from odb_ref.core.batching.cost import CostOfLength
from odb_ref.core.batching.layouts import Layout
from odb_ref.core.errors import UsageError, check_integer, choose
from odb_ref.core.types import Group, Sample

Indices: TypeAlias = tuple[int, ...]

Length: TypeAlias = "int | Sequence[int]"
"""The tokens of a sample; of each sequence of a unit: sequences that belong together (a preference pair, the completions of a
prompt) and share a micro-batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanTerms:
    """What all ranks plan by. Spec: R13.1.

    ``budget_tokens`` bounds a micro-batch in the ``layout``: its padded tokens, or their sum. ``cost`` is what is balanced
    (default: the tokens). The number of micro-batches is at least ``at_least``, and a multiple of ``multiple_of``, as
    pipelines want it. A sample beyond the budget is refused, unless ``may_exceed``: then it travels alone. Units want
    ``layout="packed"``.

    Raises: UsageError when a value makes no sense.
    """

    budget_tokens: int
    layout: Layout = Layout.PACKED
    cost: CostOfLength | None = None
    multiple_of: int = 1
    at_least: int = 1
    may_exceed: bool = False

    def __post_init__(self) -> None:
        for name in ("budget_tokens", "multiple_of", "at_least"):
            object.__setattr__(self, name, check_integer(getattr(self, name), name, 1))

    def round_up(self, need: int) -> int:
        """Returns the number of micro-batches where the rank that needs most needs ``need``."""
        return -(-max(need, self.at_least) // self.multiple_of) * self.multiple_of


@dataclass(frozen=True, slots=True)
class RankPlan:
    """The samples of one rank, and how many micro-batches it needs. Spec: R13.2."""

    terms: PlanTerms
    samples: tuple[Sample, ...]
    need: int

    def divide(self, number: int) -> tuple[Indices, ...]:
        """Returns exactly ``number`` micro-batches, as indices of the rank's samples: the most expensive first, so that it
        meets those of the other ranks; empty ones, for a rank with fewer samples than micro-batches, last.

        Raises: UsageError when that is fewer than the rank needs.
        """
        if number < self.need:
            raise UsageError(f"{self.need} micro-batches are needed, got {number}")
        layout = self.terms.layout
        emitted, _ = align(self._balance(layout, number), number, 0, layout)
        if self.terms.cost is not None:
            emitted = tuple(sorted(emitted, key=_compute_group_cost, reverse=True))
        return tuple(tuple(sorted(sample.id for sample in group)) for group in emitted)

    def _balance(self, layout: Layout, number: int) -> tuple[Group, ...]:
        """Returns groups, no more than ``number``, formed under the tightest bound for which a bisection finds so few."""
        if self.terms.cost is None:
            return _bisect(
                lambda bound: layout.compute_groups(self.samples, bound, ()),
                number,
                low=max((sample.length for sample in self.samples), default=1),
                high=self.terms.budget_tokens,
            )
        costs = [sum(sample.costs) for sample in self.samples]
        return _bisect(
            lambda bound: layout.compute_groups(self.samples, self.terms.budget_tokens, (bound,)),
            number,
            low=max(costs, default=0),
            high=sum(costs),
        )


def _compute_group_cost(group: Group) -> int:
    return sum(sum(sample.costs) for sample in group)


def _bisect(group: Callable[[int], tuple[Group, ...]], number: int, *, low: int, high: int) -> tuple[Group, ...]:
    """Returns the groups under the lowest bound found that gives no more than ``number``; ``high`` must be one that does."""
    best = group(high)
    while low < high:
        middle = (low + high) // 2
        groups = group(middle)
        if len(groups) <= number:
            best, high = groups, middle
        else:
            low = middle + 1
    return best


def prepare(lengths: Iterable[Length], terms: PlanTerms) -> RankPlan:
    """Returns what a rank has to divide, before it knows of the others.

    Raises: UsageError when a length or its cost makes no sense, or exceeds the budget. Spec: R13.2.
    """
    made = [_make_sample(index, length, terms) for index, length in enumerate(lengths)]
    # None waits longer than another: the oldest, which are packed first, are the longest.
    by_length = sorted(made, key=attrgetter("length"), reverse=True)
    placed = (replace(sample, position=place) for place, sample in enumerate(by_length))
    samples = tuple(sorted(placed, key=attrgetter("id")))
    groups = terms.layout.compute_groups(samples, terms.budget_tokens, ())
    return RankPlan(terms, samples, len(groups))


def _make_sample(index: int, length: Length, terms: PlanTerms) -> Sample:
    rows = _list_rows(index, length, terms)
    tokens = sum(rows)
    if tokens > terms.budget_tokens and not terms.may_exceed:
        raise UsageError(
            f"sample {index} has {tokens} tokens, more than the budget of {terms.budget_tokens}: "
            "raise the budget, or let such samples travel alone (may_exceed=True)"
        )
    if terms.cost is None:
        return Sample(index, index, tokens, 0)
    return Sample(index, index, tokens, 0, (sum(_compute_cost(terms.cost, row) for row in rows),))


def _list_rows(index: int, length: Length, terms: PlanTerms) -> list[int]:
    """Returns the tokens of each sequence of a sample: of one, where it is not a unit."""
    if isinstance(length, Sequence) and len(length) != 1 and terms.layout is not Layout.PACKED:
        raise UsageError(f"sample {index} is a unit of {len(length)} sequences, which needs layout='packed'")
    rows = [operator.index(row) for row in length] if isinstance(length, Sequence) else [operator.index(length)]
    if not rows or min(rows) < 1:
        raise UsageError(f"sample {index} has the length {length!r}, expected at least 1")
    return rows


def _compute_cost(cost: CostOfLength, length: int) -> int:
    found = operator.index(cost(length))
    if found < 0:
        raise UsageError(f"cost({length}) is {found}, expected no negative number")
    return found


def plan(
    lengths: Sequence[Sequence[Length]],
    *,
    budget_tokens: int,
    layout: Layout | str = Layout.PACKED,
    cost: CostOfLength | None = None,
    multiple_of: int = 1,
    at_least: int = 1,
    may_exceed: bool = False,
) -> tuple[tuple[Indices, ...], ...]:
    """Returns the micro-batches of each rank, whose samples have ``lengths[rank]`` tokens: for every rank the same number, each
    the indices of its samples.

    ::

        >>> plan([[300, 200, 100], [600]], budget_tokens=600)
        (((0, 1, 2),), ((0,),))
        >>> plan([[300, 200, 100], [600]], budget_tokens=600, at_least=2)
        (((0,), (1, 2)), ((0,), ()))

    See `PlanTerms` for the arguments. A rank plans alone once the number is known, so `odb_ref.torch.plan_micro_batches` does
    the same over a process group for one exchange of a few integers.

    Raises: UsageError when a value makes no sense or a sample exceeds the budget. Spec: R13.
    """
    terms = PlanTerms(
        budget_tokens=budget_tokens,
        layout=choose(Layout, layout, "layout"),
        cost=cost,
        multiple_of=multiple_of,
        at_least=at_least,
        may_exceed=may_exceed,
    )
    ranks = [_prepare_rank(rank, own, terms) for rank, own in enumerate(lengths)]
    number = terms.round_up(max((rank.need for rank in ranks), default=0))
    return tuple(rank.divide(number) for rank in ranks)


def _prepare_rank(rank: int, lengths: Iterable[Length], terms: PlanTerms) -> RankPlan:
    try:
        return prepare(lengths, terms)
    except UsageError as error:
        raise UsageError(f"rank {rank}: {error}") from None
