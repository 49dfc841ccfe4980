"""`odb.integrations`: the names of the frameworks' modules, imported on demand."""

from __future__ import annotations

from importlib import import_module
from typing import Final

_WHERE: Final = {
    "ODBAccelerateBridge": ("accelerate", "ODBAccelerateBridge"),
    "ODBLightningBridge": ("lightning", "ODBLightningBridge"),
    "ODBLightningCallback": ("lightning", "ODBLightningCallback"),
    "ODBLightningMixin": ("lightning", "ODBLightningMixin"),
    "ODBTrainer": ("hf", "ODBTrainer"),
    "ODBTrainerBridge": ("hf", "ODBTrainerBridge"),
    "ODBTrainerMixin": ("hf", "ODBTrainerMixin"),
    "configure_accelerator": ("accelerate", "configure_accelerator"),
    "configure_hf_trainer": ("hf", "configure_trainer"),
    "configure_lightning_module": ("lightning", "configure_lightning_module"),
    "configure_llamafactory_trainer": ("llamafactory", "configure_trainer"),
    "configure_trainer": ("hf", "configure_trainer"),
    "enable_hf_odb": ("hf", "enable_odb"),
    "enable_llamafactory_odb": ("llamafactory", "enable_odb"),
}

_MODULES: Final = ("accelerate", "hf", "lightning", "llamafactory", "llavafactory")


def __getattr__(name: str) -> object:
    if name in _MODULES:
        return import_module(f"{__name__}.{name}")
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, item = _WHERE[name]
    found: object = getattr(import_module(f"{__name__}.{module}"), item)
    return found


def __dir__() -> list[str]:
    return sorted({*_WHERE, *_MODULES})
