"""A user's target rule, by name: in simulate, compare, sweep and check --replay."""

from __future__ import annotations

from pathlib import Path

import pytest
from odb_sim.cli.main import main

from tests.helpers.commands import get_figures, refuse, tell

EAGER = f"{Path(__file__).parents[2] / 'examples' / 'rules' / 'eager.py'}:EagerRule"
SMALL = ["gsm8k", "--samples", "200", "--token-budget", "2000", "--window", "32"]


def test_a_simulated_run_of_an_own_rule_is_replayed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "trace.ndjson"
    figures = get_figures(["simulate", *SMALL, "--ranks", "3", "--policy", EAGER, "--trace", str(trace)])
    assert figures["policy"] == "eager"
    capsys.readouterr()
    assert "unknown target rule 'eager'" in tell(capsys, ["check", "--replay", str(trace)])
    assert "REPLAY holds" in tell(capsys, ["check", "--replay", "--policy", EAGER, str(trace)])


def test_a_trace_of_another_rule_of_that_name_is_not_replayed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace, other = tmp_path / "trace.ndjson", tmp_path / "other.py"
    assert main(["simulate", *SMALL, "--ranks", "3", "--policy", EAGER, "--trace", str(trace)]) == 0
    text = Path(EAGER.partition(":")[0]).read_text()
    other.write_text(text.replace("(agreement.groups_min + agreement.groups_max + 1) // 2", "1"))
    assert main(["check", "--replay", "--policy", f"{other}:EagerRule", str(trace)]) == 1
    assert "REPLAY" in capsys.readouterr().out


def test_a_rule_that_check_would_not_ask_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert "--policy needs --replay" in refuse(capsys, ["check", "--policy", EAGER, "trace.ndjson"])


def test_a_window_is_told_where_there_is_one(capsys: pytest.CaptureFixture[str]) -> None:
    """An update is its own window, with any rule."""
    for update in ([], ["--global-batch", "40"]):
        for policy in ("odb", EAGER):
            arguments = ["simulate", *SMALL[:-2], "--ranks", "2", "--policy", policy]
            headline, _, _ = tell(capsys, arguments, *update).partition(" simulated seconds")
            assert (", window " in headline) is not bool(update)


@pytest.mark.parametrize("command", ["compare", "sweep --processes 1"])
def test_compare_and_sweep_take_an_own_rule(command: str) -> None:
    found = get_figures(command, *SMALL, "--ranks", "2", "--policy", f"odb,{EAGER}")
    assert [entry["policy"] for entry in found] == ["odb", "eager"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("class R:\n name = 'odb'\n def compute_target(self, a): return 1\n", "of a shipped rule"),
        ("class R:\n name = 3\n def compute_target(self, a): return 1\n", "must be one word"),
        ("class R:\n name = 'r'\n", "needs a name and compute_target"),
        ("import sys\nsys.exit(0)\n", "SystemExit"),
        ("class R:\n def __init__(self): raise KeyError('x')\n", "cannot be made"),
    ],
)
def test_a_rule_that_cannot_be_run_beside_others_is_refused(
    text: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "rule.py"
    path.write_text(text)
    assert message in refuse(capsys, ["simulate", *SMALL, "--ranks", "2", "--policy", f"{path}:R"])


def test_a_rule_that_leaves_its_bounds_is_told_so_in_a_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "rule.py"
    path.write_text("class R:\n name = 'r'\n def compute_target(self, a): return 10**6\n")
    for command in ("simulate", "compare"):
        assert main([command, *SMALL, "--ranks", "2", "--policy", f"{path}:R"]) == 1
        said = capsys.readouterr().err.splitlines()
        assert "rule 'r' returned 1000000, outside" in said[-1]


def test_a_rule_file_called_as_a_library_harms_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "random.py"
    path.write_text("class R:\n name = 'r'\n def compute_target(self, a): return a.groups_max\n")
    monkeypatch.chdir(tmp_path)
    assert main(["simulate", *SMALL, "--ranks", "2", "--policy", "random.py:R"]) == 0
    import random

    assert random.__file__ != str(path)
