"""The connection to one other rank: what travels over it, and what is known of the process at its other end."""

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
from odb_ref.torch.exchange.process_table import ProcessStatus, read_status

HEADER: Final = struct.Struct("!BI")
_LARGEST_BYTES: Final = 1 << 30
"""No message is larger: what says that it is cannot be one."""


class MessageKind(IntEnum):
    """What a message is."""

    HEARTBEAT = 0
    END = 1
    MAX = 2
    SUM = 3
    GATHER = 4


class Activity(NamedTuple):
    """What a rank is doing: what a heartbeat carries."""

    rank: int
    text: str
    beat: int = 0
    """The heartbeat that said so first: of two on one rank the one with the higher number is newer."""
    loader: str = ""
    """The other loader that the rank's process is blocked in, if it is."""
    awaited: int = -1
    """The rank of the job that it waits for there."""

    def encode(self) -> bytes:
        """Returns what `decode_activity` reads."""
        return json.dumps(self).encode()


def decode_activity(payload: bytes) -> Activity | None:
    """Returns what a heartbeat says; None when that is nothing.

    Raises: ValueError when it cannot be read.
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
    """True when the ranks iterate over different loaders, and wait for each other for ever: all of these end."""

    def encode(self) -> bytes:
        """Returns what `decode_end` reads."""
        return json.dumps([self.loss.rank, self.loss.cause, self.is_crossed]).encode()


def decode_end(payload: bytes) -> End:
    """Returns why the exchange has ended.

    Raises: ValueError when it cannot be read.
    """
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
    """A rank's process, and where it listens."""

    address: str
    port: int
    secret: str
    """In hexadecimal digits."""
    host: str
    """What processes have in common that see each other under one number; empty where that is not known."""
    pid: int
    started: int


@dataclass(slots=True, eq=False)
class Link:
    """The connection to one rank."""

    rank: int
    connection: socket.socket
    process: Endpoint | None
    """None when the process is on another host."""
    buffer: bytearray = field(default_factory=bytearray)
    received: deque[tuple[MessageKind, bytes]] = field(default_factory=deque)
    activity: Activity | None = None
    """What it has said that it waits for."""
    is_alive: bool = True
    """True when something has come since the last heartbeat of ours."""
    silent_s: float = 0.0
    status: ProcessStatus | None = None
    is_gone: bool = False
    """True when the operating system said so at the last look."""
    sending: threading.Lock = field(default_factory=threading.Lock)

    def take_message(self) -> tuple[MessageKind, bytes] | None:
        """Returns the next message that has arrived in full; None when there is none.

        Raises: ValueError when what has arrived is not a message of ours.
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
        """Returns True when the operating system says that the process is gone; looks how it does."""
        process = self.process
        if process is None:
            return False
        before = self.status
        try:
            self.status = read_status(process.pid)
        except OSError:  # that it cannot be seen says nothing about it
            return False
        if self.status is None or self.status.is_ended or self.status.started != process.started:
            return True
        if self.status.is_busy_since(before):
            self.silent_s = 0.0  # it does something, though its interpreter lets nobody else say so
        return False

    def describe_silence(self) -> str:
        """Returns what its silence may mean."""
        if self.status is not None and self.status.is_stopped:
            return "its process is stopped (SIGSTOP, or a debugger)"
        if self.process is not None:
            return "its process does nothing: something holds its interpreter lock"
        return "its process is stopped, something holds its interpreter lock, or its host cannot be reached"
