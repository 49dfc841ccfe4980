"""Connections to a few other ranks, over which integers and reports travel, and what tells that a rank is gone.

Every rank has a link to its parent and to its children in a tree. A link that ends means that the process at its other end is
gone; one over which nothing comes for long, that it is stopped or cut off. Whoever finds that out tells all its other links,
which tell theirs: so every rank, on whichever host, names the same one, and nobody needs to see its process. Links are
plain sockets of ours: a wait on one can always be ended, which nothing does for a collective of torch that is under way.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import selectors
import socket
import struct
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Final

from odb_ref.core.errors import PeerError
from odb_ref.core.events import PeerLost
from odb_ref.torch.exchange.process_table import Look, Peer, look_at

PING_S: Final = 0.5
"""How often a rank says over each link that it is there."""
QUIET_S: Final = 2.0
"""A link over which nothing has come for so long is said to be silent."""
TELL_S: Final = 1.0
"""How long a message under way over a link may keep it from being told of an end."""
CLOSE_S: Final = 0.3
"""How long closing a link waits for its other end to read what was sent."""

GONE: Final = "its process is gone"

_HEADER: Final = struct.Struct("!BI")
_LARGEST: Final = 1 << 30
"""No message has so many bytes: what says that it has is none."""


class Kind(IntEnum):
    """What a message is."""

    PING = 0
    END = 1
    MAX = 2
    SUM = 3
    GATHER = 4


Word = tuple[int, str, int]
"""Which rank is waited for, what it is doing, and how new that is: of two words on one rank the higher number is the newer."""


Check = Callable[[], None]


class EndedError(Exception):
    """The links have ended."""

    def __init__(self, end: PeerLost) -> None:
        super().__init__(end.cause)
        self.end = end


@dataclass(slots=True, eq=False)
class Link:
    """The connection to one rank."""

    rank: int
    connection: socket.socket
    peer: Peer | None
    """None when the process is on another host."""
    buffer: bytearray = field(default_factory=bytearray)
    inbox: deque[tuple[Kind, bytes]] = field(default_factory=deque)
    word: Word | None = None
    """What it has said it waits for."""
    is_heard: bool = True
    silent_s: float = 0.0
    look: Look | None = None
    is_gone: bool = False
    """True when the operating system said so at the last look."""
    sending: threading.Lock = field(default_factory=threading.Lock)

    def find_process_end(self) -> bool:
        """Returns True when the operating system says that the process is gone; looks how it does."""
        peer = self.peer
        if peer is None:
            return False
        before = self.look
        try:
            self.look = look_at(peer.pid)
        except OSError:  # that it cannot be seen says nothing about it
            return False
        if self.look is None or self.look.is_ended or self.look.started != peer.started:
            return True
        if self.look.is_busy_since(before):
            self.silent_s = 0.0  # it does something, though its interpreter lets nobody else say so
        return False

    def describe_silence(self) -> str:
        """Returns what its silence may mean."""
        if self.look is not None and self.look.is_stopped:
            return "its process is stopped (SIGSTOP, or a debugger)"
        if self.peer is not None:
            return "its process does nothing: something holds its interpreter lock"
        return "its process is stopped, something holds its interpreter lock, or its host cannot be reached"


class Links:
    """The links of one rank. ``timeout_s`` is how long nothing may come over one."""

    def __init__(self, rank: int, links: Mapping[int, Link], timeout_s: float) -> None:
        self.rank = rank
        self._links = dict(links)
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._reading = threading.Lock()
        """Held by the thread that reads: one that waits for a message, or now and then the one that says that we are there."""
        self._end: PeerLost | None = None
        self._awaited: int | None = None
        self._wanted: int | None = None
        self._news: Word | None = None
        self._beats = 0
        self._describe: Callable[[], str] = str
        self._told = threading.Event()
        """Set when all have been told of the end."""
        self._is_closed = False
        self._closing = threading.Event()
        self._wake_in, self._wake_out = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._wake_in, selectors.EVENT_READ)
        for link in self._links.values():
            link.connection.settimeout(timeout_s)
            self._selector.register(link.connection, selectors.EVENT_READ, link)
        self.messages = 0
        """Messages sent, but for those that say that we are there."""
        self.bytes = 0
        """Their size."""
        _open.add(self)
        self._thread = threading.Thread(target=self._keep_alive, name="odb-links", daemon=True)
        self._thread.start()

    # Messages --------------------------------------------------------------------------------------------------------

    def send(self, rank: int, kind: Kind, payload: bytes) -> None:
        """Sends a message. What cannot be sent is found out when something is to be received."""
        self.messages += 1
        self.bytes += _HEADER.size + len(payload)
        link = self._links[rank]
        try:
            with link.sending:
                link.connection.sendall(_HEADER.pack(kind, len(payload)) + payload)
        except TimeoutError:
            # A part may be sent: whatever came next would be misread.
            self._find_out(
                PeerLost(rank, f"it has not read what was sent to it for {self._timeout_s:g} s (timeout_s)"), rank
            )
        except OSError:
            pass

    def _tell(self, link: Link, kind: Kind, payload: bytes, wait_s: float) -> bool:
        """Sends a short message. Returns False when the other end reads nothing: the others are to hear of us still."""
        if not link.sending.acquire(timeout=wait_s):
            return False
        try:
            poller = select.poll()
            poller.register(link.connection, select.POLLOUT)
            if not poller.poll(1000 * wait_s):
                return False
            link.connection.sendall(_HEADER.pack(kind, len(payload)) + payload)
        except (OSError, ValueError):  # it has ended, or we have closed it: who reads finds out
            pass
        finally:
            link.sending.release()
        return True

    def receive(self, rank: int, kind: Kind, check: Check = lambda: None) -> bytes:
        """Returns the next message of a rank; does ``check`` now and then meanwhile.

        Raises: EndedError when none will come, PeerError when it is of another kind, and what ``check`` raises.
        """
        link = self._links[rank]
        with self._reading:
            self._awaited = rank
            while not link.inbox:
                if self._end is not None:
                    raise EndedError(self._end)
                check()
                self._pump(PING_S)
            self._awaited = link.word = None
            got, payload = link.inbox.popleft()
        if got is not kind:
            raise PeerError(f"rank {rank} takes part in another collective: {got.name}, expected {kind.name}")
        return payload

    def _pump(self, timeout_s: float) -> None:
        """Reads what there is; for the thread that holds ``_reading``."""
        for key, _ in self._selector.select(timeout_s):
            if isinstance(key.data, Link):
                self._read(key.data)
            else:
                self._wake_in.recv(64)

    def _read(self, link: Link) -> None:
        try:
            data = link.connection.recv(1 << 16, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._selector.unregister(link.connection)
            self._find_out(PeerLost(link.rank, GONE), but=link.rank)
            return
        link.is_heard = True
        link.buffer += data
        try:
            self._take(link)
        except ValueError:
            self._selector.unregister(link.connection)
            self._find_out(PeerLost(link.rank, "what it has sent cannot be read"), but=None)

    def _take(self, link: Link) -> None:
        """Handles what has arrived in full.

        Raises: ValueError when it is none of our messages.
        """
        while len(link.buffer) >= _HEADER.size:
            number, size = _HEADER.unpack_from(link.buffer)
            kind = Kind(number)
            if size > _LARGEST:
                raise ValueError(f"a message of {size} bytes")
            if len(link.buffer) < _HEADER.size + size:
                return
            payload = bytes(link.buffer[_HEADER.size : _HEADER.size + size])
            del link.buffer[: _HEADER.size + size]
            self._handle(link, kind, payload)

    def _handle(self, link: Link, kind: Kind, payload: bytes) -> None:
        match kind:
            case Kind.PING:
                link.word = word = _decode_word(payload)
                if word is not None and word[0] == self._wanted and (self._news is None or word[2] > self._news[2]):
                    self._news = word
            case Kind.END:
                word = _decode_word(payload)
                if word is not None:
                    self._find_out(PeerLost(None if word[0] < 0 else word[0], word[1]), but=link.rank)
            case _:
                link.inbox.append((kind, payload))

    # Ends ------------------------------------------------------------------------------------------------------------

    def end(self, end: PeerLost) -> None:
        """Tells every rank that the exchange is over, and why."""
        self._find_out(end, but=None)
        with contextlib.suppress(OSError):
            self._wake_out.send(b"!")

    def _find_out(self, end: PeerLost, but: int | None) -> None:
        with self._lock:
            if self._end is not None:
                return
            self._end = end
        try:
            self._tell_all(end, [link for rank, link in self._links.items() if rank != but])
        finally:
            self._told.set()

    def _tell_all(self, end: PeerLost, links: Iterable[Link]) -> None:
        payload = _encode_word((-1 if end.rank is None else end.rank, end.cause, 0))
        # Whoever reads is not to wait for one that does not.
        busy = [link for link in links if not self._tell(link, Kind.END, payload, 0.0)]
        deadline = time.monotonic() + TELL_S
        for link in busy:
            if not self._tell(link, Kind.END, payload, max(0.0, deadline - time.monotonic())):
                with contextlib.suppress(OSError):  # ends a message under way, and with it whoever waits for that
                    link.connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Closes all; waits a moment for what was sent to be read."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            if self._end is None:
                self._end = PeerLost(self.rank, "its links are closed")
                self._told.set()
        # A link that ends before its word has come would say that this process is gone.
        self._told.wait(self._timeout_s)
        self._closing.set()
        with contextlib.suppress(OSError):
            self._wake_out.send(b"!")
        with self._reading:
            deadline = time.monotonic() + CLOSE_S
            for link in self._links.values():
                with contextlib.suppress(OSError):
                    link.connection.shutdown(socket.SHUT_WR)
            for link in self._links.values():
                with contextlib.suppress(OSError):
                    link.connection.settimeout(max(0.001, deadline - time.monotonic()))
                    while time.monotonic() < deadline and link.connection.recv(1 << 16):
                        pass
            for link in self._links.values():
                with link.sending:  # or it might go on in another connection that gets the number
                    link.connection.close()
            self._drop()

    def _drop(self) -> None:
        self._selector.close()
        for connection in (self._wake_in, self._wake_out, *(link.connection for link in self._links.values())):
            connection.close()

    def drop_in_child(self) -> None:
        """Closes a forked child's copies, which would hide that this process is gone."""
        self._drop()

    # Being there -----------------------------------------------------------------------------------------------------

    def set_describe(self, describe: Callable[[], str]) -> None:
        """``describe`` says what this rank is doing, for others that wait for it."""
        self._describe = describe

    def want(self, rank: int | None) -> None:
        """Asks what a rank is doing, as all others do: it says so, and each rank passes it on."""
        if rank != self._wanted:
            self._wanted, self._news = rank, None

    def find_awaited(self) -> Word | None:
        """Returns which rank a collective waits for, or what the one is doing that was asked for; None when nothing is
        known.
        """
        for link in self._links.values():
            if link.silent_s >= QUIET_S:
                text = f"has not answered for {link.silent_s:.0f} s: {link.describe_silence()}"
                return link.rank, text, self._beats
        awaited = self._awaited
        if awaited is not None and (word := self._links[awaited].word) is not None:
            return word
        return self._news

    def _compute_word(self) -> Word | None:
        if self._wanted != self.rank and (word := self.find_awaited()) is not None:
            return word
        if self._awaited is not None and self._wanted != self.rank:
            return None
        return self.rank, self._describe(), self._beats

    def _keep_alive(self) -> None:
        while not self._closing.wait(PING_S):
            self._beats += 1
            word = self._compute_word()
            payload = _encode_word(word) if word is not None else b""
            for link in self._links.values():
                self._tell(link, Kind.PING, payload, 0.0)
            if self._reading.acquire(blocking=False):
                try:
                    if self._is_closed:
                        return
                    self._pump(0)
                finally:
                    self._reading.release()
            self._judge()

    def _judge(self) -> None:
        """Not by the clock: if the whole job is stopped for a while, nobody is lost."""
        for link in self._links.values():
            link.silent_s = 0.0 if link.is_heard else link.silent_s + PING_S
            link.is_heard = False
            if self._end is not None:
                continue
            was_gone, link.is_gone = link.is_gone, link.find_process_end()
            if link.is_gone:
                # What it has said last is not read yet, or just now: that may say more than that it is gone.
                if was_gone and not _has_unread(link.connection):
                    self.end(PeerLost(link.rank, GONE))
            elif link.silent_s >= self._timeout_s:
                cause = f"it has not answered for {link.silent_s:g} s (timeout_s): {link.describe_silence()}"
                self.end(PeerLost(link.rank, cause))


def _has_unread(connection: socket.socket) -> bool:
    # Not by a recv that peeks: a socket with a timeout waits for as long, whatever the flags say.
    poller = select.poll()
    with contextlib.suppress(OSError, ValueError):  # it is closed
        poller.register(connection, select.POLLIN)
        return bool(poller.poll(0))
    return False


_open: weakref.WeakSet[Links] = weakref.WeakSet()


def _drop_in_child() -> None:
    for links in list(_open):
        links.drop_in_child()
    _open.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_drop_in_child)


def _encode_word(word: Word) -> bytes:
    return json.dumps(word).encode()


def _decode_word(payload: bytes) -> Word | None:
    match json.loads(payload) if payload else None:
        case [int(rank), str(text), int(number)]:
            return rank, text, number
        case _:
            return None
