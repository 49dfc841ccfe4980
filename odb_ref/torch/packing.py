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

import torch

LARGE_BYTES: Final = 1 << 18
"""Tensors from this size on go by shared memory."""

Rebuild = Callable[[bytes, torch.dtype, tuple[int, ...]], torch.Tensor]


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


class _Packer(pickle.Pickler):
    def __init__(self, file: io.BytesIO, large: list[torch.Tensor]) -> None:
        super().__init__(file, protocol=5)
        self._large = large

    def persistent_id(self, obj: object) -> int | None:
        if type(obj) is torch.Tensor and _is_plain(obj) and obj.nbytes >= LARGE_BYTES:
            self._large.append(obj)
            return len(self._large) - 1
        return None

    def reducer_override(self, obj: object) -> tuple[Rebuild, tuple[object, ...]]:
        if type(obj) is torch.Tensor and _is_plain(obj):
            data = obj.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if obj.numel() else b""
            return _unpack_tensor, (data, obj.dtype, tuple(obj.shape))
        return NotImplemented  # type: ignore[no-any-return]


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
        sample: object = _Unpacker(self.data, self.large).load()
        return sample


def pack(sample: object) -> Packed:
    """The sample as bytes.

    Raises: what pickling raises.
    """
    file = io.BytesIO()
    large: list[torch.Tensor] = []
    _Packer(file, large).dump(sample)
    return Packed(file.getvalue(), tuple(large))


def unpack(sample: object) -> object:
    """A sample as the data set gave it, whether it was packed or not."""
    return sample.unpack() if isinstance(sample, Packed) else sample
