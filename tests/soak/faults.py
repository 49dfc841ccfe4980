"""Faults at random, in real processes: ``python -m tests.soak.faults --runs N --seed S``.

Each run is what its seed expands to: some ranks, and one fault after another in them, until one of them ends the world. A run
prints its faults. No rank may hang, no sample be lost or repeated, no wrong rank blamed, and nothing left behind. Runs mostly
wait, so several run at a time. Every process is forked from this one or from a fork server that has loaded torch. As root, some
of the worlds are on several hosts, whose links are cut.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import gc
import multiprocessing
import multiprocessing.connection
import multiprocessing.forkserver
import multiprocessing.reduction
import os
import pickle
import shlex
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.lab.hosts import Lab, find_obstacle
from tests.soak.case import HOSTS, Case, Fault, World, expand
from tests.soak.judge import is_missed, judge
from tests.soak.rank import Found, Rank
from tests.torch.ranks import find_sessions

LIMIT_S = {"fork": 180.0, "forkserver": 300.0, "spawn": 300.0}
"""A run that takes longer hangs, however busy the machine is."""
LINGER_S = 15.0
SERVER = "ODB_SOAK_FORK_SERVER"
"""The variable with the address of all runs' fork server, which it would not pass on to the processes it forks."""


@dataclass(kw_only=True)
class Verdict:
    """The result of a run: the cases that were judged, and what was wrong with the last of them."""

    world: World
    seconds: float = 0.0
    cases: tuple[Case, ...] = ()
    trouble: tuple[str, ...] = ()


class _Trouble(Exception):
    """What was wrong, line by line."""


# One rank --------------------------------------------------------------------------------------------------------------


def _be_rank(world: World, rank: int, lab: Lab | None, store: str, pipe: Connection[Any, Any]) -> None:
    os.setsid()
    use_common_fork_server()
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    cut = heal = ""
    if lab is not None:
        host = world.places[rank]
        lab.enter(host)
        os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
        cut, heal = (shlex.join(lab.make_link_command(host, is_up=is_up)) for is_up in (False, True))
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=len(world.places))
    dist.barrier()
    me = Rank(rank, cut, heal)
    while (case := _receive(pipe)) is not None:
        pipe.send_bytes(pickle.dumps(me.live(case)))


def _receive(pipe: Connection[Any, Any]) -> Any:
    """Returns what was sent, or None when the other end has closed."""
    try:
        return pickle.loads(pipe.recv_bytes())
    except (EOFError, ConnectionResetError):
        return None


def _fork(function: Callable[[], object]) -> int:
    sys.stdout.flush()
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        function()
        code = 0
    finally:
        multiprocessing.util._exit_function()  # type: ignore[attr-defined]
        os._exit(code)


# One world -------------------------------------------------------------------------------------------------------------


def run(world: World) -> Verdict:
    verdict, began = Verdict(world=world), time.monotonic()
    with contextlib.ExitStack() as stack:
        lab = stack.enter_context(Lab(HOSTS)) if world.is_lab else None
        store = f"{stack.enter_context(tempfile.TemporaryDirectory())}/store"
        processes = _Processes(world, lab, store)
        try:
            for case in world.cases:
                verdict.cases += (replace(case, is_new=case.is_new or processes.is_lost),)
                processes.check(verdict.cases[-1])
            processes.check_end()
        except _Trouble as error:
            verdict.trouble = error.args
        finally:
            processes.kill()
    verdict.seconds = time.monotonic() - began
    return verdict


class _Processes:
    """The ranks of a world, seen from outside."""

    def __init__(self, world: World, lab: Lab | None, store: str) -> None:
        self._world = world
        self._lab = lab
        self._pipes: dict[int, Connection[Any, Any]] = {}
        self._pids: dict[int, int] = {}
        self._ended: dict[int, int] = {}
        """The exit codes."""
        self._seen: set[int] = set()
        self.is_lost = False
        """True if the ranks lost touch in the last case, even if only because one took too long to answer a failure, or left
        when all was agreed, which the others hear when the next epoch begins (NP2).
        """
        for rank in range(len(world.places)):
            ours, theirs = multiprocessing.Pipe()
            others = (*self._pipes.values(), ours)
            self._pids[rank] = _fork(
                lambda rank=rank, theirs=theirs, others=others: self._start(rank, theirs, others, store)
            )
            theirs.close()
            self._pipes[rank] = ours

    def _start(self, rank: int, pipe: Connection[Any, Any], others: Any, store: str) -> None:
        for other in others:
            other.close()
        _be_rank(self._world, rank, self._lab, store, pipe)

    def check(self, case: Case) -> None:
        """Takes the ranks through a case.

        Raises: _Trouble.
        """
        for rank, pipe in self._pipes.items():
            try:
                pipe.send_bytes(pickle.dumps(case))
            except OSError:
                raise _Trouble(f"rank {rank} has ended before this case") from None
        found = self._receive(case)
        self.is_lost = is_missed(case, found) or any(" is lost: " in item.text for item in found.values())
        if any(find_files()):  # listing all processes of a machine takes a while
            self._seen |= find_sessions(set(self._pids.values()))
        if case.fault is Fault.CUT and self._lab is not None:
            self._lab.set_link(case.places[case.culprit], is_up=True)
        for rank in case.absent:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pids[rank], signal.SIGKILL)
            self._ended[rank] = os.waitpid(self._pids[rank], 0)[1]
        trouble = judge(case, found)
        if case.is_closing:
            trouble += self._find_left()
        if trouble:
            raise _Trouble(*trouble)

    def _receive(self, case: Case) -> dict[int, Found]:
        found: dict[int, Found] = {}
        deadline = time.monotonic() + LIMIT_S[self._world.method]
        waiting: dict[Any, int] = {pipe: rank for rank, pipe in self._pipes.items()}
        stopped = case.absent if case.fault is Fault.STOP else set()
        while set(waiting.values()) - stopped:
            ready = wait(list(waiting), max(0.0, deadline - time.monotonic()))
            if not ready:
                raise _Trouble(f"ranks {sorted(waiting.values())} hang", *_describe_all(found))
            for pipe in ready:
                item = _receive(pipe)  # type: ignore[arg-type]
                rank = waiting.pop(pipe)
                if item is not None:
                    found[rank] = item
        return found

    def _find_left(self) -> list[str]:
        """Returns what exists besides the ranks themselves, once their loaders are closed."""
        leaders = set(self._pids.values())
        deadline = time.monotonic() + LINGER_S
        while (left := find_sessions(leaders) - leaders) and time.monotonic() < deadline:
            time.sleep(0.2)
        trouble = [f"process {pid} is left: {_read_name(pid)}" for pid in left]
        files = [
            path.name for path in find_files() if path.name.split("_")[1] in {str(pid) for pid in leaders | self._seen}
        ]
        return trouble + ([f"files are left in /dev/shm: {files}"] if files else [])

    def check_end(self) -> None:
        """Ends the ranks.

        Raises: _Trouble.
        """
        for pipe in self._pipes.values():
            pipe.close()
        deadline = time.monotonic() + LINGER_S
        while waiting := set(self._pids) - set(self._ended):
            for rank in waiting:
                done, status = os.waitpid(self._pids[rank], os.WNOHANG)
                if done:
                    self._ended[rank] = status
                    if status:
                        raise _Trouble(f"rank {rank} ended with {os.waitstatus_to_exitcode(status)}")
                elif time.monotonic() > deadline:
                    raise _Trouble(f"rank {rank} does not end")
            time.sleep(0.01)
        if trouble := self._find_left():
            raise _Trouble(*trouble)

    def kill(self) -> None:
        for pid in find_sessions(set(self._pids.values())):
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        for rank in set(self._pids) - set(self._ended):
            os.waitpid(self._pids[rank], 0)


def _describe_all(found: dict[int, Found]) -> list[str]:
    return [f"rank {rank}: {item.error or 'complete'}, {item.steps} steps, {item.text}" for rank, item in found.items()]


def _read_name(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")[:80]
    return ""


def find_files() -> Iterator[Path]:
    """Yields torch's shared-memory files, whose names contain the number of the process that made them."""
    return Path("/dev/shm").glob("torch_*_*")


# Many ------------------------------------------------------------------------------------------------------------------


def use_large_pages() -> None:
    """Restarts this program with its heap in large pages, so that forking it takes a third of the time."""
    if "GLIBC_TUNABLES" not in os.environ:
        os.environ |= {"PYTHONMALLOC": "malloc", "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
        os.execv(sys.executable, sys.orig_argv)


def warm_up() -> None:
    """Starts one fork server for all runs, which would each take seconds to load torch, and makes forks cheap."""
    os.environ[SERVER] = address = multiprocessing.connection.arbitrary_address("AF_UNIX")  # type: ignore[attr-defined]
    arbitrary, multiprocessing.connection.arbitrary_address = (  # type: ignore[attr-defined]
        multiprocessing.connection.arbitrary_address,  # type: ignore[attr-defined]
        lambda family: address,
    )
    multiprocessing.set_forkserver_preload([__spec__.name])
    multiprocessing.forkserver.ensure_running()
    multiprocessing.connection.arbitrary_address = arbitrary  # type: ignore[attr-defined]
    share_memory()


def share_memory() -> None:
    """Freezes all objects, because a garbage collection in a forked process would write to torch's memory, and so copy it."""
    gc.collect()
    gc.freeze()


def use_common_fork_server() -> None:
    """Uses the fork server of all runs. It is not a child of this process, so it is not checked or started."""
    if address := os.environ.get(SERVER):
        server = multiprocessing.forkserver._forkserver
        server._forkserver_address = address  # type: ignore[attr-defined]
        server.ensure_running = lambda: None  # type: ignore[method-assign]


def survive_clients() -> None:
    """Keeps the fork server, which all runs need, alive if a client is killed while it connects."""
    receive = multiprocessing.reduction.recvfds  # type: ignore[attr-defined]

    def receive_or_go_on(sock: Any, size: int) -> Any:
        try:
            return receive(sock, size)
        except EOFError:
            raise ConnectionAbortedError(
                errno.ECONNABORTED, "it is gone"
            ) from None  # an error that does not end the server

    multiprocessing.reduction.recvfds = receive_or_go_on  # type: ignore[attr-defined]


def run_all(worlds: Iterator[World], jobs: int) -> Iterator[Verdict]:
    running: dict[Connection[Any, Any], tuple[int, World]] = {}
    is_over = False
    while running or not is_over:
        while len(running) < jobs and not is_over:
            world = next(worlds, None)
            if world is None:
                is_over = True
                break
            ours, theirs = multiprocessing.Pipe(duplex=False)
            pid = _fork(lambda world=world, theirs=theirs: theirs.send_bytes(pickle.dumps(run(world))))
            theirs.close()
            running[ours] = pid, world
        for pipe in wait(list(running), 1.0):
            pid, world = running.pop(pipe)  # type: ignore[call-overload]
            yield _receive(pipe) or Verdict(world=world, trouble=("the run itself has failed",))  # type: ignore[arg-type]
            os.waitpid(pid, 0)
            pipe.close()  # type: ignore[union-attr]


def show(verdict: Verdict) -> None:
    number = len(verdict.cases)
    print(
        f"{'WRONG' if verdict.trouble else 'right'} in {verdict.seconds:.1f} s: seed {verdict.world.seed}, {number} faults"
    )
    for case in verdict.cases:
        print(f"    {case}")
    for line in verdict.trouble:
        print(f"        {line}")
    sys.stdout.flush()


def main() -> int:
    """Returns 0 if everything is right, else 1."""
    parser = argparse.ArgumentParser(prog="python -m tests.soak.faults", description=__doc__)
    parser.add_argument("--runs", type=int, default=20, help="how many worlds of up to 8 faults each (default: 20)")
    parser.add_argument("--seed", type=int, default=0, help="the seed of the first; each further one is one higher")
    parser.add_argument("--jobs", type=int, default=4, help="how many at a time (default: 4)")
    parser.add_argument("--loud", action="store_true", help="print each run, not only those that go wrong")
    options = parser.parse_args()
    use_large_pages()
    obstacle = find_obstacle()
    if obstacle:
        print(f"no links are cut: {obstacle}")
    warm_up()
    before = set(find_files())
    began = last = time.monotonic()
    faults: Counter[str] = Counter()
    wrong: list[int] = []
    runs = 0
    worlds = (expand(seed, has_lab=not obstacle) for seed in range(options.seed, options.seed + options.runs))
    for verdict in run_all(worlds, options.jobs):
        runs += 1
        faults += Counter(str(case.fault) for case in verdict.cases)
        if verdict.trouble:
            wrong.append(verdict.world.seed)
        if verdict.trouble or options.loud:
            show(verdict)
        if time.monotonic() - last > 60:
            last = time.monotonic()
            print(f"{runs} runs, {faults.total()} faults in {last - began:.0f} s, {len(wrong)} wrong", flush=True)
    seconds = time.monotonic() - began
    print(
        f"{runs} runs, {faults.total()} faults in {seconds:.0f} s ({faults.total() / seconds:.1f} a second): {dict(faults)}"
    )
    print(f"{len(wrong)} wrong{': seeds ' + ', '.join(map(str, sorted(wrong))) if wrong else ''}")
    left = [path.name for path in set(find_files()) - before if not Path(f"/proc/{path.name.split('_')[1]}").exists()]
    if left:
        print(f"left in /dev/shm: {left}")
    return 1 if wrong or left else 0


if __name__ == "__main__":
    sys.exit(main())
elif SERVER in os.environ and multiprocessing.parent_process() is None:  # this is the fork server
    use_common_fork_server()
    survive_clients()
    share_memory()
