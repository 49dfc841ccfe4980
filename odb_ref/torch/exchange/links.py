"""The links of a rank to its parent and children in a tree of ranks, and how they detect that one of these is gone.

A closed link means that the process at the other end is gone. A link that stays silent for long means that it is stopped or cut
off. The rank that detects this tells all its other links, which tell theirs. So every rank, on any host, names the same culprit
without having to see its process. Links are plain sockets of this library, because a wait on a socket can always be ended,
while nothing ends a torch collective once it has started.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Final

from odb_ref.core.errors import PeerError
from odb_ref.core.events import PeerLost
from odb_ref.torch.exchange.link import (
    HEADER,
    Activity,
    End,
    EndedError,
    Link,
    MessageKind,
    decode_activity,
    decode_end,
)

HEARTBEAT_S: Final = 0.5
"""How often a rank sends a heartbeat over each link."""
SILENT_S: Final = 2.0
"""A link counts as silent after this long without data."""
NOTIFY_S: Final = 1.0
"""How long a message being sent over a link may delay the news of an end."""
CLOSE_S: Final = 0.3
"""How long closing a link waits for the other end to read what was sent."""

GONE: Final = "its process is gone"

Check = Callable[[], None]


class Links:
    """The links of one rank. A link may be silent for at most ``timeout_s``. ``name`` names a rank in messages."""

    def __init__(
        self, rank: int, links: Mapping[int, Link], timeout_s: float, name: Callable[[int], str] = "rank {}".format
    ) -> None:
        self.rank = rank
        self._name = name
        self._links = dict(links)
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._reading = threading.Lock()
        """Held by the thread that reads: one that waits for a message, or sometimes the one that sends heartbeats."""
        self._end: End | None = None
        self._awaited: int | None = None
        self._asked: int | None = None
        self._latest: Activity | None = None
        self._beats = 0
        self.describe: Callable[[], Activity] = lambda: Activity(rank, "")
        """Returns what this rank is doing, for other ranks that wait for it."""
        self._notified = threading.Event()
        """Set once all have been told of the end."""
        self._is_closed = False
        self._closing = threading.Event()
        # A process alone has nobody to read from, and may run on a system without such sockets.
        self._waking: tuple[socket.socket, ...] = socket.socketpair() if self._links else ()
        self._selector = selectors.DefaultSelector()
        for waking in self._waking[:1]:
            self._selector.register(waking, selectors.EVENT_READ)
        for link in self._links.values():
            link.connection.settimeout(timeout_s)
            self._selector.register(link.connection, selectors.EVENT_READ, link)
        self.bytes = 0
        """The total size of the messages sent, without heartbeats."""
        _open.add(self)
        if self._links:
            threading.Thread(target=self._keep_alive, name="odb-links", daemon=True).start()

    # Messages --------------------------------------------------------------------------------------------------------

    def send(self, rank: int, kind: MessageKind, payload: bytes) -> None:
        """Sends a message. If that fails, the next `receive` finds out."""
        self.bytes += HEADER.size + len(payload)
        link = self._links[rank]
        try:
            with link.sending:
                link.connection.sendall(HEADER.pack(kind, len(payload)) + payload)
        except TimeoutError:
            # A part may have been sent, so anything sent afterwards would be misread.
            cause = f"it has not read what was sent to it for {self._timeout_s:g} s (timeout_s)"
            self._note_end(End(PeerLost(rank, cause)), rank)
        except OSError:
            pass

    def _try_send(self, link: Link, kind: MessageKind, payload: bytes, wait_s: float) -> bool:
        """Sends a short message. Returns False, instead of waiting longer, if the other end does not read."""
        if not link.sending.acquire(timeout=wait_s):
            return False
        try:
            if not _is_ready(link.connection, selectors.EVENT_WRITE, wait_s):
                return False
            link.connection.sendall(HEADER.pack(kind, len(payload)) + payload)
        except (OSError, ValueError):  # the link has ended or was closed here: the reading thread finds out
            pass
        finally:
            link.sending.release()
        return True

    def receive(self, rank: int, kind: MessageKind, check: Check = lambda: None) -> bytes:
        """Returns the next message from a rank. Calls ``check`` now and then while it waits.

        Raises: EndedError when none will come, PeerError when it is of another kind, and what ``check`` raises.
        """
        link = self._links[rank]
        with self._reading:
            self._awaited = rank
            while not link.received:
                if self._end is not None:
                    raise EndedError(self._end)
                check()
                self._poll(HEARTBEAT_S)
            self._awaited = link.activity = None
            got, payload = link.received.popleft()
        if got is not kind:
            raise PeerError(f"{self._name(rank)} takes part in another collective: {got.name}, expected {kind.name}")
        return payload

    def _poll(self, timeout_s: float) -> None:
        """Reads what has arrived. Only for the thread that holds ``_reading``."""
        for key, _ in self._selector.select(timeout_s):
            if isinstance(key.data, Link):
                self._read(key.data)
            else:
                self._waking[0].recv(64)

    def _read(self, link: Link) -> None:
        try:
            data = link.connection.recv(1 << 16, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._selector.unregister(link.connection)
            self._note_end(End(PeerLost(link.rank, GONE)), but=link.rank)
            return
        link.is_alive = True
        link.buffer += data
        try:
            while (message := link.take_message()) is not None:
                self._handle(link, *message)
        except ValueError:
            self._selector.unregister(link.connection)
            self._note_end(End(PeerLost(link.rank, "what it has sent cannot be read")), but=None)

    def _handle(self, link: Link, kind: MessageKind, payload: bytes) -> None:
        match kind:
            case MessageKind.HEARTBEAT:
                link.activity = activity = decode_activity(payload)
                is_asked = activity is not None and activity.rank == self._asked
                if activity is not None and is_asked and (self._latest is None or activity.beat > self._latest.beat):
                    self._latest = activity
            case MessageKind.END:
                self._note_end(decode_end(payload), but=link.rank)
            case _:
                link.received.append((kind, payload))

    # Ends ------------------------------------------------------------------------------------------------------------

    def end(self, end: End) -> None:
        """Tells every rank that the exchange is over, and why."""
        self._note_end(end, but=None)
        self._wake()

    def _wake(self) -> None:
        """Wakes the thread that waits for a message."""
        for waking in self._waking[1:]:
            with contextlib.suppress(OSError):
                waking.send(b"!")

    def _note_end(self, end: End, but: int | None) -> None:
        with self._lock:
            if self._end is not None:
                return
            self._end = end
        try:
            self._notify(end, [link for rank, link in self._links.items() if rank != but])
        finally:
            self._notified.set()

    def _notify(self, end: End, links: Iterable[Link]) -> None:
        payload = end.encode()
        # First the ranks that read, so that they need not wait for one that does not.
        busy = [link for link in links if not self._try_send(link, MessageKind.END, payload, 0.0)]
        deadline = time.monotonic() + NOTIFY_S
        for link in busy:
            if not self._try_send(link, MessageKind.END, payload, max(0.0, deadline - time.monotonic())):
                with contextlib.suppress(OSError):  # aborts a message being sent, and releases the thread that sends it
                    link.connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Closes all links. Waits briefly until the other ends have read what was sent."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            if self._end is None:
                self._end = End(PeerLost(self.rank, "its links are closed"))
                self._notified.set()
        # If a link closed before the cause is sent, the other end would report this process as gone.
        self._notified.wait(self._timeout_s)
        self._closing.set()
        self._wake()
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
                with link.sending:  # otherwise a send could continue on another connection that reuses the descriptor
                    link.connection.close()
            self.drop()

    def drop(self) -> None:
        """Closes this process's sockets. In a forked child these are copies, which would hide the death of its parent."""
        self._selector.close()
        for connection in (*self._waking, *(link.connection for link in self._links.values())):
            connection.close()

    # Heartbeats ------------------------------------------------------------------------------------------------------

    def ask(self, rank: int | None) -> None:
        """Asks what a rank is doing. All ranks ask the same one; its heartbeats answer, and each rank passes that on."""
        if rank != self._asked:
            self._asked, self._latest = rank, None

    def find_awaited(self) -> Activity | None:
        """Returns what the rank that a collective waits for is doing, else the rank asked about. None if that is unknown."""
        for link in self._links.values():
            if link.silent_s >= SILENT_S:
                text = f"has not answered for {link.silent_s:.0f} s: {link.describe_silence()}"
                return Activity(link.rank, text, self._beats)
        awaited = self._awaited
        if awaited is not None and (activity := self._links[awaited].activity) is not None:
            return activity
        return self._latest

    def _compute_activity(self) -> Activity | None:
        if self._asked != self.rank and (activity := self.find_awaited()) is not None:
            return activity
        if self._awaited is not None and self._asked != self.rank:
            return None
        return self.describe()._replace(rank=self.rank, beat=self._beats)

    def _keep_alive(self) -> None:
        while not self._closing.wait(HEARTBEAT_S):
            self._beats += 1
            activity = self._compute_activity()
            payload = activity.encode() if activity is not None else b""
            for link in self._links.values():
                self._try_send(link, MessageKind.HEARTBEAT, payload, 0.0)
            if self._reading.acquire(blocking=False):
                try:
                    if self._is_closed:
                        return
                    self._poll(0)
                finally:
                    self._reading.release()
            self._check_silence()

    def _check_silence(self) -> None:
        """Counts heartbeats instead of reading a clock: if the whole job is stopped for a while, no rank is lost."""
        for link in self._links.values():
            link.silent_s = 0.0 if link.is_alive else link.silent_s + HEARTBEAT_S
            link.is_alive = False
            if self._end is not None:
                continue
            was_gone, link.is_gone = link.is_gone, link.find_process_end()
            if link.is_gone:
                # Its last words may not be read yet, or were read just now. They may say more than that it is gone.
                if was_gone and not _has_unread(link.connection):
                    self.end(End(PeerLost(link.rank, GONE)))
            elif link.silent_s >= self._timeout_s:
                cause = f"it has not answered for {link.silent_s:g} s (timeout_s): {link.describe_silence()}"
                self.end(End(PeerLost(link.rank, cause)))


def _has_unread(connection: socket.socket) -> bool:
    # Do not use recv with MSG_PEEK: on a socket with a timeout it waits that long, whatever the flags are.
    with contextlib.suppress(OSError, ValueError):  # the socket is closed
        return _is_ready(connection, selectors.EVENT_READ, 0)
    return False


def _is_ready(connection: socket.socket, events: int, wait_s: float) -> bool:
    with selectors.DefaultSelector() as selector:
        selector.register(connection, events)
        return bool(selector.select(wait_s))


_open: weakref.WeakSet[Links] = weakref.WeakSet()


def _drop_in_child() -> None:
    for links in list(_open):
        links.drop()
    _open.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_drop_in_child)
