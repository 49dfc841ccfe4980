"""Measures how much memory something takes, and recognizes errors that mean that memory has run out."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from types import ModuleType
from typing import Final, Protocol, TypeVar

import torch
from torch.utils._python_dispatch import TorchDispatchMode

Result = TypeVar("Result")


class Operation(Protocol):
    """An operation that a dispatch mode runs."""

    def __call__(self, *args: object, **kwargs: object) -> object:
        """Runs the operation."""


_TEXTS: Final = ("out of memory", "DefaultCPUAllocator: can't allocate memory", "CUBLAS_STATUS_ALLOC_FAILED")
"""The messages of allocators and libraries that raise a plain RuntimeError."""


def is_out_of_memory(error: BaseException) -> bool:
    """Returns True if the error means that memory has run out, on the accelerator or on the host."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _TEXTS)


def attempt(run: Callable[[], Result]) -> tuple[Result | None, str]:
    """Returns ``run()``'s result and an empty string or, if memory runs out, None and the error text, keeping no frames."""
    try:
        return run(), ""
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        return None, str(error) or type(error).__name__


def _find_device() -> ModuleType | None:
    """Returns ``torch.cuda`` or the module of another accelerator, or None without one.

    ``torch.accelerator`` itself has had memory functions only since torch 2.9.
    """
    return torch.get_device_module() if torch.accelerator.is_available() else None


def release_memory() -> None:
    """Frees what a failed attempt may still hold: reference cycles of its frames, and blocks cached by the allocator."""
    gc.collect()
    if (device := _find_device()) is not None:
        device.empty_cache()


def reserve_memory(size: int, device: torch.device) -> None:
    """Allocates this many bytes and frees them, so that the allocator has them at hand.

    Raises: an error if memory has run out.
    """
    torch.empty(size, dtype=torch.uint8, device=device)


def measure_peak(run: Callable[[], object]) -> int:
    """Returns the most bytes held at once while ``run`` runs, including tensors it uses but did not create.

    On an accelerator its allocator counts. Elsewhere, and for fake tensors, the storages of tensors are added up.
    """
    is_fake = type(torch.empty(0)) is not torch.Tensor
    if (device := _find_device()) is not None and not is_fake:
        device.synchronize()
        device.reset_peak_memory_stats()
        run()
        device.synchronize()
        return int(device.max_memory_allocated())
    tracker = _StorageTracker()
    with tracker:
        run()
    return tracker.peak_bytes


def get_available_bytes() -> int | None:
    """Returns how much of the accelerator's memory this process may hold: what is free plus what it already holds, within the
    limit of ``set_per_process_memory_fraction``. None without an accelerator.
    """
    if (device := _find_device()) is None:
        return None
    free, total = device.mem_get_info()
    share = device.get_per_process_memory_fraction() if hasattr(device, "get_per_process_memory_fraction") else 1.0
    return int(min(free + device.memory_reserved(), share * total))


class _StorageTracker(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Adds up the storages of all tensors that operations take or return, for as long as each storage lives."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak_bytes = 0
        self._held_bytes = 0
        self._known: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def __torch_dispatch__(
        self, func: Operation, types: object, args: tuple[object, ...] = (), kwargs: dict[str, object] | None = None
    ) -> object:
        self._note([*args, *(kwargs or {}).values()])
        result = func(*args, **(kwargs or {}))
        self._note(result)
        return result

    def _note(self, value: object) -> None:
        match value:
            case torch.Tensor() if value.layout is torch.strided:
                self._add(value.untyped_storage())
            case list() | tuple():  # of tensors, as some operations take and return
                for item in value:
                    self._note(item)

    def _add(self, storage: torch.UntypedStorage) -> None:
        key, size = id(storage), storage.nbytes()
        if key in self._known:
            return

        def forget(_: object) -> None:
            del self._known[key]
            self._held_bytes -= size

        self._known[key] = weakref.ref(storage, forget)
        self._held_bytes += size
        self.peak_bytes = max(self.peak_bytes, self._held_bytes)
