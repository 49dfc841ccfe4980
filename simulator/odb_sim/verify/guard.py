"""What a rule under judgement may not ask: it is a function of the agreement, and all else may differ from rank to rank.

It is against mistakes. What is meant to get round it does: Python hides no object from code in the same process.
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
"""Modules that tell of nothing outside. A rule may use nothing of all others, nor of modules that these have imported."""
_DENIED: Final = ("numpy.datetime64", "numpy.random")
"""What is left out of these, with all in it: the clock, and chance."""


class OutsideError(Exception):
    """A rule has asked for more than the agreement; the text says for what."""


class Guard:
    """Notes what a rule uses of modules that are not `ALLOWED`, and what it opens.

    The rule's own files get views of the modules that they import, which note what is taken from them; the library itself is
    left as it is. What a rule catches and hides from us is noted all the same, while it is loaded and when it is asked.
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
        """Raises: OutsideError when something was noted since this was asked last."""
        noted, self._noted = self._noted, ""
        if noted:
            raise OutsideError(noted)

    def note(self, what: str) -> None:
        """Notes what is used; the first is enough."""
        self._noted = self._noted or what[:200]

    def _give(
        self,
        name: str,
        globals: Mapping[str, object] | None = None,
        locals: Mapping[str, object] | None = None,
        fromlist: Sequence[str] | None = (),
        level: int = 0,
    ) -> ModuleType:
        """Imports a module as ever, and gives the rule a view of it, where it is the rule that asks."""
        module = self._import(name, globals, locals, fromlist or (), level)
        return self.view(module) if globals is not None and self.is_own(globals) else module

    def view(self, module: ModuleType) -> ModuleType:
        """Returns what a rule sees of a module: one of its own as it is. What is set on a view is set on nothing else."""
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

        # In place of a class with this method, whose instances would have to hold the module.
        vars(view)["__getattr__"] = give
        return view

    def is_own(self, names: Mapping[str, object]) -> bool:
        """Returns True when these are the names of a module of the rule: of its file's folder, or of its package."""
        if self._folder:
            return str(Path(str(names.get("__file__", "/"))).resolve().parent) == self._folder
        return str(names.get("__name__", "")).partition(".")[0] == self._package

    def _hear(self, event: str, arguments: tuple[object, ...]) -> None:
        if event == "open" and self._is_by_rule(sys._getframe(1)):
            self.note(f"open {arguments[0]!r}")

    def _is_by_rule(self, frame: FrameType | None) -> bool:
        """Returns True when the rule opens something, or something does so on its behalf, but for an import."""
        while frame is not None:
            if "importlib" in frame.f_code.co_filename:
                return False
            if self.is_own(frame.f_globals):
                return True
            frame = frame.f_back
        return False
