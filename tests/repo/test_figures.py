"""Figures of the README, the front page and the pages beside are what their commands print, for commands that take seconds."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import pytest
from odb_sim.inputs.lengths import list_bundled_names

from tests.helpers.commands import get_figures

ROOT = Path(__file__).parents[2]
README, INDEX = ROOT / "README.md", ROOT / "docs" / "index.md"
CHOOSE, UPDATES = ROOT / "docs" / "howto" / "choose.md", ROOT / "docs" / "explanation" / "updates.md"
FIGURES = ROOT / "docs" / "explanation" / "figures.md"
SAME_UPDATES = "compare mm_mix_real --global-batch 256 --policy standard,odb"


@cache
def find_speedups(command: str) -> Mapping[str, float]:
    """Returns the speed-up of each policy from the command's JSON."""
    return {entry["policy"]: entry["speedup"] for entry in get_figures(command)}


def read_words(path: Path) -> str:
    """Returns the text of a page on one line, without marks."""
    return re.sub(r"\s+", " ", path.read_text().replace("*", ""))


def find_rows(path: Path) -> Mapping[str, list[str]]:
    """Returns the cells of each bundled trace's row in the first table that has one."""
    rows = {}
    for line in path.read_text().splitlines():
        name, *cells = [cell.strip() for cell in line.strip("|").split("|")]
        if name in list_bundled_names():
            rows.setdefault(name, cells)
    return rows


def test_the_speed_up_at_the_same_updates() -> None:
    padded, packed, padded_shared, packed_shared = (
        f"{find_speedups(SAME_UPDATES + options)['odb']:.2f}"
        for options in ("", " --layout packed", " --shards shared", " --layout packed --shards shared")
    )
    shared = f'and {padded_shared} times with `shard="shared"`, where ranks draw from one order'
    assert f"on 8 ranks: {padded} times the samples per second" in read_words(README)
    assert f"{shared}; with packed rows {packed} and {packed_shared} times" in read_words(README)
    assert f"{padded} times the samples per second" in read_words(INDEX)
    assert shared in read_words(INDEX)
    assert f"The first prints {padded} times the samples per second of fixed batches of four, the second {packed}" in (
        read_words(CHOOSE)
    )
    assert f"they print {padded_shared} and {packed_shared} times" in read_words(CHOOSE)
    assert find_rows(UPDATES)["mm_mix_real"][:4] == [padded, padded_shared, packed, packed_shared]


def test_the_range_at_the_same_updates_is_of_all_traces() -> None:
    rows = find_rows(UPDATES)
    assert sorted(rows) == sorted(list_bundled_names())
    ratios = sorted(float(cells[0]) for cells in rows.values())
    assert f"On the seven bundled traces it is {ratios[0]:.2f} to {ratios[-1]:.2f} times, padded" in read_words(README)
    assert {name: cells[-2:] for name, cells in find_rows(FIGURES).items()} == {
        name: cells[:2] for name, cells in rows.items()
    }


@pytest.mark.slow
@pytest.mark.parametrize("trace", ["arxiv_summarization_vidur", "azure_llm_2023_code"])
def test_the_ends_of_the_range(trace: str) -> None:
    found = find_speedups(f"compare {trace} --global-batch 256 --policy standard,odb")
    assert find_rows(UPDATES)[trace][0] == f"{found['odb']:.2f}"


@pytest.mark.slow
def test_the_options_that_tune_prints() -> None:
    tuned = get_figures("tune mm_mix_real --ranks 8 --memory-tokens 16384 --no-beside")
    assert f"It prints the options to use, `{tuned['options']}` here" in read_words(CHOOSE)
    batching = f'`Batching(window={tuned["window"]}, depth={tuned["depth"]}, cost="{tuned["cost"]}")`'
    assert f"`token_budget={tuned['token_budget']:_}`, {batching}" in read_words(CHOOSE)
    assert f"`Protocol(ramp_rounds={tuned['ramp']}, max_age_rounds={tuned['max_age']})`" in read_words(CHOOSE)


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
    cells = [row[1], *(cell.strip() for cell in row[2].split("|"))]
    policies = ["odb", "paper", "peer", "hfg", "balanced", "bmt", "gmt", "packing"]
    assert cells[: len(policies)] == [f"{found[policy]:.2f}" for policy in policies]
