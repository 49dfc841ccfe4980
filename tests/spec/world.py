"""A whole system in memory for the tests of the spec: W real machines, exchange, collators and lockstep consumers.

It decides nothing of the protocol: it answers effects, in an order drawn from a seed. A run ends when nothing can happen
any more; what is then left undone is a deadlock.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from odb_ref.core.config import Config
from odb_ref.core.effects import Collate, Deliver, Effect, Finish, PostCounts, PostOffer, PostReport, Read
from odb_ref.core.events import (
    Agreed,
    Collated,
    ConsumerStopped,
    Counted,
    Event,
    LocalFailed,
    Report,
    Reported,
    SamplesRead,
    StepTaken,
    Urged,
)
from odb_ref.core.machine import Machine
from odb_ref.core.offer import NONE, Offer, reduce_offers
from odb_ref.core.resume import Checkpoint, Ledger, compute_round_start
from odb_ref.core.state import Phase
from odb_ref.core.types import Group, Sample, Step, StepCounts

Shard = tuple[Sample, ...]


def make_shard(lengths: Sequence[int], first_id: int = 0, costs: Sequence[tuple[int, ...]] | None = None) -> Shard:
    """Samples of the given lengths and costs, in this order, all tokens but one supervised."""
    return tuple(
        Sample(first_id + i, i, length, max(0, length - 1), costs[i] if costs else ())
        for i, length in enumerate(lengths)
    )


def make_shards(
    lengths: Sequence[Sequence[int]], costs: Sequence[Sequence[tuple[int, ...]]] | None = None
) -> tuple[Shard, ...]:
    """One shard a rank, with ids that differ over all ranks."""
    return tuple(make_shard(shard, 1000 * rank, costs[rank] if costs else None) for rank, shard in enumerate(lengths))


@dataclass
class Node:
    """One rank: its machine and what surrounds it."""

    machine: Machine
    shard: Shard
    read: int = 0
    asked: int = 0
    collating: Collate | None = None
    round_: int = 0
    queue: list[Step] = field(default_factory=list)
    taken: list[Step] = field(default_factory=list)
    delivered: list[Step] = field(default_factory=list)
    finish: Finish | None = None
    is_stopped: bool = False
    is_urged: bool = False
    events: list[tuple[Event, tuple[Effect, ...]]] = field(default_factory=list)
    ledger: Ledger = field(default_factory=Ledger)
    begun: tuple[Effect, ...] = ()

    @property
    def head(self) -> Step | None:
        """The step the consumer would get now, if any."""
        if not self.queue or self.is_stopped:
            return None
        limit = NONE if self.finish is None else self.finish.step_limit
        return self.queue[0] if self.queue[0].number < limit else None


class World:
    """W ranks of one epoch. ``stops[r]`` is after how many steps the consumer of rank r leaves; ``fails[r]`` which ("read" or
    "collate", round) fails there.
    """

    def __init__(
        self,
        config: Config,
        shards: Sequence[Shard],
        *,
        seed: int = 0,
        stops: dict[int, int] | None = None,
        fails: dict[int, tuple[str, int]] | None = None,
        depths: Sequence[int] | None = None,
        is_urging: bool = True,
        checkpoints: Sequence[Checkpoint] | None = None,
    ) -> None:
        self.random = random.Random(seed)
        self.stops = stops or {}
        self.fails = fails or {}
        self.is_urging = is_urging
        self.nodes: list[Node] = []
        self.posts: dict[tuple[str, int], dict[int, object]] = defaultdict(dict)
        for rank, shard in enumerate(shards):
            depth = config.depth_steps if depths is None else depths[rank]
            own = replace(config, rank=rank, world_size=len(shards), depth_steps=depth)
            self.nodes.append(Node(Machine(own), shard))
        for rank, node in enumerate(self.nodes):
            if checkpoints is None:
                node.begun = node.machine.begin()
                self._perform(rank, node.begun)
            else:
                start = checkpoints[rank].start
                node.read = start.read_samples
                node.ledger = Ledger(start)
                carried = tuple(node.shard[position] for position in start.carried)
                node.begun = node.machine.begin(start, carried)
                self._perform(rank, node.begun)

    # What the ranks ask for -----------------------------------------------------------------------------------------

    def _perform(self, rank: int, effects: tuple[Effect, ...]) -> None:
        node = self.nodes[rank]
        for effect in effects:
            match effect:
                case Read():
                    node.asked = effect.count
                case PostOffer():
                    node.round_ = effect.offer.round_max
                    self.posts["offer", node.round_][rank] = effect.offer
                case PostCounts():
                    self.posts["counts", node.round_][rank] = effect.counts
                case PostReport():
                    self.posts["report", node.round_][rank] = effect.report
                case Collate():
                    node.collating = effect
                case Deliver():
                    # RELEASE: at this moment every rank holds this step, collated.
                    for other in self.nodes:
                        state = other.machine.state
                        is_open = other.collating is not None and effect.step in other.collating.steps
                        assert effect.step.number < state.planned_steps and not is_open
                    node.queue.append(effect.step)
                    node.delivered.append(effect.step)
                case Finish():
                    assert node.finish is None
                    node.finish = effect

    def send(self, rank: int, event: Event) -> None:
        """Gives a rank an event, whatever it is."""
        effects = self.nodes[rank].machine.handle(event)
        self.nodes[rank].events.append((event, effects))
        if isinstance(event, Counted):
            self.nodes[rank].ledger.note_round(compute_round_start(self.nodes[rank].machine.state))
        self._perform(rank, effects)

    # What can happen ------------------------------------------------------------------------------------------------

    def compute_choices(self) -> list[tuple[str, int]]:
        """Everything that can happen now, in a fixed order."""
        choices: list[tuple[str, int]] = []
        leavers = {rank for rank, node in enumerate(self.nodes) if node.is_stopped}
        entered = [len(node.taken) for node in self.nodes]
        for rank, node in enumerate(self.nodes):
            phase = node.machine.state.phase
            if node.asked:
                choices.append(("read", rank))
            if node.collating is not None:
                choices.append(("collated", rank))
            kind = {Phase.OFFER: "offer", Phase.COUNT: "counts", Phase.REPORT: "report"}.get(phase)
            if kind is not None and len(self.posts[kind, node.round_]) == len(self.nodes):
                choices.append((kind, rank))
            is_free = min(entered) >= len(node.taken)  # every rank has entered the collective of its last step
            if not node.is_stopped and is_free:
                if self.stops.get(rank) == len(node.taken):
                    choices.append(("stop", rank))
                elif node.head is not None:
                    choices.append(("take", rank))
            if self.is_urging and leavers - {rank} and not node.is_urged and node.finish is None:
                choices.append(("urge", rank))
        return choices

    def do(self, action: str, rank: int) -> None:
        """Makes one choice happen."""
        node = self.nodes[rank]
        match action:
            case "read":
                if self.fails.get(rank) == ("read", node.machine.state.round):
                    node.asked = 0
                    self.send(rank, LocalFailed("unreadable"))
                    return
                count = self.random.randint(1, node.asked)
                part = node.shard[node.read : node.read + count]
                node.read += len(part)
                is_ended = len(part) < count
                node.asked = 0 if is_ended else node.asked - count
                self.send(rank, SamplesRead(part, is_ended))
            case "collated":
                assert node.collating is not None
                round_ = node.collating.round
                node.collating = None
                is_bad = self.fails.get(rank) == ("collate", round_)
                self.send(rank, LocalFailed("uncollatable") if is_bad else Collated(round_))
            case "offer":
                offers = self.posts["offer", node.round_].values()
                self.send(rank, Agreed(reduce_offers(offer for offer in offers if isinstance(offer, Offer))))
            case "counts":
                rows: list[tuple[StepCounts, ...]] = [
                    row for row in self.posts["counts", node.round_].values() if isinstance(row, tuple)
                ]
                assert len({len(row) for row in rows}) == 1
                self.send(rank, Counted(tuple(sum(column[1:], column[0]) for column in zip(*rows, strict=True))))
            case "report":
                posts = self.posts["report", node.round_]
                reports = [post for _, post in sorted(posts.items()) if isinstance(post, Report)]
                self.send(rank, Reported(tuple(reports)))
            case "take":
                node.taken.append(node.queue.pop(0))
                step = node.taken[-1]
                node.ledger.note_taken(step.number, [sample.position for sample in step.group])
                self.send(rank, StepTaken())
            case "stop":
                node.is_stopped = True
                self.send(rank, ConsumerStopped())
            case "urge":
                node.is_urged = True
                self.send(rank, Urged())

    def run(self) -> World:
        """Lets things happen until nothing can."""
        while choices := self.compute_choices():
            self.do(*self.random.choice(choices))
        return self

    # What came of it ------------------------------------------------------------------------------------------------

    @property
    def is_over(self) -> bool:
        """True when every rank has finished."""
        return all(node.finish is not None for node in self.nodes)

    def get_finishes(self) -> list[Finish]:
        """How each rank finished."""
        return [node.finish for node in self.nodes if node.finish is not None]

    def get_groups(self, rank: int) -> list[Group]:
        """The groups the rank's consumer took, in order."""
        return [step.group for step in self.nodes[rank].taken]


def run(lengths: Sequence[Sequence[int]], config: Config, **options: object) -> World:
    """A run over shards of these lengths, to its end."""
    return World(config, make_shards(lengths), **options).run()  # type: ignore[arg-type]


def make_config(**options: object) -> Config:
    """A small configuration: budget 8, window 4, no ramp."""
    defaults: dict[str, object] = {
        "rank": 0, "world_size": 1, "budget_tokens": 8, "window_samples": 4, "ramp_rounds": 0, "depth_steps": 2,
    }  # fmt: skip
    return Config(**(defaults | options))  # type: ignore[arg-type]
