"""How integers and reports get from rank to rank: the collectives the exchange is made of.

They go over connections of their own, never the trainer's process group: two users of one group would have to issue their
collectives in the same order on every rank, which a loader that runs ahead cannot promise. The ranks form a tree: up it goes
what they say, down what comes of it, so the messages of one rank do not grow with the world.
"""

from __future__ import annotations

import json
import struct
from array import array
from collections.abc import Callable, Sequence
from dataclasses import asdict
from operator import add
from typing import Final, Protocol

import torch.distributed as dist

from odb_ref.core.events import PeerLost, Report
from odb_ref.torch.exchange.links import Check, Kind, Links, Word

FAN: Final = 8
"""How many children a rank has."""

_SIZE: Final = struct.Struct("!II")
Combine = Callable[[int, int], int]


class Transport(Protocol):
    """The collectives. Each is called by all ranks, in the same order, with the same sizes."""

    rank: int
    world_size: int

    def reduce_max(self, values: Sequence[int]) -> list[int]:
        """Returns the elementwise maximum over ranks."""
        ...

    def reduce_sum(self, values: Sequence[int]) -> list[int]:
        """Returns the elementwise sum over ranks."""
        ...

    def gather(self, report: Report) -> tuple[Report, ...]:
        """Returns all ranks' reports, by rank."""
        ...

    def set_describe(self, describe: Callable[[], str]) -> None:
        """``describe`` says what this rank is doing, for others that wait for it."""
        ...

    def want(self, rank: int | None) -> None:
        """Asks what a rank is doing."""
        ...

    def find_awaited(self) -> Word | None:
        """Returns which rank is waited for, and what it is doing; None when nothing is known."""
        ...

    def end(self, end: PeerLost) -> None:
        """Tells all ranks that no further collective will be. What is under way on this one raises."""
        ...

    def close(self) -> None:
        """Gives back what the transport holds. Not a collective."""
        ...


class LocalTransport:
    """A world of one."""

    rank = 0
    world_size = 1

    def reduce_max(self, values: Sequence[int]) -> list[int]:
        """Returns the values themselves."""
        return list(values)

    def reduce_sum(self, values: Sequence[int]) -> list[int]:
        """Returns the values themselves."""
        return list(values)

    def gather(self, report: Report) -> tuple[Report, ...]:
        """Returns the report itself."""
        return (report,)

    def set_describe(self, describe: Callable[[], str]) -> None:
        """Does nothing: nobody asks."""

    def want(self, rank: int | None) -> None:
        """Does nothing: nobody else is there."""

    def find_awaited(self) -> Word | None:
        """Returns None: a rank alone cannot be gone."""
        return None

    def end(self, end: PeerLost) -> None:
        """Does nothing: no other rank is there to hear it."""

    def close(self) -> None:
        """Does nothing: there are no connections."""


class ReduceTransport:
    """A reduction for an agreement: per rank and round its cost does not grow with the world."""

    name = "reduce"

    def __init__(self, links: Links, world_size: int) -> None:
        self.links = links
        self.rank = links.rank
        self.world_size = world_size
        self._parent, self._children = compute_neighbours(links.rank, world_size)

    def reduce_max(self, values: Sequence[int]) -> list[int]:
        """Returns the elementwise maximum over ranks."""
        return self._reduce(Kind.MAX, values, max)

    def reduce_sum(self, values: Sequence[int]) -> list[int]:
        """Returns the elementwise sum over ranks."""
        return self._reduce(Kind.SUM, values, add)

    def _reduce(self, kind: Kind, values: Sequence[int], combine: Combine, check: Check = lambda: None) -> list[int]:
        found = list(values)
        for child in self._children:
            theirs = _decode(self.links.receive(child, kind, check))
            found = [combine(ours, other) for ours, other in zip(found, theirs, strict=True)]
        if self._parent is not None:
            self.links.send(self._parent, kind, _encode(found))
            found = _decode(self.links.receive(self._parent, kind, check))
        message = _encode(found)
        for child in self._children:
            self.links.send(child, kind, message)
        return found

    def meet(self, values: Sequence[int], check: Check) -> list[int]:
        """Returns the elementwise maximum over ranks. Does ``check`` now and then while it waits.

        Raises: what ``check`` raises.
        """
        return self._reduce(Kind.MAX, values, max, check)

    def _gather(self, payload: bytes) -> list[bytes]:
        """Returns what all ranks give, by rank."""
        parts = {self.rank: payload}
        for child in self._children:
            parts |= _split(self.links.receive(child, Kind.GATHER))
        if self._parent is not None:
            self.links.send(self._parent, Kind.GATHER, _join(parts))
            parts = _split(self.links.receive(self._parent, Kind.GATHER))
        message = _join(parts)
        for child in self._children:
            self.links.send(child, Kind.GATHER, message)
        return [parts[rank] for rank in range(self.world_size)]

    def gather(self, report: Report) -> tuple[Report, ...]:
        """Returns all ranks' reports, by rank."""
        return tuple(Report(**json.loads(part)) for part in self._gather(json.dumps(asdict(report)).encode()))

    def set_describe(self, describe: Callable[[], str]) -> None:
        """``describe`` says what this rank is doing, for others that wait for it."""
        self.links.set_describe(describe)

    def want(self, rank: int | None) -> None:
        """Asks what a rank is doing."""
        self.links.want(rank)

    def find_awaited(self) -> Word | None:
        """Returns which rank is waited for, and what it is doing; None when nothing is known."""
        return self.links.find_awaited()

    def end(self, end: PeerLost) -> None:
        """Tells all ranks that no further collective will be. What is under way on this one raises."""
        self.links.end(end)

    def close(self) -> None:
        """Closes the connections; peers that still wait for this rank see that at once."""
        self.links.close()


class GatherTransport(ReduceTransport):
    """All-gathers, combined on each rank, as in the published method: the same answers, at a cost that grows with the world."""

    name = "gather"

    def reduce_max(self, values: Sequence[int]) -> list[int]:
        """Returns the elementwise maximum over ranks."""
        return [max(column) for column in self._gather_integers(values)]

    def reduce_sum(self, values: Sequence[int]) -> list[int]:
        """Returns the elementwise sum over ranks."""
        return [sum(column) for column in self._gather_integers(values)]

    def _gather_integers(self, values: Sequence[int]) -> list[tuple[int, ...]]:
        return list(zip(*map(_decode, self._gather(_encode(values))), strict=True))


TRANSPORTS: Final[dict[str, type[ReduceTransport]]] = {"reduce": ReduceTransport, "gather": GatherTransport}


def compute_neighbours(rank: int, world_size: int) -> tuple[int | None, tuple[int, ...]]:
    """Returns the parent of a rank in the tree, and its children."""
    first = FAN * rank + 1
    return (None if rank == 0 else (rank - 1) // FAN), tuple(range(first, min(first + FAN, world_size)))


def get_rank_and_size(process_group: dist.ProcessGroup | None) -> tuple[int, int]:
    """Returns the rank and the world size of this process in the group; 0 and 1 without torch.distributed."""
    if not dist.is_available() or not dist.is_initialized():
        return 0, 1
    return dist.get_rank(process_group), dist.get_world_size(process_group)


def _encode(values: Sequence[int]) -> bytes:
    return array("q", values).tobytes()


def _decode(payload: bytes) -> list[int]:
    values = array("q")
    values.frombytes(payload)
    return values.tolist()


def _join(parts: dict[int, bytes]) -> bytes:
    return b"".join(_SIZE.pack(rank, len(part)) + part for rank, part in parts.items())


def _split(payload: bytes) -> dict[int, bytes]:
    parts, offset = {}, 0
    while offset < len(payload):
        rank, size = _SIZE.unpack_from(payload, offset)
        offset += _SIZE.size
        parts[rank] = payload[offset : offset + size]
        offset += size
    return parts
