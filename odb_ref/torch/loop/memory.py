"""How much memory something takes, and whether an error says that there was too little."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from types import ModuleType
from typing import Final, Protocol, TypeVar

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

Run = Callable[[], object]
Result = TypeVar("Result")


class Operation(Protocol):
    """What a mode is given to run in its place."""

    def __call__(self, *args: object, **kwargs: object) -> object:
        """Runs it."""


_TEXTS: Final = ("out of memory", "DefaultCPUAllocator: can't allocate memory", "CUBLAS_STATUS_ALLOC_FAILED")
"""How the allocators and libraries say it that raise a plain RuntimeError."""


def is_out_of_memory(error: BaseException) -> bool:
    """Returns True when the error says that memory has run out, on the accelerator or on the host."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _TEXTS)


def attempt(run: Callable[[], Result]) -> tuple[Result | None, str]:
    """Returns what ``run`` does; or None and why, when memory runs out: no frame that held tensors is left then."""
    try:
        return run(), ""
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        return None, str(error) or type(error).__name__


def _find_device() -> ModuleType | None:
    """Returns ``torch.cuda``, or what stands for another accelerator; None without one.

    ``torch.accelerator`` itself has known of memory only since torch 2.9.
    """
    return torch.get_device_module() if torch.accelerator.is_available() else None


def release_memory() -> None:
    """Gives back what a failed attempt may still hold: cycles of its frames, and blocks that the allocator keeps."""
    gc.collect()
    if (device := _find_device()) is not None:
        device.empty_cache()


def reserve_memory(size: int, device: torch.device) -> None:
    """Allocates so many bytes and gives them back, which the allocator then has at hand.

    Raises: what says that memory has run out.
    """
    torch.empty(size, dtype=torch.uint8, device=device)


def measure_peak(run: Run) -> int:
    """Returns the most bytes held at once while ``run`` runs, those it uses and has not made included.

    On an accelerator as its allocator counts; elsewhere, and for fake tensors, as the tensors' storages say.
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
    """Returns what this process may hold of the accelerator's memory: what is free, and what it holds already, but no more
    than ``set_per_process_memory_fraction`` leaves it; None without an accelerator.
    """
    if (device := _find_device()) is None:
        return None
    free, total = device.mem_get_info()
    share = device.get_per_process_memory_fraction() if hasattr(device, "get_per_process_memory_fraction") else 1.0
    return int(min(free + device.memory_reserved(), share * total))


class _StorageTracker(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Adds up the storages of every tensor that an operation takes or gives, for as long as each lives."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak_bytes = 0
        self._held_bytes = 0
        self._known: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def __torch_dispatch__(
        self,
        func: Operation,
        types: object,
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        self._note((args, kwargs))
        result = func(*args, **(kwargs or {}))
        self._note(result)
        return result

    def _note(self, tree: object) -> None:
        for leaf in tree_leaves(tree):
            if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided:
                self._add(leaf.untyped_storage())
        self.peak_bytes = max(self.peak_bytes, self._held_bytes)

    def _add(self, storage: torch.UntypedStorage) -> None:
        key, size = id(storage), storage.nbytes()
        if key in self._known:
            return

        def forget(_: object) -> None:
            del self._known[key]
            self._held_bytes -= size

        self._known[key] = weakref.ref(storage, forget)
        self._held_bytes += size
