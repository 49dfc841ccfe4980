"""The settings of `online-dynamic-batching`, under the names it has and has had for them, and what they are here."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Final

from odb_ref.torch import UsageError

LossScalingMode = str | bool | None

_SCALING: Final = {"none": "none", "approx": "samples", "exact": "exact"}
_MEANT: Final = {
    "group_order_flip": "batches come in an order that is the same for the same seed",
    "no_warmup": "how large the first windows are is ramp_rounds here",
    "version": "there is one protocol here",
}
"""Settings without a counterpart, and why."""


@dataclass(frozen=True, slots=True)
class ODBConfig:
    """The settings of a loader. Those whose default is None or 0 mean the defaults of `odb_ref.ODBDataLoader`.

    Raises: UsageError when a value makes no sense.
    """

    token_budget: int
    loss_scaling: LossScalingMode = "none"
    join: bool = True
    buffer_size: int | None = None
    max_patches: int = 0
    group_order_flip: str | None = "none"
    no_sync: bool = False
    no_warmup: bool = False
    version: int = 5

    def __post_init__(self) -> None:
        resolve_scaling(self.loss_scaling)
        if self.no_sync:
            raise UsageError("no_sync=True would let ranks take different numbers of steps: there is no such mode here")

    @property
    def max_input_length(self) -> int:
        """The legacy name of ``token_budget``."""
        return self.token_budget

    @property
    def join_mode(self) -> bool:
        """The legacy name of ``join``."""
        return self.join

    @property
    def loss_scaling_enabled(self) -> bool:
        """True when losses are weighed."""
        return resolve_scaling(self.loss_scaling) != "none"

    @property
    def loss_scaling_approx(self) -> bool:
        """True when they are weighed by samples, not by tokens."""
        return resolve_scaling(self.loss_scaling) == "samples"

    def make_options(self) -> dict[str, object]:
        """Returns what `odb_ref.ODBDataLoader` is told. Warns of what has no counterpart."""
        for item in fields(self):
            if item.name in _MEANT and getattr(self, item.name) not in (item.default, None):
                warnings.warn(
                    f"{item.name}={getattr(self, item.name)!r} changes nothing: {_MEANT[item.name]}", stacklevel=4
                )
        options: dict[str, object] = {
            "token_budget": self.token_budget,
            "scaling": resolve_scaling(self.loss_scaling),
            "mode": "join" if self.join else "quota",
        }
        if self.buffer_size is not None:
            options["window"] = self.buffer_size
        if self.max_patches:
            options["max_patches"] = self.max_patches
        return options


def resolve_scaling(mode: LossScalingMode, *, is_approximate: bool = True) -> str:
    """Returns the mode by its name in `odb_ref`; ``is_approximate`` says what the legacy True means.

    Raises: UsageError when there is no such mode.
    """
    if mode is None or isinstance(mode, bool):
        return ("samples" if is_approximate else "exact") if mode else "none"
    if mode not in _SCALING:
        raise UsageError(f"loss_scaling must be one of {', '.join(_SCALING)}, or a legacy boolean, got {mode!r}")
    return _SCALING[mode]


_LEGACY: Final = {"token_budget": "max_input_length", "join": "join_mode"}
_NAMES: Final = frozenset({item.name for item in fields(ODBConfig)} | {*_LEGACY.values(), "loss_scaling_approx"})


def split_settings(options: Mapping[str, object]) -> tuple[dict[str, object], dict[str, object]]:
    """Returns the settings among ``options``, under any of their names, and the rest."""
    settings = {name: value for name, value in options.items() if name in _NAMES}
    return settings, {name: value for name, value in options.items() if name not in _NAMES}


def resolve_config(config: ODBConfig | None, settings: Mapping[str, object]) -> ODBConfig:
    """Returns the configuration that ``config`` and single ``settings`` come to; None stands for one that is not given.

    Raises: UsageError when a setting is given in two ways, or the token budget in none.
    """
    given = {name: value for name, value in settings.items() if value is not None and name != "loss_scaling_approx"}
    for name, legacy in _LEGACY.items():
        if legacy in given:
            old = given.pop(legacy)
            if given.setdefault(name, old) != old:
                raise UsageError(f"{name}={given[name]!r} and its legacy name {legacy}={old!r} say different things")
    if settings.get("loss_scaling_approx") is False and given.get("loss_scaling") is True:
        given["loss_scaling"] = "exact"
    elif given.get("loss_scaling") is True:
        given["loss_scaling"] = "approx"
    if config is not None:
        if given:
            raise UsageError(f"config= holds all settings, and {', '.join(sorted(given))} is given beside it")
        return config
    if "token_budget" not in given:
        raise UsageError("a token budget is needed: token_budget=..., or its legacy name max_input_length=...")
    return ODBConfig(**given)  # type: ignore[arg-type]
