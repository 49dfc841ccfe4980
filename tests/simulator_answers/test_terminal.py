"""No table is ever cut, neither every command's on a terminal of 80 columns, nor any table at any width."""

from __future__ import annotations

import importlib
import os
import pty
import re
import sys
import time
from io import StringIO
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from odb_sim.cli import explore as explore_command
from odb_sim.cli import verify as verify_command
from odb_sim.cli.main import EXAMPLES, load_command, main
from odb_sim.explore import suites
from odb_sim.explore.search import Exploration
from odb_sim.reports import terminal
from odb_sim.studies.processes import Local
from odb_sim.studies.published import ROWS, compare_published
from rich.cells import cell_len

from tests.helpers.effort import few
from tests.simulator.test_glossary import COMMANDS, run_demo, write_data

MODULES = [module for module in map(load_command, EXAMPLES) if module is not None]
WIDTH = 80
ESCAPES = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")

Table = tuple[list[str], list[list[str]]]


class Terminal(StringIO):
    """Collects what is printed, and claims to be a terminal."""

    def isatty(self) -> bool:
        return True


def show(table: Table, width: int, keys: int = 1) -> str:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", str(width))
        patch.setenv("TERM", "xterm")
        shown = Terminal()
        patch.setattr(sys, "stdout", shown)
        terminal.print_table("", *table, keys=keys)
    return ESCAPES.sub("", shown.getvalue())


def check_whole(shown: str, table: Table, width: int) -> None:
    """Checks that every heading and cell is in ``shown``, and that no line is longer than the terminal."""
    assert "…" not in shown
    assert max(map(cell_len, shown.splitlines())) <= width
    # A path wider than the terminal is folded in the first column.
    folded = "".join(re.split(r"\s{2,}", line.strip())[0] for line in shown.splitlines())
    header, rows = table
    for text in (*header, *(cell for row in rows for cell in row)):
        assert all(word in shown or word in folded for word in text.split()), text


@pytest.fixture
def tables(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Table, int]]:
    """Returns every table that a command prints, with the number of columns that name a row."""
    seen: list[tuple[Table, int]] = []

    def note(title: str, header: list[str], rows: list[list[str]], *, keys: int = 1) -> None:
        seen.append(((header, rows), keys))

    for module in MODULES:
        if hasattr(module, "print_table"):
            monkeypatch.setattr(module, "print_table", note)
    return seen


WIDE = {
    "compare": ["azure_llm_2023_conv", "--ranks", "64", "--samples", "6400"],
    "sweep": ["gsm8k", "--ranks", "2,64", "--samples", "6400", "--token-budget", "1024,16384", "--window", "16,4096"],
}


@pytest.mark.slow
@pytest.mark.parametrize("name", [*COMMANDS, *(f"{name} wide" for name in WIDE)])
def test_no_command_s_table_is_cut_at_80_columns(
    name: str, tables: list[tuple[Table, int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = name.split(maxsplit=1)[0]
    arguments = list(WIDE[command] if name.endswith("wide") else COMMANDS.get(name, []))
    arguments += ["--workers", "1"] if name == "sweep wide" else []
    write_data(command, arguments, tmp_path)
    if command == "published":
        comparisons = compare_published(Local(), ROWS, samples=160)
        monkeypatch.setattr("odb_sim.cli.published.compare_published", lambda executor: comparisons)
    assert main([command, *arguments]) == 0
    assert tables
    for table, keys in tables:
        for width in (WIDTH, 60):
            check_whole(show(table, width, keys), table, width)


def test_nor_are_the_demo_s(tables: list[tuple[Table, int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_demo(tmp_path / "demo", monkeypatch)
    assert [header[0] for (header, _), _ in tables] == ["simulated", "", "trace"]
    for table, keys in tables:
        check_whole(show(table, WIDTH, keys), table, WIDTH)


@pytest.mark.parametrize("name", ["", max((*suites.SMALL, *suites.FULL), key=len)])
def test_nor_are_the_explorer_s_lines(name: str) -> None:
    result = Exploration(
        states=5_000_000,
        edges=50_000_000,
        depth=123,
        ends=12_345,
        rank_states=12_345,
        transition_bound=12_345,
        seconds=1234.5,
        is_complete=False,
        counterexample=None,
    )
    lines = explore_command._summarize(name, result)
    assert max(map(len, lines)) <= WIDTH


def test_verify_s_words_fit_the_terminal(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for columns, widest in ((str(WIDTH), WIDTH), ("300", 120)):
        monkeypatch.setenv("COLUMNS", columns)
        verify_command._print_item("stage", "word " * 99)
        lines = capsys.readouterr().out.splitlines()
        assert widest - 5 <= max(map(len, lines)) <= widest


@settings(max_examples=few(150), deadline=None)
@given(
    columns=st.lists(st.tuples(st.integers(1, 30), st.integers(0, 40)), min_size=1, max_size=9),
    rows=st.integers(0, 2),
    keys=st.integers(1, 3),
    width=st.integers(60, 130),
)
def test_a_table_of_any_widths_is_whole(columns: list[tuple[int, int]], rows: int, keys: int, width: int) -> None:
    header = [f"h{number}".ljust(head, "x") for number, (head, _) in enumerate(columns)]
    body = [[f"{row}c{number}".ljust(cell, "y") for number, (_, cell) in enumerate(columns)] for row in range(rows)]
    shown = show((header, body), width, min(keys, len(columns)))
    assert "…" not in shown
    assert max(map(cell_len, shown.splitlines())) <= width
    # Whatever is folded, no letter is lost.
    cells = [cell for row in body for cell in row]
    for letter, texts in (("x", header), ("y", cells)):
        assert shown.count(letter) >= sum(text.count(letter) for text in texts)


def test_rows_keep_their_names_where_columns_go_into_blocks() -> None:
    header = ["policy", "window", *(f"column {number}" for number in range(9))]
    rows = [[f"policy{row}", str(row), *("0.123456789" for _ in range(9))] for row in range(2)]
    shown = show((header, rows), WIDTH, keys=2)
    blocks = shown.count("policy ")
    assert blocks > 1
    assert shown.count("policy0") == shown.count("policy1") == blocks
    assert shown.count("0.123456789") == 18
    assert show((header, rows), 400, keys=2).count("policy0") == 1, "one block where there is room"


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="no pty")
@pytest.mark.parametrize(
    "arguments",
    [
        ["simulate", "gsm8k", "--ranks", "2", "--samples", "60", "--token-budget", "2048"],
        ["compare", "gsm8k", "--ranks", "2", "--samples", "600"],
        ["sweep", *WIDE["sweep"], "--workers", "1"],
        ["tune", "gsm8k", "--samples", "80", "--ranks", "2", "--memory-tokens", "2048", "--window-max", "16"],
    ],
    ids=lambda arguments: arguments[0],
)
def test_on_a_real_terminal_of_80_columns(arguments: list[str]) -> None:
    pid, terminal_fd = pty.fork()
    if pid == 0:
        # The width comes from the terminal or from the variable.
        os.environ.update(COLUMNS=str(WIDTH), TERM="xterm")
        os.execv(sys.executable, [sys.executable, "-m", "odb_sim.cli.main", *arguments])
    text = b""
    while True:
        try:
            part = os.read(terminal_fd, 1 << 16)
        except OSError:
            break
        if not part:
            break
        text += part
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    shown = ESCAPES.sub("", text.decode())
    assert "…" not in shown
    lines = [line for line in shown.splitlines() if line.startswith(" ")]
    assert len(lines) > 5
    assert max(map(len, lines)) <= WIDTH


@pytest.mark.parametrize("width", [12, 16, 20, 24])
def test_on_the_narrowest_of_terminals_words_are_folded_and_not_cut(width: int) -> None:
    shown = show((["policy", "speed-up"], [["standard", "1,000.00"]]), width)
    assert "…" not in shown
    assert max(map(cell_len, shown.splitlines())) <= width
    assert sorted(re.sub(r"[\s─]", "", shown)) == sorted("policyspeed-upstandard1,000.00"), "every character is there"


def test_without_a_terminal_progress_is_a_line_now_and_then(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with terminal.show_progress("short", 3) as on_done:
        on_done(1)
    assert capsys.readouterr().err == "", "what is over soon says nothing"
    monkeypatch.setattr(terminal, "LINE_EVERY_S", 0.01)

    def tell(total: int, done: int, *, is_estimate: bool = False) -> str:
        with terminal.show_progress("long", total, is_estimate=is_estimate) as on_done:
            on_done(done)
            time.sleep(0.2)
        out, err = capsys.readouterr()
        time.sleep(0.05)
        assert (out, capsys.readouterr().err) == ("", ""), "nothing after the end"
        return str(err.splitlines()[-1])

    assert re.fullmatch(r"long: 1,000 of 3,000 done, 0 s", tell(3_000, 1_000))
    assert re.fullmatch(r"long: 2 of about 3 done, 0 s", tell(3, 2, is_estimate=True))
    assert re.fullmatch(r"long: 4 done, 0 s", tell(3, 4, is_estimate=True))
    assert re.fullmatch(r"long: 0 s", tell(0, 0))


@pytest.mark.slow
@pytest.mark.parametrize(("options", "usual"), [("--layout packed --shards shared", 600), ("--no-beside", 100)])
def test_tune_says_how_far_it_is(
    options: str, usual: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(terminal, "LINE_EVERY_S", 0.05)
    arguments = ["tune", "gsm8k", "--ranks", "2", "--memory-tokens", "2048", "--samples", "300", "--processes", "1"]
    assert main([*arguments, *options.split()]) == 0
    assert re.search(rf"^tune gsm8k: \d+ of about {usual} done, 0 s$", capsys.readouterr().err, flags=re.MULTILINE)


def test_the_module_is_the_only_one_that_makes_tables() -> None:
    for module in MODULES:
        source = Path(str(importlib.import_module(module.__name__).__file__)).read_text()
        assert "rich.table" not in source
