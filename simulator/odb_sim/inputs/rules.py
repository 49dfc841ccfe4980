"""Target rules by name: shipped ones, and those of a user's own module or file."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
import sysconfig
from functools import lru_cache
from hashlib import sha256
from importlib import resources
from pathlib import Path
from types import ModuleType
from typing import Final, Protocol, runtime_checkable

from odb_ref.core.batching.rules import RULES, TargetRule, get_rule
from odb_ref.core.errors import UsageError

OWN: Final = ":"
"""What the name of a rule that does not ship holds: ``module:name`` or ``path.py:name``."""


@runtime_checkable
class PerRank(Protocol):
    """A rule of which every rank has an instance of its own, as in a job."""

    def for_rank(self, rank: int) -> TargetRule:
        """Returns the instance of ``rank``."""
        ...


def get_instance(rule: TargetRule, rank: int) -> TargetRule:
    """Returns what ``rank`` runs: its own instance where there is one, else the rule."""
    return rule.for_rank(rank) if isinstance(rule, PerRank) else rule


def load_rule(name: str) -> TargetRule:
    """Returns the rule called ``name``: a shipped one, ``module:attribute`` or ``path.py:attribute``.

    The attribute is a rule or a class that makes one. Modules are also looked for in the current directory, after all others.
    Raises: UsageError when there is none.
    """
    module_name, colon, attribute = name.rpartition(OWN)
    if not colon:
        return get_rule(name)
    try:
        module = import_named(module_name)
    except (Exception, SystemExit) as error:  # Whatever the module does wrong while it is loaded.
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
    """As `load_rule`, for a rule that is to be run beside the shipped ones.

    Raises: UsageError when there is none, or when it carries a shipped rule's name: ranks could not tell the two apart.
    """
    rule = load_rule(name)
    if not isinstance(rule.name, str) or not rule.name:
        raise UsageError(f"rule {name!r}: its name is {rule.name!r}, which must be one word")
    if OWN in name and rule.name in RULES and type(rule) is not type(RULES[rule.name]):
        raise UsageError(f"rule {name!r} has the name {rule.name!r} of a shipped rule: give it a name of its own")
    return rule


def digest_rule(name: str) -> str:
    """Returns a digest of the file that holds the rule ``name``, and of all else of the user's that is imported, perhaps by it;
    empty for a shipped one, or without such a file.
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
    except (Exception, SystemExit):  # Whatever is wrong with it is said when it is run.
        return ""


@lru_cache(maxsize=8)
def _digest_files(files: tuple[tuple[Path, int], ...]) -> str:
    """Returns a digest of files as they were at a time each."""
    return sha256(b"".join(file.read_bytes() for file, _ in files)).hexdigest()


@lru_cache(maxsize=1)
def _list_own_files(_modules: int) -> frozenset[Path]:
    """Returns the files of modules that are neither Python's nor installed nor this program's; so many are imported."""
    names = ("stdlib", "platstdlib", "purelib", "platlib")
    libraries = [Path(sysconfig.get_path(name)).resolve() for name in names]
    libraries += [Path(str(resources.files(package))).resolve() for package in ("odb_ref", "odb_sim")]
    given = [getattr(module, "__file__", None) for module in [*sys.modules.values()]]
    files = [Path(file).resolve() for file in given if isinstance(file, str) and file.endswith(".py")]
    return frozenset(file for file in files if not any(file.is_relative_to(folder) for folder in libraries))


def describe_error(error: BaseException) -> str:
    """Returns an error in one line."""
    lines = str(error).splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def import_named(module_name: str) -> ModuleType:
    """Returns the module of this name, or of this path of a Python file.

    Raises: whatever it raises.
    """
    if not module_name.endswith(".py"):
        # Last, so that a file called random.py in the current directory stands in for nobody's library.
        if "" not in sys.path:
            sys.path.append("")
        return importlib.import_module(module_name)
    path = Path(module_name)
    # A name of its own: the stem may be that of a module which others import.
    name = f"_odb_rule_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError("not a Python file")
    module = importlib.util.module_from_spec(spec)
    # Dataclasses look their module up by name.
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module
