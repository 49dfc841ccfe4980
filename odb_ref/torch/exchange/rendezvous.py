"""How the processes of an exchange find each other, once, through the store that torch.distributed was started with.

No other process takes part. Each process writes to the store where it listens and which loader it begins. It connects to its
parent in the tree, if the parent begins the same loader. Once all have met, the store is no longer needed.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import secrets
import socket
import time
from bisect import bisect_left
from dataclasses import asdict, dataclass
from typing import Final

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from odb_ref.core.errors import JobError, UsageError
from odb_ref.core.events import PeerLost, Report
from odb_ref.torch.exchange.blocked import NOTICE_S, Wait, blocked, has_others
from odb_ref.torch.exchange.bounded_store import BoundedStore, StoreError
from odb_ref.torch.exchange.collectives import TRANSPORTS, Transport, compute_tree
from odb_ref.torch.exchange.identity import LoaderIdentity, describe_crossed, get_generation
from odb_ref.torch.exchange.interface import choose_address, list_ports
from odb_ref.torch.exchange.link import End, EndedError, Endpoint, Link
from odb_ref.torch.exchange.links import Check, Links
from odb_ref.torch.exchange.listener import SECRET_BYTES, Listener, connect
from odb_ref.torch.exchange.process_table import compute_host, read_status
from odb_ref.torch.exchange.roster import Roster

logger: Final = logging.getLogger("odb_ref")

POLL_S: Final = 0.5
CONNECT_S: Final = 2.0
"""How long one attempt to connect may take."""


class _GaveUpError(Exception):
    """Another rank has given up waiting."""


def make_transport(roster: Roster, identity: LoaderIdentity, name: str, timeout_s: float) -> Transport:
    """Returns a transport over the processes of ``roster``. Each of them must call this function; others need not.

    Spec: R18.1.
    Raises: JobError when a process does not come within ``timeout_s``, begins another loader, or asks for another transport.
    """
    if len(roster.processes) == 1:
        return TRANSPORTS[name](Links(0, {}, timeout_s), roster)
    if os.name != "posix":
        raise UsageError(
            "a loader with several ranks needs Linux or macOS. On this system, only a job of one process works"
        )
    group = dist.group.WORLD
    if group is None:
        raise UsageError("torch.distributed is not initialized")
    met = get_generation().met
    met[roster.processes] += 1
    digest = hashlib.sha256(repr(roster.processes).encode()).hexdigest()[:12]
    store = _get_store(group)
    place = f"{digest}/{met[roster.processes]}"
    with contextlib.closing(_Meeting(store, place, roster, identity, timeout_s=timeout_s)) as meeting:
        return _meet(meeting, name, roster)


def _get_store(group: dist.ProcessGroup) -> Store:
    if hasattr(group, "get_group_store"):
        return group.get_group_store()
    store: Store = dist.distributed_c10d._get_process_group_store(group)  # no public name before torch 2.9
    return store


def _meet(meeting: _Meeting, name: str, roster: Roster) -> Transport:
    transport: Transport | None = None
    try:
        transport = TRANSPORTS[name](meeting.connect(), roster)
        _check_name(transport, meeting.check_time)
        meeting.forget()
        return transport
    except BaseException as error:
        end: PeerLost | None
        try:
            end = meeting.give_up() if isinstance(error, _GaveUpError | TimeoutError) else meeting.find_end()
        except StoreError:
            end = None
        if end is None and isinstance(error, _GaveUpError | TimeoutError | StoreError):
            end = meeting.describe_store_loss()
        if transport is not None:
            if end is not None:
                transport.links.end(End(end))
            transport.links.close()
        if end is None and isinstance(error, EndedError):
            end = error.end.loss
        if end is None or not isinstance(error, Exception):
            raise
        raise JobError(f"the exchange could not be set up: {end.cause}", rank=end.rank, cause=end.cause) from error


def _check_name(transport: Transport, check: Check) -> None:
    """Waits until all processes are connected, checks that they use the same transport, and agrees on its run number."""
    number = sorted(TRANSPORTS).index(transport.name)
    low, high, transport.run = transport.reduce_max((-number, number, transport.run), check)
    if -low == high:
        return
    reports = [report for report, _ in transport.gather(Report(transport.roster.rank, "", 0, transport.name))]
    other = next(report for report in reports if report.config != reports[0].config)
    roster = transport.roster
    cause = f"transport is {other.config!r}, {roster.name(0)} has {reports[0].config!r}"
    raise JobError(f"{roster.name(other.rank)} is configured differently: {cause}", rank=other.rank, cause=cause)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Arrival:
    """What a process writes to the store: where it listens, and which loader it begins."""

    endpoint: Endpoint
    loader: LoaderIdentity

    def encode(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def decode(cls, text: bytes) -> _Arrival:
        said = json.loads(text)
        return cls(endpoint=Endpoint(**said["endpoint"]), loader=LoaderIdentity(**said["loader"]))


_MEET_AGAIN: Final = "; after ranks were in different loaders, make a new process group"
"""Until then ranks count their meetings differently, and wait for each other in different ones."""


class _Meeting:
    """The steps by which one process, identified by its index in the roster, joins the exchange."""

    def __init__(self, store: Store, place: str, roster: Roster, identity: LoaderIdentity, *, timeout_s: float) -> None:
        self._store = BoundedStore(PrefixStore("odb_ref", store), timeout_s)
        self._place = place
        """The prefix of the keys of this meeting."""
        self._roster = roster
        self._index = roster.index
        self._timeout_s = timeout_s
        self._began = time.monotonic()
        self._next_log = self._began + timeout_s / 2
        tree = compute_tree(roster)
        self._parent = tree.parent
        me = read_status(os.getpid())
        started = 0 if me is None else me.started
        secret = secrets.token_bytes(SECRET_BYTES)
        address = choose_address(store)
        self._listener = Listener(address, list_ports(), secret, tree.children)
        endpoint = Endpoint(
            address=address,
            port=self._listener.port,
            secret=secret.hex(),
            host=compute_host() if started else "",
            pid=os.getpid(),
            started=started,
        )
        self._own = _Arrival(endpoint=endpoint, loader=identity)
        self._links: dict[int, Link] = {}
        self._is_connected = False
        self._obstacle = ""
        """Why the last attempt to connect to the parent failed, if it did."""
        self._awaited = -1
        """The rank of the job that this process waits for, or -1. Kept for heartbeats, which must not wait for the store."""
        self.missed: PeerLost | None = None
        """Why other ranks that waited for this one have given up, perhaps in an earlier generation."""

    def connect(self) -> Links:
        """Connects to the parent and the children, and returns the links. Raises: TimeoutError, _GaveUpError."""
        if (said := self._read_end()) is not None:
            end, _ = said
            self.missed = end if end.rank == self._roster.rank else None
        self._store.set(self._key(self._index), self._own.encode())
        self._store.set(self._begun_key(self._index), f"it waits in {self._own.loader}")
        with blocked(Wait(self._own.loader, lambda: self._awaited, self._end_crossed)):
            if self._parent is not None:
                self._connect_to(self._parent)
            while self._listener.awaited:
                self.check_time()
                self._accept(POLL_S)
        self._is_connected = True
        return Links(self._index, self._links, self._timeout_s, self._roster.name_process)

    def _key(self, index: int) -> str:
        """Returns the key of a process's entry."""
        return f"{self._place}/{index}"

    def _begun_key(self, index: int) -> str:
        """Returns the key of a text that says what a process waits in, for ranks that wait for it in any loader."""
        return f"begun/{self._roster.processes[index]}"

    def _connect_to(self, index: int) -> None:
        """Connects to the address that the process wrote last. It may be stale, from an earlier generation, so this retries."""
        pause_s = 0.01
        while True:
            if (entry := self._read(index)) is not None:
                at = entry.endpoint
                try:
                    connection = connect(at.address, at.port, bytes.fromhex(at.secret), self._index, CONNECT_S)
                except OSError as error:
                    whom = self._roster.name_process(index)
                    self._obstacle = f"{whom} could not be reached at {at}: {error}"
                else:
                    self._obstacle = ""
                    self._link(index, connection)
                    return
            self.check_time()
            pause_s = self._pause(pause_s)

    def _pause(self, pause_s: float) -> float:
        """Accepts children while it pauses, so that they need not wait for the parent. Returns the length of the next pause."""
        until = time.monotonic() + pause_s
        while (left_s := until - time.monotonic()) > 0:
            self._accept(left_s)
        return min(POLL_S, 2 * pause_s)

    def _accept(self, wait_s: float) -> None:
        for index, connection in self._listener.accept(wait_s):
            self._link(index, connection)

    def _link(self, index: int, connection: socket.socket) -> None:
        """Registers a connection. The other process's entry in the store is current, because one has just let the other in.

        Raises: _GaveUpError when the other process begins another loader, or has given up in the meantime.
        """
        if (entry := self._read(index)) is None:
            raise _GaveUpError
        self._links[index] = Link(index, connection, entry.endpoint if self._is_here(entry.endpoint) else None)
        if not self._own.loader.is_of(entry.loader):
            own, other = map(self._roster.name_process, (self._index, index))
            cause = describe_crossed(own, self._own.loader, other, entry.loader)
            self._say_end(index, cause + self._own.loader.describe_difference(entry.loader))
            raise _GaveUpError

    def _read(self, index: int) -> _Arrival | None:
        """Returns a process's entry, or None if it has written none or given up."""
        said = self._store.get(self._key(index)) if self._store.check(self._key(index)) else b""
        return _Arrival.decode(said) if said else None

    def _is_here(self, endpoint: Endpoint) -> bool:
        """Returns True if this process can see the other one, because both are on one host."""
        if not endpoint.host or endpoint.host != self._own.endpoint.host:
            return False
        status = read_status(endpoint.pid)  # cloned virtual machines look like the same host
        return status is not None and status.started == endpoint.started

    def check_time(self) -> None:
        """Logs now and then which rank is missing.

        Raises: TimeoutError at the deadline, _GaveUpError when another rank has given up.
        """
        if self.find_end() is not None:
            raise _GaveUpError
        now = time.monotonic()
        if now >= self._began + NOTICE_S / 2 and has_others(self._own.loader):
            self._awaited = self._compute_awaited()
        if now >= self._began + self._timeout_s:
            raise TimeoutError
        if now >= self._next_log:
            self._next_log = now + self._timeout_s / 2
            missing = self._find_missing()
            name = self._roster.name_process
            waits_for = f"{name(missing[0])}, which has not started its loader" if missing else "the ranks to connect"
            if not missing and (obstacle := self._describe_obstacle()):
                waits_for += f": {obstacle}"
            logger.warning("%s waits for %s (for %.0f s)", name(self._index), waits_for, now - self._began)

    def _find_missing(self) -> list[int]:
        return [index for index in range(len(self._roster.processes)) if self._read(index) is None]

    def _compute_awaited(self) -> int:
        """Returns the first rank of the job that has not arrived, or -1 if all have."""
        keys = [self._key(index) for index in range(len(self._roster.processes))]
        if self._store.check(*keys):
            return -1
        first = bisect_left(range(len(keys)), True, key=lambda index: not self._store.check(*keys[: index + 1]))
        return self._roster.processes[first]

    def _end_crossed(self, rank: int, cause: str) -> None:
        self._say_end(self._roster.processes.index(rank) if rank in self._roster.processes else None, cause)

    def _say_end(self, index: int | None, cause: str) -> None:
        """Writes to the store, for all that have arrived, why the ranks do not meet, unless another rank has done so."""
        rank = None if index is None else index // self._roster.peers
        entries = map(self._read, range(len(self._roster.processes)))
        come = [entry.endpoint.secret for entry in entries if entry is not None]
        key = f"{self._place}/end"
        before = self._store.get(key).decode() if self._store.check(key) else ""
        if self.find_end() is None:  # an entry that exists may be for others, for example from an earlier generation
            self._store.compare_set(key, before, json.dumps([rank, cause, come]))

    def give_up(self) -> PeerLost:
        """Returns why the ranks have not met, and the first one missing, as the first rank to give up reported it."""
        end = self.find_end()
        if end is not None:
            return end
        missing = self._find_missing()
        own = str(self._own.loader)
        if missing and self.missed is not None:
            is_other = own not in self.missed.cause
            return PeerLost(self.missed.rank, self.missed.cause + _MEET_AGAIN) if is_other else self.missed
        cause = f"the ranks could not connect to each other within {self._timeout_s:g} s"
        if obstacle := self._describe_obstacle():
            cause += f": {obstacle} (GLOO_SOCKET_IFNAME chooses the interface, ODB_REF_PORTS the ports)"
        if missing:
            more = f", nor have {len(missing) - 1} others" if missing[1:] else ""
            key = self._begun_key(missing[0])
            begun = self._store.get(key).decode() if self._store.check(key) else ""
            begun += _MEET_AGAIN if begun.endswith(own) else ""
            where = f" ({begun})" if begun else ""
            cause = (
                f"not every rank has started {own} within {self._timeout_s:g} s: "
                f"{self._roster.name_process(missing[0])} has not{where}{more}"
            )
        self._say_end(missing[0] if missing else None, cause)
        return self.find_end() or PeerLost(None, cause)

    def _describe_obstacle(self) -> str:
        """Returns which connection of this process is missing, once all ranks have started. Empty if none is."""
        if self._obstacle or not self._listener.awaited:
            return self._obstacle
        child, own = map(self._roster.name_process, (min(self._listener.awaited), self._index))
        return f"{child} has not connected to {own} at {self._own.endpoint}"

    def describe_store_loss(self) -> PeerLost:
        """Returns why this process has not met the others, if it cannot ask the store."""
        reason = "its host may be cut off, or the other ranks may have given up and ended"
        cause = f"the store of torch.distributed cannot be reached: {reason}"
        before = f". Before that, {self._obstacle}" if self._obstacle else ""
        return self.missed or PeerLost(None, cause + before)

    def find_end(self) -> PeerLost | None:
        """Returns the reason that a rank that gave up wrote for this one, or None."""
        if (said := self._read_end()) is None:
            return None
        end, come = said
        return end if self._own.endpoint.secret in come else None

    def _read_end(self) -> tuple[PeerLost, list[str]] | None:
        """Returns why ranks did not meet, as stored, and the secrets of the processes it is addressed to; or None."""
        key = f"{self._place}/end"
        if not self._store.check(key):
            return None
        rank, cause, come = json.loads(self._store.get(key))
        return PeerLost(rank, cause), come

    def forget(self) -> None:
        """Removes this process's entries. Only after all have met: a read of a key that was just deleted would block."""
        with contextlib.suppress(StoreError):
            self._store.delete(self._key(self._index))
            self._store.delete(self._begun_key(self._index))

    def close(self) -> None:
        """Stops accepting connections, and closes those made so far unless all have connected. Only after `give_up`, so that
        nobody mistakes this for the end of the process.
        """
        self._listener.close()
        if self._is_connected:
            return
        with contextlib.suppress(StoreError):
            self._store.set(self._key(self._index), "")
            self._store.set(self._begun_key(self._index), f"it has given up {self._own.loader}")
        for link in self._links.values():
            link.connection.close()
