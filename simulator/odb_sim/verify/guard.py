"""Guards against a rule that depends on more than the agreement, since everything else may differ from rank to rank.

It catches mistakes, not malice: Python hides no object from code in the same process.
"""

from __future__ import annotations

import builtins
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType, ModuleType
from typing import Final

from odb_sim.inputs.rules import OWN

OUTSIDE: Final = "takes an answer from outside: "
CHANGES: Final = "changes the agreement that it is asked about"
ALLOWED: Final = (
    "__future__", "abc", "bisect", "collections", "dataclasses", "decimal", "enum", "fractions", "functools", "heapq",
    "itertools", "math", "numbers", "numpy", "odb_ref", "operator", "statistics", "typing",
)  # fmt: skip
"""Modules that reveal nothing about the outside. A rule may not use any others, even if these have imported them."""
_DENIED: Final = ("numpy.datetime64", "numpy.random")
"""Names excluded from these modules, with everything in them, because they give access to the clock and to chance."""


class OutsideError(Exception):
    """A rule has used more than the agreement. The message says what."""


class Guard:
    """Notes what a rule uses from modules that are not `ALLOWED`, and the files it opens.

    The rule's own files get views of the modules that they import, which note each access; the library itself is unchanged.
    Since the guard notes instead of raising, a rule cannot hide an access by catching exceptions, either when it is loaded or
    when it is asked.
    """

    def __init__(self, name: str) -> None:
        module_name = name.rpartition(OWN)[0]
        self._folder = str(Path(module_name).resolve().parent) if module_name.endswith(".py") else ""
        self._package = module_name.partition(".")[0]
        self._noted = ""
        self._import = builtins.__import__
        if module_name:
            builtins.__import__ = self._give
            sys.addaudithook(self._hear)

    def raise_noted(self) -> None:
        """Raises: OutsideError when something was noted since the last call."""
        noted, self._noted = self._noted, ""
        if noted:
            raise OutsideError(noted)

    def note(self, what: str) -> None:
        """Notes a use. Only the first one is kept."""
        self._noted = self._noted or what[:200]

    def _give(
        self,
        name: str,
        globals: Mapping[str, object] | None = None,
        locals: Mapping[str, object] | None = None,
        fromlist: Sequence[str] | None = (),
        level: int = 0,
    ) -> ModuleType:
        """Imports a module as usual, but returns a view of it if the rule does the import."""
        module = self._import(name, globals, locals, fromlist or (), level)
        return self.view(module) if globals is not None and self.is_own(globals) else module

    def view(self, module: ModuleType) -> ModuleType:
        """Returns the rule's view of a module, or the module itself if it is the rule's own. Setting an attribute on a view
        does not change the module.
        """
        if self.is_own(vars(module)):
            return module
        view = ModuleType(module.__name__)

        def give(name: str) -> object:
            whole = f"{module.__name__}.{name}"
            is_denied = any(f"{whole}.".startswith(f"{denied}.") for denied in _DENIED)
            if (is_denied or module.__name__.partition(".")[0] not in ALLOWED) and not name.startswith("__"):
                self.note(whole)
            try:
                found: object = getattr(module, name)
            except AttributeError:
                if name == "__all__":  # `from math import *` would find the view empty
                    return [public for public in vars(module) if not public.startswith("_")]
                found = sys.modules.get(whole)
                if found is None:
                    raise
            return self.view(found) if isinstance(found, ModuleType) else found

        # A function in the module's namespace, instead of a subclass whose instances would have to hold the module.
        vars(view)["__getattr__"] = give
        return view

    def is_own(self, names: Mapping[str, object]) -> bool:
        """Returns True when these are the names of one of the rule's modules: in its file's folder, or in its package."""
        if self._folder:
            return str(Path(str(names.get("__file__", "/"))).resolve().parent) == self._folder
        return str(names.get("__name__", "")).partition(".")[0] == self._package

    def _hear(self, event: str, arguments: tuple[object, ...]) -> None:
        if event == "open" and self._is_by_rule(sys._getframe(1)):
            self.note(f"open {arguments[0]!r}")

    def _is_by_rule(self, frame: FrameType | None) -> bool:
        """Returns True when the rule, or code it has called, opens a file, except by an import."""
        while frame is not None:
            if "importlib" in frame.f_code.co_filename:
                return False
            if self.is_own(frame.f_globals):
                return True
            frame = frame.f_back
        return False
