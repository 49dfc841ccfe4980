"""The subcommands. Each module has ``add_parser(subparsers)``, which sets ``run``: options -> exit status."""

from __future__ import annotations

from types import ModuleType
from typing import Final

ALL: Final[tuple[ModuleType, ...]] = ()
