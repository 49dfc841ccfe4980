"""The connection to one other rank: its messages, and what is known about the process at the other end."""

from __future__ import annotations

import json
import socket
import struct
import threading
from collections import deque
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Final, NamedTuple

from odb_ref.core.events import PeerLost
from odb_ref.torch.exchange.process_table import UNREADABLE, ProcessStatus, read_status

HEADER: Final = struct.Struct("!BI")
_LARGEST_BYTES: Final = 1 << 30
"""No message is larger. A header with a larger size is invalid."""


class MessageKind(IntEnum):
    """The kind of a message."""

    HEARTBEAT = 0
    END = 1
    MAX = 2
    SUM = 3
    GATHER = 4


class Activity(NamedTuple):
    """What a rank is doing, as sent with heartbeats."""

    rank: int
    text: str
    beat: int = 0
    """The number of the heartbeat that reported it first. The higher number is the newer of two reports on one rank."""
    loader: str = ""
    """The other loader that the rank's process is blocked in, or empty."""
    awaited: int = -1
    """The rank of the job that the process waits for in that loader, or -1."""

    def encode(self) -> bytes:
        """Returns the encoding that `decode_activity` reads."""
        return json.dumps(self).encode()


def decode_activity(payload: bytes) -> Activity | None:
    """Decodes a heartbeat's activity. Returns None if the heartbeat has none.

    Raises: ValueError when it is not valid JSON.
    """
    match json.loads(payload) if payload else None:
        case [int(rank), str(text), int(beat), str(loader), int(awaited)]:
            return Activity(rank, text, beat, loader, awaited)
        case _:
            return None


@dataclass(frozen=True, slots=True)
class End:
    """Why the exchange has ended."""

    loss: PeerLost
    is_crossed: bool = False
    """True if ranks iterate over different loaders and wait for each other for ever. All these loaders end."""

    def encode(self) -> bytes:
        """Returns the encoding that `decode_end` reads."""
        return json.dumps([self.loss.rank, self.loss.cause, self.is_crossed]).encode()


def decode_end(payload: bytes) -> End:
    """Decodes the reason why the exchange has ended. Raises: ValueError when it is malformed."""
    match json.loads(payload):
        case [int() | None as rank, str(cause), bool(is_crossed)]:
            return End(PeerLost(rank, cause), is_crossed)
        case other:
            raise ValueError(f"not an end: {other!r}")


class EndedError(Exception):
    """The links have ended."""

    def __init__(self, end: End) -> None:
        super().__init__(end.loss.cause)
        self.end = end


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """The process of a rank, and where it listens."""

    address: str
    port: int
    secret: str
    """Hexadecimal digits."""
    host: str
    """A value shared by all processes that see each other's process numbers, or empty if it is unknown."""
    pid: int
    started: int

    def __str__(self) -> str:
        return f"{self.address}, port {self.port}"


@dataclass(slots=True, eq=False)
class Link:
    """The connection to one rank."""

    rank: int
    connection: socket.socket
    process: Endpoint | None
    """None if the process is on another host."""
    buffer: bytearray = field(default_factory=bytearray)
    received: deque[tuple[MessageKind, bytes]] = field(default_factory=deque)
    activity: Activity | None = None
    """What the other end last reported to be waiting for."""
    is_alive: bool = True
    """True if something has arrived since the last heartbeat that this rank sent."""
    silent_s: float = 0.0
    status: ProcessStatus | None = None
    is_gone: bool = False
    """True if the operating system reported the process as gone at the last check."""
    sending: threading.Lock = field(default_factory=threading.Lock)

    def take_message(self) -> tuple[MessageKind, bytes] | None:
        """Returns the next message that has arrived completely, or None.

        Raises: ValueError when the data are not a valid message.
        """
        if len(self.buffer) < HEADER.size:
            return None
        number, size = HEADER.unpack_from(self.buffer)
        kind = MessageKind(number)
        if size > _LARGEST_BYTES:
            raise ValueError(f"a message of {size} bytes")
        if len(self.buffer) < HEADER.size + size:
            return None
        payload = bytes(self.buffer[HEADER.size : HEADER.size + size])
        del self.buffer[: HEADER.size + size]
        return kind, payload

    def find_process_end(self) -> bool:
        """Returns True if the operating system reports the process as gone. Updates `status`."""
        process = self.process
        if process is None:
            return False
        status = read_status(process.pid)
        if status is UNREADABLE:
            return False
        before, self.status = self.status, status
        if self.status is None or self.status.is_ended or self.status.started != process.started:
            return True
        if self.status.is_busy_since(before):
            self.silent_s = 0.0  # the process is busy, though its interpreter lets no thread say so
        return False

    def describe_silence(self) -> str:
        """Returns a likely explanation of the silence."""
        if self.status is not None and self.status.is_stopped:
            return "its process is stopped (SIGSTOP, or a debugger)"
        if self.process is not None:
            return (
                "its process does nothing: something holds its interpreter lock (Faults(timeout_s=) raises the limit)"
            )
        return "its process is stopped, something holds its interpreter lock, or its host cannot be reached"
