"""Arguments of the loader as a flat list of settings, for tests that combine them."""

from __future__ import annotations

from typing import Any

from odb_ref.torch.settings import RENAMED, arrange, spread


def nested(**options: Any) -> Any:
    """Returns the arguments with each setting in its group, under its present name."""
    return arrange({RENAMED.get(name, name): value for name, value in spread(options).items()})
