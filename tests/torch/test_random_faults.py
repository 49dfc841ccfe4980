"""A slice of the soak: faults at random, in real processes, and evidence that it can fail. See tests/soak/faults.py.

``ODB_FAULT_RUNS`` sets the number of worlds of up to eight faults: by default eight, or two in a slice.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from tests.helpers.effort import few
from tests.soak import faults
from tests.soak.case import Case, Fault, Victim, World, expand
from tests.soak.judge import judge
from tests.soak.rank import SHARD, Found, Rank

RUNS = int(os.environ.get("ODB_FAULT_RUNS", few(8)))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_nobody_hangs_and_the_survivors_agree() -> None:
    """It runs in a separate process, because it forks, and starts a fork server."""
    command = [sys.executable, "-W", "ignore", "-m", "tests.soak.faults", "--runs", str(RUNS)]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_a_seed_expands_to_the_same_world_again() -> None:
    assert expand(7, has_lab=True) == expand(7, has_lab=True) != expand(8, has_lab=True)


def test_the_seeds_reach_everything() -> None:
    worlds = [expand(seed, has_lab=True) for seed in range(1000)]
    cases = [case for world in worlds for case in world.cases]
    assert {case.fault for case in cases} == set(Fault)
    assert {case.ranks for case in cases} == set(range(1, 7))
    assert {case.settings.workers for case in cases} == set(range(4))
    assert {case.settings.method for case in cases} == {"fork", "forkserver", "spawn"}
    assert {(case.fault, case.victim) for case in cases} >= {(Fault.KILL, victim) for victim in Victim}
    assert {len(set(case.places)) for case in cases} >= {1, 2, 3}
    assert not any(world.is_lab for world in map(expand, range(1000)))


# It can fail -------------------------------------------------------------------------------------------------------------


def find_case(fault: Fault, *, workers: bool = True) -> Case:
    """Returns a case of two ranks, of which the second is the culprit."""
    cases = (case for seed in range(10_000) for case in expand(seed).cases)
    found = next(
        case
        for case in cases
        if case.fault is fault and case.ranks == 2 and case.culprit == 1 and bool(case.settings.workers) == workers
    )
    return replace(found, sizes=(2, 3))


def make_complete() -> dict[int, Found]:
    return {0: Found(numbers=[0, 1], steps=2), 1: Found(numbers=[SHARD, SHARD + 1, SHARD + 2], steps=2)}


def make_failed(blamed: int = 1) -> dict[int, Found]:
    return {rank: Found(error="JobError", text="it fell", blamed=blamed) for rank in range(2)}


def test_what_is_as_it_must_be_is_right() -> None:
    assert judge(find_case(Fault.NONE), make_complete()) == []
    assert judge(find_case(Fault.READ), make_failed()) == []


RAISED, KEPT = {"error": "OdbError"}, {"left": "threads ['odb-read'], 0 descriptors"}


@pytest.mark.parametrize(
    "wrong", [{"numbers": [0]}, {"numbers": [0, 1, 0]}, {"numbers": [SHARD, 1]}, {"steps": 3}, RAISED, KEPT], ids=str
)
def test_what_is_wrong_with_a_complete_epoch_is_found(wrong: dict[str, Any]) -> None:
    found = make_complete()
    assert judge(find_case(Fault.NONE), found | {0: replace(found[0], **wrong)})
    assert judge(find_case(Fault.NONE), {1: found[1]})


FINISHED = {"error": "", "text": "", "blamed": None}


@pytest.mark.parametrize("wrong", [{"text": "it stumbled"}, FINISHED, RAISED, KEPT, {"seconds": 90.0}], ids=str)
def test_what_is_wrong_with_a_failed_epoch_is_found(wrong: dict[str, Any]) -> None:
    found = make_failed()
    assert judge(find_case(Fault.READ), found | {0: replace(found[0], **wrong)})
    assert judge(find_case(Fault.READ), {1: found[1]})


def test_a_wrong_rank_is_not_to_be_blamed() -> None:
    assert judge(find_case(Fault.READ), make_failed(blamed=0))


def hang(rank: Rank, case: Case) -> Found:
    time.sleep(60)
    return Found()


def leave_a_process(rank: Rank, case: Case) -> Found:
    subprocess.Popen(["sleep", "60"])
    return make_complete()[rank.rank]


def die(rank: Rank, case: Case) -> Found:
    os._exit(0)


@pytest.mark.parametrize(
    ("live", "trouble"), [(hang, "ranks [0, 1] hang"), (leave_a_process, "is left: sleep"), (die, "without a word")]
)
def test_what_is_seen_from_outside_is_found(
    monkeypatch: pytest.MonkeyPatch, live: Callable[[Rank, Case], Found], trouble: str
) -> None:
    monkeypatch.setattr(Rank, "live", live)
    monkeypatch.setattr(faults, "LIMIT_S", {"fork": 2.0})
    monkeypatch.setattr(faults, "LINGER_S", 1.0)
    case = replace(find_case(Fault.NONE), is_new=True, is_closing=True)
    verdict = faults.run(World(seed=0, places=(0, 0), method="fork", cases=(case,)))
    assert trouble in str(verdict.trouble)


def test_after_a_rank_has_left_unheard_the_next_case_has_a_new_loader() -> None:
    """The soak found this with seed 4729."""
    case = find_case(Fault.LEAVE, workers=False)
    # All samples are in the first rounds, so all is agreed when the rank leaves.
    left = replace(case, sizes=(40, 40), step=7, settings=replace(case.settings, window=64), is_closing=False)
    after = replace(left, fault=Fault.NONE, is_new=False, is_closing=True)
    verdict = faults.run(World(seed=0, places=(0, 0), method="fork", cases=(replace(left, is_new=True), after)))
    assert not verdict.trouble and verdict.cases[1].is_new
