"""What an epoch begins with, hands out and counts, on one rank."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from operator import add

from odb_ref.core.resume import Checkpoint
from odb_ref.core.types import Step, StepCounts, compute_padded_tokens, compute_real_tokens
from odb_ref.torch.costs import Resources, compute_costs
from odb_ref.torch.engine import ReadPlan
from odb_ref.torch.quarantine import Quarantine
from odb_ref.torch.state import Place


@dataclass(frozen=True, slots=True)
class Taken:
    """A step as the consumer takes it."""

    step: Step
    batch: object
    window: StepCounts
    """Global counts of its accumulation window."""
    emitted_samples: int
    is_last: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochStart:
    """Where an epoch begins. ``get_id`` names the sample at a place of the sampler's order."""

    plan: ReadPlan
    get_id: Callable[[int], int]
    read_ahead: int
    place: Place
    quarantine: Quarantine

    @property
    def checkpoint(self) -> Checkpoint | None:
        """None at the very beginning of an epoch."""
        return self.place.checkpoint


def make_empty_start() -> EpochStart:
    """The start of an epoch of which nothing is read."""
    quarantine = Quarantine(lambda place: place, max_bad=0, total_samples=0)
    return EpochStart(
        plan=ReadPlan(keys=()), get_id=lambda place: place, read_ahead=1, place=Place(), quarantine=quarantine
    )


@dataclass(slots=True)
class EpochMetrics:
    """Counters of one epoch on one rank."""

    steps: int = 0
    idle_steps: int = 0
    samples: int = 0
    real_tokens: int = 0
    padded_tokens: int = 0
    costs: tuple[int, ...] = ()
    """Amounts of further resources."""
    data_wait_s: float = 0.0
    first_step_s: float = 0.0
    started_s: float = field(default_factory=time.monotonic)

    def count(self, step: Step) -> None:
        """Adds a step that was taken."""
        self.steps += 1
        self.idle_steps += step.is_idle
        self.samples += len(step.group)
        self.real_tokens += compute_real_tokens(step.group)
        self.padded_tokens += compute_padded_tokens(step.group)
        if costs := compute_costs(step.group):
            self.costs = tuple(map(add, self.costs, costs)) if self.costs else costs

    def describe(self, budget_tokens: int, resources: Resources) -> dict[str, float]:
        """The counters by slash-prefixed name."""
        costs = self.costs or (0,) * len(resources.limits)
        found: dict[str, float] = {f"odb/{name}": cost for name, cost in zip(resources.names, costs, strict=True)}
        return found | {
            "odb/steps": self.steps,
            "odb/idle_steps": self.idle_steps,
            "odb/samples": self.samples,
            "odb/tokens": self.real_tokens,
            "odb/padding_ratio": 1 - self.real_tokens / self.padded_tokens if self.padded_tokens else 0.0,
            "odb/fill": self.real_tokens / (self.steps * budget_tokens) if self.steps else 0.0,
            "odb/data_wait_s": self.data_wait_s,
            "odb/first_step_s": self.first_step_s,
        }
