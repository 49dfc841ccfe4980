"""odb-ref: online dynamic batching you can check. `odb_ref.core` is the protocol, `odb_ref.torch` the DataLoader.

The names a training script needs are here too. Each is imported on first access, because the core and the simulator need no
torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from odb_ref.core.errors import JobError, OdbError, UsageError
    from odb_ref.plan import plan_all, plan_rank, plan_ranks
    from odb_ref.torch import StepInfo
    from odb_ref.torch.checkpoint import JobState
    from odb_ref.torch.flattening import BoundedShapes, FlattenSamples
    from odb_ref.torch.from_dataloader import apply
    from odb_ref.torch.gathering import gather_integers, gather_objects, gather_samples
    from odb_ref.torch.loader import ODBDataLoader
    from odb_ref.torch.micro_batches import MicroBatch, plan_micro_batches
    from odb_ref.torch.reading.costs import count_patches
    from odb_ref.torch.reading.quarantine import BadSampleWarning
    from odb_ref.torch.settings import Batching, Faults, Loss, Protocol

__version__ = "0.1.0"

__all__ = [
    "BadSampleWarning",
    "Batching",
    "BoundedShapes",
    "Faults",
    "FlattenSamples",
    "JobError",
    "JobState",
    "Loss",
    "MicroBatch",
    "ODBDataLoader",
    "OdbError",
    "Protocol",
    "StepInfo",
    "UsageError",
    "__version__",
    "apply",
    "count_patches",
    "gather_integers",
    "gather_objects",
    "gather_samples",
    "plan_all",
    "plan_micro_batches",
    "plan_rank",
    "plan_ranks",
]

_CORE: Final = dict.fromkeys(("JobError", "OdbError", "UsageError"), "odb_ref.core.errors") | dict.fromkeys(
    ("plan_all", "plan_rank", "plan_ranks"), "odb_ref.plan"
)
"""The names that need no torch, and their modules."""


def __getattr__(name: str) -> object:
    if name == "pop_step_info":
        raise ImportError("odb_ref.pop_step_info is loader.steps() now: for batch, info in loader.steps()")
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(import_module(_CORE.get(name, "odb_ref.torch")), name)
    globals()[name] = value  # so that the next access finds it directly
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
