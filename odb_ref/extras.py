"""Imports of optional packages. If one is missing, the error names the command that installs it."""

from __future__ import annotations

from importlib import import_module


def require(what: str, *packages: str, extra: str) -> None:
    """Imports ``packages``, for a module that cannot work without them.

    Raises: ModuleNotFoundError that names the first missing package and the command that installs it.
    """
    for package in packages:
        try:
            import_module(package)
        except ModuleNotFoundError as error:
            if (error.name or "").partition(".")[0] != package:
                raise
            raise ModuleNotFoundError(describe(what, package, extra), name=package) from error


def describe(what: str, package: str, extra: str) -> str:
    """Returns a one-line message. Its command works for a wheel and in an environment with a clone installed."""
    return f"{what} needs {package}, which is not installed: pip install 'odb-ref[{extra}]'"
