"""A release check: ``python -m tests.release dist``, run by `make release`.

The changelog must have an entry for the version. The installed wheel must pass tests in a folder without anything else: without
an extra it names the missing one and checks traces, with [sim] it passes the tests of core and traces, with [torch] those of
the loader.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).parents[1]
TOOLS = ("hypothesis", "jsonschema", "pytest", "pytest-timeout")
COPIED = ("tests", "spec", "pyproject.toml")
LOADER = ("loader", "settings", "packed", "updates", "failures", "resume_matrix")
TESTED = {
    "sim": ("tests/core", "tests/trace"),
    "torch": tuple(f"tests/torch/test_{name}.py" for name in LOADER),
}
"""The tests of each extra. Both extras are installed for the second."""
MISSING = "odb-ref simulate: needs the simulator: pip install 'odb-ref[sim]'"
WHERE = "import odb_ref, odb_sim; print(odb_ref.__file__, odb_sim.__file__)"


def find_entry(version: str) -> str | None:
    """Returns the changelog entry of a version, or None."""
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    found = re.search(rf"^## {re.escape(version)}\b[^\n]*\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    return found and found[1].strip()


def test_wheel(wheel: Path) -> bool:
    """Returns whether the tests pass with the installed wheel."""
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder) / "empty"
        work.mkdir()
        for name in COPIED:
            (work / name).parent.mkdir(parents=True, exist_ok=True)
            copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
            copy(ROOT / name, work / name)
        venv.create(Path(folder) / "env", with_pip=True)
        python = Path(folder) / "env" / "bin" / "python"
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        install = [python, "-m", "pip", "install", "--quiet", "--constraint", ROOT / ".ci" / "constraints.txt"]

        def run(*command: str | Path) -> subprocess.CompletedProcess[str]:
            return subprocess.run(command, cwd=work, env=environment, capture_output=True, text=True, check=False)

        subprocess.run([*install, wheel.absolute()], check=True)
        shown = run(python, "-c", WHERE)
        assert all(str(Path(folder) / "env") in path for path in shown.stdout.split()), shown
        assert "usage" in run(python.parent / "odb-ref", "check", "--help").stdout
        missing = run(python.parent / "odb-ref", "simulate", "gsm8k")
        assert (missing.returncode, missing.stderr.strip()) == (2, MISSING), missing
        for extra, tests in TESTED.items():
            subprocess.run([*install, f"{wheel.absolute()}[{extra}]", *TOOLS], check=True)
            command = [python, "-m", "pytest", "-o", "pythonpath=.", *tests]
            if subprocess.run(command, cwd=work, env=environment, check=False).returncode:
                return False
        return True


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="where the wheel is")
    parser.add_argument("--draft", action="store_true", help="the entry may still be called Unreleased")
    options = parser.parse_args()
    (wheel,) = options.folder.glob("*.whl")
    version = wheel.name.split("-")[1]
    if not (find_entry(version) or (options.draft and find_entry("Unreleased"))):
        print(f"CHANGELOG.md has no entry '## {version}': rename 'Unreleased', and add a date", file=sys.stderr)
        return 1
    return 0 if test_wheel(wheel) else 1


if __name__ == "__main__":
    sys.exit(main())
