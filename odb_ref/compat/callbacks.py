"""`odb.callbacks`: the one call that sets a Trainer up, which needs transformers."""

from __future__ import annotations

from importlib import import_module


def __getattr__(name: str) -> object:
    if name == "setup_odb_training":
        return getattr(import_module("odb_ref.compat.integrations.hf"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
