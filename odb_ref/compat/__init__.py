"""The names of `online-dynamic-batching` 0.1.2. To migrate, replace ``import odb`` by ``import odb_ref.compat as odb``.

This is a thin layer; `odb_ref` makes all decisions. docs/howto/migrate.md lists the deliberate differences, with reasons.
"""

from __future__ import annotations

from odb_ref.extras import require

require(__name__, "torch", "numpy", extra="torch")

from importlib import import_module
from types import ModuleType
from typing import Final

from odb_ref.compat.config import ODBConfig
from odb_ref.compat.constants import (
    LOCAL_BATCH_SIZE_KEY,
    LOCAL_TOKENS_KEY,
    ODB_STEP_INFO_KEY,
    TOTAL_BATCH_SIZE_KEY,
    TOTAL_TOKENS_KEY,
)
from odb_ref.compat.dataloader import ODBDataLoader, apply
from odb_ref.compat.handle import ODBHandle
from odb_ref.compat.step_info import ODBStepInfo, pop_step_info
from odb_ref.compat.utils import scale_loss

__version__: Final = "0.1.2"
"""The release that has these names. The version of this package is `odb_ref.__version__`."""

apply_v9: Final = None
"""A name that the release exports, also without a value."""

__all__ = [
    "LOCAL_BATCH_SIZE_KEY",
    "LOCAL_TOKENS_KEY",
    "ODB_STEP_INFO_KEY",
    "TOTAL_BATCH_SIZE_KEY",
    "TOTAL_TOKENS_KEY",
    "ODBConfig",
    "ODBDataLoader",
    "ODBHandle",
    "ODBStepInfo",
    "__version__",
    "apply",
    "apply_v9",
    "pop_step_info",
    "scale_loss",
]


def __getattr__(name: str) -> ModuleType:
    if name == "integrations":
        return import_module("odb_ref.compat.integrations")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
