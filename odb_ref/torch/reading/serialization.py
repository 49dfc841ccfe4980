"""Samples and batches on their way from process to process: as bytes, what is large in an anonymous file.

Sent as it is, each tensor would cost a shared-memory file and a descriptor for as long as it is held: thousands, for a
window of images, where a process may have 1,024 descriptors and a container 64 MB of shared memory. So small tensors travel as
bytes, and the large ones of a sample or batch in one file of memory, which is mapped on arrival. Such a file is no
part of ``/dev/shm``: it takes what memory there is. Some stay open, so that what goes on to a third process need not be copied.
"""

from __future__ import annotations

import copyreg
import errno
import io
import os
import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from multiprocessing.reduction import DupFd
from pathlib import Path
from typing import Final, Protocol

import numpy as np
import torch

from odb_ref.core.errors import OdbError

LARGE_BYTES: Final = 1 << 18
"""Tensors and arrays from this size on go through a file of memory, where the system has such files."""

_ALIGNED: Final = 64
"""Bytes of which a part of such a file begins at a multiple."""

OPEN_SHARE: Final = 4
"""One in so many of the descriptors that a process may have is for files that stay open."""

_NUMBER_BYTES: Final = 8

_DESCRIPTORS: Final = Path("/proc/self/fd")
"""Where Linux shows the files that a process has open, by name."""


class TransferError(OdbError, MemoryError):
    """There is no memory, or no descriptor, for what one process hands to another."""


def _make_tensor(data: bytearray | memoryview, dtype: str, shape: tuple[int, ...] | None) -> torch.Tensor:
    # Half the time of the way around by torch, which is for what NumPy does not know.
    array = np.frombuffer(data, dtype)
    return torch.from_numpy(array if shape is None else array.reshape(shape))


def _make_other_tensor(data: bytearray | memoryview, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    if not len(data):
        return torch.empty(shape, dtype=dtype, device="cpu")
    return torch.frombuffer(data, dtype=dtype).reshape(shape)


def _is_plain(value: torch.Tensor) -> bool:
    return (
        value.device.type == "cpu"
        and value.layout == torch.strided
        and not value.requires_grad
        and not value.is_quantized
        and not value.is_conj()
        and not value.is_neg()
    )


def _reduce(tensor: torch.Tensor) -> str | tuple[object, ...]:
    try:
        array = tensor.numpy()  # fails where one of the questions of `_is_plain` does, and takes less than asking them
    except (TypeError, RuntimeError):
        if not _is_plain(tensor):
            return tensor.__reduce_ex__(5)  # type: ignore[no-untyped-call, no-any-return]
        # bfloat16, and other types that NumPy does not know.
        raw = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
        return _make_other_tensor, (pickle.PickleBuffer(raw.data), tensor.dtype, tuple(tensor.shape))
    whole = pickle.PickleBuffer(np.ascontiguousarray(array).data)
    return _make_tensor, (whole, array.dtype.str, None if array.ndim == 1 else array.shape)


class _Reducers(dict[type, Callable[[torch.Tensor], str | tuple[object, ...]]]):
    """How to take apart tensors, and what is registered with `copyreg`: asked about what pickle does not know by itself."""

    def __missing__(self, kind: type) -> Callable[[torch.Tensor], str | tuple[object, ...]]:
        return copyreg.dispatch_table[kind]


class _Packer(pickle.Pickler):
    dispatch_table = _Reducers({torch.Tensor: _reduce})  # type: ignore[assignment]


class Descriptor(Protocol):
    """A file descriptor on its way to another process."""

    def detach(self) -> int:
        """Returns the descriptor, now of this process."""
        ...


Content = Descriptor | bytes
Open = Callable[[bytes, tuple[int, ...], Content], "Packed"]


class _File:
    """A file of memory that is open here; it is closed when nobody needs it any more."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor

    def __del__(self) -> None:
        os.close(self.descriptor)


@dataclass(frozen=True, slots=True)
class Packed:
    """A sample or batch as bytes, and the memory of its large tensors and arrays."""

    data: bytes
    large: tuple[memoryview, ...]
    file: _File | None = None
    """The one that the large ones came in, and lie in, where it is still open."""

    def unpack(self) -> object:
        """Returns the sample, made anew but for what is large."""
        sample: object = pickle.loads(self.data, buffers=self.large)
        return sample

    def __deepcopy__(self, memo: dict[int, object]) -> Packed:
        return Packed(self.data, tuple(memoryview(bytearray(part)) for part in self.large))

    def __reduce__(self) -> tuple[Open, tuple[bytes, tuple[int, ...], Content]]:
        content = _make_content(self.large) if self.file is None else _lend(self.file.descriptor)
        return _open, (self.data, tuple(map(len, self.large)), content)


def _lend(descriptor: int) -> Descriptor:
    lent: Descriptor = DupFd(descriptor)
    return lent


def _make_content(large: Sequence[memoryview]) -> Content:
    """Returns all parts one after another, each where a view of any type may begin: in a file of memory, or as bytes where
    there are no such files or nothing to put in.
    """
    parts = [piece for part in large for piece in (part, memoryview(bytes(-len(part) % _ALIGNED)))]
    if not parts or not hasattr(os, "memfd_create") or not _DESCRIPTORS.exists():
        return b"".join(parts)
    try:
        file = os.memfd_create("odb")
        try:
            for part in parts:
                written = 0
                while written < len(part):
                    written += os.write(file, part[written:])
            return _lend(file)
        finally:
            os.close(file)
    except OSError as error:
        raise _explain(error, sum(map(len, parts))) from error


def _open(data: bytes, sizes: tuple[int, ...], content: Content) -> Packed:
    if not sizes:
        return Packed(data, ())
    ends = list(accumulate(size + -size % _ALIGNED for size in sizes))
    whole, file = _read_content(content, ends[-1])
    large = [whole[first : first + size] for first, size in zip((0, *ends), sizes, strict=False)]
    return Packed(data, tuple(large), file)


def _read_content(content: Content, nbytes: int) -> tuple[memoryview, _File | None]:
    """Returns the content in memory, which holds no descriptor, and the file that it lies in, if that stays open."""
    if isinstance(content, bytes):
        return memoryview(bytearray(content)), None
    try:
        descriptor = content.detach()
    except OSError as error:
        raise _explain(error, nbytes) from error
    except EOFError as error:  # all that is heard of what fails in the process that sends
        raise TransferError(
            "no file descriptor left in the process that hands over a tensor, or it is gone: "
            "close files that the data set keeps open, or raise the limit (ulimit -n)"
        ) from error
    file = _File(descriptor)
    try:
        # Maps the file, and closes what it has opened: a map of Python's own would keep a descriptor.
        path = str(_DESCRIPTORS / str(descriptor))
        whole = torch.from_file(path, shared=True, size=nbytes, dtype=torch.uint8)
    except RuntimeError as error:
        raise TransferError(f"{nbytes / 2**20:.1f} MiB of tensors cannot be mapped: {error}") from error
    return whole.numpy().data, file if _may_stay_open(descriptor) else None


def _may_stay_open(descriptor: int) -> bool:
    """Returns True while few files are open: the lowest number that is free is given out. Most are left to the user."""
    limit = os.sysconf("SC_OPEN_MAX")
    return limit < 0 or descriptor < limit // OPEN_SHARE


def _explain(error: OSError, nbytes: int) -> OSError | TransferError:
    """Returns what to do about a full machine; the error itself where it is of another kind."""
    if error.errno in (errno.ENOMEM, errno.ENOSPC):
        return TransferError(
            f"no memory left to hand over {nbytes / 2**20:.1f} MiB of tensors ({os.strerror(error.errno)}): "
            "bound what is held with Batching(window_bytes=), lower num_workers= or prefetch_factor=, or give the process more "
            "memory"
        )
    if error.errno in (errno.EMFILE, errno.ENFILE):
        return TransferError(
            f"no file descriptor left to hand over a tensor ({os.strerror(error.errno)}): "
            "close files that the data set keeps open, or raise the limit (ulimit -n)"
        )
    return error


def pack(sample: object) -> Packed:
    """Returns the sample as bytes; as it is where it is packed.

    Raises: what pickling raises.
    """
    if isinstance(sample, Packed):
        return sample
    file, large = io.BytesIO(), list[memoryview]()

    def keep(buffer: pickle.PickleBuffer) -> bool:
        """Returns True for what is small: it becomes a part of the bytes."""
        memory = buffer.raw()
        if memory.nbytes >= LARGE_BYTES:
            large.append(memory)
        return memory.nbytes < LARGE_BYTES

    _Packer(file, protocol=5, buffer_callback=keep).dump(sample)
    return Packed(file.getvalue(), tuple(large))


def count_bytes(sample: object) -> int:
    """Returns about how many bytes a sample takes: a function of it alone, in whichever process, packed or not. Spec: R2.3.

    Raises: what pickling raises, where it has parts of another kind than these.
    """
    match sample:
        case torch.Tensor() | np.ndarray() | np.generic():
            return sample.nbytes
        case str() | bytes() | bytearray():
            return len(sample)
        case None | bool() | int() | float() | complex():
            return _NUMBER_BYTES
        case Mapping():
            return sum(count_bytes(key) + count_bytes(value) for key, value in sample.items())
        case list() | tuple() | set() | frozenset():
            return sum(map(count_bytes, sample))
        case _:
            return len(pickle.dumps(sample, protocol=5))


def unpack(sample: object) -> object:
    """Returns a sample as the data set gave it, whether it was packed or not."""
    return sample.unpack() if isinstance(sample, Packed) else sample
