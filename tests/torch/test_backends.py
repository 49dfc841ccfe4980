"""The two ends of a loader: where the machine runs, what crosses between them, and what becomes of one without the other."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import re
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from odb_ref.core.config import Config  # noqa: E402
from odb_ref.core.effects import Outcome, OutcomeKind, PostCounts, PostOffer  # noqa: E402
from odb_ref.core.events import Agreed, Collated, Counted, Event, PeerLost, Reported, StepTaken, Urged  # noqa: E402
from odb_ref.core.offer import NONE, Offer  # noqa: E402
from odb_ref.core.resume import RoundStart  # noqa: E402
from odb_ref.core.state import Phase  # noqa: E402
from odb_ref.core.summary import StateSummary  # noqa: E402
from odb_ref.core.types import ZERO_COUNTS, Sample, Step, StepCounts  # noqa: E402
from odb_ref.torch import JobError, ODBDataLoader, pop_step_info  # noqa: E402
from odb_ref.torch.backend import loader_process, process_backend  # noqa: E402
from odb_ref.torch.backend.messages import Listener, Update  # noqa: E402
from odb_ref.torch.backend.notes import StepNote, make_round_note  # noqa: E402
from odb_ref.torch.backend.wire import Link  # noqa: E402
from odb_ref.torch.exchange.collectives import LocalTransport  # noqa: E402
from odb_ref.torch.exchange.exchange import Exchange  # noqa: E402
from odb_ref.torch.exchange.process_table import find_children, look_at  # noqa: E402
from odb_ref.torch.plan.start import EpochStart  # noqa: E402
from odb_ref.torch.trainer.trainer_side import TrainerSide  # noqa: E402
from odb_ref.trace.reading import read_trace  # noqa: E402
from tests.torch.data import Numbers, collate  # noqa: E402
from tests.torch.ranks import run_ranks  # noqa: E402

pytestmark = pytest.mark.torch

SETTINGS: dict[str, Any] = {"token_budget": 60, "window": 16, "collate_fn": collate}
CONFIG = Config(rank=0, world_size=2, budget_tokens=60, window_samples=16)


# Where the machine runs --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Telling:
    """A rule that leaves word which process asks it."""

    path: Path
    name: str = "telling"

    def compute_target(self, agreement: Offer) -> int:
        self.path.write_text(str(os.getpid()))
        return agreement.groups_max


@pytest.mark.parametrize("num_workers", [0, 1])
def test_with_workers_the_machine_is_not_in_the_training_process(tmp_path: Path, num_workers: int) -> None:
    path = tmp_path / "pid"
    with ODBDataLoader(Numbers(0, 60), policy=Telling(path), num_workers=num_workers, **SETTINGS) as loader:
        assert sum(len(batch["numbers"]) for batch in loader) == 60
    assert (int(path.read_text()) == os.getpid()) == (num_workers == 0)


@dataclass(frozen=True)
class Failing:
    """A rule with a defect."""

    name: str = "failing"

    def compute_target(self, agreement: Offer) -> int:
        raise KeyError("the rule's own")


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_rule_that_raises_ends_the_epoch_and_is_told(num_workers: int) -> None:
    with (
        ODBDataLoader(Numbers(0, 60), policy=Failing(), num_workers=num_workers, **SETTINGS) as loader,
        pytest.raises((KeyError, loader_process.LoaderProcessError), match="the rule's own"),
    ):
        list(loader)


# What crosses ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_trace_is_complete_when_the_epoch_is_and_its_times_are_the_trainers(tmp_path: Path, num_workers: int) -> None:
    path = tmp_path / "run.ndjson"
    asked_s, got_s = [], []
    with ODBDataLoader(Numbers(0, 100), num_workers=num_workers, trace=path, **SETTINGS) as loader:
        batches = iter(loader)
        while True:
            asked_s.append(time.monotonic())
            if next(batches, None) is None:
                break
            got_s.append(time.monotonic())
            time.sleep(0.01)
        _, records = read_trace(path)
        taken_s = [
            record.time_s or 0.0
            for record in records
            if record.event is not None and record.event["kind"] == "step_taken"
        ]
    assert len(taken_s) == len(got_s) > 5
    # Whenever the trace's clock has started: each step was taken between the request and the answer.
    latest = min(got - taken for got, taken in zip(got_s, taken_s, strict=True))
    assert max(asked - taken for asked, taken in zip(asked_s, taken_s, strict=False)) <= latest + 2e-6


class Unsendable:
    """Cannot be pickled a second time: as a tensor for which there is no shared memory left."""

    def __reduce__(self) -> Any:
        raise RuntimeError("unable to write to file: no space left")


def test_a_batch_that_cannot_be_sent_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader_process, "pack", lambda batch: Unsendable())
    with (
        ODBDataLoader(Numbers(0, 60), num_workers=1, **SETTINGS) as loader,
        pytest.raises(JobError, match="no space left"),
    ):
        list(loader)


def test_a_batch_that_cannot_be_rebuilt_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(batch: object) -> object:
        raise RuntimeError("cannot map the file")

    loader = ODBDataLoader(Numbers(0, 60), num_workers=1, **SETTINGS)
    with loader, pytest.raises(JobError, match="cannot map the file"):
        batches = iter(loader)
        monkeypatch.setattr(process_backend, "unpack", fail)
        list(batches)


def test_a_loader_process_killed_between_two_epochs_is_replaced() -> None:
    with ODBDataLoader(Numbers(0, 60), num_workers=1, persistent_workers=True, **SETTINGS) as loader:
        for _ in range(2):
            assert sum(len(batch["numbers"]) for batch in loader) == 60
            for process in multiprocessing.active_children():
                assert process.pid is not None
                os.kill(process.pid, signal.SIGKILL)
                process.join()


def test_a_killed_loader_process_ends_an_epoch_alone_too() -> None:
    with ODBDataLoader(Numbers(0, 4000), num_workers=1, **SETTINGS) as loader:
        with pytest.raises(JobError, match=r"rank 0 failed: the loader process exited unexpectedly"):
            for batch in loader:
                if pop_step_info(batch).step == 3:
                    for process in multiprocessing.active_children():
                        process.kill()
        # And the next epoch has a new one.
        assert sum(len(batch["numbers"]) for batch in loader) == 4000


def test_a_loader_process_that_is_stopped_is_taken_for_lost() -> None:
    loader = ODBDataLoader(Numbers(0, 4000), num_workers=1, loader_timeout_s=1.5, **SETTINGS)
    with loader, pytest.raises(JobError, match=r"rank 0 failed: the loader process has been stopped for 1.5 s"):
        for batch in loader:
            if pop_step_info(batch).step == 3:
                for process in multiprocessing.active_children():
                    assert process.pid is not None
                    os.kill(process.pid, signal.SIGSTOP)
    assert not multiprocessing.active_children()


def read_with_one_stopped(rank: int, num_workers: int, which: int, method: str) -> None:
    """Rank 1 stops one of the processes that work for its loader, before it has read all."""
    options = SETTINGS | {"num_workers": num_workers, "multiprocessing_context": method, "shard": "given"}
    options |= {"collate_fn": collate_slowly, "loader_timeout_s": 1.5}
    with ODBDataLoader(Numbers(0, 4000), **options) as loader:
        for batch in loader:
            if rank == 1 and pop_step_info(batch).step == 3:
                (process,) = multiprocessing.active_children()
                os.kill(sorted(find_children(process.pid or 0))[which], signal.SIGSTOP)


@pytest.mark.parametrize(
    ("num_workers", "which", "method", "what"),
    [
        (1, 0, "fork", "DataLoader worker"),
        (2, 1, "fork", "DataLoader worker"),
        (2, 2, "fork", "the process that collates"),
        pytest.param(1, -1, "spawn", "DataLoader worker", marks=pytest.mark.slow),
    ],
)
def test_a_worker_that_is_stopped_ends_every_rank(num_workers: int, which: int, method: str, what: str) -> None:
    """It hung all ranks; one that takes its time is waited for."""
    results = run_ranks(2, read_with_one_stopped, num_workers, which, method, timeout_s=60)
    assert {(result.error, result.rank) for result in results} == {("JobError", 1)}, results
    (text,) = {result.text for result in results}
    assert re.match(rf"rank 1 failed: {what} \(pid \d+\) has been stopped for 1.5 s \(SIGSTOP", text)
    assert max(result.seconds for result in results) < (8 if method == "fork" else 40)


def test_a_worker_that_is_stopped_between_two_epochs_is_replaced() -> None:
    settings = SETTINGS | {"num_workers": 1, "persistent_workers": True, "loader_timeout_s": 1.0}
    with ODBDataLoader(Numbers(0, 200), **settings) as loader:
        for _ in range(2):
            assert sum(len(batch["numbers"]) for batch in loader) == 200
            (process,) = multiprocessing.active_children()
            (worker,) = find_children(process.pid or 0)
            os.kill(worker, signal.SIGSTOP)
            deadline = time.monotonic() + 20
            while look_at(worker) is not None and time.monotonic() < deadline:  # killed, and waited for
                time.sleep(0.05)
        assert sum(len(batch["numbers"]) for batch in loader) == 200


# The trainer's end by itself ---------------------------------------------------------------------------------------------


class Recorder:
    """A backend that only writes down what it is told."""

    is_inline = has_work = False

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.listener: Listener | None = None

    def begin(self, start: EpochStart, listener: Listener) -> None:
        self.listener = listener

    def submit(self, event: Event, at_s: float | None = None) -> None:
        self.events.append(event)

    def work(self, steps: int, limit_s: float | None = None) -> None: ...

    def close_trace(self) -> None: ...

    def end(self) -> None: ...

    def close(self) -> None: ...


class Wire(Exchange):
    """An exchange without a thread, that keeps what is posted."""

    def __init__(self) -> None:
        super().__init__(LocalTransport())
        self.posts: list[Any] = []

    def open(self, submit: Any, describe: Any) -> PeerLost | None:
        return None

    def post(self, post: Any) -> None:
        self.posts.append(post)


OFFERING = StateSummary(phase=Phase.OFFER, round=1, planned_steps=4, released_steps=4, delivered_steps=3)
AGREEMENT = Offer(
    round_min=1,
    round_max=1,
    fingerprint_min=CONFIG.fingerprint,
    fingerprint_max=CONFIG.fingerprint,
    ready_min=1,
    failed_rank=NONE,
    stop_rank=NONE,
    stop_step=NONE,
    samples_min=1,
    samples_max=2,
    groups_min=2,
    groups_max=2,
    due_max=0,
)


def start(function: Callable[..., Any], *args: Any) -> Future[Any]:
    """Runs in a thread that hinders nothing should it never return."""
    future: Future[Any] = Future()

    def run() -> None:
        try:
            future.set_result(function(*args))
        except Exception as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


def begin() -> tuple[TrainerSide, Recorder, Wire]:
    """A rank that has offered its second round; three of the four steps of its first are delivered."""
    backend, wire = Recorder(), Wire()
    trainer_side = TrainerSide(CONFIG, backend, wire, EpochStart(keys=range(9)))
    trainer_side.begin()
    counts = StepCounts(1, 5, 5)
    steps = tuple(Step(number, 0, (Sample(number, number, 5, 5),), counts) for number in range(4))
    planned = make_round_note(steps, RoundStart(round=1, planned_steps=4, read_samples=4), budget_tokens=20)
    trainer_side.on_update(Update(OFFERING, planned=planned))
    for number in range(4):
        trainer_side.on_batch(number, f"batch {number}")
    trainer_side.on_collated(0)
    trainer_side.on_update(Update(OFFERING, is_answer=True))
    return trainer_side, backend, wire


def test_a_round_as_it_crosses_says_of_each_step_what_it_holds() -> None:
    groups = ((Sample(7, 3, 9, 4, (2, 1)), Sample(5, 0, 6, 6, (0, 3))), (), (Sample(2, 1, 5, 0, (4, 4)),))
    totals = (StepCounts(3, 20, 11, (9, 4)), StepCounts(1, 8, 2, (0, 1)), StepCounts(2, 7, 3, (4, 5)))
    steps = tuple(Step(4 + i, 2, group, total) for i, (group, total) in enumerate(zip(groups, totals, strict=True)))
    next_start = RoundStart(round=3, planned_steps=7, read_samples=4)
    sent = make_round_note(steps, next_start, budget_tokens=20, resources=2)
    note = pickle.loads(pickle.dumps(sent))
    assert note == sent
    assert [note.get(number) for number in note.numbers] == [
        StepNote(4, 2, (3, 0), StepCounts(2, 15, 10, (2, 4)), 18, totals[0], 20),
        StepNote(5, 2, (), StepCounts(0, 0, 0, (0, 0)), 0, totals[1], 20),
        StepNote(6, 2, (1,), StepCounts(1, 5, 0, (4, 4)), 5, totals[2], 20),
    ]
    assert [note.get_counts(number) for number in note.numbers] == list(totals)


def test_between_an_answer_of_the_exchange_and_the_machines_word_nothing_is_handed_out() -> None:
    """Checks: STOP. The agreement may lower the step limit, and only the machine knows."""
    trainer_side, backend, _ = begin()
    first = trainer_side.take()
    assert first is not None
    assert first.batch == "batch 0"
    trainer_side.on_update(Update(replace(OFFERING, taken_steps=1, delivered_steps=4), is_answer=True))
    answered = start(trainer_side.on_answer, Agreed(AGREEMENT))
    while not isinstance(backend.events[-1], Agreed):
        time.sleep(0.001)
    second = start(trainer_side.take)
    assert not wait([answered, second], 0.1).done
    stopped = Outcome(OutcomeKind.STOPPED, 1, "its consumer left after 1 steps")
    over = replace(OFFERING, phase=Phase.DONE, taken_steps=1, delivered_steps=4, step_limit=1, outcome=stopped)
    trainer_side.on_update(Update(over, is_answer=True))
    assert answered.result(5) is None
    with pytest.raises(JobError, match="rank 1 left the loop"):
        second.result(5)
    assert [type(event) for event in backend.events] == [Collated, StepTaken, Agreed]


def test_an_answer_that_comes_when_a_step_was_just_available_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Checks: STOP. Not an epoch without an outcome: found by the soak, where all ranks left at once."""
    trainer_side, backend, _ = begin()
    work, answers = trainer_side._work, []

    def work_and_answer() -> None:
        work()
        if not answers:
            answers.append(start(trainer_side.on_answer, Agreed(AGREEMENT)))
            while not isinstance(backend.events[-1], Agreed):
                time.sleep(0.001)

    monkeypatch.setattr(trainer_side, "_work", work_and_answer)
    taken = start(trainer_side.take)
    assert not wait([taken], 0.1).done
    trainer_side.on_update(Update(replace(OFFERING, phase=Phase.COUNT, delivered_steps=4), is_answer=True))
    step = taken.result(5)
    assert step is not None and step.batch == "batch 0"


def test_a_stand_in_answers_what_the_lost_machine_has_not() -> None:
    """Checks: ABORT, RELEASE. It takes part in the round that is agreed, and says in the next that this rank has failed."""
    trainer_side, _, wire = begin()
    answered = start(trainer_side.on_answer, Agreed(AGREEMENT))
    assert not wait([answered], 0.1).done
    trainer_side.on_lost("the loader process exited unexpectedly", EOFError())
    assert answered.result(5) is None
    assert wire.posts == [PostCounts((ZERO_COUNTS, ZERO_COUNTS))]
    # What is released is handed out, for the other ranks hand it out too.
    assert [taken.batch for taken in (trainer_side.take() for _ in range(2)) if taken is not None] == [
        "batch 0",
        "batch 1",
    ]
    start(trainer_side.on_answer, Counted((ZERO_COUNTS, ZERO_COUNTS))).result(5)
    offer = wire.posts[-1]
    assert isinstance(offer, PostOffer)
    assert (offer.offer.failed_rank, offer.offer.ready_min, offer.offer.round_min) == (0, 0, 2)
    start(trainer_side.on_answer, Agreed(offer.offer)).result(5)
    report = wire.posts[-1].report
    assert report.cause == "the loader process exited unexpectedly"
    start(trainer_side.on_answer, Reported((report, replace(report, rank=1, cause="")))).result(5)
    assert [taken.batch for taken in (trainer_side.take() for _ in range(2)) if taken is not None] == [
        "batch 2",
        "batch 3",
    ]
    with pytest.raises(JobError, match="rank 0 failed: the loader process exited unexpectedly"):
        trainer_side.take()


# One that comes or goes late ----------------------------------------------------------------------------------------------


def close_too_early(rank: int, num_workers: int) -> None:
    """Rank 1 is slow to read; rank 0 leaves meanwhile, and does not wait until rank 1 can know."""
    data = Numbers(0, 4000, bad=60 if rank == 1 else None, fault="slow")
    settings = SETTINGS | {"ramp_rounds": 0, "depth": 1000, "shard": "given", "timeout_s": 15}
    loader = ODBDataLoader(data, num_workers=num_workers, **settings)
    for step, _ in enumerate(loader):
        if rank == 0 and step == 2:
            time.sleep(0.5)  # its window is full, and offered
            break
    if rank == 0:
        loader._session.end_epoch(0.2)
        time.sleep(4)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_one_that_does_not_wait_until_the_others_know_is_named_all_the_same(num_workers: int) -> None:
    """Checks: STOP, ABORT."""
    results = run_ranks(2, close_too_early, num_workers)
    assert not results[0].error, results
    assert results[1].error == "JobError", results
    assert results[1].rank == 0
    assert "its consumer left" in results[1].text


def test_leaving_while_steps_are_skipped_is_a_stop() -> None:
    """Checks: STOP. What was trained on before the state was saved is not taken once the consumer has left."""

    def make() -> ODBDataLoader:
        settings = SETTINGS | {"window": 2000, "ramp_rounds": 0, "depth": 1}
        return ODBDataLoader(Numbers(0, 5000), num_workers=1, **settings)

    with make() as loader:
        batches = iter(loader)
        for _ in range(400):
            next(batches)
        state = loader.state_dict()
    with make() as loader:
        loader.load_state_dict(state)
        iterator = iter(loader)
        trainer_side = loader._trainer_side
        assert trainer_side is not None
        while trainer_side._position.next_step < 10:
            time.sleep(0.0005)
        iterator.close()
        assert trainer_side.wait(10)
        assert 10 <= trainer_side._position.next_step < 400, "still skipping"
        assert not trainer_side._ending.is_broken
        assert trainer_side._machine.summary is not None
        assert trainer_side._machine.summary.outcome is not None
        assert trainer_side._machine.summary.outcome.kind is OutcomeKind.STOPPED


@pytest.mark.parametrize("num_workers", [0, 1])
def test_what_belongs_to_an_epoch_that_is_over_does_not_reach_the_next(tmp_path: Path, num_workers: int) -> None:
    trace = tmp_path / "run-{epoch}.ndjson"
    options: dict[str, Any] = {"num_workers": num_workers, "persistent_workers": bool(num_workers)}
    with ODBDataLoader(Numbers(0, 300), trace=trace, **options, **SETTINGS) as loader:
        first = iter(loader)
        steps = len(list(first))
        over = loader._trainer_side
        second = iter(loader)
        next(second)
        assert next(first, None) is None
        assert over is not None
        over.on_answer(Urged())
        assert 1 + len(list(second)) == steps
        for epoch in range(2):
            _, records = read_trace(tmp_path / f"run-{epoch}.ndjson")
            kinds = [record.event["kind"] for record in records if record.event is not None]
            assert kinds.count("step_taken") == steps


class KillOnce(Numbers):
    """Kills the worker that reads the bad sample, as long as there is a file that says so."""

    word: Path

    def __getitem__(self, index: int) -> Any:
        if index == self.bad and self.word.exists():
            self.word.unlink()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(index)


def test_a_loader_process_with_a_dead_worker_is_replaced(tmp_path: Path) -> None:
    """Persistent workers, one of which died: the next epoch has others."""
    data = KillOnce(0, 300, bad=200)
    data.word = tmp_path / "kill"
    data.word.touch()
    with ODBDataLoader(data, num_workers=1, persistent_workers=True, **SETTINGS) as loader:
        with pytest.raises(JobError, match="exited unexpectedly"):
            list(loader)
        assert sorted(number for batch in loader for number in batch["numbers"]) == list(range(300))


def collate_slowly(samples: list[dict[str, Any]]) -> dict[str, Any]:
    """Worth processes of its own."""
    time.sleep(0.01)
    return collate(samples)


def count_threads(pid: int) -> int:
    try:
        return len(os.listdir(f"/proc/{pid}/task"))
    except FileNotFoundError:
        return 0


class Closing:
    """What closes a connection while it is pickled, as another thread may."""

    def __init__(self, connection: Link) -> None:
        self.connection = connection

    def __reduce__(self) -> tuple[type[str], tuple[()]]:
        self.connection.close()
        return str, ()


def test_a_connection_that_another_thread_closes_takes_no_order() -> None:
    """Found by the soak: a loader that was closed after its job had failed raised a TypeError in place of the job's error."""
    connection, other = multiprocessing.Pipe()
    with pytest.raises(TypeError):
        connection.send(Closing(connection))
    connection, other = multiprocessing.Pipe()
    process_backend.send(connection, Closing(connection))
    assert connection.closed
    with pytest.raises(EOFError):
        other.recv()
    connection, other = multiprocessing.Pipe()
    with pytest.raises(TypeError, match="pickle"):
        process_backend.send(connection, threading.Lock())


def test_workers_that_die_between_two_epochs_are_replaced() -> None:
    """Nobody misses them: all that they were to read and to collate in their epoch was done."""
    options: dict[str, Any] = {"num_workers": 2, "persistent_workers": True, "collate_fn": collate_slowly}
    with ODBDataLoader(Numbers(0, 300), **SETTINGS | options) as loader:
        assert len([number for batch in loader for number in batch["numbers"]]) == 300
        (process,) = (child for child in multiprocessing.active_children() if child.name == "odb-loader")
        workers = find_children(process.pid or 0)
        assert len(workers) == 4, "two that read, two that collate"
        for worker in workers[::2]:
            os.kill(worker, signal.SIGKILL)
            # Its first thread has ended before the process can be waited for, which takes the last.
            while (look := look_at(worker)) is not None and not (look.is_ended and count_threads(worker) <= 1):
                time.sleep(0.01)
        time.sleep(0.1)
        for _ in range(2):
            assert sorted(number for batch in loader for number in batch["numbers"]) == list(range(300))
        assert process.is_alive()
        assert not set(workers) & set(find_children(process.pid or 0)), "the others were left to themselves"


def test_a_loader_process_that_is_slow_to_die_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_backend, "JOIN_S", 0.0)
    before = len(os.listdir("/proc/self/fd"))
    with ODBDataLoader(Numbers(0, 400), num_workers=1, **SETTINGS) as loader:
        next(iter(loader))
    deadline = time.monotonic() + 20
    while len(os.listdir("/proc/self/fd")) > before and time.monotonic() < deadline:
        time.sleep(0.02)
    assert len(os.listdir("/proc/self/fd")) <= before


class SeenLate:
    """A process whose end another thread is told of: one that waits for it comes back with nothing, at first."""

    def __init__(self) -> None:
        self.waits = 0
        self.is_off_the_list = False

    @property
    def exitcode(self) -> int | None:
        return -9 if self.waits >= 2 else None

    def join(self, timeout: float | None = None) -> None:
        self.waits += 1
        self.is_off_the_list = self.exitcode is not None


def test_a_process_whose_end_another_thread_was_told_of_is_taken_off_the_list_of_children() -> None:
    process: Any = SeenLate()
    process_backend._reap(process)
    assert process.is_off_the_list
