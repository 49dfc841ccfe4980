"""The front door: `import odb_ref` is light, lists what it offers, and is typed; `python -m odb_ref` is the command."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import odb_ref
from tests.helpers.capture import capture
from tests.reach import __main__ as reach

ROOT = Path(__file__).parents[2]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return capture([sys.executable, *arguments], cwd=ROOT)


def test_importing_it_imports_nothing_heavy() -> None:
    done = run("-c", "import sys, odb_ref, odb_ref.core.machine; print({'torch', 'numpy', 'simpy'} & set(sys.modules))")
    assert done.stdout.strip() == "set()", done.stderr


def test_what_needs_torch_says_so_where_there_is_none() -> None:
    hide = "import sys; sys.modules['torch'] = None\n"
    done = run("-c", hide + "from odb_ref import ODBDataLoader")
    assert done.returncode
    assert "odb_ref.torch needs torch, which is not installed: pip install 'odb-ref[torch]'" in done.stderr
    assert run("-c", hide + "from odb_ref import JobError, UsageError, __version__, plan_all").returncode == 0


LACKING = [
    ("odb_ref.torch", "numpy", "torch"),
    ("odb_ref.compat", "torch", "torch"),
    ("odb_ref.integrations.progress", "torch", "torch"),
    ("odb_ref.integrations.hf", "transformers", "transformers"),
    ("odb_ref.integrations.hf.trainer", "accelerate", "transformers"),
    ("odb_ref.integrations.accelerate", "accelerate", "accelerate"),
    ("odb_ref.integrations.lightning", "lightning", "lightning"),
    ("odb_ref.integrations.lightning_evaluation", "lightning", "lightning"),
    ("odb_ref.integrations.trl", "transformers", "trl"),
    ("odb_ref.integrations.llamafactory", "transformers", "llamafactory"),
    ("odb_ref.compat.integrations.hf", "transformers", "transformers"),
    ("odb_ref.compat.integrations.llamafactory", "transformers", "transformers"),
    ("odb_ref.compat.integrations.accelerate", "accelerate", "accelerate"),
    ("odb_ref.compat.integrations.lightning", "lightning", "lightning"),
]
"""A module, a package that it needs, and the extra that installs it."""
LACKING_SCRIPT = """
import importlib, sys
for module, package, _ in {rows!r}:
    hidden, sys.modules[package] = sys.modules.get(package), None
    try:
        importlib.import_module(module)
    except ImportError as error:
        print(error)
    else:
        print(module, "was imported")
    del sys.modules[package]
    if hidden is not None:
        sys.modules[package] = hidden
    for name in [name for name in sys.modules if name.startswith("odb_ref")]:
        del sys.modules[name]
"""


@pytest.mark.slow
def test_a_module_without_its_package_names_the_command_that_installs_it() -> None:
    pytest.importorskip("torch")
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    done = run("-c", LACKING_SCRIPT.format(rows=LACKING))
    assert [line.partition(" needs ")[2] for line in done.stdout.splitlines()] == [
        f"{package}, which is not installed: pip install 'odb-ref[{extra}]'" for _, package, extra in LACKING
    ], done.stderr
    assert {extra for _, _, extra in LACKING} <= {*extras}


def test_a_name_that_is_none_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        _ = odb_ref.Nothing
    assert set(odb_ref.__all__) <= set(dir(odb_ref))


def test_it_offers_what_the_adapter_offers() -> None:
    """These lists must agree: what is offered, what type checkers see, and what `odb_ref.torch` has."""
    adapter = pytest.importorskip("odb_ref.torch")
    planner = {"plan_all", "plan_rank", "plan_ranks"}
    assert set(odb_ref.__all__) - {"__version__"} == {*adapter.__all__, *planner}
    for name in adapter.__all__:
        assert getattr(odb_ref, name) is getattr(adapter, name)
    tree = ast.parse((ROOT / "odb_ref" / "__init__.py").read_text())
    typed = next(node for node in tree.body if isinstance(node, ast.If))
    names = {item.name for node in typed.body if isinstance(node, ast.ImportFrom) for item in node.names}
    assert names == {*adapter.__all__, *planner}


def test_the_version_stands_in_one_place() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert "version" not in project["project"]
    assert project["tool"]["hatch"]["version"]["path"] == "odb_ref/__init__.py"
    for command in (["-m", "odb_ref", "--version"], ["-m", "odb_sim.cli.main", "--version"]):
        assert run(*command).stdout.strip() == f"odb-ref {odb_ref.__version__}"


def test_the_command_alone_prints_its_help() -> None:
    done = run("-m", "odb_ref")
    assert done.returncode == 0
    assert done.stdout.startswith("usage: odb-ref")
    assert "simulate" in done.stdout


# Types -------------------------------------------------------------------------------------------------------------------

GIVEN = """
from typing import Protocol
import torch
from torch.utils.data import Dataset

class Out(Protocol):
    loss: torch.Tensor

class Model(Protocol):
    def __call__(self, *, input_ids: torch.Tensor, labels: torch.Tensor) -> Out: ...

class Samples(Dataset[dict[str, list[int]]]): ...

def collate(samples: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]: ...  # type: ignore[empty-body]

dataset: Samples
model: Model
optimizer: torch.optim.Optimizer
"""

INFERRED = """
from odb_ref import ODBDataLoader, StepInfo
loader = ODBDataLoader(dataset, token_budget=64, collate_fn=collate)
reveal_type(loader)
for batch in loader:
    reveal_type(batch)
for batch, info in loader.steps():
    reveal_type(batch)
    reveal_type(info)
plain: ODBDataLoader[list[int]] = ODBDataLoader(dataset, token_budget=64)
for item in plain:
    reveal_type(item)
"""

REVEALED = [
    "odb_ref.torch.loader.ODBDataLoader[dict[str, torch._tensor.Tensor]]",
    "dict[str, torch._tensor.Tensor]",
    "dict[str, torch._tensor.Tensor]",
    "odb_ref.torch.epoch.info.StepInfo",
    "list[int]",
]


def check_types(path: Path, text: str) -> str:
    pytest.importorskip("torch")
    api = pytest.importorskip("mypy.api")
    # Torch does not annotate `Tensor.backward`. The setting is in the file, because on the command line it would invalidate the
    # project's cache, and reading torch's types again takes half a minute.
    path.write_text(f"# mypy: allow-untyped-calls\n{text}")
    settings = ["--config-file", str(ROOT / "pyproject.toml"), "--cache-dir", str(ROOT / ".mypy_cache")]
    out, _, _ = api.run([*settings, str(path)])
    return str(out).replace("builtins.", "")


@pytest.mark.slow
def test_the_example_of_the_readme_passes_mypy(tmp_path: Path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    examples = [block for block in blocks if "ODBDataLoader(" in block]
    assert examples
    for example in examples:
        out = check_types(tmp_path / "example.py", example)
        assert "Success" in out, out


@pytest.mark.slow
def test_the_loader_is_generic_in_its_batches(tmp_path: Path) -> None:
    out = check_types(tmp_path / "inferred.py", GIVEN + INFERRED)
    assert re.findall(r'Revealed type is "(.*?)"', out) == REVEALED, out
    assert "error" not in out, out


def test_versions_claimed_are_versions_run() -> None:
    """A lower bound is the oldest version in docs/reference/versions.md, and the versions installed here are above it."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = [line.partition("#")[0].strip() for line in (ROOT / ".ci" / "constraints.txt").read_text().splitlines()]
    here = dict(line.split("==") for line in lines if "==" in line)
    page = (ROOT / "docs" / "reference" / "versions.md").read_text()
    environments = re.findall(r"^\| (Python [^|]*) \|", page, re.MULTILINE)
    run: dict[str, list[tuple[int, ...]]] = {}
    for name, version in re.findall(r"([\w-]+) ([\d.]+)", " ".join(environments)):
        run.setdefault(name, []).append(number(version))
    extras = ("torch", "sim", "verify", "accelerate", "transformers", "lightning", "trl", "deepspeed", "llamafactory")
    for item in {item for extra in extras for item in project["optional-dependencies"][extra]}:
        found = re.fullmatch(r"([\w-]+)>=([\d.]+),?(?:<([\d.]+))?", item)
        assert found, item
        name, low, high = found[1], number(found[2]), number(found[3] or "9999")
        assert min(run[name])[: len(low)] == low, f"{item}: the oldest that was run is {min(run[name])}"
        assert max([*run[name], *([number(here[name])] if name in here else [])]) < high, item
    assert project["requires-python"] == f">={'.'.join(map(str, min(run['Python'])))}"
    claimed = {number(line.rpartition(" ")[2]) for line in project["classifiers"] if "Python :: 3." in line}
    assert claimed == set(run["Python"])


def test_a_row_of_the_page_stays_until_its_versions_are_run_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reach, "PAGE", tmp_path / "page.md")
    old = {name: f"| Python | `make reach REACH={name}`: {name} | pass |" for name in ("oldest", "newest", "verl")}
    reach.PAGE.write_text("Before.\n" + reach.BEGIN + reach.describe({}, old) + reach.END + "After.\n")
    found = {"what": "all", "python": "3.11.7", "versions": {"torch": "2.13.0"}, "tests": "9 passed", "job": "1e-13"}
    reach.write_page({"newest": found, "verl": found | {"versions": {}, "tests": "not run"}})
    new = "| Python 3.11, torch 2.13.0 | `make reach REACH=newest`: all | 9 passed; weights within 1e-13 |"
    table = reach.describe({}, old | {"newest": new})
    assert reach.PAGE.read_text() == "Before.\n" + reach.BEGIN + table + reach.END + "After.\n"


def number(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))


MISTYPED = """
from odb_ref import Batching, Faults, Loss, ODBDataLoader, Protocol, apply
from odb_ref.integrations.hf import ODBOptions
from odb_ref.integrations.lightning import LightningLoader
from odb_ref.integrations.lightning_evaluation import EvaluationLoader
from odb_ref.integrations.trl import configure_trainer
plain: torch.utils.data.DataLoader[object]
ODBDataLoader(dataset, token_budget=64, layout="packd")
ODBDataLoader(dataset, token_budget=64, windw=8)
ODBDataLoader(dataset, token_budget=64, window=8)
Batching(order="sampled")
Loss(scaling="exakt")
Faults(on_bad_sample="skip")
Protocol(on_idle="repeat")
apply(plain, token_budget=64, layout="packd")
apply(plain, token_budget=64, windw=8)
LightningLoader(dataset, token_budget=64, layout="packd")
LightningLoader(dataset, token_budget=64, window=8)
EvaluationLoader(dataset, token_budget=64, windw=8)
ODBOptions(token_budget=64, loader={"layout": "packd"})
ODBOptions(token_budget=64, loader={"windw": 8})
ODBOptions(token_budget=64, evaluation={"windw": 8})
configure_trainer(object(), layout="packd")
configure_trainer(object(), windw=8)
apply(plain, token_budget=64, layout="packed", batching=Batching(window=8), collate_fn=collate)
LightningLoader(dataset, token_budget=64, loss=Loss(accumulation_steps=2), collate_fn=collate)
ODBOptions(token_budget=64, loader={"batching": Batching(window=8)}, evaluation={"token_budget": 8})
configure_trainer(object(), token_budget=64, max_samples=9, loss=Loss(scaling="samples"))
ODBDataLoader(dataset, token_budget=64, batching=Batching(length_fn=lambda sample: len(sample["input_ids"])))
"""


@pytest.mark.slow
def test_a_mistyped_option_fails_in_mypy(tmp_path: Path) -> None:
    out = check_types(
        tmp_path / "mistyped.py",
        GIVEN.replace("from typing import Protocol", "from typing import Protocol as P").replace("(Protocol)", "(P)")
        + MISTYPED,
    )
    first = (GIVEN + MISTYPED).splitlines().index('ODBDataLoader(dataset, token_budget=64, layout="packd")') + 2
    assert sorted({int(line) for line in re.findall(r"mistyped\.py:(\d+): error", out)}) == list(
        range(first, first + 17)
    ), out
