"""Samples on their way from a worker to the process that collates them: as bytes.

Sent as it is, each tensor of a sample would cost a shared-memory file and a descriptor, which for the short tensors of text is
many times the price of copying them. Large tensors still go by shared memory.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch

LARGE_BYTES: Final = 1 << 18
"""Tensors from this size on go by shared memory."""

Rebuild = Callable[[bytes, torch.dtype, tuple[int, ...]], torch.Tensor]
FromBytes = Callable[[bytes, str, tuple[int, ...]], torch.Tensor]


def _unpack_array(data: bytes, dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
    # Half the time of the way around by torch, which is for what NumPy does not know.
    return torch.from_numpy(np.frombuffer(bytearray(data), dtype).reshape(shape))


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


Reduction = (
    tuple[Rebuild, tuple[bytes, torch.dtype, tuple[int, ...]]] | tuple[FromBytes, tuple[bytes, str, tuple[int, ...]]]
)


def _reduce(tensor: torch.Tensor) -> Reduction:
    try:
        array = tensor.numpy()
    except TypeError:  # bfloat16 and other types that NumPy does not know
        data = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""
        return _unpack_tensor, (data, tensor.dtype, tuple(tensor.shape))
    return _unpack_array, (array.tobytes(), array.dtype.str, array.shape)


class _LargeFound(Exception):
    """A sample holds a large tensor."""


class _SmallPacker(pickle.Pickler):
    """For samples without large tensors: asks nothing about what is no tensor."""

    def reducer_override(self, obj: object) -> Reduction:
        if type(obj) is torch.Tensor and _is_plain(obj):
            if obj.nbytes >= LARGE_BYTES:
                raise _LargeFound
            return _reduce(obj)
        return NotImplemented  # type: ignore[no-any-return]


class _Packer(_SmallPacker):
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


@dataclass(frozen=True, slots=True)
class Packed:
    """A sample as bytes, and its large tensors."""

    data: bytes
    large: tuple[torch.Tensor, ...]

    def unpack(self) -> object:
        """The sample, made anew."""
        sample: object = _Unpacker(self.data, self.large).load() if self.large else pickle.loads(self.data)
        return sample

    def __reduce__(self) -> tuple[type[Packed], tuple[bytes, tuple[torch.Tensor, ...]]]:
        return Packed, (self.data, self.large)  # a fraction of the time that dataclasses take by themselves


def pack(sample: object) -> Packed:
    """The sample as bytes.

    Raises: what pickling raises.
    """
    file = io.BytesIO()
    try:
        _SmallPacker(file, protocol=5).dump(sample)
    except _LargeFound:
        file = io.BytesIO()
        large: list[torch.Tensor] = []
        _Packer(file, large).dump(sample)
        return Packed(file.getvalue(), tuple(large))
    return Packed(file.getvalue(), ())


def unpack(sample: object) -> object:
    """A sample as the data set gave it, whether it was packed or not."""
    return sample.unpack() if isinstance(sample, Packed) else sample
