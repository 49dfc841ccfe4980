"""A slow collate_fn runs in several processes: the same batches, the same errors, nothing left behind."""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from odb_ref.torch import JobError
from odb_ref.torch.reading import collate_workers
from odb_ref.torch.reading.collate_workers import SLOW_S, SLOW_TIMES, CollateWorkerError, CollateWorkers
from odb_ref.torch.reading.collator import BatchMaker, CollateTask, Collator, OnIdle
from odb_ref.torch.reading.measure import Measured
from odb_ref.torch.reading.pipeline import _Maker
from odb_ref.torch.reading.serialization import Packed, pack, unpack
from odb_ref.torch.reading.service import BatchRequest, SampleListener
from tests.torch import data
from tests.torch.data import Numbers, take

SAMPLES = 200
make_loader = partial(data.make_loader, window=64)


def collate_slowly(samples: list[Any]) -> tuple[int, list[int], list[float]]:
    """Returns the process that made the batch, its samples, and what it drew."""
    time.sleep(2 * SLOW_S)
    drawn = [random.random(), float(torch.rand(()))]
    return os.getpid(), [sample["number"] for sample in samples], drawn


def read(**options: Any) -> Any:
    return take(make_loader(Numbers(0, SAMPLES), collate_fn=collate_slowly, shuffle=True, **options), list)


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes one process count as too slow, however busy the machine is."""
    monkeypatch.setattr(collate_workers, "SLOW_S", 0.0)
    monkeypatch.setattr(collate_workers, "SLOW_TIMES", 1)


@pytest.mark.usefixtures("eager")
def test_a_slow_collate_fn_runs_in_several_processes_and_makes_the_same_batches() -> None:
    """Preserves: REPLAY, COVER."""
    one = read(num_workers=1)
    assert len({pid for pid, *_ in one}) == 1
    assert len({tuple(drawn) for *_, drawn in one}) == len(one)
    for count in (2, 5):
        several = read(num_workers=count)
        assert len({pid for pid, *_ in several}) == count
        assert [made for _, *made in several] == [made for _, *made in one]


def look_up_the_data_set(worker_id: int) -> None:
    worker = torch.utils.data.get_worker_info()
    assert (worker.id, len(worker.dataset)) == (worker_id, SAMPLES)


@pytest.mark.usefixtures("eager")
def test_a_worker_init_fn_is_called_where_there_is_a_worker() -> None:
    batches = read(num_workers=3, worker_init_fn=look_up_the_data_set)
    assert len({pid for pid, *_ in batches}) > 1
    assert sorted(number for _, ids, _ in batches for number in ids) == list(range(SAMPLES))


def test_a_quick_collate_fn_runs_in_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collate_workers, "SLOW_S", 10.0)  # even a fast one may wait for a processor for some time

    loader = make_loader(Numbers(0, SAMPLES), collate_fn=lambda samples: os.getpid(), num_workers=3)
    assert len(set(take(loader, list))) == 1


@pytest.mark.parametrize(("waits", "expected"), [("l", 4), ("ls", 4), ("lss", 4), ("lssss", 1), ("s", 1)])
def test_processes_that_end_together_do_not_hide_that_they_are_too_few(
    waits: str, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If three began together, the first is waited for long, and by then the other two are there."""
    workers = CollateWorkers(str, 4, context="fork")  # type: ignore[arg-type]
    busy = SimpleNamespace(steps=(0, 1), link=None)
    workers._workers, workers._is_warm = [busy], True  # type: ignore[list-item]
    monkeypatch.setattr(workers, "_start", lambda: workers._workers.append(busy))  # type: ignore[arg-type]
    each = itertools.cycle(waits)
    monkeypatch.setattr(collate_workers, "wait", lambda *_: [] if next(each) == "l" else ["ready"])
    for _ in range(200):
        workers.make_room(left=100)
    assert len(workers._workers) == expected


class OpensOnce:
    """Opens a file when it is first called, like a connection to a server."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.file: Any = None

    def __call__(self, samples: list[Any]) -> tuple[int, int]:
        time.sleep(2 * SLOW_S)
        if self.file is None:
            self.file = open(self.path, "a")  # noqa: SIM115
            self.opened_by = os.getpid()
        return os.getpid(), self.opened_by


@pytest.mark.usefixtures("eager")
def test_what_a_collate_fn_opens_is_used_by_the_process_that_opened_it(tmp_path: Path) -> None:
    function = OpensOnce(str(tmp_path / "file"))
    users = take(make_loader(Numbers(0, SAMPLES), collate_fn=function, num_workers=3), list)
    assert len(set(users)) == 3
    assert all(user == opener for user, opener in users)


FATAL = 80


class FailsLate:
    """Collates slowly, and fails at one sample in a given way."""

    def __init__(self, fail: Callable[[], Any]) -> None:
        self.fail = fail

    def __call__(self, samples: list[Any]) -> Any:
        time.sleep(2 * SLOW_S)
        ids = [sample["number"] for sample in samples]
        return self.fail() if FATAL in ids else ids


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
        (
            threading.Lock,
            "a batch cannot be sent to another process .TypeError: cannot pickle '_thread.lock' object",
        ),
        (die, r"the process that collates \(pid \d+\) exited unexpectedly \(exit code -9\) at step \d+"),
    ],
)
def test_a_failure_of_one_of_them_is_a_failure_of_the_rank(fail: Callable[[], Any], cause: str) -> None:
    """Preserves: ABORT."""
    with make_loader(Numbers(0, FATAL + 20), collate_fn=FailsLate(fail), num_workers=2) as loader:
        for _ in range(2):  # because remains of the previous epoch must not disturb
            with pytest.raises(JobError, match=cause):
                list(loader)
    assert not multiprocessing.active_children()


def test_an_early_end_leaves_no_batch_for_the_next_epoch() -> None:
    options = {"num_workers": 2, "persistent_workers": True, "collate_fn": collate_slowly}
    with make_loader(Numbers(0, SAMPLES), **options) as loader:
        for _, batch in zip(range(20), loader, strict=False):
            assert batch
        epochs = [sorted(sample for _, ids, _ in loader for sample in ids) for _ in range(2)]
    assert epochs == [list(range(SAMPLES))] * 2


def test_what_an_earlier_epoch_has_left_under_way_is_not_taken_for_a_batch_of_this_one() -> None:
    """The soak found this: a thread that was slow to end may have begun it after its epoch was over."""

    class Listener(SampleListener):
        def on_batch(self, number: int, batch: object) -> None:
            found.append(number)

    found: list[int] = []
    with contextlib.closing(CollateWorkers(BatchMaker(str, None), 2)) as workers:
        workers.begin(0, CollateTask(0, (pack(7),), None))
        maker = _Maker(Collator(OnIdle.NONE, None), BatchMaker(str, None), workers, Listener(), None)
        maker.prepare()
        assert maker.count_work() == 0
        maker.ask((BatchRequest(5, (), False), BatchRequest(6, (), False)))
        while maker.count_work():
            maker.work()
        assert found == [5, 6]


def begin(workers: CollateWorkers, step: int, sample: Any = "sample") -> None:
    """Begins a batch of one sample."""
    workers.begin(step, CollateTask(0, (pack(sample),), None))


@contextlib.contextmanager
def start_all(make: Callable[[list[Any]], object], count: int = 2) -> Iterator[CollateWorkers]:
    """Starts workers, and waits until each has made a batch."""
    with contextlib.closing(CollateWorkers(BatchMaker(make, None), count)) as workers:
        while len(workers.processes) < count:
            workers._start()
            begin(workers, 0)
        while workers.pending:
            workers.collect()
        yield workers


def test_batches_come_with_their_numbers_in_the_order_in_which_they_are_ready() -> None:
    permit = multiprocessing.Semaphore(0)

    def make(samples: list[object]) -> object:
        time.sleep(2 * SLOW_S)
        assert samples[0] != "last" or permit.acquire(timeout=30)
        return samples[0]

    with start_all(make, 3) as workers:
        for number, sample in enumerate(("last", "one", "two")):
            assert workers.make_room(3)
            begin(workers, number, sample)
        assert not workers.make_room(3), "the last are for the worker that is done first"
        assert workers.make_room(4)
        found = [workers.collect() for _ in range(2)]
        permit.release()
        found.append(workers.collect())
    assert sorted((number, unpack(made.batch)) for number, made in found) == [(0, "last"), (1, "one"), (2, "two")]
    assert found[-1][0] == 0
    assert not workers.pending


def test_a_batch_is_handed_out_when_it_is_made_and_not_with_the_last_of_its_round() -> None:
    permit = multiprocessing.Semaphore(0)

    def make(samples: list[object]) -> object:
        time.sleep(2 * SLOW_S)
        assert samples[0] != 0 or permit.acquire(timeout=10)
        return samples[0]

    class Listener(SampleListener):
        def on_batch(self, number: int, batch: object) -> None:
            found.append(number)
            permit.release()

    found: list[int] = []
    collator = Collator(OnIdle.NONE, None)
    with start_all(make) as workers:
        for place in range(3):
            collator.put({place: Measured(1, 1, pack(place), 8)})
        maker = _Maker(collator, BatchMaker(make, None), workers, Listener(), None)
        maker.ask(tuple(BatchRequest(step, (step,)) for step in range(3)))
        while maker.count_work():
            maker.work()
        assert sorted(found) == [0, 1, 2]
        assert found[0] != 0


def test_one_that_fails_or_dies_leaves_the_others_at_work() -> None:
    def make(samples: list[object]) -> object:
        return int(str(make_or_die(samples)))

    with contextlib.closing(CollateWorkers(BatchMaker(make, None), 2)) as workers:
        workers.prepare()
        for sample, found in (("1", 1), ("x", "ValueError"), ("2", 2), ("die", "exited unexpectedly")) * 3:
            begin(workers, 0, sample)
            try:
                assert unpack(workers.collect()[1].batch) == found
            except CollateWorkerError as error:
                assert str(found) in str(error)
            assert workers.make_room(1)
            assert not workers.pending
    assert not multiprocessing.active_children()


def test_more_processes_are_started_while_there_is_more_to_make_than_those_there_are_can(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    permits = multiprocessing.Semaphore(1)

    def make(samples: list[object]) -> object:
        assert permits.acquire(timeout=60)
        return len(samples)

    with contextlib.closing(CollateWorkers(BatchMaker(make, None), 3)) as workers:
        workers.prepare()
        begin(workers, 0)
        begin(workers, 1)
        assert not workers.make_room(9), "the first batch may take long: what it needs is loaded then"
        workers.collect()
        begin(workers, 2)
        assert [workers.make_room(9) for _ in range(SLOW_TIMES)] == [False] * (SLOW_TIMES - 1) + [True]
        assert len(workers.processes) == 2
        permits.release()
        workers.collect()
        begin(workers, 3)
        assert workers.make_room(9), "the second has not two in hand"
        assert len(workers.processes) == 2
        begin(workers, 4)
        begin(workers, 5)
        permits.release()
        monkeypatch.setattr(collate_workers, "SLOW_S", 60.0)
        assert not workers.make_room(9), "it does not take that long until one of the two is done"
        assert len(workers.processes) == 2


def test_processes_that_take_long_to_start_are_started_at_once() -> None:
    with contextlib.closing(CollateWorkers(BatchMaker(make_or_die, None), 3, context="spawn")) as workers:
        workers.prepare()
        assert len(workers.processes) == 1
        assert workers._grow()
        assert len(workers.processes) == 3
        assert not workers.pending


def make_or_die(samples: list[object]) -> object:
    time.sleep(2 * SLOW_S)
    if samples[0] == "die":
        die()
    return samples[0]


def collect_all(workers: CollateWorkers) -> tuple[list[int], list[str]]:
    """Returns the numbers of the batches that were made, and what was raised."""
    numbers, errors = [], []
    while workers.pending:
        try:
            number, made = workers.collect()
        except CollateWorkerError as error:
            errors.append(str(error))
        else:
            assert unpack(made.batch) == number
            numbers.append(number)
    return sorted(numbers), errors


@pytest.mark.parametrize(("fatal", "found"), [(10, [11, 13]), (12, [10, 11, 13])])
def test_one_that_dies_with_two_batches_in_hand_is_told_of_at_the_one_that_it_makes(
    fatal: int, found: list[int]
) -> None:
    """Preserves: ABORT."""
    with start_all(make_or_die) as workers:
        for step in range(10, 14):
            assert workers.make_room(9)
            begin(workers, step, "die" if step == fatal else step)
        assert not workers.make_room(9)
        assert workers.oldest == 10
        numbers, errors = collect_all(workers)
        assert numbers == found
        assert [error[error.index("exit code") :] for error in errors] == [f"exit code -9) at step {fatal}"]
        assert workers.oldest is None
    assert not multiprocessing.active_children()


def test_one_that_dies_and_leaves_a_child_behind_is_told_of_too() -> None:
    """The child holds its end of their connection."""
    left = multiprocessing.Value("i", 0)

    def make(samples: list[object]) -> object:
        if samples[0] != "die":
            time.sleep(2 * SLOW_S)
            return samples[0]
        pid = os.fork()
        if not pid:
            time.sleep(60)
            os._exit(0)
        left.value = pid
        die()
        return None

    try:
        with start_all(make) as workers:
            begin(workers, 4, "die")
            with pytest.raises(CollateWorkerError, match=r"exit code -9\) at step 4"):
                workers.collect()
    finally:
        os.kill(left.value, signal.SIGKILL)


def test_one_that_was_killed_is_told_of_when_what_it_had_sent_is_received() -> None:
    with start_all(make_or_die) as workers:
        for step in (10, 11):
            begin(workers, step, step)
        time.sleep(0.5)  # both have sent their batches
        for process in workers.processes:
            process.kill()
            process.join()
        for step in (12, 13):
            begin(workers, step, step)
        numbers, errors = collect_all(workers)
        assert numbers == [10, 11]
        assert sorted(error.rpartition(" at ")[2] for error in errors) == ["step 12", "step 13"]


@pytest.mark.parametrize("is_tensor", [False, True])
def test_samples_and_batches_that_fill_what_joins_two_processes_do_not_wait_for_each_other(*, is_tensor: bool) -> None:
    """Preserves: FREE."""
    nbytes = 4 << 20  # a pipe holds some hundred KiB

    def make(samples: list[Any]) -> Any:
        time.sleep(2 * SLOW_S)
        return samples

    sample = torch.zeros(nbytes, dtype=torch.uint8) if is_tensor else bytes(nbytes)

    def exchange() -> None:
        left = 12
        while left or workers.pending:
            if left and workers.make_room(9):
                begin(workers, left, sample)
                left -= 1
                time.sleep(4 * SLOW_S)  # meanwhile a batch is made, and waits to be received
            else:
                found.append(len(unpack(workers.collect()[1].batch)[0]))  # type: ignore[index, arg-type]

    found: list[int] = []
    with start_all(make) as workers:
        thread = threading.Thread(target=exchange, daemon=True)
        thread.start()
        thread.join(30)
        assert found == [nbytes] * 12


class BreaksElsewhere:
    """A part of a sample that can be read where it was made, but not where it is collated."""

    def __reduce__(self) -> Any:
        return fail_plainly, ()


def test_samples_that_cannot_be_taken_in_are_a_failure_of_their_step() -> None:
    with start_all(make_or_die) as workers:
        workers.begin(7, CollateTask(0, (Packed(BreaksElsewhere(), ()),), None))  # type: ignore[arg-type]
        with pytest.raises(CollateWorkerError, match="cannot be collated, while collating step 7"):
            workers.collect()
        begin(workers, 8, 8)
        assert collect_all(workers) == ([8], [])
