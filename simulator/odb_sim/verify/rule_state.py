"""The state of a rule, by place, which could make it answer differently the next time."""

from __future__ import annotations

import inspect
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Set
from contextlib import suppress
from decimal import Context
from functools import cached_property, lru_cache
from hashlib import sha256
from types import FunctionType, GeneratorType, ModuleType
from typing import Final

_MOST: Final = 200_000
"""The most values examined. A larger table is not examined completely."""
_WORDS: Final = 60
_ASIDE: Final = (ModuleType, type(lru_cache(len)), Context)
"""Types whose changes do not change an answer (a decimal context has flags), or that are examined separately."""
_Names = Mapping[str, object]


def compute_state(rule: object, modules: Iterable[ModuleType]) -> dict[str, str]:
    """Returns the state of the rule and of its own ``modules``, to any depth, as a text for each place."""
    own = {module.__name__: vars(module) for module in modules}
    waiting: list[tuple[str, object]] = [("self", rule)]
    waiting += [item for names in own.values() for item in _list_named("", names)]
    state: dict[str, str] = {}
    places: dict[int, str] = {}
    for place, value in waiting:  # the list grows, and keeps its values alive, so that an id stays one object's
        if len(state) == _MOST:
            break
        if isinstance(value, _ASIDE):
            continue
        if isinstance(value, int | float | str | bytes | None):
            state[place] = repr(value)
        elif id(value) in places:
            state[place] = places[id(value)]
        else:
            places[id(value)], state[place] = place, _describe(value)
            waiting += _iterate_kept(place, value, own)
    return state


def describe_change(before: Mapping[str, str], after: Mapping[str, str]) -> str:
    """Returns a description of the first change, or an empty text."""
    for place in (*before, *after):
        was, now = (state.get(place, "nothing")[:_WORDS] for state in (before, after))
        if before.get(place) != after.get(place):
            return f"{place} was {was} and is {now}"
    return ""


def _describe(value: object) -> str:
    if isinstance(value, dict | list | tuple | deque):
        return f"a {type(value).__name__} of {len(value)}"
    with suppress(Exception):
        if isinstance(value, Set):
            return str(sorted(map(repr, value)))  # the order of an unchanged set may change
        with suppress(TypeError):
            return f"bytes of digest {sha256(memoryview(value).tobytes()).hexdigest()}"  # type: ignore[arg-type]  # NumPy's arrays
        return repr(value)
    return object.__repr__(value)


def _iterate_kept(place: str, value: object, own: Mapping[str, _Names]) -> Iterator[tuple[str, object]]:
    """Yields the contents of a value: of objects, classes and functions only if they are of the rule's own modules."""
    if isinstance(value, dict):
        yield from ((f"{place}[{key!r}]", item) for key, item in value.items())
    if isinstance(value, list | tuple | deque):
        yield from ((f"{place}[{number}]", item) for number, item in enumerate(value))
    if isinstance(value, GeneratorType):
        yield from _list_named(place, inspect.getgeneratorlocals(value))
    if isinstance(value, FunctionType | type) and value.__module__ in own:
        yield from _list_named(place, vars(value))
    if isinstance(value, FunctionType) and value.__module__ in own:
        yield f"{place}.__defaults__", value.__defaults__
        yield f"{place}.__kwdefaults__", value.__kwdefaults__
        for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
            with suppress(ValueError):  # an empty one
                yield f"{place}.{name}", cell.cell_contents
    if type(value).__module__ in own:
        parts = object.__getstate__(value)
        for part in parts if isinstance(parts, tuple) else (parts,):
            yield from _list_named(place, part or {}, type(value))


def _list_named(place: str, names: _Names, kind: type | None = None) -> list[tuple[str, object]]:
    """Returns the named values, without Python's special names and without cached properties."""
    return [
        (f"{place}.{name}".lstrip("."), value)
        for name, value in names.items()
        if not name.startswith("__") and not isinstance(inspect.getattr_static(kind, name, None), cached_property)
    ]
