"""`odb-ref calibrate` reads what the demo records."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

from odb_sim.cli.demo import find_script

from tests.helpers.capture import capture
from tests.helpers.commands import get_figures


@pytest.mark.timeout(240)
def test_the_demo_records_runs_that_calibrate_reads(tmp_path: Path) -> None:
    """It runs the README's two lines on fewer texts. The accuracy of the times is not tested, because machines differ."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += [str(find_script()), "--out", str(tmp_path), "--runs", "2", "--samples", "600"]
    done = capture(command, timeout=220)
    assert done.returncode == 0, done.stderr[-2000:]
    assert [line.split(":")[0] for line in done.stdout.splitlines()] == ["run 1 of 2", "run 2 of 2"]
    traces = sorted(map(str, tmp_path.glob("run*.ndjson")))
    assert len(traces) == 4
    written = get_figures("calibrate --workers 0", *traces)
    assert written["fit"]["components"][0]["spans_held"] >= 4
    assert len(written["replays"]) == 2
    for entry in written["replays"]:
        assert entry["is_equal"]
        assert entry["outcome"] == "complete"
        assert entry["predicted_steps"] == entry["measured_steps"] > 15
        assert entry["timing"]["steps"] == entry["measured_steps"] - 1
