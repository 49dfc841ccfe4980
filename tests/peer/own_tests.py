"""Runs the released peer's own tests with `odb_ref.compat` in place of the package that they import.

    python -m tests.peer.own_tests PATH    # of a checkout or an unpacked sdist of online-dynamic-batching; nothing is kept

Each of its tests passes, or is listed in `DIFFERENT` below with the reason.
Run it by hand when `odb_ref/compat` changes. The sdist comes with
``pip download --no-deps --no-binary :all: online-dynamic-batching==0.1.2``.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.abc
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Final
from xml.etree import ElementTree

ROOT = Path(__file__).parents[2]
LIMIT_S: Final = "300"
"""The time limit of a test. Some start processes twice, which takes a minute on a busy machine."""

_FAKE: Final = "its Trainer is a stand-in of a few methods; here a Trainer becomes an ODBTrainer"
_SPIED: Final = "it looks at a call from one module of the release to another"
_UNLIKE: Final = "it has no collate_fn that pads, and here a batch may hold samples of unlike lengths"
DIFFERENT: Final = {
    "test_grouping.": "groups are formed by `odb_ref.core`; the functions of odb.grouping are nothing that a program calls",
    "test_empty_batch_sizes_noop": "it calls a private method",
    "test_config_call_sets_dataloader_attrs": "it reads private attributes of a changed DataLoader",
    "test_odb_dataloader_constructs_with_handle": "it reads the private attribute `_odb_handle`",
    "test_odb_dataloader_accepts_config": "it reads the private attribute `_odb_join_mode`",
    "test_apply_enables_worker_prefetching_for_zero_worker_loader": "num_workers=0 that is chosen stays 0",
    "test_set_trainer_max_steps": "it calls the private `_set_trainer_max_steps`",
    "test_ddp_join_mode_allows_uneven_rank_exhaustion": "it wants ranks to take different numbers of steps",
    "test_ddp_loss_scaling_consistency": _UNLIKE,
    "test_ddp_dynamic_batch_sizes": _UNLIKE,
    "[configure_existing": _FAKE,
    "[native_mixin": _FAKE,
    "test_hf_integration::test_configure_trainer": _FAKE,
    "test_enable_odb_rejects_zero_workers": "num_workers=0 works",
    "test_hf_integration::test_enable_odb": _SPIED,
    "test_llamafactory_configure_trainer_requires_budget_source": "the length of the data need not be known",
    "test_llamafactory_configure_trainer_rejects_non_unit_batch_size": "a Trainer's batch size is not looked at",
    "test_llamafactory_enable_odb_rejects_zero_workers": "num_workers=0 works",
    "test_llamafactory_": _SPIED,
}
"""The tests that do not pass, by a part of their names, and why a program with its import changed loses nothing."""


class Renamed(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports `odb_ref.compat.x` in place of `odb.x`, in this process and in those that it starts."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        return importlib.util.spec_from_loader(name, self) if name.partition(".")[0] == "odb" else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        own = spec.name.replace("odb", "odb_ref.compat", 1)
        module = importlib.import_module(own) if importlib.util.find_spec(own) else ModuleType(spec.name)
        get = getattr(module, "__getattr__", None)

        def find(name: str) -> object:
            """Lets a test file import missing names. The tests that use them fail, and the others run."""
            if get is not None and not name.startswith("_"):
                with suppress(AttributeError):
                    return get(name)
            if name.startswith("__"):
                raise AttributeError(name)
            return Absent(f"{spec.name}.{name}")

        module.__getattr__ = find  # type: ignore[method-assign]
        return module

    def exec_module(self, module: ModuleType) -> None: ...


class Absent:
    """Replaces a name that `odb_ref.compat` lacks."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, *_: object, **__: object) -> object:
        raise NotImplementedError(f"{self.name} is not here")


STARTS = "import sys, tests.peer.own_tests as own; sys.meta_path.insert(0, own.Renamed())\n"


def run(path: Path, *options: str) -> dict[str, str]:
    """Returns the result of each test: ``passed``, ``failed``, ``skipped`` or ``error``."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        shutil.copytree(path / "tests", folder / "theirs")
        for file in (folder / "theirs").glob("*.py"):
            file.write_text(re.sub(r"mark\.timeout\(\d+\)", f"mark.timeout({LIMIT_S})", file.read_text()))
        (folder / "sitecustomize.py").write_text(STARTS)
        command = [sys.executable, "-m", "pytest", "-q", "--rootdir", name, "-c", "/dev/null", "-p", "no:cacheprovider"]
        places = os.pathsep.join((name, str(ROOT), str(ROOT / "simulator")))
        found: dict[str, str] = {}
        for file in sorted((folder / "theirs").glob("test_*.py")):  # one by one, because a test may end its process
            report = folder / f"{file.stem}.xml"
            subprocess.run(
                [*command, f"--junit-xml={report}", "--timeout", LIMIT_S, str(file), *options],
                env={**os.environ, "PYTHONPATH": places},
                timeout=3600,
                check=False,
            )
            if not report.exists():
                found[f"{file.stem}::"] = "ended its process"
                continue
            for case in ElementTree.parse(report).iter("testcase"):
                found[f"{case.get('classname', '').removeprefix('theirs.')}::{case.get('name')}"] = judge(case)
        return found


def judge(case: ElementTree.Element) -> str:
    return next((child.tag for child in case if child.tag in ("failure", "error", "skipped")), "passed")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", type=Path)
    options = parser.parse_args(argv)
    found = run(options.path)
    reasons = {name: next((why for part, why in DIFFERENT.items() if part in name), "") for name in found}
    for name, result in sorted(found.items()):
        if result != "passed":
            print(f"{result}: {name}: {reasons[name] or 'NOT EXPECTED'}")
    wrong = [name for name, result in found.items() if result != "passed" and not reasons[name]]
    passed = sum(result == "passed" for result in found.values())
    other = len(found) - passed - len(wrong)
    print(f"{passed} of {len(found)} pass, {other} differ for the reasons above, {len(wrong)} are wrong")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
