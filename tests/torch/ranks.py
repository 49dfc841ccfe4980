"""Runs a function in several real processes that are joined by gloo, and returns each one's result."""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import multiprocessing
import multiprocessing.forkserver
import os
import signal
import tempfile
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.helpers.waiting import is_in_time

CAN_SHARD = hasattr(torch.cpu.Stream, "record_event")
"""Whether `fully_shard` of this torch runs on CPUs. That of 2.6 does not."""
LINGER_S = 8.0
"""How long processes of a rank may outlive it. Torch's workers check every five seconds whether their parent exists."""


Prepare = Callable[[int, int], None]
"""Is called with the rank and the number of ranks."""


@dataclass(frozen=True)
class Result:
    """What one rank returned, or the exception it raised, and how long it took."""

    value: Any = None
    error: str = ""
    text: str = ""
    rank: int | None = None
    seconds: float = 0.0
    is_gone: bool = False


def get_values(results: list[Result]) -> list[Any]:
    """Returns what each rank returned.

    Raises: AssertionError when one of them failed.
    """
    assert not any(result.error or result.is_gone for result in results), results
    return [result.value for result in results]


def check_errors(results: list[Result], *texts: str, error: str = "JobError", rank: int | None = None) -> None:
    """Checks that every rank raised this error, with each of the texts in its message, and ``rank``, if given, to blame."""
    for result in results:
        assert result.error == error, results
        assert rank in (None, result.rank), results
        assert all(text in result.text for text in texts), result


def _forget_fork_server() -> None:
    """Forgets the fork server of the process that forked this one, because this process cannot wait for it."""
    server = multiprocessing.forkserver._forkserver
    server._forkserver_address = server._forkserver_alive_fd = server._forkserver_pid = None


def _run(
    pipe: Any, function: Callable[..., Any], store: str, backend: str, rank: int, world_size: int, args: tuple[Any, ...]
) -> None:
    os.setsid()  # identifies by session everything that it starts
    _forget_fork_server()
    gc.freeze()  # objects of earlier tests have threads that do not exist in this process
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)

    def join() -> None:
        dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=world_size)
        # Gloo's last rank never returns if another rank, with nothing to do, ended before the last one has connected.
        joined = dist.FileStore(f"{store}-joined", world_size)
        joined.set(str(rank), "")
        joined.wait([str(other) for other in range(world_size)])

    report(pipe, join, function, rank, args)
    with contextlib.suppress(Exception):
        dist.destroy_process_group()


def report(pipe: Any, join: Callable[[], None], function: Callable[..., Any], rank: int, args: tuple[Any, ...]) -> None:
    """Joins the group, calls the function, sends the result through the pipe, and closes it."""
    result = _call(join)
    if not result.error:
        result = _call(function, rank, *args)
    pipe.send(result)
    pipe.close()


def _call_prepared(prepare: Prepare, world_size: int, function: Callable[..., Any], rank: int, *args: Any) -> Any:
    prepare(rank, world_size)
    return function(rank, *args)


def _call(function: Callable[..., Any], *args: Any) -> Result:
    began = time.monotonic()
    try:
        return Result(value=function(*args), seconds=time.monotonic() - began)
    except BaseException as error:
        blamed = getattr(error, "rank", None)
        return Result(error=type(error).__name__, text=str(error), rank=blamed, seconds=time.monotonic() - began)


def _call_each(rank: int, function: Callable[..., Any], cases: Sequence[tuple[Any, ...]]) -> list[Result]:
    found = []
    for case in cases:
        found.append(_call(function, rank, *case))
        gc.collect()  # an error keeps alive the loader that it came from
        dist.barrier()
    return found


def in_a_rank(run: Callable[..., list[Result]]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Makes a test run as the only rank of a job, in a process of its own that ``run`` starts."""

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(test)
        def start(**fixtures: Any) -> None:
            get_values(run(1, lambda rank: test(**fixtures)))

        return start

    return decorate


def run_each(
    world_size: int, function: Callable[..., Any], cases: Iterable[tuple[Any, ...]], **options: Any
) -> list[list[Result]]:
    """Returns the results of all ranks by case. The ranks call the function with one case after another, but start once."""
    ranks = get_values(run_ranks(world_size, _call_each, function, list(cases), **options))
    return [list(results) for results in zip(*ranks, strict=True)]


def find_sessions(leaders: Collection[int]) -> set[int]:
    """Returns the living processes of these sessions."""
    found = set()
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if fields[0] not in "ZX" and int(fields[3]) in leaders:
            found.add(int(path.parent.name))
    return found


def _kill_left(leaders: Collection[int]) -> set[int]:
    left = find_sessions(leaders)
    for pid in left:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return left


def check_left(leaders: Collection[int]) -> None:
    """Checks that the processes of these sessions end, and kills those that do not."""
    is_in_time(lambda: not find_sessions(leaders), LINGER_S)
    left = _kill_left(leaders)
    assert not left, f"the ranks have ended, processes they started have not: {left}"


def run_ranks(
    world_size: int,
    function: Callable[..., Any],
    *args: Any,
    timeout_s: float = 60.0,
    method: str = "fork",
    backend: str = "gloo",
    prepare: Prepare | None = None,
) -> list[Result]:
    """Returns each rank's result, in order of rank. One that died without reporting ``is_gone``. ``prepare`` is called first.

    Raises: AssertionError when a rank has not ended in time, or a process that it started outlives it.
    """
    # DDP's first backward pass imports it, which takes seconds: here once, not in every process, and only for forked ones.
    importlib.import_module("torch._dynamo")
    if prepare is not None:
        function = functools.partial(_call_prepared, prepare, world_size, function)
    context: Any = multiprocessing.get_context(method)
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder) / "store")
        pipes, processes = [], []
        for rank in range(world_size):
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(target=_run, args=(theirs, function, store, backend, rank, world_size, args))
            process.start()
            theirs.close()
            pipes.append(ours)
            processes.append(process)
        deadline = time.monotonic() + timeout_s
        results: list[Result | None] = [None] * world_size
        try:
            for rank, pipe in enumerate(pipes):
                if pipe.poll(max(0.0, deadline - time.monotonic())):
                    try:
                        results[rank] = pipe.recv()
                    except EOFError:
                        results[rank] = Result(is_gone=True)
            for process in processes:
                process.join(max(0.1, deadline - time.monotonic()))
            hanging = [rank for rank, process in enumerate(processes) if process.is_alive()]
            if hanging:
                _kill_left(
                    {process.pid for process in processes}
                )  # a stopped process would not notice that its parent is gone
            assert not hanging, f"ranks {hanging} hang; results: {results}"
        finally:
            for process in processes:
                if process.is_alive():
                    process.kill()
                    process.join()
        check_left({process.pid for process in processes})
        return [result for result in results if result is not None]
