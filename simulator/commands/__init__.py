"""The subcommands. Each module has ``add_parser(subparsers)``, which sets ``run``: options -> exit status."""

from __future__ import annotations

from types import ModuleType
from typing import Final

from simulator.commands import calibrate, check, compare, explore, replay, simulate, sweep

ALL: Final[tuple[ModuleType, ...]] = (simulate, compare, sweep, replay, calibrate, check, explore)
