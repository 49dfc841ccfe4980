"""What a search looks for: a property that does not hold."""

from __future__ import annotations

from odb_ref.core.errors import InvariantError, OdbError


class Breach(Exception):
    """A property does not hold. ``property`` is its id."""

    def __init__(self, property_: str, detail: str) -> None:
        super().__init__(f"{property_}: {detail}")
        self.property = property_
        self.detail = detail


def name_property(error: OdbError) -> str:
    """Returns the id of the property that an error of the core shows to be broken.

    An invariant names its property; any other refusal of an event that a sound driver sent is a deadlock (FREE).
    """
    if not isinstance(error, InvariantError):
        return "FREE"
    # The core's invariants (I1, I2, ...) say first whose property they keep; others are called after it.
    word = error.detail.partition(":")[0]
    return word if word.isupper() else error.invariant
