"""Gathers the outputs of all ranks' batches of a step, sample by sample, for metrics over uneven ranks."""

from __future__ import annotations

import pickle
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, TypeVar, cast

import torch
import torch.distributed as dist

from odb_ref.core.errors import UsageError
from odb_ref.torch.epoch.info import StepInfo
from odb_ref.torch.exchange.roster import Roster, get_rank_and_size

Output = TypeVar("Output")
Value = TypeVar("Value")

_RELEASE_S: Final = 1.0


def name_rank(rank: int, group: dist.ProcessGroup | None) -> str:
    """Returns the name of a rank of a process group for messages."""
    is_part = group is not None and dist.is_initialized()
    return Roster(processes=tuple(dist.get_process_group_ranks(group))).name(rank) if is_part else f"rank {rank}"


def gather_objects(own: Value, group: dist.ProcessGroup | None = None) -> list[Value]:
    """Returns the object of each rank, in rank order, the same on every rank. A collective of the trainer, not of the exchange.

    ``own`` is anything that can be pickled; ``group`` defaults to all ranks. Without a process group, or with one rank, the
    list has one entry. Works like ``torch.distributed.all_gather_object``, but a process over gloo may end right after it: see
    `_wait_for_release`.
    """
    _, size = get_rank_and_size(group)
    if size == 1:
        return [own]
    if "gloo" not in dist.get_backend(group):
        objects = [own] * size
        dist.all_gather_object(objects, own, group=group)
        return objects
    payload = pickle.dumps(own)
    longest = max(size for (size,) in gather_integers([len(payload)], group))
    sent = torch.frombuffer(bytearray(payload.ljust(longest, b"\0")), dtype=torch.uint8)
    received = [torch.empty_like(sent) for _ in range(size)]
    dist.all_gather(received, sent, group=group)
    _wait_for_release([sent, *received])
    return [pickle.loads(tensor.numpy().tobytes()) for tensor in received]  # a pickle says where it ends


def gather_integers(own: Sequence[int], group: dist.ProcessGroup | None = None) -> list[list[int]]:
    """Returns the integers of each rank, in rank order. One all-gather, on any device, with the same number of integers from
    each rank. Use it as the ``exchange`` of `odb_ref.plan_rank`.

    ``group`` defaults to all ranks. Without a process group there is one rank. Spec: R13.11.
    """
    if not dist.is_available() or not dist.is_initialized():
        return [[*own]]
    device, backend = choose_device(dist.get_backend_config(group))
    sent = torch.tensor(own, dtype=torch.int64, device=device)
    received = [torch.empty_like(sent) for _ in range(dist.get_world_size(group))]
    dist.all_gather(received, sent, group=group)
    if backend == "gloo":
        _wait_for_release([sent, *received])
    return [tensor.tolist() for tensor in received]


def choose_device(config: str) -> tuple[str, str]:
    """Returns a device that a process group supports, and its backend. Prefers the CPU.

    ``config`` is a string such as torch's ``"cpu:gloo,cuda:nccl"``, or ``"npu:hccl"`` for a backend that torch itself lacks.
    """
    backends = dict(item.split(":") for item in config.split(","))
    device = "cpu" if "cpu" in backends else next(iter(backends))
    return device, backends[device]


def all_reduce(
    values: torch.Tensor, how: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM, group: dist.ProcessGroup | None = None
) -> torch.Tensor:
    """Returns the values reduced over ranks, in a new tensor; the values themselves without a process group.

    A collective. Works like ``torch.distributed.all_reduce``, but a process over gloo may end right after it: see
    `_wait_for_release`.
    """
    if not dist.is_available() or not dist.is_initialized():
        return values
    reduced = values.clone()
    dist.all_reduce(reduced, how, group=group)
    if values.device.type == "cpu" and "gloo" in dist.get_backend(group):
        _wait_for_release([reduced])
    return reduced


def _wait_for_release(tensors: Sequence[torch.Tensor]) -> None:
    """Waits until gloo's thread has released the tensors of a finished collective. The caller holds each of them once.

    The thread releases them shortly after the collective, and needs the interpreter lock for it. If the process ends at that
    time, the last owner of the process group, such as DDP, waits for ever for the thread while it holds the lock. Or the
    interpreter ends before the thread, which aborts the process (pytorch issue 190489). While this function holds a tensor, the
    thread only lowers its counts, and does nothing with it afterwards. If the thread were the last holder, it would need the
    lock once more, after any visible trace of the tensor is gone. Other holders do not count.
    """
    own = torch.empty(0, device="cpu")
    alone = _count_references([own])
    deadline = time.monotonic() + _RELEASE_S
    while _count_references(tensors) > alone and time.monotonic() < deadline:
        time.sleep(0.0001)


def _count_references(tensors: Sequence[torch.Tensor]) -> int:
    """Returns the highest number of references to any of them, from Python and from C++.

    In torch 2.6 holders in C++ do not raise Python's count. In torch 2.13 they do (pytorch pull request 167564), and Python's
    falls under the lock, so that both must be waited for.
    """
    # Not every torch tells its own count, in which a tensor's Python object counts as one.
    return max(sys.getrefcount(tensor) + getattr(tensor, "_use_count", int)() for tensor in tensors)


def own_memory(output: Output) -> Output:
    """Returns an output that keeps nothing else in memory. A row of a tensor would be sent, and kept, with the whole tensor."""
    # A sparse tensor has no storage to share.
    if not isinstance(output, torch.Tensor) or output.layout is not torch.strided:
        return output
    return cast(Output, output.clone()) if output.untyped_storage().nbytes() > output.nbytes else output


def check_outputs(outputs: object) -> None:
    """Raises: UsageError when outputs are fields of a batch instead of one entry per sample."""
    is_fields = isinstance(outputs, tuple) and any(isinstance(item, torch.Tensor) for item in outputs)
    if is_fields or isinstance(outputs, Mapping):
        raise UsageError(
            f"outputs is a {type(outputs).__name__}, whose entries are fields instead of samples: pass one tensor with a row "
            "for each sample, or a list with an entry for each sample"
        )


def gather_samples(outputs: Iterable[Output], info: StepInfo, group: dist.ProcessGroup | None = None) -> list[Output]:
    """Returns one entry for each sample of ``info``'s step, rank by rank, the same on every rank. A collective.

    ``outputs`` has an entry for each sample of this rank's batch. The entries of a tensor are its rows, which are moved to the
    CPU and may have other sizes on other ranks. Outputs of an idle step, which replays a batch, are left out, so that over an
    epoch each sample appears once. ``group`` must contain the ranks among which the loader divides samples;
    `ODBDataLoader.gather` finds them for any mesh. Spec: R1.3. Preserves: ONCE.

    Raises: UsageError, on every rank, when a rank does not have one entry per sample, or the group has other ranks.
    """
    check_outputs(outputs)
    if isinstance(outputs, torch.Tensor):
        outputs = outputs.detach().cpu()
    own = [] if info.is_idle else list(map(own_memory, outputs))
    parts = gather_objects((info.local_samples, own), group)
    if len(parts) != info.world_size or sum(samples for samples, _ in parts) != info.global_samples:
        raise UsageError(
            f"gather_samples: these {len(parts)} ranks are not the {info.world_size} among which the loader divides samples, "
            "so samples would be missing or repeated. Call loader.gather([] if info.is_idle else [*outputs]), which knows the "
            "loader's mesh and returns a list for each rank"
        )
    for rank, (samples, part) in enumerate(parts):
        if len(part) != samples:
            name = name_rank(rank, group)
            raise UsageError(
                f"gather_samples: {name} has {len(part)} outputs for the {samples} samples of its batch, step {info.step}"
            )
    return [output for _, part in parts for output in part]
