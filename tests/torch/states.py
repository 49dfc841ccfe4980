"""Changes saved states, and checks that they are refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from odb_ref.torch import ODBDataLoader, UsageError
from odb_ref.torch.plan.seal import seal


def change(state: dict[str, Any], **fields: Any) -> dict[str, Any]:
    """Returns the state with other fields, and a matching seal, as if it had been saved so."""
    return seal({name: value for name, value in state.items() if name != "checksums"} | fields)


def check_refused(make: Callable[[], ODBDataLoader], state: Any, message: str) -> None:
    """Checks that a new loader takes the state, and begins no epoch from it."""
    with make() as loader:
        loader.load_state_dict(state)
        with pytest.raises(UsageError, match=message):
            iter(loader)
