"""Changes saved states."""

from __future__ import annotations

from typing import Any

from odb_ref.torch.plan.seal import seal


def change(state: dict[str, Any], **fields: Any) -> dict[str, Any]:
    """Returns the state with other fields, and a matching seal, as if it had been saved so."""
    return seal({name: value for name, value in state.items() if name != "checksums"} | fields)
