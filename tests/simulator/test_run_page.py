"""The page of a run: what it shows, and that it opens offline."""

from __future__ import annotations

import html
import json
import re
from pathlib import Path

import pytest

pytest.importorskip("matplotlib")

from odb_sim.cli.main import main


@pytest.mark.parametrize("policy", ["odb", "standard"])
def test_a_page_shows_the_epoch_and_its_timelines(policy: str, tmp_path: Path) -> None:
    page, timeline = tmp_path / "page.html", tmp_path / "timeline.json"
    arguments = ["sgd_dialogues", "--ranks", "6", "--shards", "uneven", "--samples", "600", "--token-budget", "4096"]
    options = ["--window", "32", "--policy", policy, "--html", str(page)]
    assert main(["simulate", *arguments, *options]) == 0
    text = page.read_text()
    assert text.count("<svg") == 4
    for label in ("padding ratio", "efficiency", "steps in the queue, mean over ranks", "wait for ranks", "idle"):
        assert f">{label}<" in text or f"<!-- {label} -->" in text, label
    shown = [rank for rank in range(6) if f"<!-- rank {rank}   reader -->" in text]
    assert shown == [0, 1, 3, 5]
    assert not re.search(r'<(script|link|img)\b|(src|href)="(?!#)|url\((?!#)', text), "nothing to fetch: opens offline"
    alone = page.read_text()
    assert main(["simulate", *arguments, *options, "--perfetto", str(timeline)]) == 0
    assert page.read_text() == alone
    assert '"pid":5' in timeline.read_text()


@pytest.mark.parametrize("fault", ["kill:4:2", "stop:4:2", "read:4:50", "collate:4:1"])
def test_a_page_says_which_rank_a_fault_befalls_when_and_why_and_draws_it(fault: str, tmp_path: Path) -> None:
    page, figures = tmp_path / "page.html", tmp_path / "figures.json"
    arguments = ["gsm8k", "--ranks", "6", "--samples", "600", "--token-budget", "2048", "--window", "32"]
    assert main(["simulate", *arguments, "--fault", fault, "--html", str(page), "--json", str(figures)]) == 0
    text, summary = html.unescape(page.read_text()), json.loads(figures.read_text())
    assert summary["outcome"] != "complete"
    said = f"Rank 4, {summary['fault_s']:,.3f} s into the epoch, after {summary['steps']:,} steps: {summary['outcome_cause']}"
    assert said in text
    assert f"{summary['samples_emitted']:,} of 600 samples" in text
    assert "<!-- rank 4   reader -->" in text
    assert "<!-- rank 4: the fault -->" in text


def test_a_run_without_a_step_has_a_page(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    fault = ["--fault", "read:0:0"]
    arguments = ["gsm8k", "--ranks", "2", "--samples", "50", "--token-budget", "2048", "--html", str(page), *fault]
    assert main(["simulate", *arguments]) == 0
    assert "failed" in page.read_text()


@pytest.mark.parametrize(
    "arguments",
    [
        "simulate mm_mix_real --ranks 8 --samples 400 --token-budget 1024",
        "compare mm_mix_real --ranks 8 --samples 400 --token-budget 1024",
        "sweep mm_mix_real --ranks 8 --samples 400 --token-budget 1024 --window 16,32 --processes 1",
        "tune mm_mix_real --ranks 8 --samples 400 --memory-tokens 1024 --processes 1",
    ],
    ids=lambda arguments: arguments.split()[0],
)
def test_a_page_says_the_cautions_that_the_terminal_says(
    arguments: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "page.html"
    assert main([*arguments.split(), "--html", str(page)]) == 0
    cautions = [line for line in capsys.readouterr().out.splitlines() if line.startswith("Caution: ")]
    assert cautions
    text = html.unescape(page.read_text())
    assert all(caution in text for caution in cautions)
