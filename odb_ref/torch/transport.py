"""How integers and reports get from rank to rank: the collectives the exchange is made of.

A transport has its own process group over gloo, never the trainer's: two users of one group would have to issue their
collectives in the same order on every rank, which a loader that runs ahead cannot promise.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Protocol

import torch
import torch.distributed as dist

from odb_ref.core.errors import JobError, UsageError
from odb_ref.core.events import Report


@dataclass(frozen=True, slots=True)
class Peer:
    """Where a rank's process runs, to tell which one is gone."""

    host: str
    pid: int
    transport: str

    def is_gone(self) -> bool | None:
        """True when the process has ended, None when it runs on another machine."""
        if self.host != socket.gethostname():
            return None
        try:
            stat = Path(f"/proc/{self.pid}/stat").read_text()
        except FileNotFoundError:
            return Path("/proc/self").exists() or None
        except OSError:
            return None
        return stat.rpartition(")")[2].split()[0] in "ZX"


class Transport(Protocol):
    """The collectives. Each is called by all ranks, in the same order, with the same sizes."""

    rank: int
    world_size: int

    def reduce_max(self, values: Sequence[int]) -> list[int]:
        """The elementwise maximum over ranks."""
        ...

    def reduce_sum(self, values: Sequence[int]) -> list[int]:
        """The elementwise sum over ranks."""
        ...

    def gather(self, report: Report) -> tuple[Report, ...]:
        """All ranks' reports, by rank."""
        ...

    def find_gone(self) -> int | None:
        """The lowest rank whose process is known to have ended."""
        ...

    def close(self) -> None:
        """Gives back what the transport holds. Not a collective."""
        ...


@dataclass(slots=True)
class LocalTransport:
    """A world of one."""

    rank: int = 0
    world_size: int = 1

    def reduce_max(self, values: Sequence[int]) -> list[int]:
        """The values themselves."""
        return list(values)

    def reduce_sum(self, values: Sequence[int]) -> list[int]:
        """The values themselves."""
        return list(values)

    def gather(self, report: Report) -> tuple[Report, ...]:
        """The report itself."""
        return (report,)

    def find_gone(self) -> int | None:
        """None."""
        return None

    def close(self) -> None:
        """Nothing."""


class ReduceTransport:
    """One all-reduce for an agreement: per rank and round its cost does not grow with the world."""

    name = "reduce"

    def __init__(self, group: dist.ProcessGroup, peers: Sequence[Peer]) -> None:
        self._group: dist.ProcessGroup | None = group
        self._peers = tuple(peers)
        self.rank = dist.get_rank(group)
        self.world_size = len(peers)

    def reduce_max(self, values: Sequence[int]) -> list[int]:
        """The elementwise maximum over ranks."""
        tensor = torch.tensor(values, dtype=torch.int64)
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=self._group)
        return tensor.tolist()

    def reduce_sum(self, values: Sequence[int]) -> list[int]:
        """The elementwise sum over ranks."""
        tensor = torch.tensor(values, dtype=torch.int64)
        dist.all_reduce(tensor, op=dist.ReduceOp.SUM, group=self._group)
        return tensor.tolist()

    def gather(self, report: Report) -> tuple[Report, ...]:
        """All ranks' reports, by rank."""
        reports: list[Report | None] = [None] * self.world_size
        dist.all_gather_object(reports, report, group=self._group)
        return tuple(item for item in reports if item is not None)

    def find_gone(self) -> int | None:
        """The lowest rank whose process is known to have ended."""
        return next((rank for rank, peer in enumerate(self._peers) if rank != self.rank and peer.is_gone()), None)

    def close(self) -> None:
        """Closes the connections; peers that still wait for this rank see that at once."""
        group, self._group = self._group, None
        if group is not None and dist.is_initialized():
            try:
                dist.destroy_process_group(group)
            except (ValueError, RuntimeError, KeyError):
                return  # the job has destroyed all its groups, this one with them


class GatherTransport(ReduceTransport):
    """All-gathers, combined on each rank, as in the published method: the same answers, at a cost that grows with the world."""

    name = "gather"

    def _gather_integers(self, values: Sequence[int]) -> torch.Tensor:
        tensor = torch.tensor(values, dtype=torch.int64)
        parts = [torch.empty_like(tensor) for _ in range(self.world_size)]
        dist.all_gather(parts, tensor, group=self._group)
        return torch.stack(parts)

    def reduce_max(self, values: Sequence[int]) -> list[int]:
        """The elementwise maximum over ranks."""
        return self._gather_integers(values).max(dim=0).values.tolist()

    def reduce_sum(self, values: Sequence[int]) -> list[int]:
        """The elementwise sum over ranks."""
        return self._gather_integers(values).sum(dim=0).tolist()


TRANSPORTS: dict[str, type[ReduceTransport]] = {"reduce": ReduceTransport, "gather": GatherTransport}


def compute_place(process_group: dist.ProcessGroup | None) -> tuple[int, int]:
    """Rank and world size of this process in the group; 0 and 1 without torch.distributed."""
    if not dist.is_available() or not dist.is_initialized():
        return 0, 1
    return dist.get_rank(process_group), dist.get_world_size(process_group)


def _make_group(process_group: dist.ProcessGroup | None, timeout: timedelta) -> dist.ProcessGroup:
    world: dist.ProcessGroup = dist.new_group(backend="gloo", timeout=timeout)
    if process_group is None:
        return world
    # A group is made by all ranks of the job together, so all are made, in the same order. (Made by its members alone a group
    # is named after them, and would meet the remains of an earlier loader's.)
    mine = dist.get_process_group_ranks(process_group)
    rankings: list[list[int]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(rankings, mine, group=world)
    groups: dict[tuple[int, ...], dist.ProcessGroup] = {
        tuple(ranks): dist.new_group(ranks, backend="gloo", timeout=timeout)
        for ranks in sorted({tuple(ranks) for ranks in rankings})
    }
    dist.destroy_process_group(world)
    return groups[tuple(mine)]


def make_transport(process_group: dist.ProcessGroup | None, name: str, timeout_s: float) -> Transport:
    """A transport over the ranks of ``process_group`` (None: all). A collective of all ranks of the job.

    Raises: JobError when a rank does not come within ``timeout_s``, or asks for another transport.
    """
    kind = TRANSPORTS.get(name)
    if kind is None:
        raise UsageError(f"no transport {name!r}; there are {', '.join(sorted(TRANSPORTS))}")
    _, world_size = compute_place(process_group)
    if compute_place(None) == (0, 1):
        return LocalTransport()
    timeout = timedelta(seconds=timeout_s)
    try:
        group = _make_group(process_group, timeout)
        if world_size == 1:
            dist.destroy_process_group(group)
            return LocalTransport()
        peers: list[Peer | None] = [None] * world_size
        dist.all_gather_object(peers, Peer(socket.gethostname(), os.getpid(), name), group=group)
    except RuntimeError as error:
        cause = f"not every rank has started its loader within {timeout_s:g} s"
        raise JobError(f"the exchange could not be set up: {cause}", rank=None, cause=cause) from error
    known = [peer for peer in peers if peer is not None]
    for other, peer in enumerate(known):
        if peer.transport != known[0].transport:
            cause = f"transport is {peer.transport!r}, rank 0 has {known[0].transport!r}"
            raise JobError(f"rank {other} is configured differently: {cause}", rank=other, cause=cause)
    return kind(group, known)
