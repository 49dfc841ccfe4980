"""A whole system in memory: W real machines, an exchange, readers, collators and lockstep consumers.

Tests of whole runs share this world, and differ in its `Schedule`. (`tests.proofs.worlds` asks the transition function about
events that are not possible, and `tests.properties.worlds` drives the explorer's world.)

The world decides nothing of the protocol: it answers effects. The `Schedule` decides what happens next, and how much a read
finds. A run ends when the schedule finds nothing that can happen, and work left undone then is a deadlock.
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from itertools import accumulate, chain
from pathlib import Path
from typing import Any, Final

from odb_ref.core.batching.budgets import Acceptance, BudgetSchedule
from odb_ref.core.batching.rules import get_rule
from odb_ref.core.config import Config
from odb_ref.core.effects import (
    Collate,
    Deliver,
    Effect,
    Finish,
    Outcome,
    OutcomeKind,
    Post,
    PostCounts,
    PostOffer,
    PostReport,
    Read,
)
from odb_ref.core.events import (
    Agreed,
    BudgetAccepted,
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
from odb_ref.core.exchange import combine_posts
from odb_ref.core.machine import Machine
from odb_ref.core.offer import NONE, Offer
from odb_ref.core.resume import Checkpoint, Ledger, Resumed, RoundStart, compute_round_start
from odb_ref.core.state import Phase
from odb_ref.core.types import Group, Sample, Step
from odb_ref.trace.origin import Origin, OwnedLot, make_lot, place_lot
from odb_ref.trace.writing import TraceWriter

Shard = tuple[Sample, ...]
Choice = tuple[str, int]
"""Something that can happen: an action, and the rank it happens on."""

PATIENCE: Final = 200
"""The number of events per rank, on average, that may pass without any rank reading or taking anything."""

ACTIONS: Final[dict[type[Effect | Event], str]] = {
    Read: "read", Collate: "collated", Agreed: "offer", Counted: "counts", Reported: "report", Urged: "urge",
    PeerLost: "lose",
}  # fmt: skip
"""The name of the action of each item that waits on a rank."""


class Deadlock(AssertionError):
    """Some rank has not finished, but nothing more can happen."""


@dataclass
class Node:
    """One rank: its machine and what surrounds it."""

    machine: Machine
    shard: Shard
    waiting: list[Effect | Event] = field(default_factory=list)
    """Unanswered requests, and events on their way to the machine, in order of arrival."""
    read: int = 0
    round_: int = 0
    queue: list[Step] = field(default_factory=list)
    taken: list[Step] = field(default_factory=list)
    finish: Finish | None = None
    is_stopped: bool = False
    is_dead: bool = False
    events: list[tuple[Event, tuple[Effect, ...]]] = field(default_factory=list)
    ledger: Ledger = field(default_factory=Ledger)
    acceptance: Acceptance = field(init=False)
    begun: tuple[Effect, ...] = ()
    drawn: list[range] = field(default_factory=list)
    """With shared shards: the places drawn from the common order, a range for each read."""

    source: Shard = ()
    """With updates, and without shared shards: the rank's own source. The shard then holds what was read of it."""

    def draw(self, order: Shard, places: range, bad: Collection[int] = ()) -> None:
        """Appends the samples at ``places`` of the ``order`` to the rank's input, except those whose id is ``bad``."""
        self.drawn.append(places)
        good = [order[place] for place in places if place < len(order) and order[place].id not in bad]
        self.shard += tuple(replace(sample, position=i) for i, sample in enumerate(good, len(self.shard)))

    @property
    def trained(self) -> list[Sample]:
        """The samples that the consumer took, in order."""
        return [sample for step in self.taken for sample in step.group]

    @property
    def posted(self) -> list[Effect]:
        """The effects since the beginning, in order."""
        return [effect for _, effects in self.events for effect in effects]

    @property
    def collating(self) -> Collate | None:
        """The collation in progress, if any."""
        return next((item for item in self.waiting if isinstance(item, Collate)), None)

    @property
    def head(self) -> Step | None:
        """The step that the consumer would get next, if any."""
        if not self.queue or self.is_stopped:
            return None
        limit = NONE if self.finish is None else self.finish.step_limit
        return self.queue[0] if self.queue[0].number < limit else None

    def drop_work(self) -> None:
        """Forgets open reads and collations, which will not be answered."""
        self.waiting = [item for item in self.waiting if not isinstance(item, Read | Collate)]


# Schedules ----------------------------------------------------------------------------------------------------------


class Schedule(ABC):
    """Decides everything that the protocol leaves open: what happens next, and how much a read finds."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    @abstractmethod
    def choose(self, world: World) -> Choice | None:
        """Returns what happens next, or None to end the run."""

    @abstractmethod
    def answer_read(self, asked: int, left: int) -> tuple[int, bool]:
        """Returns how many of the samples asked for a read returns, and whether the source reports its end with them."""


class AnyOrder(Schedule):
    """Draws from everything that can happen. A source reports its end only when more is asked for than it has."""

    _ORDER: Final = ("read", "collated", "offer", "counts", "report", "lose", "stop", "take", "urge")

    def choose(self, world: World) -> Choice | None:
        choices = sorted(world.compute_choices(), key=lambda choice: (choice[1], self._ORDER.index(choice[0])))
        return self.random.choice(choices) if choices else None

    def answer_read(self, asked: int, left: int) -> tuple[int, bool]:
        count = self.random.randint(1, asked)
        return min(count, left), left < count


@dataclass(frozen=True)
class Fault:
    """A fault of ``rank`` after ``after`` events. ``kind`` is fail, stop, kill, urge (without a reason), or accept, which makes
    the rank accept ``tokens``.
    """

    kind: str
    rank: int
    after: int
    tokens: int = 0


class ByArrival(Schedule):
    """Draws from the list of what waits, in the order of arrival, with faults at given times.

    Most reads are answered completely, and a source reports its end with its last sample. If nothing else can happen, a trainer
    that waits for a missing rank gets an error from its own collective, and leaves too.
    """

    def __init__(self, seed: int, faults: Sequence[Fault] = ()) -> None:
        super().__init__(seed)
        self.faults = sorted(faults, key=lambda fault: fault.after)
        self.happened = 0

    def choose(self, world: World) -> Choice | None:
        while self.faults and self.faults[0].after <= self.happened:
            self._break(world, self.faults.pop(0))
        while not (choices := world.compute_choices()) and self.faults:
            self._break(world, self.faults.pop(0))
        self.happened += 1
        return self.random.choice(choices) if choices else self._find_stranded(world)

    def answer_read(self, asked: int, left: int) -> tuple[int, bool]:
        count = min(asked, left)
        if self.random.random() < 0.2:
            count = self.random.randint(min(1, count), count)
        return count, count == left

    def _break(self, world: World, fault: Fault) -> None:
        node = world.nodes[fault.rank]
        if node.is_dead or node.is_stopped or node.finish is not None:
            return
        match fault.kind:
            case "urge":
                node.waiting.append(Urged())
            case "kill":
                world.kill(fault.rank)
            case "accept":
                world.accept(fault.rank, fault.tokens)
            case "stop":
                world.do("stop", fault.rank)
            case _:
                world.fail(fault.rank, "broken sample")
                world.urge_others(fault.rank)

    def _find_stranded(self, world: World) -> Choice | None:
        is_gone = any(node.is_dead for node in world.nodes)
        is_left = any(node.is_stopped for node in world.nodes)
        for rank, node in enumerate(world.nodes):
            is_draining = node.machine.state.phase is Phase.DRAIN and is_left
            if not (node.is_dead or node.finish or node.is_stopped) and (is_gone or is_draining):
                return "strand", rank
        return None


# The world ----------------------------------------------------------------------------------------------------------


class World:
    """W ranks of one epoch. The consumer of rank r leaves after ``stops[r]`` steps, and ``fails[r]``, as ("read" or "collate",
    round), is where that rank fails. ``config`` is that of all ranks, or one for each. With shared shards, ``order`` holds all
    samples, and ``shards`` what each rank has already drawn. With updates (R16) the shards are the ranks' own sources, of which
    ``drawn`` was already read, and samples whose id is ``bad`` are set aside. A window may hold ``window_bytes``, if that is
    not 0, and a token has one byte.
    """

    paths: Sequence[Path] = ()
    """The files of the trace, if any."""

    def __init__(
        self,
        config: Config | Sequence[Config],
        shards: Sequence[Shard],
        *,
        order: Shard = (),
        seed: int = 0,
        schedule: Schedule | None = None,
        stops: dict[int, int] | None = None,
        fails: dict[int, tuple[str, int]] | None = None,
        is_urging: bool = True,
        checkpoints: Sequence[Checkpoint] | None = None,
        make_machine: Callable[[Config], Machine] = Machine,
        window_bytes: int = 0,
        budgets: Sequence[BudgetSchedule | None] = (),
        drawn: Sequence[Shard] = (),
        bad: Collection[int] = (),
    ) -> None:
        self.window_bytes = window_bytes
        self.bad = bad
        self.schedule = schedule or AnyOrder(seed)
        self.order = order
        self.stops = stops or {}
        self.fails = fails or {}
        self.is_urging = is_urging
        self.posts: dict[tuple[str, int], dict[int, Post]] = defaultdict(dict)
        configs = [config] * len(shards) if isinstance(config, Config) else config
        self.nodes = [
            Node(make_machine(replace(of_rank, rank=rank, world_size=len(shards))), shard)
            for rank, (of_rank, shard) in enumerate(zip(configs, shards, strict=True))
        ]
        for rank, node in enumerate(self.nodes):
            if self._is_own_update(node):
                node.source, node.shard = node.shard, drawn[rank] if drawn else ()
            node.acceptance = Acceptance(
                budget_tokens=node.machine.config.budget_tokens, schedule=budgets[rank] if budgets else None
            )
            if checkpoints is None:
                agreed_tokens, accepted_tokens = node.acceptance.compute_first()
                first = RoundStart(agreed_tokens=agreed_tokens, accepted_tokens=accepted_tokens)
                node.ledger = Ledger(first)
                node.begun = node.machine.begin(None if first == RoundStart() else first)
            else:
                start = checkpoints[rank].start
                node.read = start.read_samples
                node.ledger = Ledger(start)
                node.begun = node.machine.begin(start, tuple(node.shard[position] for position in start.carried))
            node.acceptance = node.acceptance.begin(node.machine.state.accepted_tokens)
            self._perform(rank, node.begun)

    @staticmethod
    def _is_own_update(node: Node) -> bool:
        return node.machine.config.update_samples is not None and node.machine.config.shared_samples is None

    # Requests of the ranks ------------------------------------------------------------------------------------------

    def _perform(self, rank: int, effects: tuple[Effect, ...]) -> None:
        node = self.nodes[rank]
        for effect in effects:
            match effect:
                case Read() | Collate():
                    if isinstance(effect, Read) and effect.first is not None:
                        order = node.source if self._is_own_update(node) else self.order
                        node.draw(order, range(effect.first, effect.first + effect.count), self.bad)
                    node.waiting.append(effect)
                case PostOffer() | PostCounts() | PostReport():
                    self._post(rank, effect)
                case Deliver(step):
                    # RELEASE: at this time every rank holds this step, collated.
                    for other in self.nodes:
                        is_open = other.collating is not None and step in other.collating.steps
                        assert step.number < other.machine.state.planned_steps and not is_open
                    node.queue.append(step)
                case Finish():
                    assert node.finish is None
                    node.finish = effect

    def _post(self, rank: int, post: Post) -> None:
        """Adds a post to its exchange. The last post sends the answer to all ranks."""
        node = self.nodes[rank]
        match post:
            case PostOffer(offer):
                node.round_ = offer.round_max
                posts = self.posts["offer", node.round_]
            case PostCounts():
                posts = self.posts["counts", node.round_]
            case PostReport():
                posts = self.posts["report", node.round_]
        posts[rank] = post
        if len(posts) == len(self.nodes):
            event = combine_posts([posts[other] for other in range(len(self.nodes))])
            for other in self.nodes:
                other.waiting.append(event)

    def send(self, rank: int, event: Event) -> None:
        effects = self.nodes[rank].machine.handle(event)
        self.nodes[rank].events.append((event, effects))
        if isinstance(event, Counted):
            state = self.nodes[rank].machine.state
            self._accept(rank, self.nodes[rank].acceptance.ask(state.planned_steps, state.agreed_tokens))
            self.nodes[rank].ledger.note_round(compute_round_start(self.nodes[rank].machine.state))
        self._perform(rank, effects)

    def accept(self, rank: int, tokens: int) -> None:
        self._accept(rank, self.nodes[rank].acceptance.tell(tokens))

    def _accept(self, rank: int, acceptance: Acceptance) -> None:
        node = self.nodes[rank]
        node.acceptance = acceptance
        if acceptance.offered_tokens != node.machine.state.accepted_tokens:
            self.send(rank, BudgetAccepted(acceptance.tokens))

    # What can happen ------------------------------------------------------------------------------------------------

    def compute_choices(self) -> list[Choice]:
        """Returns everything that can happen now: what waits on each rank, by arrival, then what its consumer can do."""
        choices: list[Choice] = []
        for rank, node in enumerate(self.nodes):
            if not node.is_dead:
                choices += [(ACTIONS[type(item)], rank) for item in node.waiting]
                choices += self.list_of_consumer(rank)
        return choices

    def list_of_consumer(self, rank: int) -> list[Choice]:
        node = self.nodes[rank]
        # The trainer's collective: a step ends when all ranks have joined it. A rank that has left joins no more steps.
        if node.is_stopped or min(len(other.taken) for other in self.nodes) < len(node.taken):
            return []
        if self.stops.get(rank) == len(node.taken):
            return [("stop", rank)]
        return [("take", rank)] if node.head is not None else []

    def do(self, action: str, rank: int) -> None:
        node = self.nodes[rank]
        match action:
            case "take":
                step = node.queue.pop(0)
                node.taken.append(step)
                node.ledger.note_taken(step.number, [sample.position for sample in step.group])
                self.send(rank, StepTaken())
            case "stop" | "strand":
                node.is_stopped = True
                self.send(rank, ConsumerStopped())
                if action == "stop" and self.is_urging:
                    self.urge_others(rank)
            case _:
                item = next(item for item in node.waiting if ACTIONS[type(item)] == action)
                node.waiting.remove(item)
                event = self._answer(rank, item)
                outcome = node.machine.state.outcome
                # Work in progress when a rank lost its exchange is discarded.
                if outcome is None or outcome.kind is not OutcomeKind.LOST:
                    self.send(rank, event)

    def _answer(self, rank: int, item: Effect | Event) -> Event:
        """Returns the event that results from ``item``, or ``item`` if it is one."""
        node = self.nodes[rank]
        match item:
            case Read(asked):
                state = node.machine.state
                if self.fails.get(rank) == ("read", state.round + (state.phase is Phase.COUNT)):
                    return LocalFailed("unreadable")
                if node.machine.config.update_samples is not None:
                    return self._answer_update(node, asked)
                count, is_ended = self.schedule.answer_read(asked, len(node.shard) - node.read)
                fitting = self._count_fitting(node, node.shard[node.read : node.read + count])
                is_full, is_ended = fitting < count, is_ended and fitting == count
                samples = node.shard[node.read : node.read + fitting]
                node.read += fitting
                if fitting < asked and not is_ended and not is_full:
                    node.waiting.append(Read(asked - fitting))
                return SamplesRead(samples, is_ended, is_full)
            case Collate(round_):
                is_bad = self.fails.get(rank) == ("collate", round_)
                return LocalFailed("uncollatable") if is_bad else Collated(round_)
            case PostOffer() | PostCounts() | PostReport() | Deliver() | Finish():
                raise AssertionError(item)
            case _:
                return item

    def _answer_update(self, node: Node, asked: int) -> SamplesRead:
        """Returns part of the samples at the places asked for. If some were set aside, the last says that no more comes."""
        left = len(node.shard) - node.read
        count = min(left, self.schedule.random.randint(1, asked))
        samples = node.shard[node.read : node.read + count]
        node.read += count
        if count < left:
            node.waiting.append(Read(asked - count))
            return SamplesRead(samples)
        if not self._is_own_update(node):
            return SamplesRead(samples, is_ended=count < asked)
        # A source may report its end with its last sample, or when more is asked for.
        over = node.drawn[-1].stop - len(node.source)
        is_ended = over > 0 or (over == 0 and self.schedule.random.random() < 0.5)
        return SamplesRead(samples, is_ended, count < asked and not is_ended)

    def _count_fitting(self, node: Node, samples: Shard) -> int:
        """Returns how many samples fit the window's bytes, one for each token, but at least one if it is empty."""
        if not self.window_bytes:
            return len(samples)
        window = node.machine.state.window
        totals = accumulate((sample.length for sample in samples), initial=sum(sample.length for sample in window))
        fitting = sum(total <= self.window_bytes for total in totals) - 1
        return min(len(samples), max(fitting, 0 if window else 1))

    def fail(self, rank: int, cause: str) -> None:
        """Makes the samples of a rank impossible to read or collate."""
        self.nodes[rank].drop_work()
        self.send(rank, LocalFailed(cause))

    def kill(self, rank: int) -> None:
        """Ends a rank. The others learn of it in time, and what is under way in an exchange may still arrive."""
        self.nodes[rank].is_dead = True
        for node in self.nodes:
            node.waiting.append(PeerLost(rank, "process gone"))

    def urge_others(self, rank: int) -> None:
        """Urges the other ranks because one of them has something to post."""
        for node in self.nodes:
            if node is not self.nodes[rank]:
                node.waiting.append(Urged())

    def step(self) -> bool:
        """Makes the next thing happen, or returns False if nothing can."""
        choice = self.schedule.choose(self)
        if choice is not None:
            self.do(*choice)
        return choice is not None

    def run(self) -> World:
        """Runs until nothing more can happen.

        Raises: AssertionError when the ranks continue without progress. Spec: TERM.
        """
        before = -1
        while all(self.step() for _ in range(PATIENCE * len(self.nodes))):
            drawn = sum(len(node.drawn) for node in self.nodes)  # samples that are set aside are drawn, and not read
            now = drawn + sum(len(node.taken) + node.machine.state.read_samples for node in self.nodes)
            if now == before:
                raise AssertionError(f"TERM: no rank draws, reads or takes anything in {PATIENCE} events each")
            before = now
        return self

    # The result -----------------------------------------------------------------------------------------------------

    def save(self) -> list[Checkpoint]:
        """Returns what each rank would save now."""
        return [node.ledger.compute_checkpoint() for node in self.nodes]

    @property
    def is_over(self) -> bool:
        """True when every rank has finished."""
        return all(node.finish is not None for node in self.nodes)

    @property
    def outcomes(self) -> list[Outcome | None]:
        """The outcome of each rank, or None if it has none."""
        return [node.finish.outcome if node.finish else None for node in self.nodes]

    def get_finishes(self) -> list[Finish]:
        return [node.finish for node in self.nodes if node.finish is not None]

    def get_groups(self, rank: int) -> list[Group]:
        """Returns the groups that the rank's consumer took, in order."""
        return [step.group for step in self.nodes[rank].taken]


# Ready made ---------------------------------------------------------------------------------------------------------


def make_shard(lengths: Sequence[int], first_id: int = 0, costs: Sequence[tuple[int, ...]] | None = None) -> Shard:
    """Returns samples of the given lengths and costs, in this order, all tokens but one supervised."""
    return tuple(
        Sample(first_id + i, i, length, max(0, length - 1), costs[i] if costs else ())
        for i, length in enumerate(lengths)
    )


def make_shards(
    lengths: Sequence[Sequence[int]], costs: Sequence[Sequence[tuple[int, ...]]] | None = None
) -> tuple[Shard, ...]:
    """Returns one shard for each rank, with ids that are unique over all ranks."""
    return tuple(make_shard(shard, 1000 * rank, costs[rank] if costs else None) for rank, shard in enumerate(lengths))


def make_offer(round_: int = 1, fingerprint: int = 1, *, samples: int = 1, groups: int = 1, **changes: int) -> Offer:
    """Returns the offer of one rank, or of several equal ones, without failures or stops, and with nothing due."""
    values = {
        "round_min": round_, "round_max": round_, "fingerprint_min": fingerprint, "fingerprint_max": fingerprint,
        "ready_min": 1, "failed_rank": NONE, "stop_step": NONE, "stop_rank": NONE, "samples_min": samples,
        "samples_max": samples, "groups_min": groups, "groups_max": groups, "due_max": 0,
    }  # fmt: skip
    return Offer(**(values | changes))


def make_config(**options: object) -> Config:
    """Returns a small configuration: budget 8, window 4, no ramp."""
    defaults: dict[str, object] = {
        "rank": 0, "world_size": 1, "budget_tokens": 8, "window_samples": 4, "ramp_rounds": 0, "depth_steps": 2,
    }  # fmt: skip
    return Config(**(defaults | options))  # type: ignore[arg-type]


def make_configs(world_size: int, rule: str = "odb", **settings: Any) -> list[Config]:
    """Returns one configuration for each rank: budget 40, window 6, a ramp of one round."""
    values = {"budget_tokens": 40, "window_samples": 6, "depth_steps": 2, "ramp_rounds": 1} | settings
    return [Config(rank=rank, world_size=world_size, rule=get_rule(rule), **values) for rank in range(world_size)]


def run(lengths: Sequence[Sequence[int]], config: Config, **options: object) -> World:
    """Runs shards of these lengths to the end, in any order."""
    return World(config, make_shards(lengths), **options).run()  # type: ignore[arg-type]


def run_by_arrival(
    lengths: Sequence[Sequence[int]],
    configs: Sequence[Config],
    *,
    seed: int = 0,
    faults: Sequence[Fault] = (),
    trace: Path | None = None,
    is_one_file: bool = True,
    driver: str = "test",
    run: str = "",
    machine_class: type[Machine] = Machine,
) -> World:
    """Runs to the end by arrival, and writes ``trace``. Half of each sample's tokens are supervised. With shared shards the
    ranks draw from all of them, rank by rank.

    Raises: Deadlock when it gets stuck before every living rank has finished.
    """
    shards = [
        tuple(
            Sample(1000 * rank + i, i, length, length // 2, tuple((i + k) % 4 for k in range(len(config.limits))))
            for i, length in enumerate(shard)
        )
        for rank, (shard, config) in enumerate(zip(lengths, configs, strict=True))
    ]
    with ExitStack() as stack:
        paths: list[Path] = []
        if trace is not None:
            paths = [trace] if is_one_file or len(shards) == 1 else list_paths(trace, len(shards))
        is_shared = configs[0].shared_samples is not None
        inputs = tuple(make_input(rank, shard) for rank, shard in enumerate(shards))
        origin = Origin(run=run, inputs=(make_input(None, chain(*shards)),) if is_shared else inputs)
        writers = [stack.enter_context(TraceWriter(path, configs[0], driver=driver, origin=origin)) for path in paths]

        def make_machine(config: Config) -> Machine:
            return machine_class(config, writers[config.rank % len(writers)].record if writers else None)

        order: Shard = ()
        if configs[0].shared_samples is not None:
            order, shards = tuple(chain.from_iterable(shards)), [()] * len(shards)
        world = World(configs, shards, order=order, schedule=ByArrival(seed, faults), make_machine=make_machine)
        world.paths = paths
        world.run()
    for rank, node in enumerate(world.nodes):
        if not node.is_dead and node.finish is None:
            raise Deadlock(f"rank {rank}: {node.machine.state}")
    return world


def write_trace(path: Path, node: Node, origin: Origin, checkpoint: Checkpoint | None = None) -> None:
    """Writes a node's trace to its own file. ``checkpoint`` is what the node resumed from."""
    with TraceWriter(path, node.machine.config, driver="test", origin=origin) as writer:
        event = None
        if checkpoint is not None:
            carried = tuple(node.shard[position] for position in checkpoint.start.carried)
            event = Resumed(checkpoint.start, carried)
        writer.record(node.machine.config.rank, event, node.begun)
        for item, effects in node.events:
            writer.record(node.machine.config.rank, item, effects)


def make_input(rank: int | None, samples: Iterable[Sample]) -> OwnedLot:
    """Returns what a header records about the existing samples."""
    ids = [sample.id for sample in samples]
    return OwnedLot(rank=rank, lot=make_lot(ids), order=place_lot(ids).digest)


def list_paths(trace: Path, ranks: int) -> list[Path]:
    """Returns one file for each rank, with the rank at the end of its name."""
    return [trace.with_name(f"{trace.name}.{rank}") for rank in range(ranks)]
