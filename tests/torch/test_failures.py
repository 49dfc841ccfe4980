"""Real processes over gloo. If one fails, every surviving rank reports the same error in time, and nothing hangs."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import re
import signal
import threading
import time
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import RandomSampler

from odb_ref.torch import JobError
from odb_ref.torch.reading.pipeline import find_failed
from odb_ref.torch.reading.tasks import get_length
from odb_ref.trace.check import check_traces
from tests.helpers.waiting import is_in_time
from tests.torch import data
from tests.torch.data import Numbers, collate, listen, take
from tests.torch.ranks import Result, check_errors, get_values, run_each, run_ranks

make_loader = partial(data.make_loader, shard="given", timeout_s=5)
SIZES = [40, 30, 20]


def check_same(results: list[Result], rank: int, cause: str) -> None:
    """Checks that all results are the same error, naming the rank and the cause."""
    check_errors(results, cause, rank=rank)
    assert len({result.text for result in results}) == 1, results


def synchronize() -> None:
    """Synchronizes as a training step does: no rank continues before all have arrived."""
    dist.all_reduce(torch.zeros(1))


def check_traced(folder: Path) -> None:
    """Checks that the traces of an epoch that ended early pass the checker."""
    (job,) = check_traces(sorted(folder.glob("*.ndjson"))).jobs
    assert not job.violations


def read_bad(rank: int, fault: str, num_workers: int, trace: Path) -> None:
    def combine(samples: list[Any]) -> Any:
        if rank == 1 and fault == "collate" and any(sample["number"] == 12 for sample in samples):
            raise RuntimeError("no memory")
        return collate(samples)

    def measure(sample: Any) -> int:
        return -3 if rank == 1 and fault == "length" and sample["number"] == 15 else len(sample["input_ids"])

    own_fault = "" if fault in ("collate", "length") else fault
    dataset = Numbers(0, SIZES[rank], bad=15 if rank == 1 else None, fault=own_fault)
    options = {"num_workers": num_workers, "trace": trace, "collate_fn": combine}
    if fault == "length":
        options["length_fn"] = measure
    with make_loader(dataset, **options) as loader:
        for _ in loader:
            synchronize()


BAD: list[tuple[str, str, int]] = [
    ("raise", "ValueError: bad row 15 (the sample is 15)", 0),
    ("raise", "ValueError: bad row 15 (the sample is 15)", 1),
    ("empty", "the length of a sample is 0", 0),
    ("empty", "the length of a sample is 0", 1),
    ("no_ids", "has no input_ids", 0),
    ("no_ids", "has no input_ids", 1),
    ("StopIteration", "StopIteration for the sample 15", 0),
    ("kill", "exited unexpectedly", 1),
    ("collate", "RuntimeError: no memory", 0),
    ("collate", "RuntimeError: no memory", 2),
    ("length", "the length of a sample is -3", 0),
]


def test_a_failure_on_one_rank_is_the_same_error_on_all_before_any_waits(tmp_path: Path) -> None:
    """Spec: R7.2, R11.4. Checks: ABORT, COVER."""
    cases = [(fault, num_workers, tmp_path / str(n) / "run.ndjson") for n, (fault, _, num_workers) in enumerate(BAD)]
    for _, _, path in cases:
        path.parent.mkdir()
    for (_, _, path), (_, cause, _), results in zip(cases, BAD, run_each(3, read_bad, cases), strict=True):
        check_same(results, 1, cause)
        assert max(result.seconds for result in results) < 5
        check_traced(path.parent)


def lose_the_index(rank: int, num_workers: int, shard: str) -> str:
    """Runs an epoch that rank 1 cannot begin, because its data set no longer has a length, and then a whole one; twice."""
    is_gone = False

    class Vanishing(Numbers):
        def __len__(self) -> int:
            if is_gone:
                raise RuntimeError("the index is gone")
            return self.count

    options = {"shard": shard, "num_workers": num_workers, "timeout_s": 60, "name": "train"}
    with data.make_loader(Vanishing(0, 40), **options) as loader:
        for go_on in (partial(loader.load_state_dict, loader.state_dict()), partial(loader.set_epoch, 2)):
            is_gone = rank == 1
            with pytest.raises((JobError, RuntimeError)) as caught:
                list(loader)
            is_gone = False
            go_on()
            assert list(loader)
    return f"{caught.type.__name__}: {caught.value}"


def test_a_rank_that_cannot_begin_an_epoch_is_the_error_on_all() -> None:
    """Spec: R7.2. Checks: ABORT."""
    cases = [(0, "given"), (0, "auto"), (1, "auto"), (1, "given")]
    for case, results in zip(cases, run_each(3, lose_the_index, cases), strict=True):
        own, told = "RuntimeError: the index is gone", "JobError: rank 1 failed: RuntimeError: the index is gone"
        assert get_values(results) == [told, own, told], case
        assert max(result.seconds for result in results) < 10


def test_a_failure_is_told_before_workers_that_hang_are_waited_for() -> None:
    """Checks: ABORT. torch waits five seconds for each."""

    def hang(index: int) -> None:
        """Raises for one sample; the samples after it never come."""
        time.sleep(1000 if index > 16 else 1)
        raise ValueError("bad row")

    def read_hanging(rank: int) -> None:
        dataset = Numbers(0, 40, bad=range(16, 40) if rank == 1 else None, fault=hang)
        with make_loader(dataset, num_workers=4, timeout_s=60) as loader:
            for _ in loader:
                synchronize()

    results = run_ranks(2, read_hanging)
    check_same(results, 1, "ValueError: bad row (the sample is 16)")
    assert max(result.seconds for result in results) < 10


def test_a_sample_over_the_budget_travels_alone_and_fails_no_rank() -> None:
    def read_long(rank: int) -> list[list[int]]:
        dataset = Numbers(0, SIZES[rank], bad=15 if rank == 1 else None, fault="long")
        return [numbers for _, numbers, _ in take(make_loader(dataset, num_workers=2), data.read)]

    values = get_values(run_ranks(3, read_long))
    assert [sorted(chain(*value)) for value in values] == [list(range(size)) for size in SIZES]
    assert [15] in values[1]
    assert len({len(value) for value in values}) == 1


def fail_and_go_on(rank: int) -> tuple[str, int]:
    """Runs an epoch in which the shortest sample of rank 1 cannot be collated, and one without it."""
    is_bad = rank == 1

    class Moody(Numbers):
        def __getitem__(self, index: int) -> Any:
            return super().__getitem__(index) | ({"is_bad": 1} if is_bad and index == 1 else {})

    def combine(samples: list[Any]) -> Any:
        if any("is_bad" in sample for sample in samples):
            raise ValueError("cannot be collated")
        return collate(samples)

    with make_loader(Moody(0, (40, 5)[rank]), collate_fn=combine) as loader:
        try:
            for _ in loader:
                synchronize()
        except JobError as error:
            text = str(error)
        is_bad = False
        idle = 0
        for _, info in loader.steps():
            synchronize()
            idle += info.is_idle
    return text, idle


def test_what_failed_in_one_epoch_is_not_replayed_in_the_idle_steps_of_the_next() -> None:
    """The soak found this with seed 61449. Spec: R1.3."""
    values = get_values(run_ranks(2, fail_and_go_on))
    assert all("cannot be collated" in value[0] for value in values)
    assert values[0][1] == 0 < values[1][1]


def test_a_worker_whose_exit_code_another_thread_has_read_has_not_failed() -> None:
    """Under a fork server an exit code can be read once, and the second reader gets 255. The soak found this: a worker that had
    finished, and was being joined by torch, ended the job.
    """
    context = multiprocessing.get_context("forkserver")
    done, failed = (context.Process(target=os._exit, args=(code,)) for code in (0, 3))
    failed.start()
    done.start()  # last, because starting a process reads the codes of those that have ended
    os.read(done.sentinel, 8)
    failed.join()
    done.join()
    assert (done.exitcode, failed.exitcode) == (255, 3)
    assert find_failed([done]) is None
    assert find_failed([done, failed]) is failed


def square(tokens: int) -> int:
    return tokens**2


DIFFERENT: list[tuple[dict[str, Any], str]] = [
    ({"token_budget": 61}, "budget_tokens is 61, rank 0 has 60"),
    ({"mode": "quota"}, "mode is 'quota', rank 0 has 'join'"),
    ({"accumulation_steps": 2}, "accumulation_steps is 2, rank 0 has 1"),
    ({"loss_scaling": "samples"}, "loss_scaling is 'samples', rank 0 has 'exact'"),
    ({"loss_reduction": "sum"}, "loss_reduction is 'sum', rank 0 has 'mean'"),
    ({"trainer_divides_loss": True}, "trainer_divides_loss is True, rank 0 has False"),
    ({"causal_shift": False}, "causal_shift is False, rank 0 has True"),
    ({"supervised_fn": get_length}, "supervised_fn is 'given', rank 0 has 'default'"),
    ({"on_idle": "none"}, "on_idle is 'none', rank 0 has 'replay'"),
    ({"on_bad_sample": "quarantine"}, "on_bad_sample is 'quarantine', rank 0 has 'fail'"),
    ({"transport": "gather"}, "transport is 'gather', rank 0 has 'reduce'"),
    ({"cost": square}, "cost is 'square/"),
    ({"sizes": "even"}, "sizes is 'even', rank 0 has "),
    ({"window_bytes": 9001}, "window_bytes is 9001, rank 0 has "),
    ({"shard": "auto"}, "shard is 'auto', rank 0 has 'given'"),  # the last two: their loaders differ in kind
    ({"shard": "auto", "seed": 4}, "seed is 4, rank 0 has "),
]


def test_ranks_that_are_configured_differently_say_so() -> None:
    """Spec: R2.7, R2.8, R7.3. Checks: ABORT."""

    def read_differently(rank: int, options: dict[str, Any]) -> None:
        take(make_loader(Numbers(0, SIZES[rank]), **(options if rank == 1 else {})))

    found = run_each(3, read_differently, [(options,) for options, _ in DIFFERENT])
    for results, (_, cause) in zip(found, DIFFERENT, strict=True):
        check_same(results, 1, cause)


def test_a_sampler_that_lists_another_order_on_a_rank_is_told_what_it_needs() -> None:
    def list_differently(rank: int) -> None:
        dataset = Numbers(0, 20)
        order = RandomSampler(dataset, generator=torch.Generator().manual_seed(rank))
        take(data.make_loader(dataset, update_samples=8, sampler=order))

    check_same(run_ranks(2, list_differently), 1, "must list all of it, with the same seed on every rank")


def test_a_killed_process_is_named_in_time(tmp_path: Path) -> None:
    def read_and_die(rank: int) -> None:
        with make_loader(Numbers(0, 200), trace=tmp_path / "run.ndjson") as loader:
            for step, _ in enumerate(loader):
                if rank == 1 and step == 3:
                    os.kill(os.getpid(), signal.SIGKILL)
                time.sleep(0.02)

    results = run_ranks(3, read_and_die)
    assert results[1].is_gone
    check_same([results[0], results[2]], 1, "its process is gone")
    assert max(results[0].seconds, results[2].seconds) < 5
    check_traced(tmp_path)


def test_a_rank_inside_a_step_logs_who_is_lost() -> None:
    """Its step may wait for the lost rank for as long as the process group does, and then name nobody."""

    def stay_inside(rank: int) -> bool:
        lines = listen()
        with make_loader(Numbers(0, 200)) as loader:
            steps = iter(loader)
            next(steps)
            if rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            return is_in_time(lambda: any(re.search("rank 1 is lost.*rank 0 holds step 0:", line) for line in lines), 4)

    assert run_ranks(2, stay_inside)[0].value


def test_a_killed_loader_process_is_named_on_all_ranks() -> None:
    def read_and_lose_the_loader_process(rank: int) -> None:
        # Far more than a pipe holds is on its way at that time. Nothing that waits for it to be read may stay.
        with make_loader(Numbers(0, 4000), num_workers=2, prefetch_factor=32) as loader:
            for step, _ in enumerate(loader):
                if rank == 1 and step == 3:
                    (process,) = multiprocessing.active_children()
                    process.kill()
                time.sleep(0.01)

    results = run_ranks(3, read_and_lose_the_loader_process)
    check_same(results, 1, "the loader process exited unexpectedly (exit code -9)")
    assert max(result.seconds for result in results) < 5


def test_a_rank_that_never_starts_is_noticed_in_time() -> None:
    def read_on_some(rank: int) -> None:
        if rank != 1:
            take(make_loader(Numbers(0, 20), timeout_s=2))

    (results,) = run_each(3, read_on_some, [()])  # nobody ends before all have
    assert {results[0].error, results[2].error} == {"JobError"}, results
    assert "not every rank has started" in results[0].text
    assert max(results[0].seconds, results[2].seconds) < 7


def test_a_slow_trainer_is_not_taken_for_a_lost_one() -> None:
    def read_slowly(rank: int) -> int:
        steps = 0
        with make_loader(Numbers(0, 30), timeout_s=1) as loader:
            for epoch in range(2):
                for _ in loader:
                    synchronize()
                    if rank == 0 and steps == 2:
                        time.sleep(1.5)
                    steps += 1
                if rank == 1 and epoch == 0:
                    time.sleep(1.5)  # a checkpoint, for example
        return steps

    values = get_values(run_ranks(2, read_slowly))
    assert values[0] == values[1]


def leave(rank: int, leaves: dict[int, int], how: str, trace: Path) -> int:
    """Leaves the loop at the rank's step in ``leaves``. Until the first of these, ranks are in lockstep."""
    steps = 0
    with make_loader(Numbers(0, 60), trace=trace) as loader:
        for _ in loader.steps():
            if leaves.get(rank) == steps:
                if how == "raise":
                    raise KeyError("the trainer's own")
                break
            if steps < min(leaves.values()):
                dist.barrier()
            steps += 1
            time.sleep(0.01)
        if how == "again":
            return sum(1 for _ in loader)
    return steps


def test_all_ranks_may_leave_at_the_same_step_and_one_that_leaves_alone_is_named(tmp_path: Path) -> None:
    """Traces of ranks that leave in lockstep pass the checker."""
    together, one = dict.fromkeys(range(3), 4), {2: 4}
    # When they leave later, it is at the next step if they do not know yet. A trainer's collective would hold them there.
    later = {0: 5, 1: 5, 2: 4}
    kinds = (("break", together), ("again", together), ("alone", one), ("raise", one), ("later", later), ("again", one))
    cases = [(leaves, how, tmp_path / f"{number} {how}" / "run.ndjson") for number, (how, leaves) in enumerate(kinds)]
    for *_, trace in cases:
        trace.parent.mkdir()
    same, again, alone, raised, _, (*others, own) = run_each(3, leave, cases)
    assert [result.value for result in same] == [4, 4, 4], same
    assert len({result.value for result in again}) == 1, again
    assert again[0].value > 5
    for results in (alone, raised):
        check_same(results[:2], 2, "left the loop")
        assert max(result.seconds for result in results) < 5
    assert (alone[2].value, raised[2].error) == (4, "KeyError")
    check_traced(tmp_path / "0 break")
    check_traced(tmp_path / "4 later")
    # One that begins again was told only that a rank is lost, which had ended because of it.
    check_same(others, 2, "left the loop")
    assert re.search(r"is lost: .* This process did not finish the epoch before: if it left by itself", own.text), own


def test_control_c_on_any_rank_ends_all() -> None:
    def interrupt(rank: int, culprits: list[int], num_workers: int) -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background starts with Ctrl-C ignored
        with make_loader(Numbers(0, 2000), num_workers=num_workers) as loader:
            for step, _ in enumerate(loader):
                if rank in culprits and step == 3:
                    os.killpg(os.getpgrp(), signal.SIGINT)  # as a terminal does, which signals workers too
                time.sleep(0.02)

    *of_one, of_all = run_each(3, interrupt, [([1], 0), ([1], 2), ([0, 1, 2], 2)])
    for results in of_one:
        assert results[1].error == "KeyboardInterrupt"
        check_same([results[0], results[2]], 1, "left the loop")
    # A rank that has not received its own signal yet may learn of another's first.
    assert {result.error for result in of_all} <= {"KeyboardInterrupt", "JobError"}, of_all
    assert "KeyboardInterrupt" in {result.error for result in of_all}
    assert max(result.seconds for results in (*of_one, of_all) for result in results) < 5


def test_one_that_leaves_and_closes_while_others_are_slow_is_named() -> None:
    """The others are in the trainer's collective when one leaves. Their loaders must end nevertheless."""

    def leave_while_others_wait(rank: int) -> None:
        with make_loader(Numbers(0, 60)) as loader:
            for step, _ in enumerate(loader):
                if rank == 0 and step == 3:
                    break
                time.sleep(0.2 if rank else 0)
            # The loader of rank 0 is closed here. The others learn of it at their next request.

    results = run_ranks(3, leave_while_others_wait)
    check_same(results[1:], 0, "left the loop")
    assert max(result.seconds for result in results) < 6


def leave_others_in_a_collective(rank: int, folder: Path) -> list[str]:
    """Returns what a rank logs that has left alone, while the other waits for it as in a model's collective."""
    lines = listen(lambda line: (folder / "logged").touch() if "waits for" in line else None)
    with make_loader(window=64, timeout_s=1) as loader:
        steps = loader.steps()
        for _ in range(3 + rank):
            next(steps)
        if rank == 0:
            steps.close()
            threading.Thread(target=list, args=(loader,), daemon=True).start()
        is_in_time((folder / "logged").exists, 40.0)
    return lines


def test_a_rank_that_left_alone_logs_it_while_it_waits_in_the_next_epoch(tmp_path: Path) -> None:
    """The other can neither learn of it nor be called back. Spec: NP2."""
    first, _ = get_values(run_ranks(2, leave_others_in_a_collective, tmp_path))
    assert any(re.match(r"rank 0 waits for rank 1, .*\. rank 0 left the epoch before early", line) for line in first), (
        first
    )


def leave_when_all_is_agreed_on(rank: int, leaver: int | None) -> int:
    """Returns the number of epochs that a rank read completely. All samples fit one window, so nothing is exchanged later."""
    read = 0
    with make_loader(window=64) as loader:
        for _ in range(3):
            for _, info in loader.steps():
                if rank == leaver and info.step == 3:
                    break
            read += info.is_last
            dist.barrier()
    return read


def test_one_that_has_left_alone_unheard_is_named_when_the_next_epoch_begins() -> None:
    (alone, together) = run_each(2, leave_when_all_is_agreed_on, [(1,), (None,)])
    check_same(alone, 1, "the epoch before is 'left early', rank 0 has 'complete'")
    assert get_values(together) == [3, 3]


def leave_or_stay_inside(rank: int, word: Path) -> bool:
    """Rank 0 leaves alone. Rank 1 stays inside a step until rank 2, which asks for steps, knows. Returns whether it did."""
    with make_loader(Numbers(100 * rank, 60), timeout_s=20) as loader:
        batches = iter(loader)
        for _ in range(3):
            next(batches)
        synchronize()
        if rank == 0:
            batches.close()
        is_told = rank != 1 or is_in_time(word.exists, 15)
        with pytest.raises(JobError, match="rank 0 left the loop") if rank else contextlib.nullcontext():
            while rank:
                next(batches)
        if rank == 2:
            word.touch()
        synchronize()
        return is_told


def test_an_urged_rank_reads_without_a_trainer_that_does_not_come(tmp_path: Path) -> None:
    """Spec: R5.9, R12.2. Checks: STOP."""
    assert all(get_values(run_ranks(3, leave_or_stay_inside, tmp_path / "word")))
