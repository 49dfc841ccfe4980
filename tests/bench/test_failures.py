"""The judge of the failure table can say no, and two failures are what the table says."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.bench import failures, process
from tests.bench.failures import CULPRIT, FAILURES, Failure, judge, run_failure
from tests.bench.launch import Rank

TEXT = "JobError: rank 1 failed: ValueError: sample 150 is broken"


def get_failure(name: str) -> Failure:
    return next(failure for failure in FAILURES if failure.name == name)


def make_rank(*, error: str = TEXT, blamed: int | None = CULPRIT, ended: float = 11.0, **left: int) -> Rank:
    more = {"processes": 0, "threads": 0, "descriptors": 0} | left
    data: dict[str, Any] = {
        "started": 1.0,
        "ended": ended,
        "closed": ended,
        "error": error,
        "blamed": blamed,
        "steps": 9,
    }
    return Rank(exit_status=0, data=data | {"left": more}, error="", seconds=2.0, kept={"moment": "10.5"})


def test_one_error_that_names_rank_and_cause_is_right() -> None:
    found = judge(get_failure("getitem"), [make_rank(), make_rank(ended=11.5), make_rank()])
    assert found.is_right
    assert found.seconds == 1.0
    assert found.left == "nothing"
    assert found.raised == TEXT


@pytest.mark.parametrize(
    ("odd", "told"),
    [
        (make_rank(error="JobError: rank 1 failed"), "different errors"),
        (make_rank(blamed=2), "blamed"),
        (make_rank(ended=16.0), "later than 5 s"),
        (make_rank(error=""), "no error"),
        (replace(make_rank(), exit_status=None), "rank 2 hangs"),
        (replace(make_rank(), data=None, error="Segmentation fault"), "rank 2: Segmentation fault"),
    ],
)
def test_anything_else_is_wrong_and_the_table_says_why(odd: Rank, told: str) -> None:
    found = judge(get_failure("getitem"), [make_rank(), make_rank(), odd])
    assert not found.is_right
    assert told in found.trouble


@pytest.mark.parametrize(
    ("odd", "left"),
    [
        (make_rank(descriptors=2), "2 descriptors"),
        (make_rank(processes=-1, threads=1), "1 threads"),
        (replace(make_rank(), left_processes=3), "3 processes at the end"),
        (replace(make_rank(), left_files=1), "1 files at the end"),
    ],
)
def test_what_is_left_over_is_wrong(odd: Rank, left: str) -> None:
    found = judge(get_failure("getitem"), [make_rank(), make_rank(), odd])
    assert not found.is_right
    assert found.left == left


def test_whoever_leaves_by_itself_may_raise_something_else() -> None:
    text = "JobError: rank 1 left the loop before its end: its consumer left after 5 steps"
    others = make_rank(error=text)
    assert judge(get_failure("leaves"), [others, make_rank(error="", blamed=None), others]).is_right
    assert not judge(get_failure("raises"), [others, make_rank(error="", blamed=None), others]).is_right


@pytest.mark.slow
@pytest.mark.parametrize("name", ["worker", "interrupt"])
def test_a_failure_is_what_the_table_says(name: str) -> None:
    """Checks: ABORT, STOP. The whole table takes a minute or two: ``python -m tests.bench --only failures``."""
    found = run_failure(get_failure(name))
    assert found.is_right, found


def test_the_clock_tells_waiting_for_the_lock_from_waiting_for_nothing() -> None:
    turns = process._calibrate(0.01)
    alone, rival = (process._control(kind, turns) for kind in ("alone", "rival"))
    # About 0.001 and 0.4 on an idle machine; others that run beside this test blur both.
    assert rival["lock_wait_s"] > 0.08 * rival["python_s"]
    assert alone["lock_wait_s"] < 0.5 * rival["lock_wait_s"]


def test_every_failure_has_a_name_of_its_own() -> None:
    assert len({failure.name for failure in FAILURES}) == len(FAILURES)
    assert {failures.CULPRIT} <= set(range(failures.RANKS))
