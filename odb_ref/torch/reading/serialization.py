"""Samples and batches on their way from process to process: as bytes, their large tensors in an anonymous file.

Sent as it is, each tensor would cost a shared-memory file and a descriptor for as long as it is held: thousands, for a
window of images, where a process may have 1,024 descriptors and a container 64 MB of shared memory. So small tensors travel as
bytes, and the large ones of a sample or batch in one file of memory, which is mapped on arrival. Such a file is no
part of ``/dev/shm``: it takes what memory there is. Some stay open, so that what goes on to a third process need not be copied.
"""

from __future__ import annotations

import copyreg
import errno
import io
import math
import os
import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.reduction import DupFd
from pathlib import Path
from typing import Final, Protocol

import numpy as np
import torch

from odb_ref.core.errors import OdbError

LARGE_BYTES: Final = 1 << 18
"""Tensors from this size on go through a file of memory, where the system has such files."""

OPEN_SHARE: Final = 4
"""One in so many of the descriptors that a process may have is for files that stay open."""

_NUMBER_BYTES: Final = 8

_DESCRIPTORS: Final = Path("/proc/self/fd")
"""Where Linux shows the files that a process has open, by name."""


class TransferError(OdbError, MemoryError):
    """There is no memory, or no descriptor, for what one process hands to another."""


FromBytes = Callable[[bytearray, str, tuple[int, ...] | None], torch.Tensor]
Rebuild = Callable[[bytes, torch.dtype, tuple[int, ...]], torch.Tensor]
Reduced = (
    tuple[FromBytes, tuple[bytearray, str, tuple[int, ...] | None]]
    | tuple[Rebuild, tuple[bytes, torch.dtype, tuple[int, ...]]]
)


def _unpack_array(data: bytearray, dtype: str, shape: tuple[int, ...] | None) -> torch.Tensor:
    # Half the time of the way around by torch, which is for what NumPy does not know.
    array = np.frombuffer(data, dtype)
    return torch.from_numpy(array if shape is None else array.reshape(shape))


def _unpack_tensor(data: bytes, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    if not data:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(bytearray(data), dtype=dtype).reshape(shape)


def _is_plain(value: object) -> bool:
    return (
        type(value) is torch.Tensor
        and value.device.type == "cpu"
        and value.layout == torch.strided
        and not value.requires_grad
        and not value.is_quantized
        and not value.is_conj()
        and not value.is_neg()
    )


class _LargeFound(Exception):
    """A sample holds a large tensor."""


def _reduce(tensor: torch.Tensor) -> Reduced | str | tuple[object, ...]:
    try:
        array = tensor.numpy()  # fails where one of the questions of `_is_plain` does, and takes less than asking them
    except (TypeError, RuntimeError):
        if not _is_plain(tensor):
            return tensor.__reduce_ex__(5)  # type: ignore[no-untyped-call, no-any-return]
        # bfloat16, and other types that NumPy does not know.
        if tensor.nbytes >= LARGE_BYTES:
            raise _LargeFound from None
        data = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""
        return _unpack_tensor, (data, tensor.dtype, tuple(tensor.shape))
    if array.nbytes >= LARGE_BYTES:
        raise _LargeFound
    # Of memory, not of the array: the number in an array without dimensions would be taken for a length.
    return _unpack_array, (bytearray(array.data), array.dtype.str, None if array.ndim == 1 else array.shape)


Reduce = Callable[[torch.Tensor], Reduced | str | tuple[object, ...]]


class _Reducers(dict[type, Reduce]):
    """How to take apart tensors, and what is registered with `copyreg`: asked about what pickle does not know by itself."""

    def __missing__(self, kind: type) -> Reduce:
        return copyreg.dispatch_table[kind]


class _SmallPacker(pickle.Pickler):
    """For samples without large tensors."""

    dispatch_table = _Reducers({torch.Tensor: _reduce})  # type: ignore[assignment]


class _Packer(_SmallPacker):
    """Leaves the large tensors out: it is asked about every object."""

    def __init__(self, file: io.BytesIO, large: list[torch.Tensor]) -> None:
        super().__init__(file, protocol=5)
        self._large = large

    def persistent_id(self, obj: object) -> int | None:
        if type(obj) is torch.Tensor and _is_plain(obj) and obj.nbytes >= LARGE_BYTES:
            self._large.append(obj)
            return len(self._large) - 1
        return None


class _Unpacker(pickle.Unpickler):
    def __init__(self, data: bytes, large: tuple[torch.Tensor, ...]) -> None:
        super().__init__(io.BytesIO(data))
        self._large = large

    def persistent_load(self, pid: int) -> torch.Tensor:
        return self._large[pid]


class Descriptor(Protocol):
    """A file descriptor on its way to another process."""

    def detach(self) -> int:
        """Returns the descriptor, now of this process."""
        ...


Shape = tuple[torch.dtype, tuple[int, ...]]
Content = Descriptor | bytes
Open = Callable[[bytes, tuple[Shape, ...], Content], "Packed"]


class _File:
    """A file of memory that is open here; it is closed when nobody needs it any more."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor

    def __del__(self) -> None:
        os.close(self.descriptor)


@dataclass(frozen=True, slots=True)
class Packed:
    """A sample or batch as bytes, and its large tensors."""

    data: bytes
    large: tuple[torch.Tensor, ...]
    file: _File | None = None
    """The one that the large tensors came in, and lie in, where it is still open."""

    def unpack(self) -> object:
        """Returns the sample, made anew but for its large tensors."""
        sample: object = _Unpacker(self.data, self.large).load() if self.large else pickle.loads(self.data)
        return sample

    def __deepcopy__(self, memo: dict[int, object]) -> Packed:
        return Packed(self.data, tuple(tensor.clone() for tensor in self.large))

    def __reduce__(self) -> tuple[Open, tuple[bytes, tuple[Shape, ...], Content]]:
        tensors = [tensor.contiguous() for tensor in self.large]
        shapes = tuple((tensor.dtype, tuple(tensor.shape)) for tensor in tensors)
        if self.file is not None:
            return _open, (self.data, shapes, _lend(self.file.descriptor))
        return _open, (self.data, shapes, _make_content([_view_bytes(tensor) for tensor in tensors]))


def _lend(descriptor: int) -> Descriptor:
    lent: Descriptor = DupFd(descriptor)
    return lent


def _view_bytes(tensor: torch.Tensor) -> memoryview:
    """Returns the memory of a contiguous tensor."""
    array = tensor.reshape(-1).view(torch.uint8).numpy()
    return array.data


def _make_content(parts: Sequence[memoryview]) -> Content:
    """Returns all parts one after another: in a file of memory, or as bytes where there are no such files or nothing to put
    in.
    """
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


def _open(data: bytes, shapes: tuple[Shape, ...], content: Content) -> Packed:
    if not shapes:
        return Packed(data, ())
    whole, file = _read_content(content, sum(math.prod(shape) * dtype.itemsize for dtype, shape in shapes))
    tensors: list[torch.Tensor] = []
    offset = 0
    for dtype, shape in shapes:
        end = offset + math.prod(shape) * dtype.itemsize
        part = whole[offset:end]
        # A view needs the alignment of its type, which the tensor before may have spoilt.
        part = part if offset % dtype.itemsize == 0 else part.clone()
        tensors.append(part.view(dtype).reshape(shape))
        offset = end
    return Packed(data, tuple(tensors), file)


def _read_content(content: Content, nbytes: int) -> tuple[torch.Tensor, _File | None]:
    """Returns the content as a tensor of bytes, which holds no descriptor, and the file that it lies in, if that stays open."""
    if isinstance(content, bytes):
        return torch.frombuffer(bytearray(content), dtype=torch.uint8), None
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
    return whole, file if _may_stay_open(descriptor) else None


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
    file = io.BytesIO()
    try:
        _SmallPacker(file, protocol=5).dump(sample)
    except _LargeFound:
        file = io.BytesIO()
        large: list[torch.Tensor] = []
        _Packer(file, large).dump(sample)
        return Packed(file.getvalue(), tuple(large))
    return Packed(file.getvalue(), ())


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
