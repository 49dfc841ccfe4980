"""The published figures: drawn lengths have the stated moments, and every row and assumption is in the tables."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from odb_sim.cli.main import main
from odb_sim.studies import published
from odb_sim.studies.processes import Local
from odb_sim.studies.published import (
    ASSUMPTIONS,
    MEAN_TOKENS,
    ROWS,
    Inputs,
    Shape,
    compare_published,
    draw_lengths,
    predict,
)

from tests.helpers.commands import get_figures


@pytest.mark.parametrize("shape", list(Shape))
@pytest.mark.parametrize("cv", [0.29, 0.48, 1.0])
def test_lengths_have_the_stated_mean_and_variation(shape: Shape, cv: float) -> None:
    inputs = Inputs(length_cv=cv, mean_tokens=2000, shape=shape, cutoff_tokens=10**6, samples=40_000)
    tokens = draw_lengths(inputs).tokens
    assert tokens.mean() == pytest.approx(2000, rel=0.03)
    assert tokens.std() / tokens.mean() == pytest.approx(cv, rel=0.05)
    assert np.array_equal(tokens, draw_lengths(inputs).tokens)


def test_the_cut_off_is_kept() -> None:
    assert draw_lengths(Inputs(length_cv=1.0, mean_tokens=3000, cutoff_tokens=4096)).tokens.max() == 4096


def test_a_fixed_batch_is_of_the_size_asked_for() -> None:
    base = Inputs(length_cv=0.3, mean_tokens=500, samples=400)
    assert predict(replace(base, batch_size=3)).batch_size == 3
    safe = predict(base)
    assert safe.batch_size == 12_288 // int(draw_lengths(base).tokens.max())


def test_the_published_speed_ups_are_the_quotients_of_the_published_throughputs() -> None:
    for row in ROWS:
        assert row.odb_samples_per_s / row.standard_samples_per_s == pytest.approx(row.speedup, abs=0.01)
    assert set(MEAN_TOKENS) == {row.name for row in ROWS}


def test_every_assumption_moves_its_input_and_nothing_else() -> None:
    base = Inputs(length_cv=0.5, mean_tokens=1000)
    for assumption in ASSUMPTIONS:
        moved = {inputs for inputs in assumption.move(base) if inputs != base}
        assert moved
        for inputs in moved:
            assert replace(inputs, **{assumption.field: getattr(base, assumption.field)}) == base


def test_the_command_shows_every_row_and_writes_every_input(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    comparisons = compare_published(Local(), ROWS[:1], samples=320)
    monkeypatch.setattr("odb_sim.cli.published.compare_published", lambda executor: comparisons)
    (entry,) = get_figures("published --processes 1")
    assert entry["published"]["speedup"] == 1.77
    assert entry["speedup_low"] <= entry["predicted_speedup"] <= entry["speedup_high"]
    assert entry["error"] == pytest.approx(entry["predicted_speedup"] / 1.77 - 1)
    assert [item["input"] for item in entry["assumptions"]] == [item.field for item in published.ASSUMPTIONS]
    text = capsys.readouterr().out
    assert all(assumption.reason in text for assumption in ASSUMPTIONS)
    assert main(["published", "--processes", "0"]) == 2
