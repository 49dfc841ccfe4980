"""The torch adapter: `ODBDataLoader` and `StepInfo`, over a standard DataLoader and almost only public torch API."""

from odb_ref.extras import require

require(__name__, "torch", "numpy", extra="torch")

from odb_ref.core.errors import JobError, OdbError, UsageError
from odb_ref.torch.checkpoint import JobState
from odb_ref.torch.epoch.info import StepInfo
from odb_ref.torch.flattening import BoundedShapes, FlattenSamples
from odb_ref.torch.from_dataloader import apply
from odb_ref.torch.gathering import gather_integers, gather_objects, gather_samples
from odb_ref.torch.loader import ODBDataLoader
from odb_ref.torch.micro_batches import MicroBatch, plan_micro_batches
from odb_ref.torch.reading.costs import count_patches
from odb_ref.torch.reading.quarantine import BadSampleWarning
from odb_ref.torch.settings import Batching, Faults, Loss, Protocol

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
    "apply",
    "count_patches",
    "gather_integers",
    "gather_objects",
    "gather_samples",
    "plan_micro_batches",
]
