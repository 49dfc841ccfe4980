"""Several hosts on this machine: namespaces for network, names and processes, joined by a switch in a namespace of its own.

The switch is connected only to the hosts, and none of them to the machine. All hosts have the same name, as containers may.
Each host is a process that starts its ranks. When it ends, so do they.

Needs root and ``ip``.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import multiprocessing
import os
import re
import shutil
import signal
import subprocess
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.helpers.capture import capture
from tests.torch.ranks import Result, report

CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWPID, CLONE_NEWNET = 0x00020000, 0x04000000, 0x20000000, 0x40000000
MS_REC, MS_PRIVATE = 0x4000, 0x40000
PREFIX = "odblab"
NAME = b"node"
FIRST_PORT = 29501


def run_ip(*arguments: str) -> None:
    capture(["ip", *arguments], check=True)


@functools.cache
def find_obstacle() -> str:
    """Returns why hosts cannot be made here, or an empty string."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        return "needs root and ip (iproute2)"
    try:
        with Lab(1) as lab:
            results = lab.run([0], _find_name)
    except (OSError, subprocess.SubprocessError, RuntimeError) as error:
        return f"no namespaces here: {error}"
    return "" if results[0].value == NAME.decode() else f"no namespaces here: {results[0]}"


def _find_name(_rank: int) -> str:
    return os.uname().nodename


@dataclass
class Lab:
    """A number of hosts, each with the address 10.77.0.(its number + 1)."""

    hosts: int
    switch: str = field(init=False)
    names: list[str] = field(init=False)
    port: int = field(default=FIRST_PORT, init=False)
    """Where the ranks of a run meet. Each run has its own port, because killed ranks may still hold the one before."""

    def __post_init__(self) -> None:
        self.switch = f"{PREFIX}{os.getpid()}sw"
        self.names = [f"{PREFIX}{os.getpid()}h{host}" for host in range(self.hosts)]

    def __enter__(self) -> Lab:
        remove_left()
        try:
            run_ip("netns", "add", self.switch)
            run_ip("-n", self.switch, "link", "add", "br0", "type", "bridge")
            run_ip("-n", self.switch, "link", "set", "br0", "up")
            for host, name in enumerate(self.names):
                run_ip("netns", "add", name)
                run_ip("-n", name, "link", "set", "lo", "up")
                run_ip("-n", self.switch, "link", "add", f"p{host}", "type", "veth", "peer", "eth0", "netns", name)
                run_ip("-n", self.switch, "link", "set", f"p{host}", "master", "br0", "up")
                run_ip("-n", name, "addr", "add", f"10.77.0.{host + 1}/24", "dev", "eth0")
                run_ip("-n", name, "link", "set", "eth0", "up")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for name in (*self.names, self.switch):
            with contextlib.suppress(subprocess.CalledProcessError):
                run_ip("netns", "del", name)

    def set_link(self, host: int, *, is_up: bool) -> None:
        """Plugs in or unplugs the cable of a host, at the switch."""
        run_ip(*self.make_link_command(host, is_up=is_up)[1:])

    def make_link_command(self, host: int, *, is_up: bool) -> list[str]:
        """Returns the command that does so, which works on any host."""
        return ["ip", "-n", self.switch, "link", "set", f"p{host}", "up" if is_up else "down"]

    def enter(self, host: int) -> None:
        """Moves this process, which has one thread, to a host. It remains among the processes of this machine."""
        libc = ctypes.CDLL(None, use_errno=True)
        self._use_network(libc, host)
        _check(libc.unshare(CLONE_NEWUTS))
        _check(libc.sethostname(NAME, len(NAME)))

    def _use_network(self, libc: Any, host: int) -> None:
        with Path(f"/run/netns/{self.names[host]}").open() as space:
            _check(libc.setns(space.fileno(), CLONE_NEWNET))

    def run(
        self,
        places: Sequence[int],
        function: Callable[..., Any],
        *args: Any,
        meanwhile: Callable[[Lab], None] = lambda lab: None,
        timeout_s: float = 60.0,
        without: Sequence[int] = (),
    ) -> list[Result]:
        """Returns each rank's result. Rank r runs on host ``places[r]``. Processes of the ranks in ``without`` do nothing else.

        Raises: AssertionError when a rank has not ended in time.
        """
        self.port += 1
        pipes = [multiprocessing.Pipe(duplex=False) for _ in places]
        hosts = {}
        for host in sorted(set(places)):
            ranks = {rank: pipes[rank][1] for rank, place in enumerate(places) if place == host}
            hosts[host] = _fork(lambda host=host, ranks=ranks: self._be_host(host, ranks, len(places), function, args))
        for _, theirs in pipes:
            theirs.close()
        deadline = time.monotonic() + timeout_s
        results: list[Result | None] = [None] * len(places)
        try:
            meanwhile(self)
            for rank, (ours, _) in enumerate(pipes):
                if rank not in without and ours.poll(max(0.0, deadline - time.monotonic())):
                    try:
                        results[rank] = ours.recv()
                    except EOFError:
                        results[rank] = Result(is_gone=True)
        finally:
            for pid in hosts.values():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)  # ends everything that runs on the host
                os.waitpid(pid, 0)
        hanging = [rank for rank, result in enumerate(results) if result is None and rank not in without]
        assert not hanging, f"ranks {hanging} hang; results: {results}"
        return [result or Result(is_gone=True) for result in results]

    def _be_host(
        self,
        host: int,
        ranks: dict[int, Connection[Any, Any]],
        world_size: int,
        function: Callable[..., Any],
        args: Any,
    ) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        self._use_network(libc, host)
        _check(libc.unshare(CLONE_NEWUTS | CLONE_NEWNS | CLONE_NEWPID))
        _check(libc.sethostname(NAME, len(NAME)))
        _check(libc.mount(None, b"/", None, MS_REC | MS_PRIVATE, None))
        libc.prctl(1, signal.SIGKILL)
        init = _fork(lambda: self._start_ranks(libc, ranks, world_size, function, args))
        for pipe in ranks.values():
            pipe.close()
        libc.prctl(1, signal.SIGKILL)
        os.waitpid(init, 0)

    def _start_ranks(
        self,
        libc: Any,
        ranks: dict[int, Connection[Any, Any]],
        world_size: int,
        function: Callable[..., Any],
        args: Any,
    ) -> None:
        libc.prctl(1, signal.SIGKILL)  # this is the first process of its namespace, and the others end with it
        _check(libc.mount(b"proc", b"/proc", b"proc", 0, None))
        for rank, pipe in ranks.items():
            _fork(lambda rank=rank, pipe=pipe: _be_rank(pipe, self.port, rank, world_size, function, args))
        for pipe in ranks.values():
            pipe.close()
        while True:
            try:
                os.waitpid(-1, 0)
            except ChildProcessError:
                return


def _be_rank(
    pipe: Connection[Any, Any], port: int, rank: int, world_size: int, function: Callable[..., Any], args: Any
) -> None:
    os.environ |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "eth0", "MASTER_ADDR": "10.77.0.1"}
    torch.set_num_threads(1)

    def join() -> None:
        if world_size > 1:
            dist.init_process_group("gloo", init_method=f"tcp://10.77.0.1:{port}", rank=rank, world_size=world_size)
            dist.barrier()  # a rank that ends before all are connected would break that

    report(pipe, join, function, rank, args)


def _fork(function: Callable[[], object]) -> int:
    pid = os.fork()
    if pid:
        return pid
    try:
        function()
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def _check(answer: int) -> None:
    if answer:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def find_left() -> Iterator[str]:
    """Yields namespaces of labs whose process is gone."""
    for path in Path("/run/netns").glob(f"{PREFIX}*"):
        found = re.match(rf"{PREFIX}(\d+)", path.name)
        if found and not Path(f"/proc/{found[1]}").exists():
            yield path.name


def remove_left() -> None:
    """Removes what a killed lab has left."""
    for name in list(find_left()):
        with contextlib.suppress(subprocess.CalledProcessError):
            run_ip("netns", "del", name)
