"""Changes saved states, and checks how epochs fail."""

from __future__ import annotations

from typing import Any

import pytest

from odb_ref.torch import JobError, ODBDataLoader, UsageError
from odb_ref.torch.plan.seal import seal


def change(state: dict[str, Any], **fields: Any) -> dict[str, Any]:
    """Returns the state with other fields, and a matching seal, as if it had been saved so."""
    return seal({name: value for name, value in state.items() if name != "checksums"} | fields)


def check_fails(loader: ODBDataLoader, message: str, error: type[Exception] = JobError) -> None:
    """Checks that an epoch raises this error, and closes the loader."""
    with loader, pytest.raises(error, match=message):
        list(loader.steps())


def check_refused(loader: ODBDataLoader, message: str) -> None:
    """Checks that an epoch does not begin, and closes the loader."""
    with loader, pytest.raises(UsageError, match=message):
        iter(loader)
