"""How the ranks of a loader find each other: through the store that torch.distributed was started with, once.

Only the ranks of the loader's own group take part. Each says in the store where it listens, and connects to its parent in the
tree; when all have met, the store is not needed any more.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import logging
import os
import secrets
import socket
import struct
import time
from collections import Counter
from dataclasses import asdict
from typing import Final

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from odb_ref.core.errors import JobError, OdbError, UsageError
from odb_ref.core.events import PeerLost, Report
from odb_ref.torch.exchange.collectives import (
    TRANSPORTS,
    LocalTransport,
    ReduceTransport,
    Transport,
    compute_neighbours,
    get_rank_and_size,
)
from odb_ref.torch.exchange.door import TOKEN_BYTES, Door, knock
from odb_ref.torch.exchange.links import Check, EndedError, Link, Links
from odb_ref.torch.exchange.process_table import Peer, compute_host, look_at

logger: Final = logging.getLogger("odb_ref")

POLL_S: Final = 0.5
CONNECT_S: Final = 2.0
"""How long one attempt to connect to one address may take."""

_INTERFACE: Final = struct.Struct("256s")
_SIOCGIFADDR: Final = 0x8915

_made: Counter[tuple[int, ...]] = Counter()
"""How many exchanges these ranks have had: it names the next one, the same on each of them."""


class _GaveUpError(Exception):
    """Another rank has given up waiting."""


def make_transport(
    process_group: dist.ProcessGroup | None, name: str, timeout_s: float, log_wait_s: float = 30.0
) -> Transport:
    """Returns a transport over the ranks of ``process_group`` (None: all), each of which must ask for one; nobody else has
    to.

    Raises: JobError when a rank does not come within ``timeout_s``, or asks for another transport.
    """
    if name not in TRANSPORTS:
        raise UsageError(f"no transport {name!r}; there are {', '.join(sorted(TRANSPORTS))}")
    rank, world_size = get_rank_and_size(process_group)
    if world_size == 1:
        return LocalTransport()
    group = dist.group.WORLD
    if group is None:
        raise UsageError("torch.distributed is not initialized")
    members = tuple(dist.get_process_group_ranks(group if process_group is None else process_group))
    _made[members] += 1
    digest = hashlib.sha256(repr(members).encode()).hexdigest()[:12]
    store = PrefixStore(f"odb_ref/{digest}/{_made[members]}", group.get_group_store())
    try:
        with contextlib.closing(_Meeting(store, rank, world_size, timeout_s, log_wait_s)) as meeting:
            return _meet(meeting, name, world_size)
    except OdbError:
        raise
    except RuntimeError as error:
        cause = "the store that torch.distributed was started with cannot be reached: the others may have given up, and ended"
        raise JobError(f"the exchange could not be set up: {cause}", rank=None, cause=cause) from error


def _meet(meeting: _Meeting, name: str, world_size: int) -> ReduceTransport:
    transport: ReduceTransport | None = None
    try:
        transport = TRANSPORTS[name](meeting.connect(), world_size)
        _check_name(transport, meeting.check_time)
        meeting.forget()
        return transport
    except BaseException as error:
        end = meeting.give_up() if isinstance(error, _GaveUpError | TimeoutError) else meeting.find_end()
        if transport is not None:
            if end is not None:
                transport.end(end)
            transport.close()
        if end is None and isinstance(error, EndedError):
            end = error.end
        if end is None:
            raise
        raise JobError(f"the exchange could not be set up: {end.cause}", rank=end.rank, cause=end.cause) from error


def _check_name(transport: ReduceTransport, check: Check) -> None:
    """Waits until all ranks are connected, and have asked for the same transport."""
    number = sorted(TRANSPORTS).index(transport.name)
    low, high = transport.meet((-number, number), check)
    if -low == high:
        return
    reports = transport.gather(Report(transport.rank, "", 0, transport.name))
    other = next(report for report in reports if report.config != reports[0].config)
    cause = f"transport is {other.config!r}, rank 0 has {reports[0].config!r}"
    raise JobError(f"rank {other.rank} is configured differently: {cause}", rank=other.rank, cause=cause)


class _Meeting:
    """One rank's way into the exchange."""

    def __init__(self, store: Store, rank: int, world_size: int, timeout_s: float, log_wait_s: float) -> None:
        self._store = store
        self._rank = rank
        self._world_size = world_size
        self._timeout_s = timeout_s
        self._log_wait_s = log_wait_s
        self._began = time.monotonic()
        self._next_log = self._began + log_wait_s
        self._deadline = self._began + timeout_s
        self._parent, children = compute_neighbours(rank, world_size)
        me = look_at(os.getpid())
        token = secrets.token_bytes(TOKEN_BYTES)
        self._door = Door(token, children)
        self._peer = Peer(
            addresses=tuple(find_addresses()),
            port=self._door.port,
            token=token.hex(),
            host="" if me is None else compute_host(),
            pid=os.getpid(),
            started=0 if me is None else me.started,
        )
        self._links: dict[int, Link] = {}

    def connect(self) -> Links:
        """Returns the links to parent and children.

        Raises: TimeoutError, _GaveUpError.
        """
        self._store.set(str(self._rank), json.dumps(asdict(self._peer)))
        try:
            if self._parent is not None:
                self._links[self._parent] = self._connect_to(self._parent)
            while self._door.awaited:
                self.check_time()
                self._welcome(POLL_S)
        except BaseException as error:
            if isinstance(error, _GaveUpError | TimeoutError):
                self.give_up()  # before anyone can take a closed connection for a process that is gone
            for link in self._links.values():
                link.connection.close()
            raise
        return Links(self._rank, self._links, self._timeout_s)

    def _connect_to(self, rank: int) -> Link:
        pause_s = 0.01
        while (peer := self._look_up(rank)) is None:
            pause_s = self._pause(pause_s)
        is_here = self._is_here(peer)
        addresses = ("127.0.0.1",) if is_here else peer.addresses
        while True:
            for address in addresses:
                with contextlib.suppress(OSError):
                    connection = knock(address, peer.port, bytes.fromhex(peer.token), self._rank, CONNECT_S)
                    return Link(rank, connection, peer if is_here else None)
            pause_s = self._pause(pause_s)

    def _pause(self, pause_s: float) -> float:
        """Lets in whoever comes in the meantime: the children need not wait for the parent. Returns how long to pause next."""
        self.check_time()
        until = time.monotonic() + pause_s
        while (left_s := until - time.monotonic()) > 0:
            self._welcome(left_s)
        return min(POLL_S, 2 * pause_s)

    def _welcome(self, wait_s: float) -> None:
        for rank, connection in self._door.welcome(wait_s):
            peer = self._look_up(rank)
            self._links[rank] = Link(rank, connection, peer if peer is not None and self._is_here(peer) else None)

    def _look_up(self, rank: int) -> Peer | None:
        """Returns where a rank is; None when it has not said so yet."""
        if not self._store.check([str(rank)]):
            return None
        found = json.loads(self._store.get(str(rank)))
        return Peer(**(found | {"addresses": tuple(found["addresses"])}))

    def _is_here(self, peer: Peer) -> bool:
        """Returns True when the process is one that this one can see."""
        if not peer.host or peer.host != self._peer.host:
            return False
        look = look_at(peer.pid)  # copies of one virtual machine take themselves for one host
        return look is not None and look.started == peer.started

    def check_time(self) -> None:
        """Logs now and then which rank is waited for.

        Raises: TimeoutError when that was long enough, _GaveUpError when another rank says so.
        """
        if self._store.check(["end"]):
            raise _GaveUpError
        now = time.monotonic()
        if now >= self._deadline:
            raise TimeoutError
        if now >= self._next_log:
            self._next_log = now + self._log_wait_s
            missing = self._find_missing()
            waits_for = f"rank {missing[0]}, which has not started its loader" if missing else "the ranks to connect"
            logger.warning("rank %s waits for %s (for %.0f s)", self._rank, waits_for, now - self._began)

    def _find_missing(self) -> list[int]:
        return [rank for rank in range(self._world_size) if not self._store.check([str(rank)])]

    def give_up(self) -> PeerLost:
        """Returns why the ranks have not met, and the first that did not come: what the first rank that gave up said."""
        end = self.find_end()
        if end is not None:
            return end
        missing = self._find_missing()
        cause = f"the ranks could not connect to each other within {self._timeout_s:g} s"
        if missing:
            more = f", nor have {len(missing) - 1} others" if missing[1:] else ""
            cause = (
                f"not every rank has started its loader within {self._timeout_s:g} s: rank {missing[0]} has not{more}"
            )
        self._store.compare_set("end", "", json.dumps([missing[0] if missing else None, cause]))
        return self.find_end() or PeerLost(None, cause)

    def find_end(self) -> PeerLost | None:
        """Returns what the first rank that gave up has said; None when none has."""
        if not self._store.check(["end"]):
            return None
        rank, cause = json.loads(self._store.get("end"))
        return PeerLost(rank, cause)

    def forget(self) -> None:
        """Removes this rank's entry once all have met: a key that goes between a look and a read would be waited for."""
        with contextlib.suppress(RuntimeError):
            self._store.delete_key(str(self._rank))

    def close(self) -> None:
        """Lets nobody in any more."""
        self._door.close()


def find_addresses() -> list[str]:
    """Returns this host's own, those first that other hosts can most likely reach."""
    found = []
    for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(","):
        if name:
            found.append(_find_address_of(name))
    for target in (os.environ.get("MASTER_ADDR"), "192.0.2.1"):
        if target:
            found.append(_find_source_of(target))
    with contextlib.suppress(OSError):
        found += [str(item[4][0]) for item in socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)]
    unique = list(dict.fromkeys(address for address in found if address))
    return [*(item for item in unique if not item.startswith("127.")), "127.0.0.1"]


def _find_address_of(interface: str) -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, contextlib.suppress(OSError):
        answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, _INTERFACE.pack(interface.encode()[:15]))
        return socket.inet_ntoa(answer[20:24])
    return ""


def _find_source_of(target: str) -> str:
    """Returns the address from which this host would send to another. Nothing is sent."""
    with contextlib.suppress(OSError):
        family, kind, _, _, address = socket.getaddrinfo(target, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    return ""
