"""A world whose ranks keep the machine in one process and exchange, queue and consumer in another. Spec: R7.6.

Each rank has a pipe to its loader process, with events, and one back, with updates; what is in them may stay there for any
time, and batches come by a third way. A loader process may be killed at any moment: what it has not read and what it has
not yet sent is gone, and when the trainer's end notices, a stand-in goes on. Beside the stand-in a *twin* is told the same: a
real machine, with its samples, that has failed at the same state. Nobody may see a difference.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, fields

from odb_ref.core.config import Config
from odb_ref.core.effects import (
    Collate,
    Deliver,
    Effect,
    Finish,
    OutcomeKind,
    Post,
    PostCounts,
    PostOffer,
    PostReport,
    Read,
)
from odb_ref.core.events import Agreed, Collated, Event, LocalFailed, PeerLost, SamplesRead
from odb_ref.core.machine import Machine
from odb_ref.core.state import Phase, State
from odb_ref.core.summary import StateSummary, compute_summary, make_stand_in
from odb_ref.core.types import Step
from tests.helpers.world import ACTIONS, AnyOrder, Choice, Node, Shard, World

CAUSE = "loader process lost"


@dataclass(frozen=True)
class Update:
    """What the loader process says after an event; ``state`` is for the twin, and no driver has it."""

    summary: StateSummary
    posts: tuple[Post, ...]
    planned: tuple[Step, ...]
    is_answer: bool
    state: State


@dataclass
class End:
    """One rank's trainer's end, and its pipes."""

    inbox: deque[Event] = field(default_factory=deque)
    updates: deque[Update] = field(default_factory=deque)
    batches: deque[int] = field(default_factory=deque)
    """Rounds whose batches are under way."""
    unanswered: deque[Event] = field(default_factory=deque)
    last: Update | None = None
    planned: list[Step] = field(default_factory=list)
    ready_steps: int = 0
    """The steps whose batches have come."""
    is_posted: bool = False
    """A post has no answer yet."""
    is_dead: bool = False
    is_replaced: bool = False
    is_told_of_loss: bool = False
    twin: Machine | None = None
    at_loss: StateSummary | None = None

    @property
    def summary(self) -> StateSummary:
        return StateSummary() if self.last is None else self.last.summary


@dataclass(frozen=True)
class Kill:
    """The loader process of a rank dies after so many actions, or as soon from then on as the trainer's end knows of
    ``phase``, with its last so many updates not sent.
    """

    after: int
    phase: Phase | None = None
    unsent: int = 0
    is_losing_batches: bool = False


class Weighted(AnyOrder):
    """Draws as `AnyOrder` does; ``speeds`` says how likely each kind of action is."""

    def __init__(self, seed: int, speeds: dict[str, float]) -> None:
        super().__init__(seed)
        self.speeds = speeds

    def choose(self, world: World) -> Choice | None:
        choices = world.compute_choices()
        weights = [self.speeds.get(action, 1.0) for action, _ in choices]
        return self.random.choices(choices, weights)[0] if choices else None


class SplitWorld(World):
    """As `World`, with every rank in two processes. ``kills`` says by rank which loader processes die; ``break_after`` after
    how many actions the exchange breaks; ``speeds`` how likely each kind of action is.
    """

    holding: tuple[type[Event], ...] = (Agreed, PeerLost)
    """Nothing is handed out while one of these is not answered."""
    is_failure_told_last = False

    def __init__(
        self,
        config: Config | Sequence[Config],
        shards: Sequence[Shard],
        *,
        seed: int = 0,
        kills: dict[int, Kill] | None = None,
        break_after: int | None = None,
        speeds: dict[str, float] | None = None,
        **options: object,
    ) -> None:
        self.ends = [End() for _ in shards]
        self.kills = dict(kills or {})
        self.break_after = break_after
        self.is_broken = False
        self.happened = 0
        super().__init__(config, shards, schedule=Weighted(seed, speeds or {}), **options)  # type: ignore[arg-type]

    # The loader process ---------------------------------------------------------------------------------------------

    def _perform(self, rank: int, effects: tuple[Effect, ...], *, is_answer: bool = False) -> None:
        """The loader process reads and collates, and sends the rest to the other end."""
        node = self.nodes[rank]
        node.waiting += [effect for effect in effects if isinstance(effect, Read | Collate)]
        self.ends[rank].updates.append(_make_update(node.machine, effects, is_answer))

    def _handle(self, rank: int, event: Event, *, is_answer: bool) -> None:
        self._perform(rank, self.nodes[rank].machine.handle(event), is_answer=is_answer)

    def kill(self, rank: int, kill: Kill) -> None:
        """The loader process is gone; nobody has noticed."""
        node, end = self.nodes[rank], self.ends[rank]
        end.is_dead = True
        node.drop_work()
        end.inbox.clear()
        for _ in range(min(kill.unsent, len(end.updates))):
            end.updates.pop()
        if kill.is_losing_batches:
            end.batches.clear()

    # The trainer's end ----------------------------------------------------------------------------------------------

    def send(self, rank: int, event: Event) -> None:
        """An event goes where it belongs."""
        if isinstance(event, SamplesRead | LocalFailed):
            self._handle(rank, event, is_answer=False)
        elif isinstance(event, Collated):
            self.ends[rank].batches.append(event.round)
        else:
            self._submit(rank, event)

    def _submit(self, rank: int, event: Event) -> None:
        end = self.ends[rank]
        if end.is_replaced:
            self._tell_stand_in(rank, event)
            return
        end.unanswered.append(event)
        if not end.is_dead:
            end.inbox.append(event)

    def _receive(self, rank: int, update: Update) -> None:
        node, end = self.nodes[rank], self.ends[rank]
        end.last = update
        if update.is_answer:
            end.unanswered.popleft()
        end.planned.extend(update.planned)
        for post in update.posts:
            assert not end.is_posted, "a post while another is open"
            end.is_posted = True
            self._post(rank, post)
        summary = update.summary
        for other in self.ends:
            assert other.summary.round != summary.round or other.summary.planned_steps == summary.planned_steps
        while len(node.delivered) < summary.delivered_steps:
            number = len(node.delivered)
            # RELEASE: every rank holds the batches of the step at its trainer's end.
            assert min(other.ready_steps for other in self.ends) > number, (
                f"rank {rank} is given step {number} too early"
            )
            node.queue.append(end.planned[number])
            node.delivered.append(end.planned[number])
        if summary.phase is Phase.DONE and node.finish is None:
            assert summary.outcome is not None
            node.finish = Finish(summary.outcome, summary.step_limit)

    def notice(self, rank: int) -> None:
        """The loader process is known to be lost: a stand-in goes on."""
        node, end = self.nodes[rank], self.ends[rank]
        config = node.machine.config
        node.machine, end.twin = Machine(config), Machine(config)
        if end.last is None:
            node.machine.begin()
            end.twin.begin()
        else:
            node.machine.state = make_stand_in(end.last.summary)
            end.twin.state = end.last.state
        end.is_replaced, end.at_loss = True, end.summary
        end.batches.clear()
        events, failure = [*end.unanswered], LocalFailed(CAUSE)
        end.unanswered.clear()
        for event in (*events, failure) if self.is_failure_told_last else (failure, *events):
            self._tell_stand_in(rank, event)

    def _tell_stand_in(self, rank: int, event: Event) -> None:
        node, end = self.nodes[rank], self.ends[rank]
        assert end.twin is not None
        effects, expected = node.machine.handle(event), end.twin.handle(event)
        assert _describe(effects) == _describe(expected), f"rank {rank} {event}: not what a rank that failed does"
        assert compute_summary(node.machine.state) == compute_summary(end.twin.state), f"rank {rank} {event}"
        self._receive(rank, _make_update(node.machine, effects, is_answer=False))

    # What can happen ------------------------------------------------------------------------------------------------

    def compute_choices(self) -> list[Choice]:
        """Everything that can happen now, in a fixed order."""
        choices: list[Choice] = []
        for rank, (node, end) in enumerate(zip(self.nodes, self.ends, strict=True)):
            choices += [(action, rank) for action in self._iterate_actions(rank, node, end)]
        return choices

    def _iterate_actions(self, rank: int, node: Node, end: End) -> list[str]:
        waiting = [ACTIONS[type(item)] for item in node.waiting]
        if end.is_told_of_loss:
            waiting = [action for action in waiting if action not in ("offer", "counts", "report")]
        can = {
            **dict.fromkeys(waiting, True),
            "handle": bool(end.inbox),
            "update": bool(end.updates),
            "arrive": bool(end.batches) and any(step.round == end.batches[0] for step in end.planned),
            "notice": end.is_dead and not end.is_replaced and not end.updates,
            "break": self.is_broken and not end.is_told_of_loss and node.finish is None,
        }
        is_held = any(isinstance(event, self.holding) for event in end.unanswered)
        for action, _ in self._list_of_consumer(rank):
            is_below_limit = bool(node.queue) and node.queue[0].number < end.summary.step_limit
            can[action] = action == "stop" or (is_below_limit and not is_held)
        return [action for action, is_possible in can.items() if is_possible]

    def do(self, action: str, rank: int) -> None:
        """Makes one choice happen."""
        end = self.ends[rank]
        match action:
            case "handle":
                self._handle(rank, end.inbox.popleft(), is_answer=True)
            case "update":
                self._receive(rank, end.updates.popleft())
            case "arrive":
                round_ = end.batches.popleft()
                end.ready_steps = 1 + max(step.number for step in end.planned if step.round == round_)
                self._submit(rank, Collated(round_))
            case "notice":
                self.notice(rank)
            case "break":
                end.is_told_of_loss = True
                self.send(rank, PeerLost(None, "broken"))
            case "offer" | "counts" | "report":
                end.is_posted = False
                super().do(action, rank)
            case _:
                super().do(action, rank)

    def step(self) -> bool:
        """Makes the next thing happen, after the loader processes that die now; False when nothing can."""
        for rank, kill in list(self.kills.items()):
            if kill.after <= self.happened and kill.phase in (None, self.ends[rank].summary.phase):
                del self.kills[rank]
                self.kill(rank, kill)
        self.is_broken |= self.break_after is not None and self.break_after <= self.happened
        self.happened += 1
        return super().step()

    def run(self) -> SplitWorld:
        """Lets things happen until nothing can."""
        super().run()
        return self

    # What must hold at the end --------------------------------------------------------------------------------------

    def check_end(self) -> None:
        """Every rank has ended, as ABORT, STOP and FREE say."""
        least = min(len(node.taken) for node in self.nodes)
        is_stranding = any(node.is_stopped and len(node.taken) == least for node in self.nodes)
        for node, end in zip(self.nodes, self.ends, strict=True):
            is_stranded = end.summary.phase is Phase.DRAIN and is_stranding and not node.is_stopped
            assert node.finish is not None or is_stranded, f"{end.summary} waits for ever"
        ended = [
            (node, end)
            for node, end in zip(self.nodes, self.ends, strict=True)
            if end.summary.outcome is not None and end.summary.outcome.kind is not OutcomeKind.LOST
        ]
        assert self.is_broken or len(ended) == len(self.nodes)
        assert len({end.summary.outcome for _, end in ended}) <= 1
        assert len({end.summary.round for _, end in ended}) <= 1
        going_on = [(node, end) for node, end in ended if not node.is_stopped]
        assert len({end.summary.step_limit for _, end in going_on}) <= 1
        causes = {(rank, CAUSE) for rank, end in enumerate(self.ends) if end.is_replaced}
        causes |= {(rank, cause) for rank in self.fails for cause in ("unreadable", "uncollatable")}
        for node, end in ended:
            outcome, at_loss = end.summary.outcome, end.at_loss
            assert outcome is not None
            if outcome.kind is OutcomeKind.FAILED:
                assert (outcome.rank, outcome.cause) in causes
            if not any(other.is_stopped for other in self.nodes) and not self.is_broken:
                assert len(node.taken) == end.summary.step_limit, "a released step is not handed out"
            if at_loss is not None and at_loss.phase in (Phase.FILL, Phase.COUNT, Phase.REPORT):
                assert outcome.kind is OutcomeKind.FAILED
                assert end.summary.round == at_loss.round + (at_loss.phase is Phase.COUNT)
            if at_loss is not None and at_loss.phase is Phase.OFFER and outcome.kind is OutcomeKind.FAILED:
                assert at_loss.round <= end.summary.round <= at_loss.round + 1


def _make_update(machine: Machine, effects: tuple[Effect, ...], is_answer: bool) -> Update:
    return Update(
        summary=compute_summary(machine.state),
        posts=tuple(effect for effect in effects if isinstance(effect, Post)),
        planned=tuple(step for effect in effects if isinstance(effect, Collate) for step in effect.steps),
        is_answer=is_answer,
        state=machine.state,
    )


_OF_SAMPLES = ("samples_min", "samples_max", "groups_min", "groups_max", "due_max", "ready_min")


def _describe(effects: tuple[Effect, ...]) -> list[object]:
    """What others can see of effects, but for what they say of samples."""
    seen: list[object] = []
    for effect in effects:
        match effect:
            case PostOffer(offer):
                names = [item.name for item in fields(offer) if item.name not in _OF_SAMPLES]
                seen.append([getattr(offer, name) for name in names])
            case PostCounts(counts):
                seen.append(len(counts))
            case PostReport(report):
                seen.append(report)
            case Deliver(step):
                seen.append(step.number)
            case Finish():
                seen.append(effect)
            case Read() | Collate():
                pass
    return seen
