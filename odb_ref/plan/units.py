"""Units: the measured samples of a plan. Samples that must share a micro-batch are one unit. Spec: R13.1, R13.3."""

from __future__ import annotations

import operator
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import SupportsIndex, TypeAlias, TypeVar

from odb_ref.core.batching.layouts import Layout
from odb_ref.core.errors import UsageError
from odb_ref.plan.terms import SAMPLES, SAY_ALONE, Oversize, PlanTerms, Within

Indices: TypeAlias = tuple[int, ...]
Key: TypeAlias = Hashable
Value = TypeVar("Value")


@dataclass(frozen=True, slots=True, kw_only=True)
class Samples:
    """The samples of a plan as columns, by index."""

    lengths: tuple[int, ...]
    supervised: tuple[int, ...]
    """The number of tokens that carry loss."""
    keys: tuple[Key, ...] | None
    """Samples with equal keys belong together."""
    uses: tuple[tuple[int, ...], ...]
    """For each limit, how much each sample uses of it."""

    def sum_by_key(self) -> dict[Key, int]:
        """Returns the supervised tokens of each key, summed over its samples."""
        if self.keys is None:
            return dict(enumerate(self.supervised))
        sums: dict[Key, int] = {}
        for key, supervised in zip(self.keys, self.supervised, strict=True):
            sums[key] = sums.get(key, 0) + supervised
        return sums

    def get_keys(self) -> Sequence[Key]:
        """Returns the key of each sample, or its index if there are no keys."""
        return range(len(self.lengths)) if self.keys is None else self.keys


@dataclass(frozen=True, slots=True, kw_only=True)
class Units:
    """The units to divide, as columns, by number. A unit is a sample, or all samples that must share a micro-batch."""

    members: tuple[Indices, ...]
    """The indices of a unit's samples."""
    longest: tuple[int, ...]
    """The tokens of a unit's longest sample, rounded up (R13.2)."""
    tokens: tuple[int, ...]
    """The tokens of a micro-batch that holds only this unit."""
    costs: tuple[int, ...]
    """The cost of a micro-batch that holds only this unit."""
    uses: tuple[tuple[int, ...], ...]
    """For each limit, how much each unit uses of it."""

    def __len__(self) -> int:
        return len(self.members)


def make_samples(
    lengths: Iterable[SupportsIndex],
    supervised: Iterable[SupportsIndex] | None,
    together: Iterable[Key] | None,
    uses: Mapping[str, Iterable[SupportsIndex]] | None,
    terms: PlanTerms,
) -> Samples:
    """Returns the checked samples.

    Raises: UsageError when a value is not valid, or two columns differ in length. Spec: R13.1.
    """
    found = _read("lengths", lengths)
    number = len(found)
    if number and min(found) < 1:
        index, length = next((index, length) for index, length in enumerate(found) if length < 1)
        raise UsageError(f"sample {index} has the length {length}, expected at least 1")
    carrying = found if supervised is None else _read("supervised", supervised, number)
    for index, (tokens, length) in enumerate(zip(carrying, found, strict=True)):
        if not 0 <= tokens <= length:
            raise UsageError(f"sample {index} has {tokens} supervised tokens of {length}")
    keys = None if together is None else tuple(map(_read_key, read_list("together", together)))
    if keys is not None and len(keys) != number:
        raise UsageError(f"{number} lengths, but {len(keys)} keys of together")
    if keys is None and terms.within is not Within.MICRO_BATCH:
        raise UsageError(
            f"within={str(terms.within)!r} is for samples of one key: give a key for each sample as together"
        )
    given = dict(uses or {})
    columns = []
    for name, _ in terms.limits:
        if name == SAMPLES and name not in given:
            columns.append((1,) * number)
        elif name not in given:
            raise UsageError(f"limits say {name!r}, but uses do not say what a sample uses of it")
        else:
            column = _read(f"uses[{name!r}]", given.pop(name), number)
            if number and min(column) < 0:
                raise UsageError(f"uses[{name!r}] has {min(column)}, expected no negative number")
            columns.append(column)
    if given:
        raise UsageError(f"uses say {sorted(given)[0]!r}, which no limit bounds")
    return Samples(lengths=found, supervised=carrying, keys=keys, uses=tuple(columns))


def read_sums(name: str, sums: Mapping[Key, int]) -> dict[Key, int]:
    """Returns the sums as integers by key, as those of ``together`` are read. Raises: UsageError when a value is not valid."""
    return dict(zip(map(_read_key, sums), _read(name, sums.values()), strict=True))


def _read(name: str, values: Iterable[SupportsIndex], number: int | None = None) -> tuple[int, ...]:
    """Returns the values, integers of any library's type, as Python ones. Refuses any number of them but ``number``."""
    given = read_list(name, values)
    if number is not None and len(given) != number:
        raise UsageError(f"{number} lengths, but {len(given)} values of {name}")
    if bool in set(map(type, given)):
        raise UsageError(f"{name} must be integers, got a truth value")
    try:
        return tuple(map(operator.index, given))
    except TypeError as error:
        raise UsageError(f"{name} must be integers: {error}") from None


def read_list(name: str, values: Iterable[Value]) -> tuple[Value, ...]:
    """Returns the values of a list of any library's type. Raises: UsageError when ``values`` is not a list."""
    try:
        if not isinstance(values, str | bytes | bytearray):
            return tuple(values)
    except TypeError:
        pass
    raise UsageError(f"{name} must be a list, got {values!r:.60}")


def _read_key(key: Key) -> Key:
    """Returns the key. A scalar array or tensor becomes a Python number, because equal tensors have different hashes."""
    dimensions = getattr(key, "ndim", None)
    if dimensions == 0 and hasattr(key, "item"):
        key = key.item()
    try:
        hash(key)
    except TypeError as error:
        raise UsageError(f"keys of together must be hashable: {error}") from None
    if dimensions or key != key:  # noqa: PLR0124  # not a number
        raise UsageError(f"keys of together must be equal where samples belong together, and {key!r:.60} equals none")
    return key


def make_units(samples: Samples, indices: Sequence[int], terms: PlanTerms) -> Units:
    """Returns the units of the samples at ``indices``.

    Raises: UsageError when a unit exceeds the budget or a limit, unless ``oversize`` allows it. Spec: R13.2, R13.3, R13.7.
    """
    members = _join(samples, indices, terms)
    rounded = tuple([-(-length // terms.pad_to) * terms.pad_to for length in samples.lengths])
    cost_of = {length: _compute_cost(terms, length) for length in {rounded[index] for index in indices}}
    longest = tuple([max([rounded[index] for index in unit]) for unit in members])
    if terms.layout is Layout.PADDED:
        tokens = tuple([len(unit) * length for unit, length in zip(members, longest, strict=True)])
        costs = tuple([len(unit) * cost_of[length] for unit, length in zip(members, longest, strict=True)])
    elif len(members) == len(indices):
        tokens, costs = longest, tuple(map(cost_of.__getitem__, longest))
    else:
        tokens = tuple([sum([rounded[index] for index in unit]) for unit in members])
        costs = tuple([sum([cost_of[rounded[index]] for index in unit]) for unit in members])
    uses = tuple(tuple([sum([column[index] for index in unit]) for unit in members]) for column in samples.uses)
    units = Units(members=members, longest=longest, tokens=tokens, costs=costs, uses=uses)
    if terms.oversize is Oversize.REFUSE:
        _check_sizes(units, terms)
    return units


def _join(samples: Samples, indices: Sequence[int], terms: PlanTerms) -> tuple[Indices, ...]:
    """Returns the samples of each unit, ordered by the first sample of each."""
    if samples.keys is None or terms.within is not Within.MICRO_BATCH:
        return tuple([(index,) for index in indices])
    found: dict[Key, list[int]] = {}
    for index in indices:
        found.setdefault(samples.keys[index], []).append(index)
    return tuple(map(tuple, found.values()))


def _compute_cost(terms: PlanTerms, length: int) -> int:
    try:
        cost = operator.index(terms.cost.of_tokens(length))
    except TypeError as error:
        raise UsageError(f"cost({length}) must be an integer: {error}") from None
    if cost < 1:
        raise UsageError(f"cost({length}) is {cost}, expected at least 1")
    return cost


def is_oversize(units: Units, number: int, terms: PlanTerms) -> bool:
    """Returns True when a unit exceeds the budget or a limit by itself. Spec: R13.3."""
    return units.tokens[number] > terms.budget or any(
        column[number] > limit for column, (_, limit) in zip(units.uses, terms.limits, strict=True)
    )


def _check_sizes(units: Units, terms: PlanTerms) -> None:
    if not units.members:
        return
    if max(units.tokens) > terms.budget:
        number = next(number for number, tokens in enumerate(units.tokens) if tokens > terms.budget)
        way = SAY_ALONE if len(units.members[number]) == 1 else ""
        has = f"has {units.tokens[number]} tokens, more than the budget of {terms.budget}"
        raise UsageError(f"{_name(units.members[number])} {has}: raise the budget{way}")
    for column, (name, limit) in zip(units.uses, terms.limits, strict=True):
        number, used = max(enumerate(column), key=operator.itemgetter(1))
        if used > limit:
            uses = f"uses {used} {name!r}, more than the limit of {limit}"
            raise UsageError(f"{_name(units.members[number])} {uses}: raise it")


def _name(unit: Indices) -> str:
    return f"sample {unit[0]}" if len(unit) == 1 else f"sample {unit[0]}, with those together with it,"
