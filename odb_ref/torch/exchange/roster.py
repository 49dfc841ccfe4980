"""The participants of an exchange: the processes of the job, and which of them form one data-parallel rank."""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from odb_ref.core.errors import UsageError

DATA_PARALLEL: Final = frozenset({"batch", "dp", "dp_replicate", "dp_shard"})
"""Names of mesh dimensions along which ranks train on different batches, unless the user names others."""

MODEL_PARALLEL: Final = frozenset(
    {"cp", "ep", "etp", "pp", "sp", "tp", "context", "expert", "model", "pipeline", "sequence", "tensor"}
)
"""Names of mesh dimensions along which ranks train on the same batches. The meaning of any other name is unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Roster:
    """The processes of an exchange, in order: those of data-parallel rank 0, its *peers*, then those of rank 1, and so on.

    The peers of a rank hold parts of one model (tensor, context, pipeline parallel) and train on the same batches.
    Spec: R17.1.
    """

    processes: tuple[int, ...] = (0,)
    """The ranks of these processes in the job."""
    index: int = 0
    """The index of this process among them."""
    peers: int = 1
    """How many processes form one data-parallel rank."""
    group_name: str = ""
    """Torch's name for their process group. Empty for a mesh, or if the group is the whole job."""

    @property
    def rank(self) -> int:
        """The data-parallel rank of this process."""
        return self.index // self.peers

    @property
    def peer(self) -> int:
        """The index of this process among its rank's peers."""
        return self.index % self.peers

    @property
    def world_size(self) -> int:
        """The number of data-parallel ranks."""
        return len(self.processes) // self.peers

    def name(self, rank: int, peer: int | None = None) -> str:
        """Returns the name of a rank, or of one of its processes, for messages: its number in the job, then in its group."""
        own = self.processes[rank * self.peers : (rank + 1) * self.peers]
        if self.peers > 1:
            some = ", ".join(map(str, own[:4])) + (", ..." if own[4:] else "")
            which = f"rank {own[peer]}" if peer is not None else f"one of ranks {some}"
            return f"{which} (rank {rank} of its mesh)"
        return f"rank {own[0]}" + (f" (rank {rank} of its group)" if own[0] != rank else "")

    def name_process(self, index: int) -> str:
        """Returns the name of a process in messages."""
        return self.name(index // self.peers, index % self.peers)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """The ranks of a loader, as its user gave them: a process group (None means all ranks), or a mesh and its data-parallel
    dimensions.
    """

    process_group: dist.ProcessGroup | None = None
    mesh: DeviceMesh | None = None
    dimensions: tuple[int, ...] = ()
    """The data-parallel dimensions of the mesh, outermost first."""

    @property
    def groups(self) -> tuple[dist.ProcessGroup | None, ...]:
        """The process groups along the data-parallel dimensions, outermost first. Without a mesh, only the process group."""
        if self.mesh is None:
            return (self.process_group,)
        return tuple(self.mesh.get_group(dimension) for dimension in self.dimensions)

    def find_rank_and_size(self) -> tuple[int, int]:
        """Returns this process's data-parallel rank and the number of ranks; 0 and 1 without torch.distributed.

        Raises: UsageError when this process does not belong to them.
        """
        rank, size = 0, 1
        for group in self.groups:
            own, many = get_rank_and_size(group)
            if own < 0:
                raise UsageError(f"rank {dist.get_rank()} is not a member of the loader's process_group")
            rank, size = rank * many + own, size * many
        return rank, size

    def make_roster(self) -> Roster:
        """Returns the processes that take part. Raises: UsageError when this process does not belong to them."""
        if not dist.is_available() or not dist.is_initialized():
            if (size := os.environ.get("WORLD_SIZE", "1")) not in ("", "0", "1"):
                warnings.warn(
                    f"WORLD_SIZE is {size}, but this process has not called init_process_group, so each process reads all "
                    "samples. Call it before the first epoch",
                    RuntimeWarning,
                    stacklevel=2,
                )
            return Roster()
        if self.mesh is not None:
            return self._make_roster_of(self.mesh)
        index, _ = self.find_rank_and_size()
        group = dist.group.WORLD if self.process_group is None else self.process_group
        name = "" if group is None or group is dist.group.WORLD else group.group_name
        return Roster(processes=tuple(dist.get_process_group_ranks(group)), index=index, group_name=name)

    def _make_roster_of(self, mesh: DeviceMesh) -> Roster:
        others = [dimension for dimension in range(mesh.ndim) if dimension not in self.dimensions]
        processes = tuple(int(rank) for rank in mesh.mesh.permute(*self.dimensions, *others).flatten().tolist())
        if dist.get_rank() not in processes:
            raise UsageError(f"rank {dist.get_rank()} is not a member of the loader's mesh")
        _, size = self.find_rank_and_size()
        return Roster(processes=processes, index=processes.index(dist.get_rank()), peers=len(processes) // size)


def choose_ranks(
    process_group: dist.ProcessGroup | None,
    mesh: DeviceMesh | None,
    mesh_dims: str | Sequence[str] | None,
    *,
    is_apart: bool,
) -> Ranks:
    """Returns the ranks of a loader.

    ``mesh_dims`` names the data-parallel dimensions of the mesh. By default these are the dimensions with a name in
    `DATA_PARALLEL`, or a mesh's only dimension if its name is not in `MODEL_PARALLEL`. ``is_apart`` promises that no rank
    outside the process group is a peer of one inside. Spec: R17.1.

    Raises: UsageError when the arguments contradict each other, or leave out ranks that may be peers.
    """
    if is_apart and process_group is None:
        raise UsageError("is_apart needs process_group: it describes the ranks outside that group")
    if process_group is not None and dist.is_available() and not _is_group(process_group):
        raise UsageError(f"process_group must be a ProcessGroup, got {process_group!r}")
    if mesh is None:
        if mesh_dims is not None:
            raise UsageError("mesh_dims needs mesh: it names the mesh's dimensions")
        if process_group is not None and not is_apart:
            _check_whole("process_group", get_rank_and_size(process_group)[1])
        return Ranks(process_group=process_group)
    if process_group is not None:
        raise UsageError("process_group and mesh exclude each other")
    names = mesh.mesh_dim_names or ()
    _check_whole("mesh", mesh.size())
    if mesh_dims is None and mesh.ndim == 1 and not MODEL_PARALLEL.intersection(names):
        return Ranks(mesh=mesh, dimensions=(0,))
    wanted = {mesh_dims} if isinstance(mesh_dims, str) else set(DATA_PARALLEL if mesh_dims is None else mesh_dims)
    dimensions = tuple(number for number, name in enumerate(names) if name in wanted)
    unknown = [] if mesh_dims is None else sorted(wanted.difference(names))
    doubtful = [] if mesh_dims is not None else [name for name in names if name not in DATA_PARALLEL | MODEL_PARALLEL]
    if not dimensions or unknown or doubtful:
        known = ", ".join(sorted(DATA_PARALLEL))
        asked = f"mesh_dims={mesh_dims!r} is not among them" if mesh_dims is not None else f"none is named {known}"
        what = f"it is not known whether {doubtful[0]!r} is data-parallel" if doubtful else asked
        raise UsageError(
            f"mesh has the dimensions {names or mesh.ndim}: {what}. Pass Protocol(mesh_dims=) with the names of the dimensions "
            "along which ranks train on different batches. If there is none, give the mesh one of size 1"
        )
    return Ranks(mesh=mesh, dimensions=dimensions)


def _is_group(found: object) -> bool:
    """Returns True also for what `torch.distributed.new_group` returns to a process outside the group."""
    return isinstance(found, dist.ProcessGroup) or found is dist.GroupMember.NON_GROUP_MEMBER


def _check_whole(name: str, size: int) -> None:
    """Raises: UsageError when ranks of the job are left out. Peers in separate exchanges would agree only as long as nothing
    happens on one of them alone.
    """
    _, job_size = get_rank_and_size(None)
    if size < job_size:
        part = (
            f"has {size} of the job's {job_size} ranks"
            if size > 0
            else f"does not contain this process, rank {dist.get_rank()} of the job"
        )
        raise UsageError(
            f"{name} {part}. If the other ranks are model-parallel peers of these, pass the whole mesh as mesh= "
            "(DeviceMesh.from_group makes one from process groups) and the names of its data-parallel dimensions as "
            "Protocol(mesh_dims=), so that peers read the same batches whatever happens on one of them. If they are not, pass "
            "Protocol(process_group=, is_apart=True)"
        )


def get_rank_and_size(process_group: dist.ProcessGroup | None) -> tuple[int, int]:
    """Returns this process's rank in the group, and the group's size; 0 and 1 without torch.distributed."""
    if not dist.is_available() or not dist.is_initialized():
        return 0, 1
    return dist.get_rank(process_group), dist.get_world_size(process_group)
