"""A small world in memory: N machines, an exchange, readers, collators and coupled trainers under a random scheduler.

Deliberately naive: one list of things that may happen next, and a seeded choice among them.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from odb_ref.core.config import Config
from odb_ref.core.effects import (
    Collate,
    Deliver,
    Effect,
    Finish,
    Outcome,
    OutcomeKind,
    PostCounts,
    PostOffer,
    PostReport,
    Read,
)
from odb_ref.core.events import (
    Agreed,
    Collated,
    ConsumerStopped,
    Counted,
    Event,
    LocalFailed,
    PeerLost,
    Reported,
    SamplesRead,
    StepTaken,
    Urged,
)
from odb_ref.core.machine import Machine
from odb_ref.core.offer import reduce_offers
from odb_ref.core.rules import get_rule
from odb_ref.core.state import Phase
from odb_ref.core.trace import TraceWriter
from odb_ref.core.types import ZERO_COUNTS, Sample, Step


@dataclass(frozen=True)
class Fault:
    """What goes wrong with ``rank`` after so many events: ``kind`` is fail, stop, kill, or urge (for nothing)."""

    kind: str
    rank: int
    after: int


@dataclass
class Rank:
    machine: Machine
    shard: Sequence[int]
    pending: list[Effect | Event] = field(default_factory=list)
    read: int = 0
    queue: list[Step] = field(default_factory=list)
    taken: list[Step] = field(default_factory=list)
    finish: Finish | None = None
    has_left: bool = False
    is_dead: bool = False


class Deadlock(AssertionError):
    """Some rank has not finished and nothing can happen any more."""


def make_configs(world_size: int, rule: str = "odb", **settings: Any) -> list[Config]:
    values = {"budget_tokens": 40, "window_samples": 6, "depth_steps": 2, "ramp_rounds": 1} | settings
    return [Config(rank=rank, world_size=world_size, rule=get_rule(rule), **values) for rank in range(world_size)]


class World:
    """Runs to the end at once; raises Deadlock when it gets stuck before every living rank has finished."""

    def __init__(
        self,
        shards: Sequence[Sequence[int]],
        configs: Sequence[Config],
        *,
        seed: int = 0,
        faults: Sequence[Fault] = (),
        trace: Path | None = None,
        is_one_file: bool = True,
        driver: str = "test",
        machine_class: type[Machine] = Machine,
    ) -> None:
        self.random = random.Random(seed)
        self.writers: list[TraceWriter] = []
        self.paths: list[Path] = []
        if trace is not None:
            count = 1 if is_one_file else len(shards)
            self.paths = [trace.with_name(f"{trace.name}.{rank}") if count > 1 else trace for rank in range(count)]
            self.writers = [TraceWriter(path, configs[0], driver=driver) for path in self.paths]
        self.ranks = [
            Rank(machine_class(config, self._get_observer(config.rank)), shard)
            for config, shard in zip(configs, shards, strict=True)
        ]
        self.faults = sorted(faults, key=lambda fault: fault.after)
        self.posts: dict[tuple[type, int], dict[int, Any]] = {}
        self.numbers: dict[tuple[int, type], int] = {}
        self.is_broken = False
        try:
            self._run()
        finally:
            for writer in self.writers:
                writer.close()

    @property
    def outcomes(self) -> list[Outcome | None]:
        return [rank.finish.outcome if rank.finish else None for rank in self.ranks]

    def _get_observer(self, rank: int) -> Any:
        if not self.writers:
            return None
        return self.writers[rank % len(self.writers)].record

    def _run(self) -> None:
        for number, rank in enumerate(self.ranks):
            self._perform(number, rank.machine.begin())
        happened = 0
        while True:
            while self.faults and self.faults[0].after <= happened:
                self._break(self.faults.pop(0))
            actions: list[tuple[int, int]] = []
            for number, rank in enumerate(self.ranks):
                if rank.is_dead:
                    continue
                actions += [(number, index) for index in range(len(rank.pending))]
                if self._can_take(number):
                    actions.append((number, -1))
            if not actions:
                if self.faults:
                    self._break(self.faults.pop(0))
                    continue
                if self._fail_collective():
                    continue
                break
            number, index = self.random.choice(actions)
            happened += 1
            self._act(number, index)
        for number, rank in enumerate(self.ranks):
            if not rank.is_dead and rank.finish is None:
                raise Deadlock(f"rank {number}: {rank.machine.state}")

    def _can_take(self, number: int) -> bool:
        rank = self.ranks[number]
        if not rank.queue or rank.has_left:
            return False
        if rank.finish is not None and rank.queue[0].number >= rank.finish.step_limit:
            return False
        # The trainer's collective: a step ends when all ranks are in it. One that has left is in no step any more.
        return min(len(other.taken) for other in self.ranks) >= len(rank.taken)

    def _fail_collective(self) -> bool:
        """A trainer that waits for one that is gone gets an error from its own collective, and leaves too."""
        is_gone = any(rank.is_dead for rank in self.ranks)
        for number, rank in enumerate(self.ranks):
            is_draining = rank.machine.state.phase is Phase.DRAIN and any(other.has_left for other in self.ranks)
            if not (rank.is_dead or rank.finish or rank.has_left) and (is_gone or is_draining):
                rank.has_left = True
                self._perform(number, rank.machine.handle(ConsumerStopped()))
                return True
        return False

    def _break(self, fault: Fault) -> None:
        rank = self.ranks[fault.rank]
        if rank.is_dead or rank.finish is not None or rank.has_left:
            return
        if fault.kind == "urge":
            rank.pending.append(Urged())
            return
        if fault.kind == "kill":
            rank.is_dead = self.is_broken = True
            for number, other in enumerate(self.ranks):
                # What is pending of an exchange may still arrive.
                other.pending.append(PeerLost(fault.rank, "process gone"))
                if number == fault.rank:
                    other.pending.clear()
            return
        if fault.kind == "stop":
            rank.has_left = True
            self._perform(fault.rank, rank.machine.handle(ConsumerStopped()))
        else:
            rank.pending = [item for item in rank.pending if not isinstance(item, Read | Collate)]
            self._perform(fault.rank, rank.machine.handle(LocalFailed("broken sample")))
        for number, other in enumerate(self.ranks):
            if number != fault.rank:
                other.pending.append(Urged())

    def _act(self, number: int, index: int) -> None:
        rank = self.ranks[number]
        if index < 0:
            rank.taken.append(rank.queue.pop(0))
            self._perform(number, rank.machine.handle(StepTaken()))
            return
        item = rank.pending.pop(index)
        event: Event
        match item:
            case Read(count):
                end = min(rank.read + count, len(rank.shard))
                if self.random.random() < 0.2:
                    end = self.random.randint(min(rank.read + 1, end), end)
                samples = tuple(
                    Sample(
                        1000 * number + position,
                        position,
                        rank.shard[position],
                        rank.shard[position] // 2,
                        tuple((position + i) % 4 for i in range(len(rank.machine.config.limits))),
                    )
                    for position in range(rank.read, end)
                )
                left = count - len(samples)
                rank.read = end
                is_ended = end == len(rank.shard)
                if left and not is_ended:
                    rank.pending.append(Read(left))
                event = SamplesRead(samples, is_ended)
            case Collate(round):
                event = Collated(round)
            case PostOffer() | PostCounts() | PostReport() | Deliver() | Finish():
                raise AssertionError(item)
            case _:
                event = item
        if rank.finish is not None and rank.finish.outcome.kind is OutcomeKind.LOST:
            return
        self._perform(number, rank.machine.handle(event))

    def _perform(self, number: int, effects: Sequence[Effect]) -> None:
        rank = self.ranks[number]
        for effect in effects:
            match effect:
                case Read() | Collate():
                    rank.pending.append(effect)
                case Deliver(step):
                    rank.queue.append(step)
                case Finish():
                    rank.finish = effect
                case _:
                    self._post(number, effect)

    def _post(self, number: int, effect: PostOffer | PostCounts | PostReport) -> None:
        kind = type(effect)
        key = (kind, self.numbers.get((number, kind), 0))
        self.numbers[number, kind] = key[1] + 1
        posts = self.posts.setdefault(key, {})
        posts[number] = effect
        if len(posts) < len(self.ranks):
            return
        event: Event
        if kind is PostOffer:
            event = Agreed(reduce_offers(post.offer for post in posts.values()))
        elif kind is PostCounts:
            rows = [posts[rank].counts for rank in range(len(self.ranks))]
            event = Counted(tuple(sum(column, ZERO_COUNTS) for column in zip(*rows, strict=True)))
        else:
            event = Reported(tuple(posts[rank].report for rank in range(len(self.ranks))))
        del self.posts[key]
        for rank in self.ranks:
            rank.pending.append(event)
