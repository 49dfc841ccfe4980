"""Other values of a rule's parameters, which its name must distinguish."""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping, Sequence


def iterate_others(value: object, words: Sequence[str]) -> Iterator[object]:
    """Yields other values of the same type as ``value``, and nothing for unknown types."""
    match value:
        case bool():
            yield not value
        case int() | float():
            near = (value * 1.001, value * 1.000001) if isinstance(value, float) else ()
            for other in (value + 1, value * 2 + 1, value - 1, value / 2, value * 1_000, -value, *near):
                if type(value)(other) != value:
                    yield type(value)(other)
        case enum.Enum():
            yield from (item for item in type(value) if item is not value)
        case str():
            yield from (word for word in (*words, f"{value}x", "") if word != value)
        case None:
            yield from (1, 1_000, 0.5, True, "x", ())
            yield from iterate_options(words)
        case tuple() | list() | set() | frozenset():
            items = list(value)
            yield type(value)()
            for place, item in enumerate(items):
                yield type(value)(items[:place] + items[place + 1 :])
                yield from (
                    type(value)([*items[:place], other, *items[place + 1 :]]) for other in iterate_others(item, words)
                )
            yield type(value)([*items, items[0] if items else 1])
        case dict():
            yield {}
            for key, item in value.items():
                yield from ({**value, key: other} for other in iterate_others(item, words))
        case _:
            return


def iterate_pairs(one: object, two: object) -> Iterator[tuple[object, object]]:
    """Yields other values of two parameters at once, in case a name holds only their sum. Yields nothing for unlike types."""
    if type(one) is type(two) and one != two:
        yield two, one
    if isinstance(one, int | float) and isinstance(two, int | float) and not isinstance(one, bool):
        yield from ((one + 1, two - 1), (one - 1, two + 1))


def iterate_options(words: Sequence[str]) -> Iterator[Mapping[str, object]]:
    """Yields keyword options for a rule that takes any, since each of the words may be the name of one."""
    for word in words:
        if word.isidentifier():
            for value in (1, 1_000, True, "x"):
                yield {word: value}
