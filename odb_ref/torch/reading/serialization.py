"""Packs samples and batches for transfer between processes: as bytes, with large parts in an anonymous file.

By default, each tensor would take a shared-memory file and a descriptor for as long as it is held. A window of images would
need thousands, where a process may have 1,024 descriptors and a container 64 MB of shared memory. So small tensors travel as
bytes, and all large ones of a sample or batch in one memory file, which the receiver maps. Such a file is not in ``/dev/shm``
and may use all free memory. Some files stay open, so that they can be passed on to a third process without a copy.
"""

from __future__ import annotations

import errno
import io
import os
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from multiprocessing.reduction import DupFd
from pathlib import Path
from typing import Final, Protocol

import numpy as np
import torch

from odb_ref.core.errors import OdbError, UsageError
from odb_ref.torch.reading.description import describe

LARGE_BYTES: Final = 1 << 18
"""Tensors and arrays of at least this size go through a memory file, if the system supports these."""

_ALIGNED: Final = 64
"""Each part of such a file begins at a multiple of this many bytes."""

OPEN_SHARE: Final = 4
"""Files that stay open may use one in this many of the descriptors that a process may have."""

_NUMBER_BYTES: Final = 8

_DESCRIPTORS: Final = Path("/proc/self/fd")
"""The directory in which Linux lists the open files of a process."""


class TransferError(OdbError, MemoryError):
    """There is not enough memory, or no descriptor left, to hand something to another process."""


def _make_tensor(data: bytearray | memoryview, dtype: str, shape: tuple[int, ...] | None) -> torch.Tensor:
    # Twice as fast as torch.frombuffer, which is only needed for types that NumPy lacks.
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
        array = tensor.numpy()  # fails for all tensors that `_is_plain` rejects, and is faster than checking first
    except (TypeError, RuntimeError):
        if not _is_plain(tensor):
            return tensor.__reduce_ex__(5)  # type: ignore[no-untyped-call, no-any-return]
        # bfloat16, and other types that NumPy lacks.
        raw = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
        return _make_other_tensor, (pickle.PickleBuffer(raw.data), tensor.dtype, tuple(tensor.shape))
    whole = pickle.PickleBuffer(np.ascontiguousarray(array).data)
    return _make_tensor, (whole, array.dtype.str, None if array.ndim == 1 else array.shape)


class _Packer(pickle.Pickler):
    def reducer_override(self, item: object) -> object:  # type: ignore[override]
        return _reduce(item) if type(item) is torch.Tensor else NotImplemented


class Descriptor(Protocol):
    """A file descriptor on its way to another process."""

    def detach(self) -> int:
        """Returns the descriptor, which then belongs to this process."""


Content = Descriptor | bytes


class _File:
    """An open memory file. It is closed when the last reference to this object goes."""

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
    """The file that holds the large parts, if it is still open."""

    def unpack(self) -> object:
        """Rebuilds the sample. Its large parts share the memory of this object."""
        sample: object = pickle.loads(self.data, buffers=self.large)
        return sample

    def __deepcopy__(self, memo: dict[int, object]) -> Packed:
        return Packed(self.data, tuple(memoryview(bytearray(part)) for part in self.large))

    def __reduce__(self) -> tuple[object, ...]:
        content = _make_content(self.large) if self.file is None else _lend(self.file.descriptor)
        return _open, (self.data, tuple(map(len, self.large)), content)


def _lend(descriptor: int) -> Descriptor:
    lent: Descriptor = DupFd(descriptor)
    return lent


def _make_content(large: Sequence[memoryview]) -> Content:
    """Returns all parts in a row, each aligned for a view of any type. They are in a memory file, or in bytes if there are no
    parts or no such files.
    """
    parts = [piece for part in large for piece in (part, memoryview(bytes(-len(part) % _ALIGNED)))]
    if not parts or not hasattr(os, "memfd_create") or not _DESCRIPTORS.exists():
        return b"".join(parts)
    try:
        with open(os.memfd_create("odb"), "wb") as file:
            file.writelines(parts)
            file.flush()
            return _lend(file.fileno())
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
    """Returns the content as memory, which holds no descriptor, and its file, if that stays open."""
    if isinstance(content, bytes):
        return memoryview(bytearray(content)), None
    try:
        descriptor = content.detach()
    except OSError as error:
        raise _explain(error, nbytes) from error
    except EOFError as error:  # the only sign of a failure in the sending process
        raise TransferError(
            "the process that hands over a tensor has no file descriptor left, or is gone: close files that the data set "
            "keeps open, or raise the limit (ulimit -n)"
        ) from error
    file = _File(descriptor)
    try:
        # This maps the file and closes its own descriptor. Python's mmap would keep one.
        path = str(_DESCRIPTORS / str(descriptor))
        whole = torch.from_file(path, shared=True, size=nbytes, dtype=torch.uint8)
    except RuntimeError as error:
        raise TransferError(f"{nbytes / 2**20:.1f} MiB of tensors cannot be mapped: {error}") from error
    # It stays open while few files are, judging by the lowest free descriptor. Most descriptors are left to the user.
    limit = os.sysconf("SC_OPEN_MAX")
    return whole.numpy().data, file if limit < 0 or descriptor < limit // OPEN_SHARE else None


def _explain(error: OSError, nbytes: int) -> OSError | TransferError:
    """Returns an error with advice if memory or descriptors ran out; otherwise the error itself."""
    if error.errno in (errno.ENOMEM, errno.ENOSPC):
        return TransferError(
            f"no memory left to hand over {nbytes / 2**20:.1f} MiB of tensors ({os.strerror(error.errno)}): limit the samples "
            "held with Batching(window_bytes=), lower num_workers= or prefetch_factor=, or give the process more memory"
        )
    if error.errno in (errno.EMFILE, errno.ENFILE):
        return TransferError(
            f"no file descriptor left to hand over a tensor ({os.strerror(error.errno)}): "
            "close files that the data set keeps open, or raise the limit (ulimit -n)"
        )
    return error


def pack(sample: object, *, what: str = "a sample") -> Packed:
    """Packs a sample or a batch, unless it is packed already. Raises: UsageError when a part of it cannot be pickled."""
    if isinstance(sample, Packed):
        return sample
    file, large = io.BytesIO(), list[memoryview]()

    def keep(buffer: pickle.PickleBuffer) -> bool:
        """Returns True for a small buffer, which is then stored in the bytes."""
        memory = buffer.raw()
        if memory.nbytes >= LARGE_BYTES:
            large.append(memory)
        return memory.nbytes < LARGE_BYTES

    try:
        _Packer(file, protocol=5, buffer_callback=keep).dump(sample)
    except MemoryError:
        raise
    except Exception as error:  # a part may raise anything: an open file, a lock
        raise UsageError(
            f"{what} cannot be sent to another process ({describe(error)}): with num_workers above 0, it must be possible to "
            "pickle all of it. Leave out what cannot be pickled, or use num_workers=0"
        ) from error
    return Packed(file.getvalue(), tuple(large))


def count_bytes(sample: object) -> int:
    """Returns about how many bytes a sample takes. Depends on the sample only, not on the process. Spec: R2.3.

    Raises: errors from pickling parts of other types than these.
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
    """Returns a sample as the data set yielded it, whether it is packed or not."""
    return sample.unpack() if isinstance(sample, Packed) else sample
