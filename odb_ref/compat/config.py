"""Translates the settings of `online-dynamic-batching`, under all names they have had, to those of `odb_ref`."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Final

from odb_ref.torch import UsageError

LossScalingMode = str | bool | None

_SCALING: Final = {"none": "none", "approx": "exact", "exact": "exact"}
"""Both modes of the release weight by tokens, one by an estimate. Here the numbers are known."""
_ALIASES: dict[str, str] = dict.fromkeys(("no", "off", "false"), "none") | {"token_exact": "exact"}
_ALIASES |= dict.fromkeys(("token", "token_approx", "approximate", "true"), "approx")
_MEANT: Final = {
    "group_order_flip": "batches come in an order that is the same for the same seed",
    "no_warmup": "how large the first windows are is ramp_rounds here",
    "version": "there is one protocol here",
}
"""Settings without a counterpart, and why."""


@dataclass(frozen=True, slots=True)
class ODBConfig:
    """The settings of a loader. A default of None or 0 means the default of `odb_ref.ODBDataLoader`.

    Raises: UsageError when a value is invalid.
    """

    token_budget: int
    loss_scaling: str = "none"
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
        """True if losses are weighted."""
        return resolve_scaling(self.loss_scaling) != "none"

    @property
    def loss_scaling_approx(self) -> bool:
        """True unless the mode is ``"exact"``. Here both modes are exact."""
        return self.loss_scaling != "exact"

    def make_options(self) -> dict[str, object]:
        """Returns the arguments of `odb_ref.ODBDataLoader`. Warns about settings without a counterpart."""
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


def normalize_loss_scaling(loss_scaling: LossScalingMode, loss_scaling_approx: bool = True) -> str:
    """Returns the name of the mode in the release: ``"none"``, ``"approx"`` or ``"exact"``.

    ``loss_scaling_approx`` determines what the legacy value True means.

    Raises: UsageError when there is no such mode.
    """
    if loss_scaling is None or isinstance(loss_scaling, bool):
        return ("approx" if loss_scaling_approx else "exact") if loss_scaling else "none"
    mode = loss_scaling.lower().replace("-", "_")
    mode = _ALIASES.get(mode, mode)
    if mode not in _SCALING:
        raise UsageError(
            f"loss_scaling must be one of {', '.join(_SCALING)}, or a legacy boolean, got {loss_scaling!r}"
        )
    return mode


def resolve_scaling(mode: LossScalingMode) -> str:
    """Returns the name of the mode in `odb_ref`. Raises: UsageError when there is no such mode."""
    return _SCALING[normalize_loss_scaling(mode)]


_LEGACY: Final = {"token_budget": "max_input_length", "join": "join_mode"}
_NAMES: Final = frozenset({item.name for item in fields(ODBConfig)} | {*_LEGACY.values(), "loss_scaling_approx"})


def split_settings(options: Mapping[str, object]) -> tuple[dict[str, object], dict[str, object]]:
    """Splits ``options`` into settings, under any of their names, and the rest."""
    settings = {name: value for name, value in options.items() if name in _NAMES}
    return settings, {name: value for name, value in options.items() if name not in _NAMES}


def resolve_config(*, config: ODBConfig | None = None, **settings: object) -> ODBConfig:
    """Returns the configuration from ``config`` or from single ``settings``, under any of their names.

    None means that a setting is not given.

    Raises: UsageError when a setting is given twice with different values, or the token budget is missing; TypeError for an
    unknown name.
    """
    if unknown := settings.keys() - _NAMES:
        raise TypeError(f"resolve_config() has no argument {', '.join(sorted(unknown))}")
    given = {name: value for name, value in settings.items() if value is not None and name != "loss_scaling_approx"}
    for name, legacy in _LEGACY.items():
        if legacy in given:
            old = given.pop(legacy)
            if given.setdefault(name, old) != old:
                raise UsageError(f"{name}={given[name]!r} and its legacy name {legacy}={old!r} say different things")
    if "loss_scaling" in given:
        is_approximate = settings.get("loss_scaling_approx") is not False
        given["loss_scaling"] = normalize_loss_scaling(given["loss_scaling"], is_approximate)  # type: ignore[arg-type]
    if config is not None:
        if others := [name for name, value in given.items() if value != getattr(config, name)]:
            raise UsageError(
                f"config= holds all settings, and {', '.join(sorted(others))} is given beside it, otherwise"
            )
        return config
    if "token_budget" not in given:
        raise UsageError("a token budget is needed: token_budget=..., or its legacy name max_input_length=...")
    return ODBConfig(**given)  # type: ignore[arg-type]


def replace_config(config: ODBConfig, **changes: object) -> ODBConfig:
    """Returns a configuration with some settings changed."""
    return replace(config, **changes)  # type: ignore[arg-type]
