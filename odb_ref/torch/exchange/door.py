"""Where other ranks come in: the connections they make, and which of them are really theirs.

Who connects shows the secret that this rank has put into the store of torch.distributed, is answered, and confirms: so nobody
is let in who has no part in the job, nor a connection that a rank has given up since, because nobody came to the door for long.
"""

from __future__ import annotations

import contextlib
import hmac
import selectors
import socket
import struct
from collections.abc import Iterable
from typing import Final

TOKEN_BYTES: Final = 16
GUESTS: Final = 64
"""So many may stand at the door; when there are more, the one that came first and has not shown the secret has to go."""

_HELLO: Final = struct.Struct(f"!{TOKEN_BYTES}sI")
_WELCOME: Final = b"+"
_CONFIRM: Final = b"!"


class Door:
    """A listening socket, and those that have come and are not in yet. Never waits for one of them alone."""

    def __init__(self, token: bytes, ranks: Iterable[int]) -> None:
        self._token = token
        self.awaited = set(ranks)
        """Those that are to come in, and have not."""
        self._listener = _listen()
        self._listener.setblocking(False)
        self.port: int = self._listener.getsockname()[1]
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._guests: dict[socket.socket, bytearray] = {}

    def welcome(self, wait_s: float) -> list[tuple[int, socket.socket]]:
        """Returns the ranks that have come in, with their connections; waits a while for something to happen."""
        found = []
        for key, _ in self._selector.select(wait_s):
            if key.fileobj is self._listener:
                self._accept()
                continue
            guest = key.fileobj
            if isinstance(guest, socket.socket) and guest in self._guests:
                rank = self._hear(guest)
                if rank is not None:
                    found.append((rank, guest))
        return found

    def _accept(self) -> None:
        try:
            guest, _ = self._listener.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return
        guest.setblocking(False)
        guest.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if len(self._guests) >= GUESTS:
            unknown = (item for item, heard in self._guests.items() if len(heard) < _HELLO.size)
            self._turn_away(next(unknown, guest))
        if guest.fileno() >= 0:
            self._guests[guest] = bytearray()
            self._selector.register(guest, selectors.EVENT_READ)

    def _turn_away(self, guest: socket.socket) -> None:
        if self._guests.pop(guest, None) is not None:
            self._selector.unregister(guest)
        guest.close()

    def _hear(self, guest: socket.socket) -> int | None:
        """Returns the rank of a guest that is in now."""
        heard = self._guests[guest]
        # Not a byte more than belongs to the greeting: what follows is for others to read.
        missing = _HELLO.size - len(heard) or len(_CONFIRM)
        try:
            said = guest.recv(missing)
            heard += said
            if not said:
                raise ConnectionAbortedError
            if len(heard) == _HELLO.size:
                self._check(heard)
                guest.sendall(_WELCOME)
            elif len(heard) > _HELLO.size:
                return self._let_in(guest, self._check(heard[: _HELLO.size]))
        except BlockingIOError:
            return None
        except OSError:
            self._turn_away(guest)
        return None

    def _check(self, hello: bytearray) -> int:
        token, rank = _HELLO.unpack(hello)
        if not hmac.compare_digest(token, self._token) or rank not in self.awaited:
            raise ConnectionRefusedError
        return int(rank)

    def _let_in(self, guest: socket.socket, rank: int) -> int:
        self.awaited.remove(rank)
        del self._guests[guest]
        self._selector.unregister(guest)
        return rank

    def close(self) -> None:
        """Lets nobody in any more."""
        self._selector.close()
        self._listener.close()
        for guest in self._guests:
            guest.close()
        self._guests.clear()


def knock(address: str, port: int, token: bytes, rank: int, wait_s: float) -> socket.socket:
    """Returns a connection to a rank that has said it is the one, for ``rank``.

    Raises: OSError.
    """
    connection = socket.create_connection((address, port), wait_s)
    try:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.sendall(_HELLO.pack(token, rank))
        if connection.recv(len(_WELCOME)) != _WELCOME:
            raise ConnectionRefusedError
        connection.sendall(_CONFIRM)
    except BaseException:
        connection.close()
        raise
    return connection


def _listen() -> socket.socket:
    # On every interface: which of them other hosts can reach is not known here, and the secret keeps strangers out.
    if socket.has_dualstack_ipv6():
        with contextlib.suppress(OSError):  # a kernel may be told to do without
            return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True, backlog=GUESTS)
    return socket.create_server(("", 0), backlog=GUESTS)
