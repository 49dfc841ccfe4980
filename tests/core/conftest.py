"""The core keeps no state: its modules hold the same before and after all of these tests."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator
from types import FunctionType, ModuleType
from typing import Protocol

import pytest

import odb_ref.core


def describe(value: object) -> str:
    """Describes a value in a module: the mutable parts of a function, the attributes of a class, or the value itself."""
    if isinstance(value, FunctionType):
        cells = [cell.cell_contents for cell in value.__closure__ or ()]
        return f"{vars(value)} {value.__defaults__} {value.__kwdefaults__} {cells}"
    if isinstance(value, type) and value.__module__.startswith("odb_ref.core"):
        # Python's own cache for ``isinstance`` with a protocol changes when it is used.
        own = {name: item for name, item in vars(value).items() if not (Protocol in value.__bases__ and name[0] == "_")}
        return str({name: describe(item) for name, item in own.items() if item is not value})
    return repr(value)


def list_held() -> dict[str, dict[str, str]]:
    """Returns for each module of the core what it holds, by name."""
    names = [item.name for item in pkgutil.walk_packages(odb_ref.core.__path__, "odb_ref.core.")]
    modules = [importlib.import_module(name) for name in names]
    return {
        module.__name__: {
            name: describe(item)
            for name, item in vars(module).items()
            if not name.startswith("__") and not isinstance(item, ModuleType)
        }
        for module in modules
    }


@pytest.fixture(autouse=True, scope="package")
def _core_remembers_nothing() -> Iterator[None]:
    before = list_held()
    yield
    after = list_held()
    changed = [(name, key) for name, held in after.items() for key in held if before[name].get(key) != held[key]]
    assert not changed, f"REPLAY: the core remembers what was before, in {changed}"
