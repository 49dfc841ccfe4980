"""The loader process and the driver: what passes between them, and what happens to one without the other."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import re
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from multiprocessing.util import Finalize
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from odb_ref.core.batching.weighting import Weighting
from odb_ref.core.config import Config
from odb_ref.core.effects import OutcomeKind, PostCounts, PostOffer
from odb_ref.core.errors import RuleError
from odb_ref.core.events import Agreed, Counted, PeerLost, Reported, Urged
from odb_ref.core.offer import Offer
from odb_ref.core.types import StepCounts
from odb_ref.torch import JobError
from odb_ref.torch.epoch import driver as epoch_driver
from odb_ref.torch.epoch.delivery import Delivery
from odb_ref.torch.epoch.driver import EpochDriver
from odb_ref.torch.exchange.collectives import Transport
from odb_ref.torch.exchange.exchange_thread import Exchange
from odb_ref.torch.exchange.identity import LoaderIdentity
from odb_ref.torch.exchange.links import Links
from odb_ref.torch.exchange.process_table import find_children, read_status
from odb_ref.torch.exchange.roster import Roster
from odb_ref.torch.plan.start import EpochStart
from odb_ref.torch.reading.service import BatchRequest
from odb_ref.torch.workers import process as loader_process
from odb_ref.torch.workers import serving
from odb_ref.trace.reading import read_trace
from tests.helpers.waiting import count_descriptors, is_in_time
from tests.helpers.world import make_offer
from tests.torch import data
from tests.torch.data import Numbers, collate, read_numbers, save, take
from tests.torch.ranks import run_each
from tests.torch.states import check_fails

make_loader = partial(data.make_loader, Numbers(0, 60), window=16)
CONFIG = Config(rank=0, world_size=2, budget_tokens=60, window_samples=16, ramp_rounds=0)


# Where the machine runs --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_workers", [0, 1])
def test_the_machine_is_in_the_training_process(tmp_path: Path, num_workers: int) -> None:
    path = tmp_path / "pid"

    def compute_target(agreement: Offer) -> int:
        path.write_text(str(os.getpid()))
        return agreement.groups_max

    rule = SimpleNamespace(name="telling", compute_target=compute_target)
    assert len(take(make_loader(policy=rule, num_workers=num_workers))) == 60
    assert int(path.read_text()) == os.getpid()


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_rule_that_raises_ends_the_epoch_and_is_told(num_workers: int) -> None:
    rule = SimpleNamespace(name="failing", compute_target=lambda agreement: {}["the rule's own"])
    with pytest.raises(RuleError, match="rule 'failing' raised KeyError") as caught:
        take(make_loader(policy=rule, num_workers=num_workers))
    assert isinstance(caught.value.__cause__, KeyError)


# What passes between them ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_trace_is_complete_when_the_epoch_is_and_its_times_are_the_trainers(tmp_path: Path, num_workers: int) -> None:
    path = tmp_path / "run.ndjson"
    asked_s, got_s = [], []
    with make_loader(num_workers=num_workers, trace=path) as loader:
        batches = iter(loader)
        while True:
            asked_s.append(time.monotonic())
            if next(batches, None) is None:
                break
            got_s.append(time.monotonic())
            time.sleep(0.01)
        _, records = read_trace(path)
        taken_s = [record.time_s or 0.0 for record in records if (record.event or {}).get("kind") == "step_taken"]
    assert len(taken_s) == len(got_s) > 5
    # Wherever the trace's clock starts, each step was taken between the request and the answer.
    latest = min(got - taken for got, taken in zip(got_s, taken_s, strict=True))
    assert max(asked - taken for asked, taken in zip(asked_s, taken_s, strict=False)) <= latest + 2e-6


class Unsendable:
    """It cannot be pickled a second time, like a tensor for which no shared memory is left."""

    def __reduce__(self) -> Any:
        raise RuntimeError("unable to write to file: no space left")


def test_a_batch_that_cannot_be_sent_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "pack", lambda batch, what: Unsendable())
    check_fails(make_loader(num_workers=1), "no space left")


def test_a_batch_that_cannot_be_rebuilt_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(batch: object) -> object:
        raise RuntimeError("cannot map the file")

    with make_loader(num_workers=1) as loader, pytest.raises(JobError, match="cannot map the file"):
        batches = iter(loader)
        monkeypatch.setattr(epoch_driver, "unpack", fail)
        list(batches)


@pytest.mark.parametrize("is_present", [False, True])
def test_the_end_of_a_process_that_was_given_up_does_not_concern_the_next(*, is_present: bool) -> None:
    """The soak found this: on a busy machine its end was noticed late."""
    with make_loader(num_workers=1) as loader:
        batches = iter(loader)
        service: Any = loader._session._service
        service._lose("it was killed", EOFError(), service._pipe if is_present else object())
        with pytest.raises(JobError, match="it was killed") if is_present else contextlib.nullcontext():
            assert sum(len(batch["numbers"]) for batch in batches) == 60


def test_a_loader_process_killed_between_two_epochs_is_replaced() -> None:
    with make_loader(num_workers=1, persistent_workers=True) as loader:
        for _ in range(2):
            assert len(read_numbers(loader)) == 60
            for process in multiprocessing.active_children():
                process.kill()
                process.join()


def test_a_killed_loader_process_ends_an_epoch_alone_too() -> None:
    with data.make_loader(Numbers(0, 400), num_workers=1) as loader:
        with pytest.raises(JobError, match=r"rank 0 failed: the loader process exited unexpectedly"):
            signal_at_step_3(loader, signal.SIGKILL)
        # And the next epoch has a new one.
        assert len(read_numbers(loader)) == 400


def test_a_loader_process_that_is_stopped_is_taken_for_lost() -> None:
    loader = data.make_loader(Numbers(0, 4000), num_workers=1, loader_timeout_s=1.5)
    with loader, pytest.raises(JobError, match=r"rank 0 failed: the loader process has been stopped for 1.5 s"):
        signal_at_step_3(loader, signal.SIGSTOP)
    assert not multiprocessing.active_children()


def signal_at_step_3(loader: Any, number: signal.Signals) -> None:
    for _, info in loader.steps():
        if info.step == 3:
            (process,) = multiprocessing.active_children()
            os.kill(process.pid or 0, number)


def read_with_one_stopped(rank: int, num_workers: int, which: int, method: str) -> None:
    """Rank 1 stops one of its loader's processes before it has read everything."""
    options = {"num_workers": num_workers, "multiprocessing_context": method, "shard": "given"}
    options |= {"collate_fn": collate_slowly, "loader_timeout_s": 1.0}
    with data.make_loader(Numbers(0, 4000), window=16, **options) as loader:
        for _, info in loader.steps():
            if rank == 1 and info.step == 3:
                (process,) = multiprocessing.active_children()
                os.kill(sorted(find_children(process.pid or 0))[which], signal.SIGSTOP)


class Finishing(Numbers):
    """Each process that reads it leaves a file when it ends by itself."""

    def __init__(self, folder: Path) -> None:
        super().__init__(0, 60)
        self.folder, self.is_new = folder, True

    def __getitem__(self, index: int) -> Any:
        if self.is_new:
            self.is_new = False
            Finalize(None, (self.folder / str(os.getpid())).touch, exitpriority=1)
        return super().__getitem__(index)


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_workers_end_by_themselves(method: str, tmp_path: Path) -> None:
    with data.make_loader(Finishing(tmp_path), num_workers=1, multiprocessing_context=method) as loader:
        assert len(read_numbers(loader)) == 60
    assert len(list(tmp_path.iterdir())) == 1


STOPPED = [(1, 0, "fork", "DataLoader worker"), (2, 2, "fork", "the process that collates")]
MORE = [(2, 1, "fork", "DataLoader worker"), (1, -1, "spawn", "(DataLoader worker|the process that collates)")]


@pytest.mark.parametrize("cases", [STOPPED, pytest.param(MORE, marks=pytest.mark.deep)], ids=["few", "more"])
def test_a_worker_that_is_stopped_ends_every_rank(cases: list[tuple[int, int, str, str]]) -> None:
    """It hung all ranks before. A slow worker is waited for."""
    found = run_each(2, read_with_one_stopped, [case[:3] for case in cases], timeout_s=60)
    for (_, _, method, what), results in zip(cases, found, strict=True):
        assert {(result.error, result.rank) for result in results} == {("JobError", 1)}, results
        (text,) = {result.text for result in results}
        assert re.match(rf"rank 1 failed: {what} \(pid \d+\) has been stopped for 1 s \(SIGSTOP", text)
        assert max(result.seconds for result in results) < (8 if method == "fork" else 40)


@pytest.mark.deep
def test_a_worker_that_is_stopped_between_two_epochs_is_replaced() -> None:
    with make_loader(num_workers=1, persistent_workers=True, loader_timeout_s=1.0) as loader:
        collates: set[int] = set()
        for _ in range(2):
            assert len(read_numbers(loader)) == 60
            (process,) = multiprocessing.active_children()
            worker, *others = sorted(set(find_children(process.pid or 0)) - collates)
            collates |= {*others}  # the one begun second
            os.kill(worker, signal.SIGSTOP)
            assert is_in_time(lambda worker=worker: read_status(worker) is None, 20)  # killed, and waited for
        assert len(read_numbers(loader)) == 60


# The driver by itself ----------------------------------------------------------------------------------------------------


class Recorder:
    """A sample service that only records its requests."""

    is_inline = has_work = False

    def __init__(self) -> None:
        self.asked: list[tuple[Any, ...]] = []

    def read(self, count: int, held: tuple[int, ...] | None = None, end: int | None = None) -> None:
        self.asked.append(("read", count))

    def collate(self, requests: tuple[BatchRequest, ...]) -> None:
        self.asked.append(("collate", *(request.number for request in requests)))

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_, **__: self.asked.append((name,))


class Wire(Exchange):
    """An exchange without a thread, which keeps what is posted."""

    def __init__(self) -> None:
        super().__init__(
            Transport(Links(0, {}, 60.0), Roster()),
            LoaderIdentity(name="train.py:20", made_at="train.py:20", ordinal=0, is_common=False),
        )
        self.posts: list[Any] = []

    def open(self, submit: Any, describe: Any) -> PeerLost | None:
        return None

    def post(self, post: Any, failure: str = "", note: str = "") -> None:
        self.posts.append(post)

    def take_answer(self) -> None:
        """The test answers."""


def make_agreement(round_: int, **changed: int) -> Offer:
    return make_offer(round_, CONFIG.fingerprint, samples_max=2, groups=2, **changed)


def begin() -> tuple[Delivery, Recorder, Wire]:
    """Returns a rank that has offered its second round. Its first, of two steps, is collated but not released."""
    service: Any = Recorder()
    wire = Wire()
    start = EpochStart(keys=range(99))
    driver = EpochDriver(CONFIG, service, wire, start)
    delivery = Delivery(driver, Weighting(), log_wait_s=30.0)
    delivery.begin()
    assert service.asked == [("begin",), ("read", 16)]
    driver.on_read([(place, 20, 20, ()) for place in range(6)], is_ended=False, is_full=False)
    driver.on_read([(place, 20, 20, ()) for place in range(6, 16)], is_ended=False, is_full=False)
    driver.submit(Agreed(make_agreement(0)))
    assert isinstance(wire.posts[-1], PostCounts)
    driver.submit(Counted((StepCounts(6, 120, 120),) * 2))
    assert service.asked[2:] == [("read", 6), ("collate", 0, 1)]
    driver.on_read([(place, 20, 20, ()) for place in range(16, 22)], is_ended=False, is_full=False)
    posts = len(wire.posts)
    driver.on_batch(1, "batch 1")
    assert len(wire.posts) == posts, "RELEASE: the round is not collated"
    driver.on_batch(0, "batch 0")
    assert [type(post) for post in wire.posts] == [PostOffer, PostCounts, PostOffer]
    assert wire.posts[-1].offer.ready_min == 1
    return delivery, service, wire


def test_a_sample_that_turns_out_bad_after_the_finish_is_not_in_the_trace(tmp_path: Path) -> None:
    """Spec: R9.6, R11.1. A read may be open when a rank finishes, and what it brings is ignored."""
    start = EpochStart(keys=range(99), trace=tmp_path / "t", max_bad=9)
    service: Any = Recorder()
    driver = EpochDriver(CONFIG, service, Wire(), start)
    driver.begin()
    driver.on_bad(3, "torn")
    driver.submit(PeerLost(1, "gone"))
    assert driver.is_finished
    driver.on_bad(4, "torn")
    driver.close()
    _, records = read_trace(tmp_path / "t")
    events = [record.event or {"kind": "begun"} for record in records]
    assert [(event["kind"], event.get("place")) for event in events] == [
        ("begun", None), ("set_aside", 3), ("peer_lost", None),
    ]  # fmt: skip


def take_two(delivery: Delivery) -> list[object]:
    return [taken[0] for taken in (delivery.take() for _ in range(2)) if taken is not None]


def test_steps_are_handed_out_once_all_ranks_have_theirs() -> None:
    """Checks: RELEASE, STOP."""
    delivery, _, _ = begin()
    assert not delivery._is_available()
    delivery.driver.submit(Agreed(make_agreement(1)))
    delivery.driver.submit(Counted((StepCounts(6, 120, 120),) * 2))  # then the counts of step 2 are also known
    assert take_two(delivery) == ["batch 0", "batch 1"]
    delivery, _, _ = begin()
    delivery.driver.submit(Agreed(make_agreement(1, stop_rank=0, stop_step=0)))
    with pytest.raises(JobError, match="rank 0 left the loop"):
        delivery.take()


@pytest.mark.parametrize("is_agreed", [False, True])
def test_a_loader_process_that_is_lost_is_a_rank_that_has_failed(is_agreed: bool) -> None:
    """Checks: ABORT, RELEASE. It takes part in the round being agreed, and reports in the next that it has failed."""
    delivery, service, wire = begin()
    driver = delivery.driver
    if is_agreed:
        driver.submit(Agreed(make_agreement(1)))
    driver.on_error("the loader process exited unexpectedly", EOFError())
    if not is_agreed:
        driver.submit(Agreed(make_agreement(1)))
    assert isinstance(wire.posts[-1], PostCounts)
    driver.submit(Counted((StepCounts(6, 120, 120),) * 2))
    offer = wire.posts[-1].offer
    assert (offer.failed_rank, offer.ready_min, offer.round_min) == (0, 0, 2)
    driver.submit(Agreed(offer))
    report = wire.posts[-1].report
    assert report.cause == "the loader process exited unexpectedly"
    driver.submit(Reported((report, replace(report, rank=1, cause=""))))
    # Released steps are handed out, because the other ranks hand them out too.
    assert take_two(delivery) == ["batch 0", "batch 1"]
    with pytest.raises(JobError, match="rank 0 failed: the loader process exited unexpectedly"):
        delivery.take()
    assert service.asked[-1] == ("stop",)


def test_half_an_event_ends_the_exchange(monkeypatch: pytest.MonkeyPatch) -> None:
    """Checks: ABORT. Ctrl-C comes between a transition and its effects. No rank may wait for a post that was not sent."""
    delivery, _, wire = begin()
    causes: list[str] = []
    monkeypatch.setattr(wire, "abort", causes.append)

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(wire, "post", interrupt)
    with pytest.raises(KeyboardInterrupt):
        delivery.driver.submit(Agreed(make_agreement(1)))
    assert causes == ["KeyboardInterrupt"]
    with pytest.raises(KeyboardInterrupt):
        delivery.take()


# Late arrivals and departures ---------------------------------------------------------------------------------------------


def close_too_early(rank: int, num_workers: int) -> None:
    """Rank 1 is slow to read. Rank 0 leaves in the meantime, without waiting until rank 1 can know."""
    samples = Numbers(0, 4000, bad=60 if rank == 1 else None, fault="slow")
    options = {"window": 16, "ramp_rounds": 0, "depth": 1000, "shard": "given", "timeout_s": 15}
    loader = data.make_loader(samples, num_workers=num_workers, **options)
    try:
        for step, _ in enumerate(loader):
            if rank == 0 and step == 2:
                time.sleep(0.5)  # its window is full, and offered
                break
        if rank == 0:
            loader._session.end_epoch(0.2)
    finally:
        dist.barrier()  # the rank that left stays until the other knows


def test_one_that_does_not_wait_until_the_others_know_is_named_all_the_same() -> None:
    """Checks: STOP, ABORT."""
    for first, second in run_each(2, close_too_early, [(0,), (1,)]):
        assert not first.error, first
        assert (second.error, second.rank) == ("JobError", 0), second
        assert "its consumer left" in second.text


def test_leaving_while_steps_are_skipped_is_a_stop() -> None:
    """Checks: STOP. Steps trained on before the state was saved are not taken again once the consumer has left."""

    make = partial(data.make_loader, Numbers(0, 5000), num_workers=1, window=2000, ramp_rounds=0, depth=1)
    _, state = save(make(), 400)
    with make(state=state) as loader:
        iterator = iter(loader)
        delivery = loader._delivery
        iterator.close()
        assert delivery.wait(10)
        assert delivery.driver.cursor.next_step < 400
        assert delivery.driver.defect is None
        outcome = delivery.driver.state.outcome
        assert outcome.kind is OutcomeKind.STOPPED


@pytest.mark.parametrize("num_workers", [0, 1])
def test_what_belongs_to_an_epoch_that_is_over_does_not_reach_the_next(tmp_path: Path, num_workers: int) -> None:
    trace = tmp_path / "run-{epoch}.ndjson"
    with make_loader(trace=trace, num_workers=num_workers, persistent_workers=bool(num_workers)) as loader:
        first = iter(loader)
        steps = len(list(first))
        over = loader._delivery
        second = iter(loader)
        next(second)
        assert next(first, None) is None
        over._on_answer(Urged())
        assert 1 + len(list(second)) == steps
        for epoch in range(2):
            _, records = read_trace(tmp_path / f"run-{epoch}.ndjson")
            kinds = [record.event["kind"] for record in records if record.event is not None]
            assert kinds.count("step_taken") == steps


def test_a_loader_process_with_a_dead_worker_is_replaced(tmp_path: Path) -> None:
    """One of the persistent workers died, so the next epoch has new ones."""
    word = tmp_path / "kill"
    word.touch()

    def kill_once(index: int) -> str:
        is_first = word.exists()
        word.unlink(missing_ok=True)
        return "kill" if is_first else ""

    samples = Numbers(0, 300, bad=200, fault=kill_once)
    with data.make_loader(samples, num_workers=1, persistent_workers=True) as loader:
        with pytest.raises(JobError, match="exited unexpectedly"):
            list(loader)
        assert sorted(read_numbers(loader)) == list(range(300))


def collate_slowly(samples: list[dict[str, Any]]) -> dict[str, Any]:
    """It is slow enough for collate processes, on a busy machine too."""
    time.sleep(0.03)
    return collate(samples)


def count_threads(pid: int) -> int:
    try:
        return len(os.listdir(f"/proc/{pid}/task"))
    except FileNotFoundError:
        return 0


class Closing:
    """It closes a connection while it is pickled, as another thread may."""

    def __init__(self, connection: Any) -> None:
        self.connection = connection

    def __reduce__(self) -> tuple[type[str], tuple[()]]:
        self.connection.close()
        return str, ()


def test_a_connection_that_another_thread_closes_takes_no_order() -> None:
    """The soak found this: a loader closed after its job had failed raised a TypeError in place of the job's error."""
    connection, other = multiprocessing.Pipe()
    with pytest.raises(TypeError):
        connection.send(Closing(connection))
    connection, other = multiprocessing.Pipe()
    loader_process.send(connection, Closing(connection))
    assert connection.closed
    with pytest.raises(EOFError):
        other.recv()
    connection, other = multiprocessing.Pipe()
    with pytest.raises(TypeError, match="pickle"):
        loader_process.send(connection, threading.Lock())


def test_workers_that_die_between_two_epochs_are_replaced() -> None:
    """They are not missed, because they had read and collated everything in their epoch."""
    options: dict[str, Any] = {"num_workers": 2, "persistent_workers": True, "collate_fn": collate_slowly}
    with data.make_loader(Numbers(0, 150), window=16, **options) as loader:
        assert len(read_numbers(loader)) == 150
        (process,) = (child for child in multiprocessing.active_children() if child.name == "odb-loader")
        workers = find_children(process.pid or 0)
        assert len(workers) == 4, "two that read, two that collate"
        for worker in workers[::2]:
            os.kill(worker, signal.SIGKILL)
            # Its first thread has ended before the process can be waited for, which requires its last thread to end.
            while (look := read_status(worker)) is not None and not (look.is_ended and count_threads(worker) <= 1):
                time.sleep(0.01)
        time.sleep(0.1)
        for _ in range(2):
            assert sorted(read_numbers(loader)) == list(range(150))
        assert process.is_alive()
        assert not set(workers) & set(find_children(process.pid or 0)), "the others were left to themselves"


def test_a_loader_process_that_is_slow_to_die_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader_process, "JOIN_S", 0.0)
    before = count_descriptors()
    with data.make_loader(Numbers(0, 400), num_workers=1) as loader:
        next(iter(loader))
    assert is_in_time(lambda: count_descriptors() <= before, 20)


class SeenLate:
    """A process whose end is reported to another thread. A caller that waits for it gets nothing back at first."""

    def __init__(self) -> None:
        self.waits = 0
        self.is_off_the_list = False
        self.sentinel, _ = os.pipe()

    @property
    def exitcode(self) -> int | None:
        return -9 if self.waits >= 2 else None

    def join(self, timeout: float | None = None) -> None:
        self.waits += 1
        self.is_off_the_list = self.exitcode is not None


def test_a_process_whose_end_another_thread_was_told_of_is_taken_off_the_list_of_children() -> None:
    process: Any = SeenLate()
    loader_process._reap(process)
    assert process.is_off_the_list
    os.close(process.sentinel)
