"""The collectives of the exchange: they carry integers and reports between processes.

They use connections of their own, never the trainer's process group. Two users of one group would have to issue their
collectives in the same order on every rank, which a loader that runs ahead cannot guarantee. The processes form a tree: their
values travel up and the result travels down, so no process's messages grow with the number of processes.
"""

from __future__ import annotations

import json
import secrets
import struct
from array import array
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import reduce
from operator import add
from typing import Final

from odb_ref.core.events import Report
from odb_ref.core.peers import settle
from odb_ref.torch.exchange.link import MessageKind
from odb_ref.torch.exchange.links import Check, Links
from odb_ref.torch.exchange.roster import Roster

FAN: Final = 8
"""The number of children of a node in the tree."""

RUN_BITS: Final = 60

_SIZE: Final = struct.Struct("!II")
Combine = Callable[[int, int], int]


class Transport:
    """The collectives. All processes must call them in the same order, with the same sizes.

    An agreement is a reduction, so its cost per process and round does not grow with the number of processes.
    """

    name = "reduce"

    def __init__(self, links: Links, roster: Roster) -> None:
        self.links = links
        self.roster = roster
        self.run = secrets.randbits(RUN_BITS)
        """A number that all processes of this transport have once they have met, and no other transport."""
        self._tree = compute_tree(roster)

    def reduce_max(self, values: Sequence[int], check: Check = lambda: None) -> list[int]:
        """Returns the elementwise maximum over all processes. Calls ``check`` now and then while it waits."""
        return self._reduce(MessageKind.MAX, values, max, check=check)

    def reduce_offers(self, values: Sequence[int]) -> list[int]:
        """Returns the elementwise maximum over ranks. A rank's values are the maximum over its peers, settled. Spec: R17.2."""
        return self._reduce(MessageKind.MAX, values, max, settle=settle)

    def reduce_sum(self, values: Sequence[int]) -> list[int]:
        """Returns the elementwise sum over all processes."""
        return self._reduce(MessageKind.SUM, values, add)

    def _reduce(
        self,
        kind: MessageKind,
        values: Sequence[int],
        combine: Combine,
        *,
        settle: Callable[[Sequence[int]], Sequence[int]] | None = None,
        check: Check = lambda: None,
    ) -> list[int]:
        tree, found = self._tree, list(values)
        for child in tree.peers:
            found = list(map(combine, found, _decode(self.links.receive(child, kind, check))))
        if settle is not None and tree.is_first:
            found = list(settle(found))
        for child in tree.ranks:
            found = list(map(combine, found, _decode(self.links.receive(child, kind, check))))
        if tree.parent is not None:
            self.links.send(tree.parent, kind, _encode(found))
            found = _decode(self.links.receive(tree.parent, kind, check))
        message = _encode(found)
        for child in tree.children:
            self.links.send(child, kind, message)
        return found

    def _gather(self, payload: bytes) -> list[bytes]:
        """Returns the payloads of all processes, in order."""
        parts = {self.roster.index: payload}
        for child in self._tree.children:
            parts |= _split(self.links.receive(child, MessageKind.GATHER))
        if self._tree.parent is not None:
            self.links.send(self._tree.parent, MessageKind.GATHER, _join(parts))
            parts = _split(self.links.receive(self._tree.parent, MessageKind.GATHER))
        message = _join(parts)
        for child in self._tree.children:
            self.links.send(child, MessageKind.GATHER, message)
        return [part for _, part in sorted(parts.items())]

    def gather(self, report: Report, note: str = "") -> list[tuple[Report, str]]:
        """Returns the reports of all processes, in order, with their notes, on which no outcome depends. Spec: R17.4."""
        pairs = [json.loads(part) for part in self._gather(json.dumps((asdict(report), note)).encode())]
        return [(Report(**fields), text) for fields, text in pairs]


class GatherTransport(Transport):
    """Gathers all values on every process, like the published method. Same answers, at a cost that grows with the world."""

    name = "gather"

    def reduce_offers(self, values: Sequence[int]) -> list[int]:
        """Returns the elementwise maximum over ranks. A rank's values are the maximum over its peers, settled. Spec: R17.2."""
        posts, peers = self._gather_integers(values), self.roster.peers
        ranks = [posts[first : first + peers] for first in range(0, len(posts), peers)]
        return _reduce_columns(max, [settle(_reduce_columns(max, rank)) for rank in ranks])

    def reduce_sum(self, values: Sequence[int]) -> list[int]:
        """Returns the elementwise sum over all processes."""
        return _reduce_columns(add, self._gather_integers(values))

    def _gather_integers(self, values: Sequence[int]) -> list[list[int]]:
        return list(map(_decode, self._gather(_encode(values))))


TRANSPORTS: Final[dict[str, type[Transport]]] = {"reduce": Transport, "gather": GatherTransport}


@dataclass(frozen=True, slots=True, kw_only=True)
class Tree:
    """The neighbours of a process, as indices in the roster."""

    parent: int | None
    peers: tuple[int, ...]
    """Children that are peers of the same rank."""
    ranks: tuple[int, ...]
    """Children that are the first peers of other ranks. Only the first peer of a rank has any."""
    is_first: bool

    @property
    def children(self) -> tuple[int, ...]:
        """All children."""
        return self.peers + self.ranks


def compute_tree(roster: Roster) -> Tree:
    """Returns the neighbours of this process. The first peers of all ranks form a tree, with each rank's peers below its first.

    So the values of a rank's peers are combined at the first of them, before they meet those of other ranks. Spec: R17.2.
    """
    parent, peers = _compute_neighbours(roster.peer, roster.peers)
    begin = roster.rank * roster.peers
    below = tuple(begin + peer for peer in peers)
    if parent is not None:
        return Tree(parent=begin + parent, peers=below, ranks=(), is_first=False)
    rank_above, ranks = _compute_neighbours(roster.rank, roster.world_size)
    above = None if rank_above is None else rank_above * roster.peers
    return Tree(parent=above, peers=below, ranks=tuple(rank * roster.peers for rank in ranks), is_first=True)


def _compute_neighbours(number: int, size: int) -> tuple[int | None, tuple[int, ...]]:
    """Returns the parent and the children of a node in a tree with ``size`` nodes."""
    first = FAN * number + 1
    return (None if number == 0 else (number - 1) // FAN), tuple(range(first, min(first + FAN, size)))


def _reduce_columns(combine: Combine, rows: Sequence[Sequence[int]]) -> list[int]:
    return [reduce(combine, column) for column in zip(*rows, strict=True)]


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
