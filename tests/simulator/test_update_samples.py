"""``--global-batch``: the updates of plain training, simulated on the core and compared with every policy at that size."""

from __future__ import annotations

from pathlib import Path

import pytest
from odb_sim.cli.main import main
from odb_sim.inputs.workload import Sharding
from odb_sim.studies.runs import Driver, Result, run

from odb_ref.core.batching.layouts import Layout
from odb_ref.core.errors import UsageError
from odb_ref.trace.check.job import check_traces
from tests.helpers.commands import get_figures, tell
from tests.helpers.simulated import make_run


def simulate(ranks: int = 4, sharding: Sharding = Sharding.EVEN, **settings: object) -> Result:
    given: dict[str, object] = {"budget_tokens": 4000, "update_samples": 128} | settings
    return run(make_run("gsm8k", ranks, 600, sharding=sharding, **given))


@pytest.mark.parametrize("sharding", [Sharding.EVEN, Sharding.SHARED])
@pytest.mark.parametrize("layout", list(Layout))
@pytest.mark.parametrize("budget", [1000, 4000])
def test_the_number_of_updates_is_that_of_plain_training(sharding: Sharding, layout: Layout, budget: int) -> None:
    """Checks: UPDATE."""
    for ranks in (1, 3, 4):
        result = simulate(ranks, sharding, layout=layout, budget_tokens=budget)
        assert result.summary.updates == 5
        samples: dict[int, int] = {}
        for row in result.rows:
            samples[row.round] = samples.get(row.round, 0) + row.samples
        assert list(samples.values()) == [128] * 4 + [88]


def test_updates_dealt_by_load_wait_less() -> None:
    own, dealt = (simulate(8, sharding, layout=Layout.PACKED) for sharding in (Sharding.EVEN, Sharding.SHARED))
    assert dealt.summary.sim_time_s < own.summary.sim_time_s
    assert dealt.summary.efficiency > own.summary.efficiency


def test_rounds_leave_updates_to_events() -> None:
    assert simulate().summary.driver == Driver.EVENTS
    with pytest.raises(UsageError, match="updates of a fixed number"):
        simulate(driver=Driver.ROUNDS)


def test_every_policy_is_compared_at_the_same_update(capsys: pytest.CaptureFixture[str]) -> None:
    command = "compare gsm8k --ranks 2 --samples 300 --global-batch 100"
    figures = get_figures(command)
    assert "at one global batch of 100 samples" in capsys.readouterr().out
    assert {entry["policy"] for entry in figures} >= {
        "odb",
        "standard",
        "peer",
        "bmt",
        "packing",
    }


def test_a_simulated_trace_is_checked_and_replayed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Checks: UPDATE, REPLAY."""
    trace = str(tmp_path / "t.ndjson")
    command = ["simulate", "gsm8k", "--ranks", "2", "--token-budget", "4000", "--samples", "300", "--shards", "shared"]
    assert main([*command, "--global-batch", "64", "--trace", trace]) == 0
    assert not check_traces([trace], is_replayed=True).violations
    assert "equal" in tell(capsys, ["replay", trace])
    assert (
        main(["sweep", "gsm8k", "--ranks", "2", "--token-budget", "4000", "--samples", "300", "--global-batch", "64"])
        == 0
    )
