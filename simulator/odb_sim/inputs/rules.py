"""Target rules by name: shipped ones, and those in a user's module or file."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
import sysconfig
from collections.abc import Callable
from functools import lru_cache
from hashlib import sha256
from importlib import resources
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType
from typing import Final

from odb_ref.core.batching.rules import RULES, TargetRule, get_rule
from odb_ref.core.errors import UsageError

OWN: Final = ":"
"""Occurs in the name of a user's rule: ``module:name`` or ``path.py:name``."""


def load_rule(name: str, load: Callable[[str], ModuleType] | None = None) -> TargetRule:
    """Returns the rule called ``name``: a shipped one, ``module:attribute`` or ``path.py:attribute``.

    The attribute is a rule, or a class that makes one. The current directory is searched for modules last. ``load`` returns the
    module instead of `import_named`.
    Raises: UsageError when there is no such rule.
    """
    module_name, colon, attribute = name.rpartition(OWN)
    if not colon:
        return get_rule(name)
    try:
        module = (load or import_named)(module_name)
    except (Exception, SystemExit) as error:  # anything the module may do wrong while it is loaded
        raise UsageError(f"rule {name!r}: cannot import {module_name!r}: {describe_error(error)}") from error
    try:
        found: object = getattr(module, attribute)
    except AttributeError:
        raise UsageError(f"rule {name!r}: module {module_name!r} has no {attribute!r}") from None
    try:
        rule = found() if isinstance(found, type) else found
        is_rule = isinstance(rule, TargetRule)
    except (Exception, SystemExit) as error:
        raise UsageError(f"rule {name!r} cannot be made: {describe_error(error)}") from error
    if not is_rule:
        raise UsageError(
            f"rule {name!r}: needs a name and compute_target(agreement), see odb_ref.core.batching.rules.TargetRule"
        )
    return rule  # type: ignore[return-value]  # `is_rule` says so.


def load_policy_rule(name: str) -> TargetRule:
    """Returns the rule as `load_rule` does, for use beside the shipped ones.

    Raises: UsageError when there is no such rule, or it has a shipped rule's name, since ranks could not tell the two apart.
    """
    return check_rule_name(name, load_rule(name))


def check_rule_name(name: str, rule: TargetRule) -> TargetRule:
    """Returns the rule that ``name`` has loaded. Raises: UsageError when it is not known by a name of its own."""
    if not isinstance(rule.name, str) or not rule.name:
        raise UsageError(f"rule {name!r}: its name is {rule.name!r}, which must be one word")
    if OWN in name and rule.name in RULES and type(rule) is not type(RULES[rule.name]):
        raise UsageError(f"rule {name!r} has the name {rule.name!r} of a shipped rule: give it a name of its own")
    return rule


def digest_rule(name: str) -> str:
    """Returns a digest of the file that holds the rule ``name`` and of all other imported files of the user's, since the rule
    may use them. The result is empty for a shipped rule, or without such a file.
    """
    module_name, colon, _ = name.rpartition(OWN)
    if not colon:
        return ""
    try:
        path = inspect.getsourcefile(import_named(module_name))
        if path is None:
            return ""
        files = sorted({Path(path).resolve(), *_list_own_files(len(sys.modules))})
        return _digest_files(tuple((file, file.stat().st_mtime_ns) for file in files if file.is_file()))
    except (Exception, SystemExit):  # running the rule will report the error
        return ""


@lru_cache(maxsize=8)
def _digest_files(files: tuple[tuple[Path, int], ...]) -> str:
    """Returns a digest of files, given with their times of modification so that changed files are read again."""
    return sha256(b"".join(file.read_bytes() for file, _ in files)).hexdigest()


@lru_cache(maxsize=1)
def _list_own_files(_modules: int) -> frozenset[Path]:
    """Returns the files of imported modules that belong neither to Python, to installed packages, nor to this program. The
    argument is the number of imported modules, so that the cache notices new ones.
    """
    names = ("stdlib", "platstdlib", "purelib", "platlib")
    libraries = [Path(sysconfig.get_path(name)).resolve() for name in names]
    libraries += [Path(str(resources.files(package))).resolve() for package in ("odb_ref", "odb_sim")]
    given = [getattr(module, "__file__", None) for module in [*sys.modules.values()]]
    files = [Path(file).resolve() for file in given if isinstance(file, str) and file.endswith(".py")]
    return frozenset(file for file in files if not any(file.is_relative_to(folder) for folder in libraries))


def describe_error(error: BaseException) -> str:
    """Returns an error in one line."""
    try:
        lines = str(error).splitlines()
    except Exception:  # an error of a user's rule may do anything
        lines = []
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def import_named(module_name: str) -> ModuleType:
    """Returns the module of this name, or of this path of a Python file. Raises: any error that the module raises."""
    if not module_name.endswith(".py"):
        _search_here()
        return importlib.import_module(module_name)
    path = Path(module_name)
    # A distinct name, because the stem may be that of a module which others import.
    name = f"_odb_rule_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError("not a Python file")
    module = importlib.util.module_from_spec(spec)
    # Dataclasses look their module up by name.
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def find_file(module_name: str) -> str:
    """Returns the file of a module. Neither it nor a package that holds it is run. Raises: any error, if there is none."""
    if module_name.endswith(".py"):
        return module_name
    _search_here()
    package, *parts = module_name.split(".")
    spec = importlib.util.find_spec(package)
    for part in parts:
        spec = spec and PathFinder.find_spec(part, spec.submodule_search_locations or ())
    if spec is None or spec.origin is None:
        raise ImportError(f"there is no module {module_name!r}")
    return spec.origin


def _search_here() -> None:
    # Last, so that a file called random.py in the current directory replaces no library.
    if "" not in sys.path:
        sys.path.append("")
