"""The violation of a property, which a search looks for."""

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

    An invariant names its property. Any other refusal of an event from a correct driver counts as a deadlock (FREE).
    """
    if not isinstance(error, InvariantError):
        return "FREE"
    # The message of a core invariant (I1, I2, ...) begins with its property. Other invariants are named after theirs.
    word = error.detail.partition(":")[0]
    return word if word.isupper() else error.invariant
