"""The subcommands. Each module has ``add_parser(subparsers)``, which sets ``run``: options -> exit status."""

from __future__ import annotations

from types import ModuleType
from typing import Final

from odb_sim.cli import (
    calibrate,
    check,
    compare,
    demo,
    explore,
    published,
    replay,
    simulate,
    sweep,
    tune,
    verify,
)

ALL: Final[tuple[ModuleType, ...]] = (
    demo,
    simulate,
    compare,
    sweep,
    tune,
    replay,
    calibrate,
    published,
    check,
    explore,
    verify,
)
