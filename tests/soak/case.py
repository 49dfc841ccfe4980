"""A world of the soak: the faults that its seed expands to, one after another in the same processes."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final

FAULTS: Final = 8
"""The number of faults in a world, unless one of them ends it."""
COSTLY_FAULTS: Final = 2
"""The number of faults if every process that is started loads torch."""
SHORT_TIMEOUT_S: Final = 3.0
"""The timeout of loaders if nothing else detects the fault: a process is stopped, or a link is cut."""
LONG_TIMEOUT_S: Final = 100.0
"""The timeout in all other cases, in which nothing should wait for it."""
HOSTS: Final = 3


class Fault(StrEnum):
    """A fault on one rank, or what seems to be one."""

    NONE = "none"
    SLOW = "slow"
    LATE = "late"
    HOLD = "hold"
    """Something holds the interpreter lock for a while."""
    PAUSE = "pause"
    """A process is stopped and continues."""
    BLIP = "blip"
    """The link of a host is cut for a short time."""
    LEAVE_ALL = "leave all"
    READ = "read"
    COLLATE = "collate"
    SAMPLER = "sampler"
    KILL = "kill"
    STOP = "stop"
    CUT = "cut"
    """The link of a host is cut for a long time."""
    BLOCK = "block"
    """The data set of one rank blocks for ever, and another rank fails."""
    LEAVE = "leave"
    TRAINER = "trainer"
    INTERRUPT = "interrupt"
    NEVER = "never"
    TOO_LATE = "too late"
    CONFIG = "config"


HARMLESS = {Fault.NONE, Fault.SLOW, Fault.LATE, Fault.HOLD, Fault.PAUSE, Fault.BLIP, Fault.LEAVE_ALL}
"""No rank raises anything."""
MISSABLE = {Fault.KILL, Fault.STOP, Fault.CUT, Fault.LEAVE, Fault.TRAINER, Fault.INTERRUPT}
"""These faults have no effect after the last step."""
NEEDS_OTHERS = {Fault.CONFIG, Fault.NEVER, Fault.TOO_LATE, Fault.BLOCK, Fault.LATE}
NEEDS_LINKS = {Fault.CUT, Fault.BLIP}
NEEDS_NEW_LOADER = {Fault.CONFIG, Fault.NEVER, Fault.TOO_LATE, Fault.LATE, Fault.STOP, Fault.CUT}
"""These concern how loaders connect, or their timeouts."""
ENDS_LOADER = NEEDS_NEW_LOADER - {Fault.LATE} | {Fault.BLOCK}
"""After these the ranks have lost touch, or differ in their settings."""
WAITED_FOR = {Fault.STOP, Fault.CUT, Fault.NEVER, Fault.TOO_LATE}
"""Only a timeout detects these."""

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
"""Errors that are not an Exception."""


class Victim(StrEnum):
    """The process of a rank that the fault strikes."""

    RANK = "rank"
    LOADER = "loader"
    WORKER = "worker"


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The settings of a loader, on all ranks."""

    method: str
    workers: int
    window: int
    depth: int
    transport: str
    accumulation_steps: int
    is_persistent: bool

    def __str__(self) -> str:
        return (
            f"{self.workers} workers ({self.method}), window {self.window}, depth {self.depth}, {self.transport}, "
            f"accumulation {self.accumulation_steps}{', persistent' if self.is_persistent else ''}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One epoch of a world, and the fault in it."""

    settings: Settings
    is_new: bool
    """True if the case makes a new loader, False if it uses that of the previous case."""
    is_closing: bool = True
    """True if the loader is closed at the end, False if the next case uses it."""
    places: tuple[int, ...]
    """The host of each rank."""
    fault: Fault
    culprit: int
    victim: Victim
    error: str
    sizes: tuple[int, ...]
    sample: int
    """The culprit's sample at which the fault strikes, if it depends on a sample."""
    step: int
    """The step at which the fault strikes otherwise."""
    is_coupled: bool
    """True if the trainer has a collective in every step."""

    @property
    def ranks(self) -> int:
        return len(self.places)

    @property
    def timeout_s(self) -> float:
        return SHORT_TIMEOUT_S if self.fault in WAITED_FOR else LONG_TIMEOUT_S

    @property
    def failing(self) -> int:
        """The rank that must be blamed."""
        if self.fault is Fault.CONFIG and self.culprit == 0:
            return 1  # the others are compared with rank 0
        return (self.culprit + 1) % self.ranks if self.fault is Fault.BLOCK else self.culprit

    @property
    def absent(self) -> set[int]:
        """The ranks whose process is lost."""
        is_lost = self.fault in (Fault.KILL, Fault.STOP) and self.victim is Victim.RANK
        return {self.culprit} if is_lost else set()

    @property
    def is_last(self) -> bool:
        """True if no case can follow, because the ranks no longer count the same loaders, or one is gone."""
        return bool(self.absent) or self.fault is Fault.NEVER

    def __str__(self) -> str:
        what = {
            Fault.READ: f" ({self.error} at sample {self.sample})",
            Fault.COLLATE: f" ({self.error} at sample {self.sample})",
            Fault.SAMPLER: f" ({self.error})",
            Fault.TRAINER: f" ({self.error} at step {self.step})",
            Fault.BLOCK: f" (at sample {self.sample})",
            Fault.HOLD: f" (at sample {self.sample})",
            Fault.KILL: f" the {self.victim} at step {self.step}",
            Fault.STOP: f" the {self.victim} at step {self.step}",
            Fault.PAUSE: f" the {self.victim} at step {self.step}",
        }.get(self.fault, f" at step {self.step}")
        hosts = f" on hosts {self.places}" if any(self.places) else ""
        loader = "a new loader" if self.is_new else "the same loader"
        return (
            f"{self.fault}{what} on rank {self.culprit} of {self.ranks}{hosts}, sizes {self.sizes}, "
            f"{'coupled, ' if self.is_coupled else ''}{loader}: {self.settings}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """Some processes, and the faults that strike them."""

    seed: int
    places: tuple[int, ...]
    method: str
    cases: tuple[Case, ...]

    @property
    def is_lab(self) -> bool:
        """True if its ranks are on several hosts."""
        return any(self.places)


def expand(seed: int, *, has_lab: bool = False) -> World:
    choose = random.Random(seed)
    ranks = choose.choice([1, 2, 2, 2, 3, 3, 4, 5, 6])
    is_lab = choose.random() < 0.15 and has_lab
    # Processes other than forked ones take seconds to load torch.
    method = choose.choices(["fork", "forkserver", "spawn"], [85, 14, 1])[0]
    if is_lab:
        ranks, method = max(2, ranks), "fork"
    elif method == "spawn":
        ranks = min(ranks, 2)
    # Rank 1 is never on the host of rank 0, so there are at least two hosts.
    places = tuple([0, 1, *(choose.randrange(HOSTS) for _ in range(4))][:ranks]) if is_lab else (0,) * ranks
    cases: list[Case] = []
    while len(cases) < (COSTLY_FAULTS if method == "spawn" else FAULTS):
        case = _draw(choose, places, method, cases[-1] if cases else None)
        if cases:
            cases[-1] = replace(cases[-1], is_closing=case.is_new)
        cases.append(case)
        if case.is_last:
            break
    return World(seed=seed, places=places, method=method, cases=tuple(cases))


def _draw(choose: random.Random, places: tuple[int, ...], method: str, before: Case | None) -> Case:
    ranks = len(places)
    faults = [fault for fault in Fault if ranks > 1 or fault not in NEEDS_OTHERS]
    if not any(places):
        faults = [fault for fault in faults if fault not in NEEDS_LINKS]
    else:
        faults += 2 * [Fault.CUT, Fault.BLIP]
    fault = choose.choice(faults)
    is_new = before is None or before.fault in ENDS_LOADER or fault in NEEDS_NEW_LOADER or choose.random() < 0.5
    settings = _draw_settings(choose, method, fault) if is_new or before is None else before.settings
    is_blocked = fault is Fault.BLOCK and not settings.workers  # otherwise the trainer would read
    if is_blocked:
        settings, is_new = replace(settings, workers=1), True
    workers = settings.workers
    victims = list(Victim) if workers and fault in (Fault.KILL, Fault.STOP, Fault.PAUSE) else [Victim.RANK]
    victim = choose.choice(victims)
    culprit = choose.randrange(ranks)
    sizes = tuple(choose.randint(0, 40) + 20 * (rank == culprit) for rank in range(ranks))
    if fault is Fault.BLOCK:  # the failing rank then needs a sample to fail at
        sizes = tuple(max(1, size) for size in sizes)
    error = choose.choice(ERRORS)
    is_safe = fault in (Fault.NONE, Fault.SLOW, Fault.PAUSE, Fault.READ, Fault.COLLATE, Fault.SAMPLER, Fault.CONFIG)
    if not workers and fault in (Fault.READ, Fault.COLLATE) and error in OUTRIGHT:
        is_safe = False  # it ends the thread that reads, which is the trainer's
    is_loaders = victim is not Victim.RANK and fault is Fault.KILL
    return Case(
        settings=settings,
        is_new=is_new,
        places=places,
        fault=fault,
        culprit=culprit,
        victim=victim,
        error=error,
        sizes=sizes,
        sample=choose.randrange(sizes[culprit]),
        step=choose.randrange(6),
        is_coupled=(is_safe or is_loaders) and choose.random() < 0.5,
    )


def _draw_settings(choose: random.Random, method: str, fault: Fault) -> Settings:
    workers = choose.choice([0, 0, 1, 1, 2, 3])
    if fault is Fault.BLOCK or method != "fork":
        workers = max(1, workers)
    return Settings(
        method=method,
        workers=1 if method == "spawn" else workers,
        window=choose.choice([4, 8, 16]),
        depth=choose.choice([1, 3, 8]),
        transport=choose.choice(["reduce", "gather"]),
        accumulation_steps=choose.choice([1, 3]),
        is_persistent=bool(workers) and choose.random() < 0.3,
    )
