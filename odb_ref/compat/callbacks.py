"""`odb.callbacks`: counts a Trainer's samples. Needs transformers when it is used."""

from __future__ import annotations

from importlib import import_module


def __getattr__(name: str) -> object:
    if name in ("setup_odb_training", "ODBDynamicBatchCallback"):
        return getattr(import_module("odb_ref.compat.integrations.hf"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
