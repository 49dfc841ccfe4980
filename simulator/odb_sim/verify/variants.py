"""Other values of a rule's parameters, which its name must distinguish."""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations


def iterate_changes(given: Mapping[str, object], words: Sequence[str]) -> Iterator[Mapping[str, object]]:
    """Yields other values of one of the parameters, or of two at once, in case a name joins them or holds only their sum."""
    for name, value in given.items():
        yield from ({name: other} for other in _iterate_others(value, words))
    for one, two in combinations(given, 2):
        yield from ({one: first, two: second} for first, second in _iterate_pairs(given[one], given[two]))


def _iterate_others(value: object, words: Sequence[str]) -> Iterator[object]:
    """Yields other values of the same type as ``value``."""
    match value:
        case bool():
            yield not value
        case int():
            near = (value + 1, value * 2 + 1, value - 1, value // 2, value * 1_000, -value, 0, None)
            yield from (other for other in dict.fromkeys(near) if other != value)
        case enum.Enum():
            yield from (item for item in type(value) if item is not value)
        case str():
            yield from (word for word in (*words, f"{value}x", "") if word != value)
        case None:
            yield from (1, 1_000, True, "x", ())
        case tuple():
            yield ()
            for place, item in enumerate(value):
                yield value[:place] + value[place + 1 :]
                yield from ((*value[:place], other, *value[place + 1 :]) for other in _iterate_others(item, words))
            yield (*value, value[0] if value else 1)


def _iterate_pairs(one: object, two: object) -> Iterator[tuple[object, object]]:
    if type(one) is type(two) and one != two:
        yield two, one
    if isinstance(one, int) and isinstance(two, int) and not isinstance(one, bool):
        yield from ((one + 1, two - 1), (one - 1, two + 1))
        if max(abs(one), abs(two)) < 10**18 and (digits := f"{one}{two}").isdecimal():  # Python writes no huge number
            yield from ((int(digits[:place]), int(digits[place:])) for place in range(1, len(digits)))
