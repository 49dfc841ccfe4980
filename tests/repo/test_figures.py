"""Figures of the README, the front page and the pages beside are what their commands print, for commands that take seconds."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import pytest

from tests.helpers.commands import get_figures

ROOT = Path(__file__).parents[2]
README, INDEX = ROOT / "README.md", ROOT / "docs" / "index.md"
CHOOSE, UPDATES = ROOT / "docs" / "howto" / "choose.md", ROOT / "docs" / "explanation" / "updates.md"
FIGURES = ROOT / "docs" / "explanation" / "figures.md"
SAME_UPDATES = "compare mm_mix_real --global-batch 256 --shards shared --policy standard,odb"


@cache
def find_speedups(command: str) -> Mapping[str, float]:
    """Returns the speed-up of each policy from the command's JSON."""
    return {entry["policy"]: entry["speedup"] for entry in get_figures(command)}


def read_words(path: Path) -> str:
    """Returns the text of a page on one line, without marks."""
    return re.sub(r"\s+", " ", path.read_text().replace("*", ""))


def test_the_speed_up_at_the_same_updates() -> None:
    padded = f"{find_speedups(SAME_UPDATES)['odb']:.2f}"
    packed = f"{find_speedups(f'{SAME_UPDATES} --layout packed')['odb']:.2f}"
    assert f"on 8 ranks: {padded} times the samples per second" in read_words(README)
    assert f"and {packed} times with `--layout packed`" in read_words(README)
    assert f"{padded} times the samples per second" in read_words(INDEX)
    assert f"The first prints {padded} times the samples per second of fixed batches of four, the second {packed}" in (
        read_words(CHOOSE)
    )
    row = re.search(r"^\| mm_mix_real \|(.*)\|$", UPDATES.read_text(), re.MULTILINE)
    assert row is not None
    cells = [cell.strip() for cell in row[1].split("|")]
    assert (cells[1], cells[3]) == (padded, packed)


@pytest.mark.slow
def test_the_speed_up_of_the_free_mode() -> None:
    found = find_speedups("compare mm_mix_real")
    odb, bmt, gmt, packing = (f"{found[name]:.2f}" for name in ("odb", "bmt", "gmt", "packing"))
    said = f"reaches {odb} times at one global batch of about 199 samples"
    assert said in read_words(README)
    assert f"bmt {bmt}, gmt {gmt} and packing {packing}" in read_words(README)


@pytest.mark.slow
@pytest.mark.parametrize("trace", ["mm_mix_real", "llamafactory_demos", "gsm8k"])
def test_a_row_of_the_figures(trace: str) -> None:
    found = find_speedups(f"compare {trace}")
    row = re.search(rf"^\| {trace} \| \*\*([\d.]+)\*\* \|(.*)\|$", FIGURES.read_text(), re.MULTILINE)
    assert row is not None
    cells = [row[1], *(cell.strip() for cell in row[2].split("|"))]
    policies = ["odb", "paper", "peer", "hfg", "balanced", "bmt", "gmt", "packing"]
    assert cells[: len(policies)] == [f"{found[policy]:.2f}" for policy in policies]
