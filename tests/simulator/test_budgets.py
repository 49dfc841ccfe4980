"""A token budget that changes in an epoch: the same steps by both drivers, and a trace that the checker accepts."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from odb_sim.cli.main import main
from odb_sim.inputs.conditions import parse_budget_schedule
from odb_sim.inputs.workload import Sharding
from odb_sim.recorded.replay import replay
from odb_sim.recorded.runs import load_runs
from odb_sim.studies.runs import Driver, Run, run

from odb_ref.core.batching.layouts import Layout
from odb_ref.core.errors import UsageError
from odb_ref.trace.check import check_traces
from odb_ref.trace.writing import TraceWriter
from tests.helpers.commands import get_figures
from tests.helpers.simulated import make_run
from tests.simulator.test_rounds import check_equal
from tests.simulator.test_view import read_data

SCHEDULE = parse_budget_schedule("0:2000,30:8000,60:3000")


def _make(driver: Driver, layout: Layout, sharding: Sharding) -> Run:
    settings = {"driver": driver, "layout": layout, "sharding": sharding, "budget_schedule": SCHEDULE}
    return make_run("azure_llm_2023_conv", 3, 1500, draw=1, budget_tokens=8000, window_samples=64, **settings)


@pytest.mark.parametrize("sharding", list(Sharding))
@pytest.mark.parametrize("layout", list(Layout))
def test_both_drivers_follow_a_schedule_alike(layout: Layout, sharding: Sharding, tmp_path: Path) -> None:
    """Spec: R14.6, R15.1, R15.4. Checks: BUDGET, DEAL, REPLAY."""
    path = tmp_path / "trace.ndjson"
    what = _make(Driver.EVENTS, layout, sharding)
    with TraceWriter(path, what.build_config(), driver="simulator") as writer:
        events = run(what, observer=writer.record)
    check_equal(events, run(_make(Driver.ROUNDS, layout, sharding)), has_chance=True)
    assert check_traces([path], is_replayed=True).is_ok
    assert replay(load_runs([path])[0]).is_equal
    tokens = [
        np.mean([row.padded_tokens / (3 - row.idle_ranks) for row in events.rows if row.round == round_])
        for round_ in range(events.rows[-1].round + 1)
    ]
    assert max(tokens) > 1.4 * tokens[0]
    assert tokens[-1] < max(tokens)
    if sharding is Sharding.EVEN:  # if draws do not change the samples
        means = [
            np.mean([row.samples for row in events.rows if row.round == round_])
            for round_ in range(events.rows[-1].round + 1)
        ]
        assert max(means) > 1.5 * means[0]
        assert means[-1] < max(means)


@pytest.mark.parametrize("text", ["", "5:100", "0:0", "0:5,0:6", "0:5;3:4", "0:5,3", "0:1:2"])
def test_a_schedule_that_makes_no_sense_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="budget schedule"):
        parse_budget_schedule(text)


def test_pages_of_a_run_tell_which_budget_was_in_force(tmp_path: Path) -> None:
    page, trace, view = (tmp_path / name for name in ("run.html", "t.ndjson", "view.html"))
    command = f"simulate gsm8k --ranks 2 --samples 500 --window 32 --token-budget 2048 --html {page}"
    assert main(command.split()) == 0
    assert "largest budget" not in page.read_text(encoding="utf-8")
    figures = get_figures(f"{command} --budget-schedule 0:512,10:2048 --trace {trace}")
    text = page.read_text(encoding="utf-8")
    assert "budget 2,048 at most (0:512,10:2048)" in text
    assert "of the largest budget of 2,048 is filled" in text
    assert figures["budget_schedule"] == "0:512,10:2048"
    assert main(["replay", str(trace), "--html", str(page)]) == 0
    assert "of the largest budget of 2,048 is filled" in page.read_text(encoding="utf-8")
    assert main(["view", str(trace), "--html", str(view)]) == 0
    budgets = [entry["parts"][0]["budget"] for entry in read_data(view)["rounds"]]
    assert budgets == sorted(budgets)
    assert set(budgets) == {512, 2048}
