"""A run of the soak: what its seed expands to, and what must come of it."""

from __future__ import annotations

import random
from dataclasses import dataclass
from enum import StrEnum

STOP_TIMEOUT_S = 2.0
"""The timeouts of the loaders where a process is stopped: nothing else tells."""


class Fault(StrEnum):
    """What goes wrong on one rank, or seems to."""

    NONE = "none"
    SLOW = "slow"
    LATE = "late"
    HOLD = "hold"
    """Something holds the interpreter lock for a while."""
    PAUSE = "pause"
    """A process is stopped and goes on."""
    LEAVE_ALL = "leave all"
    READ = "read"
    COLLATE = "collate"
    KILL = "kill"
    STOP = "stop"
    BLOCK = "block"
    """The data set of one rank blocks for ever, another rank fails."""
    LEAVE = "leave"
    TRAINER = "trainer"
    INTERRUPT = "interrupt"
    NEVER = "never"
    CONFIG = "config"


HARMLESS = {Fault.NONE, Fault.SLOW, Fault.LATE, Fault.HOLD, Fault.PAUSE, Fault.LEAVE_ALL}
"""Nobody raises anything."""
MISSABLE = {Fault.KILL, Fault.STOP, Fault.LEAVE, Fault.TRAINER, Fault.INTERRUPT}
"""What happens after the last step is missed by nobody."""
ERRORS = (
    "ValueError",
    "SystemExit",
    "Panic",
    "KeyboardInterrupt",
    "Unspeakable",
    "StopIteration",
    "MemoryError",
    "exit",
)

OUTRIGHT = ("SystemExit", "Panic", "KeyboardInterrupt", "exit")
"""No Exception."""


class Victim(StrEnum):
    """Which process of a rank it happens to."""

    RANK = "rank"
    LOADER = "loader"
    WORKER = "worker"


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One run."""

    seed: int
    fault: Fault
    ranks: int
    culprit: int
    victim: Victim
    error: str
    workers: int
    method: str
    sizes: tuple[int, ...]
    sample: int
    """At which sample of the culprit's, where it is a matter of one."""
    step: int
    """At which step, else."""
    window: int
    depth: int
    transport: str
    accumulation_steps: int
    is_coupled: bool
    """The trainer has a collective in every step."""
    is_persistent: bool
    epochs: int

    @property
    def timeout_s(self) -> float:
        """Of the loaders."""
        is_waited_for = self.fault in (Fault.STOP, Fault.NEVER)
        return STOP_TIMEOUT_S if is_waited_for else 20.0

    @property
    def failing(self) -> int:
        """The rank that is to be blamed."""
        if self.fault is Fault.CONFIG and self.culprit == 0:
            return 1  # it is rank 0 that the others are compared with
        return (self.culprit + 1) % self.ranks if self.fault is Fault.BLOCK else self.culprit

    @property
    def absent(self) -> set[int]:
        """The ranks that end without a word, or never."""
        is_lost = self.fault in (Fault.KILL, Fault.STOP) and self.victim is Victim.RANK
        return {self.culprit} if is_lost or self.fault is Fault.NEVER else set()

    def __str__(self) -> str:
        what = {
            Fault.READ: f" ({self.error} at sample {self.sample})",
            Fault.COLLATE: f" ({self.error} at sample {self.sample})",
            Fault.BLOCK: f" (at sample {self.sample})",
            Fault.KILL: f" the {self.victim} at step {self.step}",
            Fault.STOP: f" the {self.victim} at step {self.step}",
            Fault.PAUSE: f" the {self.victim} at step {self.step}",
        }.get(self.fault, f" at step {self.step}")
        return (
            f"seed {self.seed}: {self.fault}{what} on rank {self.culprit} of {self.ranks}, {self.workers} workers "
            f"({self.method}), sizes {self.sizes}, window {self.window}, depth {self.depth}, {self.transport}"
            f"{', coupled' if self.is_coupled else ''}{', persistent' if self.is_persistent else ''}"
            f"{', 2 epochs' if self.epochs > 1 else ''}"
        )


def expand(seed: int) -> Case:
    """The run of a seed."""
    choose = random.Random(seed)
    ranks = choose.randint(1, 6)
    fault = choose.choice(list(Fault))
    if ranks == 1 and fault in (Fault.CONFIG, Fault.NEVER, Fault.BLOCK, Fault.LATE):
        ranks = choose.randint(2, 6)
    workers = choose.choice([0, 0, 1, 1, 2, 3])
    if fault is Fault.BLOCK:
        workers = max(1, workers)  # without, it is the trainer that reads
    # A process of any other kind than a forked one loads torch for seconds.
    method = choose.choices(["fork", "forkserver", "spawn"], [30, 1, 1])[0] if workers else "fork"
    if method != "fork":
        ranks, workers = min(ranks, 2), 1
    victim = choose.choice(list(Victim)) if workers and fault in (Fault.KILL, Fault.STOP, Fault.PAUSE) else Victim.RANK
    culprit = choose.randrange(ranks)
    sizes = tuple(choose.randint(0, 40) + 20 * (rank == culprit) for rank in range(ranks))
    if fault is Fault.BLOCK:  # who fails then needs a sample to fail at
        sizes = tuple(max(1, size) for size in sizes)
    is_safe = fault in (Fault.NONE, Fault.SLOW, Fault.PAUSE, Fault.READ, Fault.COLLATE, Fault.CONFIG)
    error = choose.choice(ERRORS)
    if not workers and fault in (Fault.READ, Fault.COLLATE) and error in OUTRIGHT:
        is_safe = False  # it ends the thread that reads, which is the trainer's
    is_loaders = victim is not Victim.RANK and fault is Fault.KILL
    return Case(
        seed=seed,
        fault=fault,
        ranks=ranks,
        culprit=culprit,
        victim=victim,
        error=error,
        workers=workers,
        method=method,
        sizes=sizes,
        sample=choose.randrange(sizes[culprit]),
        step=choose.randrange(6),
        window=choose.choice([4, 8, 16]),
        depth=choose.choice([1, 3, 8]),
        transport=choose.choice(["reduce", "gather"]),
        accumulation_steps=choose.choice([1, 3]),
        is_coupled=(is_safe or is_loaders) and choose.random() < 0.5,
        is_persistent=bool(workers) and choose.random() < 0.3,
        epochs=choose.choice([1, 1, 2]) if fault in (Fault.NONE, Fault.SLOW) else 1,
    )
