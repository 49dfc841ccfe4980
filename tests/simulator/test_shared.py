"""Shared shards in the simulator: what they gain, what the commands report about them, and replays of recorded runs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from odb_sim.cli.main import main
from odb_sim.engine.loading import CHUNK_SAMPLES, OrderReader
from odb_sim.inputs.costs import LoaderCost
from odb_sim.inputs.lengths import load_lengths
from odb_sim.inputs.workload import Sharding
from odb_sim.studies.runs import Driver, run

from odb_ref.core.batching.layouts import Layout
from odb_ref.core.errors import UsageError
from odb_ref.core.resume import RoundStart
from odb_ref.trace.check import Property, Status, check_traces
from tests.helpers.commands import get_figures
from tests.helpers.simulated import make_run

COMMON = ["--token-budget", "8192", "--samples", "900", "--shards", "shared", "--layout", "packed"]


def simulate(name: str, sharding: Sharding, *, ranks: int, window: int) -> float:
    budget = max(12_288, int(load_lengths(name).tokens.max()))
    settings = {"budget_tokens": budget, "window_samples": window, "sharding": sharding, "driver": Driver.ROUNDS}
    return run(make_run(name, ranks, 10 * ranks * window, draw=1, layout=Layout.PACKED, **settings)).summary.efficiency


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "ranks", "window"),
    [("azure_llm_2023_conv", 16, 512), ("azure_llm_2023_conv", 64, 1024), ("mm_mix_real", 64, 1024)],
)
def test_packed_rows_of_shared_shards_waste_less_than_a_hundredth(name: str, ranks: int, window: int) -> None:
    """Spec: R14. Checks: DEAL. With fixed shards the ranks that end first wait for the others, for the length of a window."""
    shared = simulate(name, Sharding.SHARED, ranks=ranks, window=window)
    assert shared >= 0.99
    assert shared > simulate(name, Sharding.EVEN, ranks=ranks, window=window) + 0.01


def test_commands_share_shards_and_say_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Spec: R14. Checks: DEAL."""
    trace = tmp_path / "trace"
    said = get_figures("simulate gsm8k --ranks 3", *COMMON, "--trace", str(trace))
    assert (said["shards"], said["layout"]) == ("shared", "packed")
    assert main(["check", str(trace), "--replay"]) == 0
    (job,) = check_traces([trace]).jobs
    assert job.get_status(Property.DEAL) is Status.HOLDS
    assert main(["replay", str(trace)]) == 0
    swept = get_figures("sweep gsm8k --ranks 2,3 --window 64", *COMMON)
    assert [entry["shards"] for entry in swept] == ["shared"] * 2
    # Baselines cannot share them.
    compared = [entry["shards"] for entry in get_figures("compare gsm8k --ranks 3", *COMMON[:-2])]
    assert (compared.count("shared"), set(compared)) == (2, {"shared", "even"})
    capsys.readouterr()


def test_nothing_is_read_before_it_is_drawn() -> None:
    """Spec: R14.2."""
    loader = LoaderCost(workers=2, prefetch_factor=2, sample_s=1.0, per_token_s=0.0)
    tokens = np.ones(200, dtype=np.int64)
    readers = [OrderReader(loader, tokens) for _ in range(2)]
    assert readers[0].read(16, 5.0, first=0) == readers[1].read(32, 5.0, first=16) == 21.0
    # The second worker of rank 0 is free, and begins when it is asked.
    assert readers[0].read(1, 30.0, first=48) == 31.0
    assert readers[1].read(3 * CHUNK_SAMPLES, 30.0, first=49) == 62.0
    assert readers[1].read(1, 80.0, 2.0, first=97) == 82.0, "twice as slow"
    assert readers[0].read(0, 90.0, first=98) == 90.0


def test_a_saved_epoch_of_shared_shards_is_not_simulated() -> None:
    with pytest.raises(UsageError, match="only from its beginning"):
        make_run("gsm8k", 2, 100, budget_tokens=900, sharding=Sharding.SHARED, starts=(RoundStart(round=1),) * 2)
