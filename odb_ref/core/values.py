"""Making frozen values quickly: an initialiser of a frozen dataclass sets each field by way of a lookup, and samples, counts
and states are made by the million.

A value begins as a *draft*, of a class with the same slots that can be written to, and becomes what it is when it is filled
in: ``draft.__class__ = cls``. What fills it in is compiled once for each class, as `dataclasses` compiles an ``__init__``.
"""

from __future__ import annotations

from dataclasses import MISSING, fields
from typing import TYPE_CHECKING, TypeVar, cast

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

T = TypeVar("T", bound="DataclassInstance")


def make_draft(cls: type[T]) -> type[T]:
    """Returns a constructor that gives what the frozen, slotted dataclass ``cls`` gives, in a third of the time."""
    parameters = [item.name if item.default is MISSING else f"{item.name}=_{item.name}" for item in fields(cls)]
    values = {item.name: item.name for item in fields(cls)}
    defaults = {f"_{item.name}": item.default for item in fields(cls)}
    return cast("type[T]", _compile(cls, parameters, values, defaults))


def make_replace(cls: type[DataclassInstance]) -> object:
    """Returns a function that gives what `dataclasses.replace` gives of a ``cls``, in an eighth of the time.

    To it an ellipsis means "as it was": no field's value is one.
    """
    parameters = ["_value", *(f"{item.name}=..." for item in fields(cls))]
    values = {item.name: f"_value.{item.name} if {item.name} is ... else {item.name}" for item in fields(cls)}
    return _compile(cls, parameters, values, {})


def _compile(
    cls: type[DataclassInstance], parameters: list[str], values: dict[str, str], scope: dict[str, object]
) -> object:
    """Returns a function of ``parameters`` that gives a ``cls`` with ``values``: expressions, by field."""
    lines = [
        f"def make({', '.join(parameters)}):",
        "    draft = _Draft()",
        *(f"    draft.{name} = {value}" for name, value in values.items()),
        "    draft.__class__ = _cls",
        "    return draft",
    ]
    draft = type(cls.__name__, (), {"__slots__": tuple(values)})
    scope |= {"_Draft": draft, "_cls": cls}
    exec("\n".join(lines), scope)
    return scope["make"]
