"""Builds an environment for each corner of the supported versions, and runs tests and a job of two ranks in it.

    python -m tests.reach --list              # what is run, and what each downloads
    python -m tests.reach                     # all: some 25 GB of downloads, 8 GB of disk at a time, two hours on two cores
    python -m tests.reach oldest newest       # some
    python -m tests.reach --keep oldest       # leaves the environment in .make/reach/oldest, and uses one that was left
    python -m tests.reach --page              # the table of what has been run, into docs/reference/versions.md

It is run by hand before a release and when a bound changes, not by CI. If something is missing (a Python that is not installed
as ``python3.12``, a version that the index lacks), the environment's row says so, and the others run. Results stay in
.make/reach/found.json; on the page they replace older ones. Like ``make test``, it runs a slice of tests with many cases.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / ".make" / "reach"
FOUND = FOLDER / "found.json"
PAGE = ROOT / "docs" / "reference" / "versions.md"
BEGIN, END = "<!-- made by python -m tests.reach --page -->\n", "<!-- end -->\n"

TOOLS = ("pytest", "pytest-timeout", "hypothesis", "jsonschema")
SIMULATED = ("simpy", "networkx", "rich")
SHOWN = ("torch", "numpy", "transformers", "accelerate", "lightning", "trl", "deepspeed", "llamafactory", *SIMULATED)
"""The packages whose versions the table shows."""

CORE = ("tests/core", "tests/trace")
LOADER = tuple(f"tests/torch/test_{name}.py" for name in ("batch_digests", "loader", "packed", "updates"))
SIMULATOR = ("tests/simulator/test_rounds.py", "tests/simulator/test_simulate_command.py")
TRAINER = ("tests/integrations/test_hf_updates.py", "tests/integrations/test_hf.py")
ACCELERATE = ("tests/integrations/test_accelerate_updates.py",)
LIGHTNING = ("tests/integrations/test_lightning_updates.py",)
# The other tests of these frameworks are run by hand: tests/README.md.
TRL = ("tests/integrations/test_trl.py::test_the_updates_are_those_of_trl",)
TRL_TASKS = "tests/integrations/test_trl.py::test_trl_trains_on_whole_samples_with_the_loss_of_one_process"
DEEPSPEED = tuple(
    f"tests/integrations/test_deepspeed.py::test_the_weights_are_those_of_one_process_on_the_union[{kinds}-2]"
    for kinds in ("plain,windows,plain updates", "accelerate updates,trainer updates")
)
LLAMAFACTORY = ("tests/integrations/test_llamafactory.py::test_the_updates_are_those_of_llamafactory",)
JOB = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "examples/same_updates.py", "--double")


@dataclass(frozen=True)
class Cell:
    """An environment: its Python, the versions it pins, the extras of this project, and the tests to run in it."""

    python: str
    pins: tuple[str, ...]
    extras: str
    tests: tuple[str, ...]
    what: str


CELLS = {
    "oldest": Cell(
        "3.11",
        (
            *("torch==2.6.0", "numpy==1.26.0", "transformers==4.56.0", "accelerate==1.10.0", "lightning==2.5.3"),
            *("simpy==4.1.0", "networkx==3.2", "rich==13.7.0"),
        ),
        "torch,sim,transformers,lightning",
        (*CORE, *LOADER, *SIMULATOR, *TRAINER, *ACCELERATE, *LIGHTNING),
        "the oldest of everything",
    ),
    "newest": Cell(
        "3.11",
        (),
        "torch,sim,transformers,lightning,trl,deepspeed",
        (*CORE, *LOADER, *SIMULATOR, *TRAINER, *ACCELERATE, *LIGHTNING, *TRL, *DEEPSPEED),
        "the newest of everything",
    ),
    "verl": Cell(
        "3.12",
        ("torch==2.11.0", "transformers==5.9.0"),
        "torch,sim,transformers,lightning",
        (*CORE, *LOADER, *TRAINER, *ACCELERATE, *LIGHTNING),
        "what verl 0.9.1 pins",
    ),
    "nemo-rl": Cell(
        "3.12",
        ("torch==2.9.0", "transformers==4.57.1"),
        "torch,sim,transformers",
        (*CORE, *LOADER, *TRAINER, *ACCELERATE),
        "what NeMo-RL pins",
    ),
    "skyrl": Cell(
        "3.13",
        ("torch==2.13.0", "transformers==5.16.1"),
        "torch,sim,transformers",
        (*CORE, *LOADER, *TRAINER, *ACCELERATE),
        "what SkyRL pins",
    ),
    "python-3.14": Cell(
        "3.14",
        (),
        "torch,sim,transformers,lightning",
        (*CORE, *LOADER, *SIMULATOR, *TRAINER, *ACCELERATE, *LIGHTNING),
        "the newest of everything on the newest Python",
    ),
    "trl": Cell(
        "3.11",
        ("torch==2.8.0", "trl==1.0.0", "transformers==4.56.2", "accelerate==1.10.0"),
        "torch,sim,transformers,trl",
        (*TRL, TRL_TASKS, *ACCELERATE),
        "the oldest TRL",
    ),
    "llamafactory": Cell(
        "3.11",
        ("torch==2.9.1", "torchvision==0.24.1", "torchaudio==2.9.1", "llamafactory==0.9.5"),
        "torch,sim,llamafactory",
        LLAMAFACTORY,
        "what LLaMA-Factory 0.9.5 pins",
    ),
}


def run(command: list[str], log: Path, limit_s: int, **environment: str) -> tuple[bool, str]:
    """Returns whether a command succeeds, and its output, which also goes to the log."""
    with log.open("a") as file:
        file.write(f"\n$ {' '.join(command)}\n")
        file.flush()
        try:
            done = subprocess.run(
                command,
                cwd=ROOT,
                env=os.environ | environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=limit_s,
                check=False,
            )
        except subprocess.TimeoutExpired:
            file.write(f"stopped after {limit_s} s\n")
            return False, f"stopped after {limit_s} s"
        file.write(done.stdout)
    return done.returncode == 0, done.stdout


def build(name: str, cell: Cell, log: Path, *, is_kept: bool) -> tuple[str, str]:
    """Makes the environment, anew unless it is kept. Returns its Python, and why it cannot be used, or an empty string."""
    folder = FOLDER / name
    python = str(folder / "bin" / "python")
    if is_kept and (folder / "whole").exists():
        return python, ""
    shutil.rmtree(folder, ignore_errors=True)
    interpreter = shutil.which(f"python{cell.python}")
    # A shim may stand in for a Python that is not installed.
    if interpreter is None or not run([interpreter, "--version"], log, 60)[0]:
        return python, f"no python{cell.python} here"
    pip = [python, "-m", "pip", "install", "--quiet", "--no-compile"]
    for command in (
        [interpreter, "-m", "venv", str(folder)],
        [*pip, "--upgrade", "pip"],
        [*pip, "--editable", f".[{cell.extras}]", *cell.pins, *TOOLS],
    ):
        is_done, printed = run(command, log, 3600)
        if not is_done:
            errors = [line for line in printed.splitlines() if line.startswith("ERROR: ")]
            return python, (errors or [printed.strip()])[0].removeprefix("ERROR: ")
    (folder / "whole").touch()
    return python, ""


def try_cell(name: str, cell: Cell, *, is_kept: bool) -> dict[str, Any]:
    """Returns the results of an environment: its versions, the tests passed, and the difference of two ranks' weights."""
    log = FOLDER / f"{name}.log"
    log.unlink(missing_ok=True)
    start = time.monotonic()
    found: dict[str, Any] = {"what": cell.what, "python": cell.python, "versions": {}, "job": "", "is_right": False}
    python, trouble = build(name, cell, log, is_kept=is_kept)
    if trouble:
        return found | {"tests": f"not run: {trouble}"}
    _, found["python"] = run([python, "-c", "import platform; print(platform.python_version(), end='')"], log, 60)
    listed = json.loads(run([python, "-m", "pip", "list", "--format", "json"], log, 300)[1].partition("\n")[0])
    found["versions"] = {item["name"]: item["version"].partition("+")[0] for item in listed if item["name"] in SHOWN}
    own = {f"ODB_{package}_PYTHON": python for package in ("TRL", "DEEPSPEED", "LLAMAFACTORY")}
    command = [python, "-m", "pytest", "-p", "no:cacheprovider", "--slice", "--timeout", "900", *cell.tests]
    have_passed, tests = run(command, log, 7200, **own, OMP_NUM_THREADS="1")
    found["tests"] = (re.findall(r"^=* ?(\d+ (?:passed|failed).*) in [\d.]+s", tests, re.MULTILINE) or ["failed"])[-1]
    _, job = run([python, *JOB], log, 600, OMP_NUM_THREADS="1")
    found["job"] = (re.findall(r"weights differ by (\S+) at most", job) or ["failed"])[-1]
    found["is_right"] = have_passed and found["job"] != "failed"
    found["minutes"] = round((time.monotonic() - start) / 60)
    if not is_kept:
        shutil.rmtree(Path(python).parents[1])
    return found


def describe(found: dict[str, dict[str, Any]], kept: dict[str, str]) -> str:
    """Returns the table in Markdown, with rows that are kept. A test compares its versions with those of pyproject.toml."""
    rows = kept | {name: describe_cell(name, cell) for name, cell in found.items() if name in CELLS}
    head = ["| environment | what was run | result |", "|---|---|---|"]
    return "\n".join([*head, *(rows[name] for name in CELLS if name in rows)]) + "\n"


def describe_cell(name: str, cell: dict[str, Any]) -> str:
    # Packages that are there only for another package were not tried.
    tried = [f"{package} {cell['versions'][package]}" for package in SHOWN if is_tried(name, package, cell)]
    python = ".".join(cell["python"].split(".")[:2])
    came = f"{cell['tests']}; weights within {cell['job']}" if cell["job"] else cell["tests"]
    return f"| {', '.join([f'Python {python}', *tried])} | `make reach REACH={name}`: {cell['what']} | {came} |"


def is_tried(name: str, package: str, cell: dict[str, Any]) -> bool:
    """Returns whether tests of the environment use the package."""
    by = {"trl": "test_trl", **dict.fromkeys(SIMULATED, "tests/simulator")}.get(package, "")
    return package in cell["versions"] and any(by in test for test in CELLS[name].tests)


def write_page(found: dict[str, dict[str, Any]]) -> None:
    """Writes what was found into the page. The rows of what could not be run here, or was run elsewhere, stay."""
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    table, _, after = rest.partition(END)
    kept = {row[2]: row[1] for row in re.finditer(r"^(.*`make reach REACH=(.*?)`.*)$", table, re.MULTILINE)}
    ran = {name: cell for name, cell in found.items() if cell["versions"]}
    PAGE.write_text(before + BEGIN + describe(ran, kept) + END + after, encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cells", nargs="*", metavar="CELL", help=f"of {', '.join(CELLS)}; default: all")
    parser.add_argument("--list", action="store_true", help="print what would be run")
    parser.add_argument("--keep", action="store_true", help="leave the environments, and use those that were left")
    parser.add_argument("--page", action="store_true", help="only write the page, of what has been found")
    options = parser.parse_args()
    FOLDER.mkdir(parents=True, exist_ok=True)
    found = json.loads(FOUND.read_text()) if FOUND.exists() else {}
    names = options.cells or [*CELLS]
    if options.list:
        for name in names:
            cell = CELLS[name]
            print(f"{name}: {cell.what}; Python {cell.python}, .[{cell.extras}] {' '.join(cell.pins)} (about 3 GB)")
        return 0
    for name in [] if options.page else names:
        print(f"{name}: {CELLS[name].what} ...", flush=True)
        found[name] = try_cell(name, CELLS[name], is_kept=options.keep)
        print(f"{name}: {found[name]['tests']}; see {FOLDER.relative_to(ROOT)}", flush=True)
        FOUND.write_text(json.dumps(found, indent=1))
    print(describe(found, {}))
    if options.page:
        write_page(found)
    return not all(found[name]["is_right"] for name in names if name in found)


if __name__ == "__main__":
    sys.exit(main())
