"""Resumed epochs, recorded anywhere, are simulated again decision by decision."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from odb_sim.cli.main import main
from odb_sim.recorded.replay import build_run, replay
from odb_sim.recorded.runs import load_runs
from odb_sim.studies.runs import run

from odb_ref.core.errors import UsageError
from odb_ref.core.resume import RoundStart
from odb_ref.trace.format import TraceError
from odb_ref.trace.writing import TraceWriter
from tests.helpers.tamper import Tampered
from tests.helpers.world import AnyOrder
from tests.trace.test_resumed import CONFIGS, find_carrying, write_rest


class Prompt(AnyOrder):
    """Sources report their end with their last sample, as the loader's and the simulator's do. Rules see when they do."""

    def answer_read(self, asked: int, left: int) -> tuple[int, bool]:
        count = min(self.random.randint(1, asked), left)
        return count, count == left


@pytest.mark.slow
@pytest.mark.parametrize("name", CONFIGS)
def test_the_rest_of_an_epoch_replays_equal_after_any_step(name: str, tmp_path: Path) -> None:
    rounds = set()
    for count in range(12):
        (recorded,) = load_runs(write_rest(tmp_path, name, count, schedule=Prompt))
        found = replay(recorded)
        assert found.difference == ""
        assert found.outcome == "complete"
        assert found.measured_steps == found.predicted_steps
        rounds.add(recorded.ranks[0].start.round)
    assert max(rounds) > 1


def test_the_simulator_records_the_rest_as_it_was_recorded(tmp_path: Path) -> None:
    (recorded,) = load_runs(find_carrying(tmp_path, Prompt))
    assert recorded.starts
    what = build_run(recorded)
    path = tmp_path / "again.ndjson"
    with TraceWriter(path, recorded.config, driver="simulator") as writer:
        run(what, observer=writer.record)
    (again,) = load_runs([path])
    assert again.starts == recorded.starts
    assert [rank.rounds for rank in again.ranks] == [rank.rounds for rank in recorded.ranks]
    assert main(["replay", str(path)]) == 0


def test_a_rest_that_decides_otherwise_is_a_difference(tmp_path: Path) -> None:
    paths = find_carrying(tmp_path, Prompt)
    trace = Tampered(paths[0])
    collated = [step["positions"] for effect in trace.effects("collate") for step in effect["steps"]]
    next(positions for positions in collated if len(positions) > 1).reverse()
    trace.write(paths[0])
    (recorded,) = load_runs(paths)
    assert "rank 0: positions" in replay(recorded).difference


def test_a_start_that_makes_no_sense_is_refused(tmp_path: Path) -> None:
    def load(change: dict[str, Any] | None, *, is_late: bool = False) -> None:
        trace = Tampered(find_carrying(tmp_path, Prompt)[0])
        trace.records[0]["event"]["start"].update(change or {})
        if is_late:
            trace.records.insert(1, trace.records[0])
        load_runs([trace.write(tmp_path / "bad.ndjson")])

    with pytest.raises(TraceError, match=r"bad\.ndjson.*resumed after 1\d+ samples"):
        load({"read_samples": 10**12})
    with pytest.raises(TraceError, match="resumed without the samples it carries"):
        load({"carried": []})
    with pytest.raises(TraceError, match="resumed in the midst of its epoch"):
        load(None, is_late=True)


def test_every_rank_of_the_protocol_goes_on_or_none(tmp_path: Path) -> None:
    (recorded,) = load_runs(find_carrying(tmp_path, Prompt))
    what = build_run(recorded)
    with pytest.raises(UsageError, match="1 starts given"):
        replace(what, starts=(RoundStart(),))
    with pytest.raises(UsageError, match="resumed only by every rank of the protocol"):
        replace(what, policy="standard")


def train_and_go_on(rank: int, limit: int, folder: Path) -> None:
    """Leaves an epoch after ``limit`` steps and resumes it in a new loader, which writes a trace."""
    from tests.torch.data import Numbers, read
    from tests.torch.test_state import make_loader, save

    shard = Numbers(100 * rank, (40, 18, 5)[rank])
    state = save(limit, shard, shard="given")
    with make_loader(shard, shard="given", trace=folder / f"{rank}.ndjson") as loader:
        loader.load_state_dict(state)
        read(loader)


@pytest.mark.parametrize("limit", [4, 9])
def test_a_real_job_that_was_resumed_replays_equal(limit: int, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    from tests.torch.ranks import get_values, run_ranks

    get_values(run_ranks(3, train_and_go_on, limit, tmp_path))
    (recorded,) = load_runs(sorted(tmp_path.glob("*.ndjson")))
    assert recorded.driver == "torch"
    assert len(recorded.starts) == 3
    found = replay(recorded)
    assert found.difference == ""
    assert found.decisions == 3 * found.measured_steps > 0
    assert main(["replay", *map(str, sorted(tmp_path.glob("*.ndjson")))]) == 0
