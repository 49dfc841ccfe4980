"""The glossary names every figure that the simulator prints or writes, for a run, its steps and its timeline, and no other."""

from __future__ import annotations

import csv
import importlib
import json
import re
from collections.abc import Iterator
from dataclasses import fields
from importlib import resources
from pathlib import Path

import pytest
from odb_sim.cli import demo
from odb_sim.cli.main import EXAMPLES, load_command, main
from odb_sim.engine.metrics import StepRow
from odb_sim.reports import recorded_report
from odb_sim.studies.processes import Local
from odb_sim.studies.published import ROWS, compare_published
from odb_sim.studies.runs import POLICIES

from tests.helpers.commands import get_figures
from tests.simulator_answers.helpers import record

Json = None | bool | int | float | str | list["Json"] | dict[str, "Json"]

OPAQUE = {"costs", "values", "inputs", "constants", "model", "because"}
"""Keys whose value has its own names: numbers of a cost model, inputs of a prediction, constants of a preset."""


def read_glossary() -> str:
    return (resources.files("odb_sim") / "GLOSSARY.md").read_text(encoding="utf-8")


def read_names(heading: str) -> list[str]:
    """Returns the names in the first column of the section's table."""
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
    """Returns the headings of every table that a command prints while the test runs."""
    seen: list[str] = []
    for module in map(load_command, EXAMPLES):
        if hasattr(module, "print_table"):
            monkeypatch.setattr(module, "print_table", lambda title, header, rows, keys=1: seen.extend(header))
    return seen


@pytest.mark.parametrize("policy", ["odb", "standard", "packing"])
def test_every_figure_has_a_formula(policy: str) -> None:
    figures = get_figures(f"simulate gsm8k --ranks 2 --token-budget 2048 --samples 50 --policy {policy}")
    assert read_names("Figures of a run") == list(figures)


def test_every_column_has_a_formula() -> None:
    assert read_names("Columns of the steps") == [item.name for item in fields(StepRow)]


DATA = ["gsm8k", "--ranks", "2", "--samples", "60"]
ALONE = ["--processes", "1"]
COMMANDS = {
    "simulate": [*DATA, "--token-budget", "2048"],
    "compare": DATA,
    "compare several": ["sgd_dialogues", *DATA],
    "sweep": [*DATA, "--token-budget", "1024", "--window", "16", *ALONE],
    "tune": [*DATA, "--memory-tokens", "1024", "--window-max", "16", *ALONE],
    "lengths": ALONE,
    "plan": ["DATA", "--model", "qwen2.5-0.5b", "--gpu", "h100", "--gpus", "2", "--global-batch", "64", *ALONE],
    "micro-batches": ["gsm8k", "--ranks", "2", "--budget", "8192", "--step-samples", "1000"],
    "published": ALONE,
    "replay": [],
    "calibrate": ["--table"],
}


def write_data(command: str, arguments: list[str], folder: Path) -> None:
    """Writes data files or traces for a command that reads them."""
    if command in ("replay", "calibrate"):
        arguments += [str(record(folder / f"{number}.ndjson", samples=900, seed=number)) for number in range(2)]
    if command == "lengths":
        (folder / "data.json").write_text(json.dumps([{"input_ids": list(range(n))} for n in range(1, 30)]))
        arguments.append(str(folder / "data.json"))
    if command == "plan":
        arguments[0] = str(folder / "lengths.csv")
        Path(arguments[0]).write_text("total_tokens\n" + "".join(f"{50 + 7 * n}\n" for n in range(160)))


@pytest.mark.slow
@pytest.mark.parametrize("name", COMMANDS)
def test_what_a_command_prints_and_writes_has_a_formula(
    name: str, headings: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command, arguments = name.split(maxsplit=1)[0], list(COMMANDS[name])
    write_data(command, arguments, tmp_path)
    if command == "published":
        comparisons = compare_published(Local(), ROWS[:1], samples=160)
        monkeypatch.setattr("odb_sim.cli.published.compare_published", lambda executor: comparisons)
    table = tmp_path / "out.csv"
    options = ["--csv", str(table)] if command in ("compare", "sweep") else []
    keys = set(list_keys(get_figures([command, *arguments, *options])))
    assert len(keys) > 5
    if table.exists():
        with table.open(newline="") as file:
            keys |= set(next(csv.reader(file)))
    assert keys - read_all_names() - set(POLICIES) == set()
    assert headings
    data_sets = {row.name.split(",")[0] for row in ROWS}
    assert set(headings) - set(read_names("Columns of tables")) - set(POLICIES) - data_sets - {""} == set()


CURVE = [(0, 0.0, 5.9), (2, 4.0, 5.0), (4, 8.0, 4.5)]


def test_curves_lie_on_each_other_over_updates_and_not_over_seconds() -> None:
    """A curve also ends where its training does."""
    curves = {"fixed": CURVE, "odb": [(u, s / 2, loss) for u, s, loss in CURVE]}
    (updates, _), (seconds, _) = recorded_report.draw_curves(curves)
    fixed, odb = (series.values for series in updates.series)
    assert fixed == odb == [5.9, 5.0, 4.5]
    fixed, odb = (series.values for series in seconds.series)
    middle = seconds.x.index("4")
    assert (fixed[middle], odb[middle], odb[middle + 1], fixed[-1]) == (5.0, 4.5, None, 4.5)


def run_demo(out: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Json]:
    """Runs the demo with a small simulation and pretended training, and returns the figures of the training."""
    pytest.importorskip("torch")
    figures: dict[str, Json] = dict.fromkeys(recorded_report.TRAINING_FIGURES, 12345)

    def train(out: Path, text: str | None) -> dict[str, Json]:
        for rank in range(demo.TRAINING_RANKS):
            record(out / f"train-rank{rank}.ndjson", samples=100)
        curves = {"fixed": CURVE, "odb": [(u, s / 2, loss) for u, s, loss in CURVE], "free": CURVE[:2]}
        (out / "train.json").write_text(json.dumps({"curves": curves}))
        return figures

    monkeypatch.setattr(demo, "_train", train)
    monkeypatch.setattr(demo, "SAMPLES_PER_RANK", 20)
    assert main(["demo", "--out", str(out)]) == 0
    return figures


def test_what_the_demo_prints_has_a_formula(
    headings: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    figures = run_demo(tmp_path / "demo", monkeypatch)
    assert set(figures) == set(read_names("Figures of the demo's training"))
    assert "speed" in headings
    assert set(headings) - set(read_names("Columns of tables")) - {*recorded_report.TRAINED, ""} == set()


def test_what_the_explorer_writes_has_a_formula() -> None:
    keys = set(get_figures("explore --shard-sizes 1,1")) - {"name"}
    assert keys == set(read_names("Figures of an exploration"))


def test_every_command_that_prints_a_table_is_run_here() -> None:
    names = {name.split(maxsplit=1)[0] for name in COMMANDS} | {"demo", "verify"}
    tables = {
        module.__name__.split(".")[-1].replace("_", "-")
        for module in map(load_command, EXAMPLES)
        if hasattr(module, "print_table")
    }
    assert tables <= names


def test_every_span_of_a_timeline_is_described() -> None:
    spans = set(read_names("Spans of the timeline (`--perfetto`)"))
    source = "".join(
        Path(str(importlib.import_module(f"odb_sim.{name}").__file__)).read_text()
        for name in ("engine.world", "engine.trainers", "baselines.figures")
    )
    used = {
        name for call in re.findall(r"timeline\.add\(([^\n]*)\)", source) for name in re.findall(r'"([^"]+)"', call)
    }
    assert len(used) > 6
    assert used <= spans | set(re.findall(r"`([^`]+)`", read_glossary()))
