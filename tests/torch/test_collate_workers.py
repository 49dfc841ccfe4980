"""A slow collate_fn runs in several processes: the same batches, the same errors, nothing left behind."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from odb_ref.torch import JobError, ODBDataLoader  # noqa: E402
from odb_ref.torch.reading import collate_workers  # noqa: E402
from odb_ref.torch.reading.collate_workers import SLOW_S, TRIAL_BATCHES, CollateTask, CollateWorkers  # noqa: E402
from odb_ref.torch.reading.collator import BatchMaker  # noqa: E402
from odb_ref.torch.reading.serialization import pack, unpack  # noqa: E402
from tests.torch.data import Numbers  # noqa: E402

pytestmark = pytest.mark.torch

SETTINGS: dict[str, Any] = {"token_budget": 60, "window": 64, "timeout_s": 20}
SAMPLES = 200


def collate_slowly(samples: list[Any]) -> tuple[int, list[int], float, list[float]]:
    """Says who made the batch, of what, and what it drew."""
    time.sleep(2 * SLOW_S)
    drawn = [random.random(), float(torch.rand(()))]
    return os.getpid(), [sample["number"] for sample in samples], time.monotonic(), drawn


def read(**options: Any) -> list[Any]:
    with ODBDataLoader(Numbers(0, SAMPLES), collate_fn=collate_slowly, shuffle=True, **SETTINGS | options) as loader:
        return list(loader)


def test_a_slow_collate_fn_runs_in_several_processes_and_makes_the_same_batches() -> None:
    """Preserves: REPLAY, COVER."""
    one, three = read(num_workers=1), read(num_workers=3)
    assert len({pid for pid, *_ in one}) == 1
    assert len({pid for pid, *_ in three}) == 4  # the loader process for the first batches, then each of the three
    assert [(ids, drawn) for _, ids, _, drawn in one] == [(ids, drawn) for _, ids, _, drawn in three]
    assert len({tuple(drawn) for *_, drawn in one}) == len(one)


def test_a_quick_collate_fn_stays_in_the_loader_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collate_workers, "SLOW_S", 0.5)  # a busy machine makes any slow

    def make(samples: list[Any]) -> int:
        return os.getpid()

    with ODBDataLoader(Numbers(0, SAMPLES), collate_fn=make, num_workers=3, **SETTINGS) as loader:
        assert len(set(loader)) == 1


class FailsLate:
    """Collates slowly, and fails at one sample, in whatever way it is told to."""

    def __init__(self, fail: Callable[[], None]) -> None:
        self.fail = fail

    def __call__(self, samples: list[Any]) -> list[int]:
        time.sleep(2 * SLOW_S)
        ids = [sample["number"] for sample in samples]
        if SAMPLES - 20 in ids:
            self.fail()
        return ids


def fail_plainly() -> None:
    raise ValueError("this sample cannot be collated")


def exit_quietly() -> None:
    sys.exit(3)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize(
    ("fail", "cause"),
    [
        (fail_plainly, "ValueError: this sample cannot be collated"),
        (exit_quietly, "SystemExit: 3"),
        (die, r"the process that collates \(pid \d+\) exited unexpectedly \(exit code -9\)"),
    ],
)
def test_a_failure_of_one_of_them_is_a_failure_of_the_rank(fail: Callable[[], None], cause: str) -> None:
    """Preserves: ABORT."""
    options = SETTINGS | {"collate_fn": FailsLate(fail), "num_workers": 2}
    with ODBDataLoader(Numbers(0, SAMPLES), **options) as loader:
        with pytest.raises(JobError, match=cause):
            list(loader)
        with pytest.raises(JobError, match=cause):  # and again: what is left of the epoch before does not disturb
            list(loader)
    assert not multiprocessing.active_children()


def test_an_early_end_leaves_no_batch_for_the_next_epoch() -> None:
    options = SETTINGS | {"num_workers": 2, "persistent_workers": True, "collate_fn": collate_slowly}
    with ODBDataLoader(Numbers(0, SAMPLES), **options) as loader:
        for _, batch in zip(range(20), loader, strict=False):
            assert batch
        epochs = [sorted(sample for _, ids, _, _ in loader for sample in ids) for _ in range(2)]
    assert epochs == [list(range(SAMPLES))] * 2


def test_batches_come_with_their_numbers_however_long_each_takes() -> None:
    def make(samples: list[object]) -> object:
        time.sleep(float(str(samples[0])))
        return samples[0]

    workers = CollateWorkers(BatchMaker(make, None), 3)
    try:
        for _ in range(TRIAL_BATCHES):
            assert not workers.are_worth_it
            workers.make(CollateTask(0, (0.02,), None))
        assert workers.are_worth_it
        for number, delay in enumerate((0.3, 0.0, 0.1)):
            assert workers.has_room
            workers.submit(number, CollateTask(0, (pack(delay),), None))
        assert not workers.has_room
        found = [workers.collect() for _ in range(3)]
    finally:
        workers.close()
    assert sorted((number, unpack(made.batch)) for number, made in found) == [(0, 0.3), (1, 0.0), (2, 0.1)]
    assert found[-1][0] == 0
    assert not workers.pending
