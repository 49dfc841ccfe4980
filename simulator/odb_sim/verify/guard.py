"""What a rule under judgement may not ask: it is a function of the agreement, and all else may differ from rank to rank."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Final

from odb_sim.inputs.rules import OWN

OUTSIDE: Final = "takes an answer from outside: "


class OutsideError(Exception):
    """A rule has asked for more than the agreement; the text says for what."""


class Guard:
    """Notes what a rule asks of the world outside: files, the network, other processes, modules, the environment, arguments.

    While it is loaded a rule may import; while it is asked it may not even do that. What it catches and hides from us is noted
    all the same. Only code in the rule's own file is looked at, and all that runs while the rule is asked.
    """

    def __init__(self, name: str) -> None:
        module_name = name.rpartition(OWN)[0]
        self._module = f"_odb_rule_{Path(module_name).stem}" if module_name.endswith(".py") else module_name
        self._is_asked = False
        self._noted = ""
        sys.addaudithook(self._hear)
        vars(os)["environ"] = _Watched(os.environ, self)  # for who asks `os`, not for the processes it starts
        sys.argv = _WatchedList(sys.argv, self)
        sys.orig_argv = _WatchedList(sys.orig_argv, self)

    def __enter__(self) -> None:
        self._is_asked = True

    def __exit__(self, *rest: object) -> None:
        self._is_asked = False

    def raise_noted(self) -> None:
        """Raises: OutsideError when something was noted since this was asked last."""
        noted, self._noted = self._noted, ""
        if noted:
            raise OutsideError(noted)

    def note(self, what: str) -> None:
        """Notes what was asked for, when it was by a rule."""
        if not self._noted and (self._is_asked or self._is_of_rule(sys._getframe(2))):
            self._noted = what

    def _hear(self, event: str, arguments: tuple[object, ...]) -> None:
        if event in _AUDITED and (self._is_asked or (event != "import" and self._is_of_rule(sys._getframe(1)))):
            self._noted = self._noted or f"{event} {arguments[0] if arguments else ''!r}"[:200]

    def _is_of_rule(self, frame: FrameType | None) -> bool:
        """Returns True when the frame is in the rule's own file, or in the library on its behalf, and nothing is imported."""
        while frame is not None:
            if frame.f_globals.get("__name__") == self._module:
                return True
            if "importlib" in frame.f_code.co_filename or frame.f_globals.get("__name__") == "__main__":
                return False
            frame = frame.f_back
        return False


_AUDITED: Final = frozenset(
    {
        "open", "import", "os.listdir", "os.scandir", "os.system", "os.exec", "os.fork", "os.posix_spawn", "subprocess.Popen",
        "socket.__new__", "socket.connect", "socket.getaddrinfo", "ctypes.dlopen", "mmap.__new__", "sqlite3.connect",
    }
)  # fmt: skip
"""What CPython says of itself when code reaches outside (PEP 578)."""


class _Watched(dict[str, str]):
    """The environment, for a rule that looks into it."""

    def __init__(self, values: Mapping[str, str], guard: Guard) -> None:
        super().__init__(values)
        self._guard = guard

    def __getitem__(self, key: str) -> str:
        self._guard.note(f"the environment's {key}")
        return super().__getitem__(key)

    def get(self, key: str, default: object = None) -> object:  # type: ignore[override]
        self._guard.note(f"the environment's {key}")
        return super().get(key, default)

    def __contains__(self, key: object) -> bool:
        self._guard.note(f"the environment's {key}")
        return super().__contains__(key)

    def __iter__(self) -> Iterator[str]:
        self._guard.note("the environment")
        return super().__iter__()

    def items(self):  # type: ignore[no-untyped-def]
        self._guard.note("the environment")
        return super().items()

    def keys(self):  # type: ignore[no-untyped-def]
        self._guard.note("the environment")
        return super().keys()

    def values(self):  # type: ignore[no-untyped-def]
        self._guard.note("the environment")
        return super().values()


class _WatchedList(list[str]):
    """The arguments of the command, for a rule that looks at them."""

    def __init__(self, values: Sequence[str], guard: Guard) -> None:
        super().__init__(values)
        self._guard = guard

    def __getitem__(self, place):  # type: ignore[no-untyped-def]
        self._guard.note("sys.argv")
        return super().__getitem__(place)

    def __contains__(self, item: object) -> bool:
        self._guard.note("sys.argv")
        return super().__contains__(item)

    def __iter__(self) -> Iterator[str]:
        self._guard.note("sys.argv")
        return super().__iter__()

    def __len__(self) -> int:
        self._guard.note("sys.argv")
        return super().__len__()
