"""A slice of the swarm, and evidence that it can fail."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from odb_ref.core.state import Phase
from tests.proofs import worlds
from tests.soak import swarm

FIRST_SEED = int(os.environ.get("ODB_SEED", "6"))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(FIRST_SEED, FIRST_SEED + 8))
def test_a_seed_of_the_swarm_is_as_it_must_be(seed: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert swarm.swarm(seed), capsys.readouterr().out
    assert capsys.readouterr().out.startswith(f"seed {seed}: ")


def test_a_seed_expands_to_the_same_run_again(tmp_path: Path) -> None:
    for kind in (swarm.simulate, swarm.run_in_memory):
        first, again = (kind(swarm.Draw(5), tmp_path)[0] for _ in range(2))
        assert first == again != kind(swarm.Draw(6), tmp_path)[0]


def test_an_only_rank_is_not_killed(tmp_path: Path) -> None:
    """No rank would report it, so its trace is that of a deadlock."""
    runs = [kind(swarm.Draw(seed), tmp_path)[0] for seed in range(80) for kind in (swarm.simulate, swarm.run_in_memory)]
    killed = [run for run in runs if "kill" in run]
    assert killed and not [run for run in killed if re.search(r"shards \[\d+\]|: 1 ranks", run)]


def test_a_failing_run_is_said_and_exits_1(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def fail(draw: object, folder: Path) -> tuple[str, Callable[[], str]]:
        def go() -> str:
            raise swarm.Failure("ALIGN, rank 1")

        return "planted", go

    for name in ("simulate", "run_in_memory", "compare"):
        monkeypatch.setattr(swarm, name, fail)
    assert swarm.main(["--seed", "3", "--runs", "2"]) == 1
    printed = capsys.readouterr().out
    assert "seed 3: FAILED: Failure: ALIGN, rank 1" in printed and "2 runs, 2 failed: seeds 3, 4" in printed


def test_a_long_world_has_hundreds_of_rounds() -> None:
    world = worlds.make_long_world(4, 600)
    while not world.is_over():
        world.one_event()
    assert max(rank.state.round for rank in world.ranks) > 100
    assert all(rank.state.phase is Phase.DONE for rank in world.ranks)
