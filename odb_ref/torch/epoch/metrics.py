"""Counters of an epoch."""

from __future__ import annotations

from dataclasses import dataclass
from operator import add

from odb_ref.torch.epoch.info import StepInfo
from odb_ref.torch.reading.costs import Resources


@dataclass(slots=True)
class EpochMetrics:
    """Counters of one epoch on one rank."""

    started_s: float
    steps: int = 0
    idle_steps: int = 0
    samples: int = 0
    real_tokens: int = 0
    padded_tokens: int = 0
    budgets_tokens: int = 0
    """The sum of the budgets in force, over all steps."""
    budget_tokens: int = 0
    """The budget in force in the step taken last."""
    global_tokens: int = 0
    """Real tokens over all ranks."""
    costs: tuple[int, ...] = ()
    """Amounts of further resources, summed."""
    data_wait_s: float = 0.0
    first_step_s: float = 0.0

    def note_wait(self, began_s: float, now_s: float) -> None:
        """Adds the time that the trainer waited for a step."""
        self.data_wait_s += now_s - began_s
        if not self.steps:
            self.first_step_s = now_s - self.started_s

    def count(self, info: StepInfo, budget_tokens: int) -> None:
        """Adds a step that was taken, under this budget."""
        self.steps += 1
        self.idle_steps += info.is_idle
        self.samples += info.local_samples
        self.real_tokens += info.local_tokens
        self.padded_tokens += info.padded_tokens
        self.budgets_tokens += budget_tokens
        self.budget_tokens = budget_tokens
        self.global_tokens += info.global_tokens
        self.costs = tuple(map(add, self.costs, info.local_costs)) if self.costs else info.local_costs

    def describe(self, resources: Resources, world_size: int) -> dict[str, float]:
        """Returns the counters by slash-prefixed name."""
        budgets_tokens = max(1, self.budgets_tokens)
        costs = self.costs or (0,) * len(resources.limits)
        found: dict[str, float] = {f"odb/{name}": cost for name, cost in zip(resources.names, costs, strict=True)}
        return found | {
            "odb/steps": self.steps,
            "odb/idle_steps": self.idle_steps,
            "odb/samples": self.samples,
            "odb/tokens": self.real_tokens,
            "odb/token_budget": self.budget_tokens,
            "odb/padding_ratio": 1 - self.real_tokens / self.padded_tokens if self.padded_tokens else 0.0,
            "odb/fill": self.real_tokens / budgets_tokens,
            "odb/efficiency": self.global_tokens / (world_size * budgets_tokens),
            "odb/data_wait_s": self.data_wait_s,
            "odb/first_step_s": self.first_step_s,
        }
