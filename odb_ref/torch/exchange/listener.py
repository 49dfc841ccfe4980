"""The listening socket of a rank, and the handshake that lets another rank in.

::

    connecting rank   secret, its number  ->
                                          <-  "+"
                      "!"                 ->

The secret is what this rank has written to the store of torch.distributed, so only processes of the job get in. The
confirmation rejects connections that were not accepted for so long that the connecting rank has given them up.
"""

from __future__ import annotations

import contextlib
import hmac
import selectors
import socket
import struct
import sys
from collections.abc import Iterable
from typing import Final

SECRET_BYTES: Final = 16
MAX_PENDING: Final = 64
"""How many handshakes may be pending. Beyond that, the oldest one that has not shown the secret is dropped."""

_TCP_RTO_MAX_MS: Final = 44
"""The option of Linux 6.15 and later that limits the time between two attempts to send what was lost."""
_RESEND_MS: Final = 1000

_REQUEST: Final = struct.Struct(f"!{SECRET_BYTES}sI")
_ACCEPTED: Final = b"+"
_CONFIRMED: Final = b"!"


class Listener:
    """A listening socket with its pending handshakes. Never waits for a single one of them."""

    def __init__(self, address: str, ports: Iterable[int], secret: bytes, ranks: Iterable[int]) -> None:
        self._secret = secret
        self.awaited = set(ranks)
        """The ranks that have not connected yet."""
        self._listener = _listen(address, ports)
        self._listener.setblocking(False)
        self.port: int = self._listener.getsockname()[1]
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._pending: dict[socket.socket, bytearray] = {}

    def accept(self, wait_s: float) -> list[tuple[int, socket.socket]]:
        """Waits up to ``wait_s`` for activity. Returns the ranks whose handshake is complete, with their connections."""
        found = []
        for key, _ in self._selector.select(wait_s):
            connection = key.fileobj
            if connection is self._listener:
                self._begin()
            elif isinstance(connection, socket.socket) and connection in self._pending:
                rank = self._go_on(connection)
                if rank is not None:
                    found.append((rank, connection))
        return found

    def _begin(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return
        connection.setblocking(False)
        _set_options(connection)
        if len(self._pending) >= MAX_PENDING:
            unknown = (item for item, received in self._pending.items() if len(received) < _REQUEST.size)
            self._refuse(next(unknown, connection))
        if connection.fileno() >= 0:
            self._pending[connection] = bytearray()
            self._selector.register(connection, selectors.EVENT_READ)

    def _refuse(self, connection: socket.socket) -> None:
        if self._pending.pop(connection, None) is not None:
            self._selector.unregister(connection)
        connection.close()

    def _go_on(self, connection: socket.socket) -> int | None:
        """Continues a handshake. Returns the rank at the other end once it is complete."""
        received = self._pending[connection]
        # Do not read beyond the handshake: the following bytes are for the link.
        missing = _REQUEST.size - len(received) or len(_CONFIRMED)
        try:
            data = connection.recv(missing)
            received += data
            if not data:
                raise ConnectionAbortedError
            if len(received) == _REQUEST.size:
                self._check(received)
                connection.sendall(_ACCEPTED)
            elif len(received) > _REQUEST.size:
                rank = self._check(received[: _REQUEST.size])
                self.awaited.remove(rank)
                del self._pending[connection]
                self._selector.unregister(connection)
                return rank
        except BlockingIOError:
            return None
        except OSError:
            self._refuse(connection)
        return None

    def _check(self, request: bytearray) -> int:
        secret, rank = _REQUEST.unpack(request)
        if not hmac.compare_digest(secret, self._secret) or rank not in self.awaited:
            raise ConnectionRefusedError
        return int(rank)

    def close(self) -> None:
        """Stops accepting connections."""
        self._selector.close()
        self._listener.close()
        for connection in self._pending:
            connection.close()
        self._pending.clear()


def connect(address: str, port: int, secret: bytes, rank: int, wait_s: float) -> socket.socket:
    """Connects to a rank on behalf of ``rank``, and returns the connection once it is accepted. Raises: OSError."""
    connection = socket.create_connection((address, port), wait_s)
    try:
        _set_options(connection)
        connection.sendall(_REQUEST.pack(secret, rank))
        if connection.recv(len(_ACCEPTED)) != _ACCEPTED:
            raise ConnectionRefusedError("this process was not let in")
        connection.sendall(_CONFIRMED)
    except BaseException:
        connection.close()
        raise
    return connection


def _set_options(connection: socket.socket) -> None:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if sys.platform == "linux":
        # Otherwise that time doubles, so after an outage of some seconds a link could be silent for as long again.
        with contextlib.suppress(OSError):
            connection.setsockopt(socket.IPPROTO_TCP, _TCP_RTO_MAX_MS, _RESEND_MS)


def _listen(address: str, ports: Iterable[int]) -> socket.socket:
    """Returns a socket that listens at the first free port of ``ports``. Port 0 lets the operating system choose.

    Raises: OSError when no port is free.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    refused: OSError | None = None
    for port in ports:
        try:
            return socket.create_server((address, port), family=family, backlog=MAX_PENDING)
        except OSError as error:
            refused = error
    raise refused or OSError("there is no port to listen at")
