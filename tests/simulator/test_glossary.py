"""The glossary names every figure that the simulator prints or writes; of a run, its steps and its timeline, and no other."""

from __future__ import annotations

import csv
import importlib
import json
import re
from collections.abc import Iterator
from importlib import resources
from pathlib import Path

import pytest

from simulator import bench_scale, commands, demo_report
from simulator.cli import main
from simulator.commands import demo
from simulator.metrics import list_step_columns
from simulator.published import ROWS, compare_published
from simulator.runs import POLICIES
from simulator.sweep import Local
from tests.simulator_answers.helpers import record

Json = None | bool | int | float | str | list["Json"] | dict[str, "Json"]

OPAQUE = {"costs", "values", "inputs"}
"""Keys whose value has names of its own: numbers of a cost model, inputs of a prediction."""


def read_glossary() -> str:
    return (resources.files("simulator") / "GLOSSARY.md").read_text(encoding="utf-8")


def read_names(heading: str) -> list[str]:
    """What the first column of the section's table has, each name in it."""
    section = read_glossary().split(f"## {heading}\n")[1].split("\n## ")[0]
    cells = re.findall(r"^\| (`.*?) \|", section, flags=re.MULTILINE)
    return [name for cell in cells for name in re.findall(r"`([^`]+)`", cell)]


def read_all_names() -> set[str]:
    headings = re.findall(r"^## (.*)$", read_glossary(), flags=re.MULTILINE)
    return {name for heading in headings for name in read_names(heading)}


def list_keys(value: Json) -> Iterator[str]:
    if isinstance(value, list):
        for item in value:
            yield from list_keys(item)
    if isinstance(value, dict):
        for key, item in value.items():
            yield key
            if key not in OPAQUE:
                yield from list_keys(item)


@pytest.fixture
def headings(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The headings of every table that a command prints while the test runs."""
    seen: list[str] = []
    for module in (*commands.ALL, bench_scale):
        if hasattr(module, "print_table"):
            monkeypatch.setattr(module, "print_table", lambda title, header, rows: seen.extend(header))
    return seen


@pytest.mark.parametrize("policy", ["odb", "standard", "packing"])
def test_every_figure_has_a_formula(policy: str, tmp_path: Path) -> None:
    path = tmp_path / "figures.json"
    arguments = ["simulate", "gsm8k", "--ranks", "2", "--token-budget", "2048", "--samples", "50", "--policy", policy]
    assert main([*arguments, "--json", str(path)]) == 0
    assert read_names("Figures of a run") == list(json.loads(path.read_text()))


def test_every_column_has_a_formula() -> None:
    assert read_names("Columns of the steps") == list_step_columns()


DATA = ["gsm8k", "--ranks", "2", "--samples", "60"]
COMMANDS = {
    "simulate": [*DATA, "--token-budget", "2048"],
    "compare": DATA,
    "compare several": ["sgd_dialogues", *DATA],
    "sweep": [*DATA, "--token-budget", "1024", "--window", "16", "--workers", "1"],
    "tune": [*DATA, "--memory-tokens", "1024", "--window-max", "16", "--workers", "1"],
    "published": ["--workers", "1"],
    "replay": [],
    "calibrate": ["--table"],
}


@pytest.mark.parametrize("name", COMMANDS)
def test_what_a_command_prints_and_writes_has_a_formula(
    name: str, headings: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command, arguments = name.split(maxsplit=1)[0], list(COMMANDS[name])
    if command in ("replay", "calibrate"):
        arguments += [str(record(tmp_path / f"{number}.ndjson", samples=900)) for number in range(2)]
    if command == "published":
        comparisons = compare_published(Local(), ROWS[:1], samples=160)
        monkeypatch.setattr("simulator.commands.published.compare_published", lambda executor: comparisons)
    written, table = tmp_path / "out.json", tmp_path / "out.csv"
    options = ["--json", str(written)] + (["--csv", str(table)] if command in ("compare", "sweep") else [])
    assert main([command, *arguments, *options]) == 0
    keys = set(list_keys(json.loads(written.read_text())))
    assert len(keys) > 5
    if table.exists():
        with table.open(newline="") as file:
            keys |= set(next(csv.reader(file)))
    assert keys - read_all_names() - set(POLICIES) == set()
    assert headings
    data_sets = {row.name.split(",")[0] for row in ROWS}
    assert set(headings) - set(read_names("Columns of tables")) - set(POLICIES) - data_sets - {""} == set()


def test_what_scaling_prints_has_a_formula(headings: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    figures = {"wall_time_s": 1.0, "cpu_time_s": 1.0, "peak_bytes": 1.0, "steps": 1.0}
    monkeypatch.setattr(bench_scale, "measure_apart", lambda ranks, samples: figures)
    monkeypatch.setattr("sys.argv", ["bench_scale", "--ranks", "2"])
    bench_scale.main()
    assert headings
    assert set(headings) <= set(read_names("Columns of tables"))


def test_what_the_demo_prints_has_a_formula(
    headings: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib")
    pytest.importorskip("torch")
    figures: dict[str, Json] = dict.fromkeys(demo_report.TRAINING_FIGURES, 1)

    def train(out: Path, text: str | None) -> dict[str, Json]:
        for rank in range(demo.TRAINING_RANKS):
            record(out / f"train-rank{rank}.ndjson", samples=100)
        return figures

    monkeypatch.setattr(demo, "_train", train)
    monkeypatch.setattr(demo, "SAMPLES_PER_RANK", 20)
    assert main(["demo", "--out", str(tmp_path / "demo")]) == 0
    assert set(figures) == set(read_names("Figures of the demo's training"))
    assert "speed" in headings
    assert set(headings) - set(read_names("Columns of tables")) - {"odb", "fixed batches", ""} == set()


def test_what_the_explorer_writes_has_a_formula(tmp_path: Path) -> None:
    path = tmp_path / "explored.json"
    assert main(["explore", "--shards", "1,1", "--json", str(path)]) == 0
    keys = set(json.loads(path.read_text())) - {"name"}
    assert keys == set(read_names("Figures of an exploration"))


def test_every_command_that_prints_a_table_is_run_here() -> None:
    names = {name.split(maxsplit=1)[0] for name in COMMANDS} | {"demo"}
    tables = {module.__name__.split(".")[-1] for module in commands.ALL if hasattr(module, "print_table")}
    assert tables <= names


def test_every_span_of_a_timeline_is_described() -> None:
    spans = set(read_names("Spans of the timeline (`--perfetto`)"))
    source = "".join(
        Path(str(importlib.import_module(f"simulator.{name}").__file__)).read_text()
        for name in ("world", "trainers", "baselines")
    )
    used = {
        name for call in re.findall(r"timeline\.add\(([^\n]*)\)", source) for name in re.findall(r'"([^"]+)"', call)
    }
    assert len(used) > 6
    assert used <= spans | set(re.findall(r"`([^`]+)`", read_glossary()))
