"""Making frozen values quickly: an initialiser of a frozen dataclass sets each field by way of a lookup, and samples, counts
and states are made by the million.
"""

from __future__ import annotations

from dataclasses import MISSING, field, fields, make_dataclass
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

T = TypeVar("T", bound="DataclassInstance")


def make_draft(cls: type[T], *, is_open: bool = False) -> type[T]:
    """Returns a constructor that gives what the frozen, slotted dataclass ``cls`` gives, in less than half the time.

    It is a class with the same slots that can be written to, whose instances become ``cls`` when they are filled in; an
    open one leaves that to the caller, who has fields to set before: ``draft.__class__ = cls``.
    """

    def __post_init__(self: T) -> None:
        self.__class__ = cls

    items = [
        (item.name, item.type, field() if item.default is MISSING else field(default=item.default))
        for item in fields(cls)
    ]
    namespace = {} if is_open else {"__post_init__": __post_init__}
    return make_dataclass(cls.__name__, items, namespace=namespace, slots=True)
