"""Arguments of the loader as a flat list of settings, for tests that add some to others."""

from __future__ import annotations

from typing import Any

from odb_ref.torch.settings import RENAMED, arrange, spread


def nested(**options: Any) -> Any:
    """Returns the arguments, with each setting in its group, whatever its name was in earlier versions."""
    return arrange({RENAMED.get(name, name): value for name, value in spread(options).items()})
