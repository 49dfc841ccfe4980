"""The integrations with training frameworks, in real processes."""

from __future__ import annotations

import importlib
import os

import pytest


def require(framework: str) -> None:
    """Skips the module or the test, naming what to install, if a framework is missing. In CI that is a failure."""
    for name in ("torch", framework):
        try:
            importlib.import_module(name)
        except ImportError:
            message = f"needs {name}: pip install 'odb-ref[torch,{framework}]'"
            if os.environ.get("CI") == "true":
                pytest.fail(message)
            pytest.skip(message, allow_module_level=True)
