"""What an epoch begins with, hands out and counts, on one rank; and what the two ends of a loader tell each other of it.

One end is where samples are read and batches formed: a `Driver` with its machine. The other, the `Outlet`, is where the model
is trained: it holds the ready steps and the exchange. They may be two processes, so what goes from one to the other is values.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from operator import add
from pathlib import Path
from typing import Protocol

from odb_ref.core.config import Config
from odb_ref.core.effects import Post
from odb_ref.core.events import Event
from odb_ref.core.outline import Outline
from odb_ref.core.resume import Checkpoint, RoundStart
from odb_ref.core.types import Step, StepCounts, compute_counts, compute_padded_tokens
from odb_ref.torch.costs import Resources, compute_costs
from odb_ref.torch.quarantine import Quarantine
from odb_ref.torch.state import START, Place


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochStart:
    """Where an epoch begins on this rank, and what is particular to it."""

    keys: Sequence[object] | None
    """The rank's samples of the whole epoch, as its sampler names them in order; None for an iterable data set."""
    place: Place = START
    seed: int = 0
    read_ahead: int = 1
    max_bad: float = 0
    tag: str = ""
    quota_samples: int | None = None
    trace: Path | None = None
    epoch: int = 0
    started_s: float = field(default_factory=time.monotonic)

    @property
    def checkpoint(self) -> Checkpoint | None:
        """None at the very beginning of an epoch."""
        return self.place.checkpoint

    def make_config(self, base: Config) -> Config:
        """The configuration of the epoch."""
        return replace(base, tag=self.tag, quota_samples=self.quota_samples)

    def make_quarantine(self) -> Quarantine:
        """Knows what was set aside before."""
        return Quarantine(
            self.get_key,
            max_bad=self.max_bad,
            total_samples=None if self.keys is None else len(self.keys),
            bad=self.place.bad,
            known_places=self.place.known,
        )

    def get_key(self, place: int) -> object:
        """What the sampler calls the sample at a place of its order; of an iterable data set the place."""
        return place if self.keys is None else self.keys[place]

    def get_id(self, place: int) -> int:
        """The key where it is a number, else the place."""
        key = self.get_key(place)
        return key if isinstance(key, int) else place


@dataclass(frozen=True, slots=True)
class StepNote:
    """A planned step, without its samples."""

    number: int
    round: int
    positions: tuple[int, ...]
    local: StepCounts
    padded_tokens: int
    costs: tuple[int, ...]
    global_counts: StepCounts

    @property
    def is_idle(self) -> bool:
        """True when this rank has nothing to train on in this step."""
        return not self.positions


@dataclass(frozen=True, slots=True)
class RoundNote:
    """A planned round: its steps, and where the next round begins.

    Few objects, however many its steps: taking many apart would hold the interpreter lock of the training process, and then
    have its garbage collector look for more.
    """

    round: int
    numbers: range
    """The numbers of its steps."""
    next_start: RoundStart
    positions: array[int]
    """Of all its samples, step by step."""
    rows: array[int]
    """For each step: where its positions begin, the counts of this rank and of all ranks, padded tokens, further costs."""

    def get(self, number: int) -> StepNote:
        """A step by its number."""
        width = len(self.rows) // len(self.numbers)
        row = self.rows[width * (number - self.numbers.start) :][:width]
        first, samples, tokens, supervised, padded_tokens = row[:5]
        return StepNote(
            number,
            self.round,
            tuple(self.positions[first : first + samples]),
            StepCounts(samples, tokens, supervised),
            padded_tokens,
            tuple(row[8:]) if samples else (),
            StepCounts(*row[5:8]),
        )

    def get_counts(self, number: int) -> StepCounts:
        """What a step holds, on all ranks."""
        first = len(self.rows) // len(self.numbers) * (number - self.numbers.start)
        return StepCounts(*self.rows[first + 5 : first + 8])


def make_round_note(steps: Sequence[Step], next_start: RoundStart, resources: int) -> RoundNote:
    """What is to be known of a round where it is trained on; ``resources`` is the number of further costs of each sample."""
    first = next_start.planned_steps - len(steps)
    positions, rows = array("q"), array("q")
    for step in steps:
        local, total = compute_counts(step.group), step.global_counts
        rows.extend((len(positions), local.samples, local.tokens, local.supervised, compute_padded_tokens(step.group)))
        rows.extend((total.samples, total.tokens, total.supervised))
        rows.extend(compute_costs(step.group) or (0,) * resources)
        positions.extend(sample.position for sample in step.group)
    return RoundNote(steps[0].round, range(first, first + len(steps)), next_start, positions, rows)


@dataclass(frozen=True, slots=True)
class Update:
    """What an event has led to, as far as the trainer's end has to know."""

    outline: Outline
    post: Post | None = None
    planned: RoundNote | None = None
    is_answer: bool = False
    """True when the event came from the trainer's end: the oldest that was not answered."""


class Listener(Protocol):
    """The trainer's end, as the other end sees it; called from its threads, one update at a time."""

    def on_update(self, update: Update) -> None:
        """The machine has handled an event."""
        ...

    def on_collated(self, round_: int, batches: Sequence[tuple[int, object]]) -> None:
        """The batches of a round, each with the number of its step. To be answered with `Collated` once they are ready."""
        ...

    def on_bad(self, place: int, cause: str) -> None:
        """A sample was set aside; comes before any update on the samples behind it."""
        ...

    def on_error(self, error: BaseException) -> None:
        """Reading or collating failed; the machine knows."""
        ...

    def on_broken(self, error: Exception) -> None:
        """The machine cannot go on: a defect of ours, of a rule, or a peer's message. Nothing more comes."""
        ...

    def on_lost(self, cause: str, error: BaseException) -> None:
        """The machine is gone, with the process that held it. Nothing more comes."""
        ...


class Backend(Protocol):
    """The end where samples are read and batches formed, as the trainer's end sees it; for one epoch at a time."""

    def begin(self, start: EpochStart, listener: Listener) -> None:
        """Starts an epoch.

        Raises: what starting a process raises.
        """
        ...

    def submit(self, event: Event, at_s: float | None = None) -> None:
        """Has the machine handle an event of the trainer's end; ``at_s`` is when it happened, if not now.

        Does not wait for that.
        """
        ...

    def conclude(self) -> None:
        """Ends the trace: when it returns, it is complete."""
        ...

    def end(self) -> None:
        """Ends the epoch: what is reported from now on is of no account."""
        ...

    def close(self) -> None:
        """Ends the epoch, and gives back workers that outlive one."""
        ...


@dataclass(frozen=True, slots=True)
class Taken:
    """A step as the consumer takes it."""

    step: StepNote
    batch: object
    window: StepCounts
    """Global counts of its accumulation window."""
    emitted_samples: int
    is_last: bool


@dataclass(slots=True)
class EpochMetrics:
    """Counters of one epoch on one rank."""

    started_s: float
    steps: int = 0
    idle_steps: int = 0
    samples: int = 0
    real_tokens: int = 0
    padded_tokens: int = 0
    global_tokens: int = 0
    """Real tokens of the steps on all ranks."""
    costs: tuple[int, ...] = ()
    """Amounts of further resources."""
    data_wait_s: float = 0.0
    first_step_s: float = 0.0

    def count(self, step: StepNote) -> None:
        """Adds a step that was taken."""
        self.steps += 1
        self.idle_steps += step.is_idle
        self.samples += step.local.samples
        self.real_tokens += step.local.tokens
        self.padded_tokens += step.padded_tokens
        self.global_tokens += step.global_counts.tokens
        if step.costs:
            self.costs = tuple(map(add, self.costs, step.costs)) if self.costs else step.costs

    def describe(self, budget_tokens: int, resources: Resources, world_size: int) -> dict[str, float]:
        """The counters by slash-prefixed name."""
        budgets_tokens = max(1, self.steps * budget_tokens)
        costs = self.costs or (0,) * len(resources.limits)
        found: dict[str, float] = {f"odb/{name}": cost for name, cost in zip(resources.names, costs, strict=True)}
        return found | {
            "odb/steps": self.steps,
            "odb/idle_steps": self.idle_steps,
            "odb/samples": self.samples,
            "odb/tokens": self.real_tokens,
            "odb/padding_ratio": 1 - self.real_tokens / self.padded_tokens if self.padded_tokens else 0.0,
            "odb/fill": self.real_tokens / budgets_tokens,
            "odb/efficiency": self.global_tokens / (world_size * budgets_tokens),
            "odb/data_wait_s": self.data_wait_s,
            "odb/first_step_s": self.first_step_s,
        }
