"""One rank and all that is its own: the core's state, and the driver, source, collation and consumer around it.

The driver does what every driver does: performs effects, answers with events. It keeps its own books (what is being read
and collated, what is posted, what is delivered) and so notices a core that asks for something impossible.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Final, assert_never

from odb_ref.core import machine
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
from odb_ref.core.errors import InvariantError, OdbError
from odb_ref.core.events import (
    Agreed,
    Collated,
    ConsumerStopped,
    Event,
    LocalFailed,
    PeerLost,
    SamplesRead,
    StepTaken,
    Urged,
)
from odb_ref.core.exchange import Answer, combine_posts
from odb_ref.core.invariants import check_transition
from odb_ref.core.offer import Offer, reduce_offers
from odb_ref.core.rounds import Transition, count_fitting
from odb_ref.core.state import Phase, State
from odb_ref.core.summary import compute_summary, make_stand_in
from odb_ref.core.types import Sample, Step
from odb_sim.explore.bounds import Bounds
from odb_sim.explore.violation import Violation, name_property


def _stand_in(state: State) -> State:
    return make_stand_in(compute_summary(state))


@dataclass(frozen=True, slots=True)
class Core:
    """The functions of the core that a world runs: the shipped ones, or those of a mutant."""

    start: Callable[[Config], Transition] = machine.start
    transition: Callable[[Config, State, Event], Transition] = machine.transition
    check: Callable[[Config, State, State], None] = check_transition
    reduce: Callable[[Sequence[Offer]], Offer] = reduce_offers
    stand_in: Callable[[State], State] = _stand_in


class Act(IntEnum):
    """What can happen next to a rank."""

    READ = 0
    COLLATE = 1
    ANSWER = 2
    """The answer of an exchange arrives."""
    TAKE = 3
    URGE = 4
    LOSE = 5
    """The rank learns that a peer's process is gone."""
    STOP = 6
    FAIL_READ = 7
    FAIL_COLLATE = 8
    DIE = 9
    """The rank's own process is gone."""
    ABANDON = 10
    """The consumer leaves in the middle of the step it has taken last."""
    LOSE_LOADER = 11
    """The process that holds the machine is gone, and the trainer's end has not noticed."""
    STAND_IN = 12
    """It has, and a stand-in goes on."""


ACTS: Final = len(Act)


@dataclass(frozen=True, slots=True)
class Rank:
    """A rank in its surroundings; a value."""

    state: State
    reading: int = 0
    """Samples being read: what a ``Read`` asked for and is not answered."""
    is_exhausted: bool = False
    """The source has said that it has ended."""
    collating: int | None = None
    """The round being collated."""
    post: Post | None = None
    """What the rank has given to the exchange and has no answer to."""
    queue: tuple[Step, ...] = ()
    taken: tuple[Step, ...] = ()
    """History: what the consumer has got."""
    drawn: tuple[Sample, ...] = ()
    """History, with shared shards: what the rank has asked for of the common order."""
    windows: tuple[int, ...] = ()
    """History: how many samples had been read at the end of each window."""
    finish: Finish | None = None
    causes: tuple[str, ...] = ()
    """The failures injected here."""
    is_left: bool = False
    """The consumer has left."""
    is_inside: bool = False
    """It has left in the middle of a step."""
    is_urged: bool = False
    is_lost: bool = False
    """The rank has learnt that a peer's process is gone."""
    is_gone: bool = False
    # A lost loader process (R7.6).
    is_cut: bool = False
    """The process that held the machine is gone."""
    is_replaced: bool = False
    """A stand-in goes on."""
    unanswered: tuple[Event, ...] = ()
    """What the trainer's end has sent to a machine that is gone."""
    held: tuple[Step, ...] = ()
    """The steps that were planned and not delivered at the loss: the stand-in knows their numbers only."""
    is_late: bool = False
    """The loss came after an offer, whose agreement may end the epoch first, or after the last agreement."""

    @property
    def has_step(self) -> bool:
        """True when the consumer would get a step at once."""
        limit = self.finish.step_limit if self.finish is not None else None
        if any(isinstance(event, Agreed | PeerLost) for event in self.unanswered):
            return False  # it may lower the step limit
        return bool(self.queue) and (limit is None or self.queue[0].number < limit)

    @property
    def outbox(self) -> tuple[Step, ...]:
        """The released steps that are not delivered, with what they hold."""
        if not self.is_replaced:
            return self.state.outbox
        numbers = {step.number for step in self.state.outbox}
        return tuple(step for step in self.held if step.number in numbers)

    @property
    def entered_steps(self) -> int:
        """The steps whose collectives the consumer has entered: all it has taken, but for one it left in the middle of."""
        return len(self.taken) - self.is_inside

    @property
    def is_done(self) -> bool:
        """True when nothing of this rank is under way: it has finished, or its process is gone."""
        return self.finish is not None or self.is_gone


def compute_acts(rank: Rank) -> tuple[Act, ...]:
    """Returns what may happen to the rank next as far as the rank alone decides; the world has a say in most."""
    if rank.is_gone:
        return ()
    acts: list[Act] = []
    if rank.finish is None:
        if rank.reading:
            acts += [Act.READ, Act.FAIL_READ]
        if rank.collating is not None:
            # The batches may be on their way when the process that made them is gone.
            acts += [Act.COLLATE] if rank.is_cut else [Act.COLLATE, Act.FAIL_COLLATE]
        if not rank.is_cut:
            acts.append(Act.LOSE_LOADER)
        elif not rank.is_replaced:
            acts.append(Act.STAND_IN)
        # A driver drops what comes after `PeerLost`, also when the machine has not heard of it.
        if rank.post is not None and not (rank.is_cut and rank.is_lost):
            acts.append(Act.ANSWER)
        if not rank.is_urged:
            acts.append(Act.URGE)
        if not rank.is_lost:
            acts.append(Act.LOSE)
        acts.append(Act.DIE)
    if not rank.is_left:
        if rank.has_step:
            acts.append(Act.TAKE)
        if rank.has_step or rank.finish is None:
            acts.append(Act.STOP)
            if rank.taken:
                acts.append(Act.ABANDON)
    return tuple(sorted(acts))


def forget(rank: Rank) -> Rank:
    """Returns a rank to which nothing can happen any more, without its samples, books and flags: nobody looks at them.

    What stays is what the checks of all ranks together see: its round and steps, whether it was ready, and how it ended.
    """
    state = rank.state
    is_ready = rank.collating is None and state.is_collated
    is_complete = state.outcome is not None and state.outcome.kind is OutcomeKind.COMPLETE
    bare = State(
        phase=state.phase,
        round=state.round,
        planned_steps=state.planned_steps,
        plan=state.plan,
        is_collated=is_ready,
        outbox=state.outbox if is_complete else (),
        outcome=state.outcome,
        step_limit=state.step_limit,
    )
    return replace(
        rank,
        state=bare,
        reading=0,
        is_exhausted=True,
        collating=None,
        windows=(),
        drawn=rank.drawn if is_complete else (),
        queue=rank.queue if is_complete or rank.has_step else (),
        held=rank.held if is_complete else (),
        is_urged=True,
        is_lost=True,
        unanswered=(),
    )


@dataclass(frozen=True, slots=True)
class RankDriver:
    """Drives one core: ``begin`` once, then ``act`` for each thing that happens. Pure: a new rank comes back."""

    bounds: Bounds
    config: Config
    shard: tuple[Sample, ...]
    """Those of all ranks, where they share one order."""
    core: Core

    def begin(self) -> Rank:
        """Returns the rank at the start of the epoch.

        Raises: Violation.
        """
        state, effects = self.core.start(self.config)
        return self._perform(Rank(state), effects)

    def act(self, rank: Rank, act: Act, answer: Answer | None = None, lost: int | None = None) -> Rank:
        """Returns the rank after ``act``; ``answer`` is what the exchange brings, ``lost`` the rank that is gone.

        Raises: Violation when the core refuses the event, breaks an invariant or asks for something impossible.
        """
        match act:
            case Act.READ:
                return self._handle(*self._read(rank))
            case Act.COLLATE:
                return self._handle(
                    replace(rank, collating=None), Collated(-1 if rank.collating is None else rank.collating)
                )
            case Act.ANSWER:
                after = self._handle(replace(rank, post=None), _require_answer(answer))
                if rank.state.phase is Phase.OFFER and after.state.phase is Phase.COUNT and not rank.is_cut:
                    after = replace(after, windows=(*rank.windows, rank.state.read_samples))
                return after
            case Act.TAKE:
                return self._handle(replace(rank, queue=rank.queue[1:], taken=rank.taken + rank.queue[:1]), StepTaken())
            case Act.STOP:
                return self._handle(replace(rank, is_left=True), ConsumerStopped())
            case Act.URGE:
                return self._handle(replace(rank, is_urged=True), Urged())
            case Act.LOSE:
                return self._handle(replace(rank, is_lost=True), PeerLost(lost, "its process is gone"))
            case Act.FAIL_READ:
                cause = f"sample {rank.state.read_samples} of rank {self.config.rank} is broken"
                return self._handle(replace(rank, reading=0, causes=(*rank.causes, cause)), LocalFailed(cause))
            case Act.FAIL_COLLATE:
                cause = f"round {rank.collating} of rank {self.config.rank} cannot be collated"
                return self._handle(replace(rank, collating=None, causes=(*rank.causes, cause)), LocalFailed(cause))
            case Act.DIE:
                return replace(rank, is_gone=True)
            case Act.ABANDON:
                return self._handle(replace(rank, is_left=True, is_inside=True), ConsumerStopped())
            case Act.LOSE_LOADER:
                return replace(rank, is_cut=True, reading=0)
            case Act.STAND_IN:
                return self._replace(rank)
            case _:
                assert_never(act)

    def _replace(self, rank: Rank) -> Rank:
        """Returns the rank with a stand-in, which has handled what its machine has not."""
        cause = f"the loader of rank {self.config.rank} is gone"
        after = replace(
            rank,
            state=self.core.stand_in(rank.state),
            collating=None,
            causes=(*rank.causes, cause),
            is_replaced=True,
            unanswered=(),
            held=(*rank.state.outbox, *rank.state.plan),
            is_late=rank.state.phase in (Phase.OFFER, Phase.DRAIN),
        )
        for event in order_events(cause, rank.unanswered):
            after = self._handle(after, event)
        return after

    def _read(self, rank: Rank) -> tuple[Rank, SamplesRead]:
        start = rank.state.read_samples
        asked = min(1, rank.reading) if self.bounds.is_single_reads else rank.reading
        shard = rank.drawn if self.bounds.is_shared else self.shard
        samples = shard[start : start + asked]
        fitting = samples
        if most := self.bounds.window_bytes:
            room = most - sum(sample.length for sample in rank.state.window)
            fits = count_fitting((item.length for item in samples), room, is_empty=not rank.state.window)
            fitting = samples[:fits]
        is_full = len(fitting) < len(samples)
        is_ended = not is_full and len(samples) < asked
        if self.bounds.is_eager_end:
            is_ended = start + len(fitting) == len(shard)
        left = 0 if is_ended or is_full else rank.reading - len(fitting)
        is_exhausted = is_ended and not self.bounds.is_shared
        return replace(rank, reading=left, is_exhausted=is_exhausted), SamplesRead(fitting, is_ended, is_full)

    def _handle(self, rank: Rank, event: Event) -> Rank:
        if rank.is_cut and not rank.is_replaced:
            return replace(rank, unanswered=(*rank.unanswered, event))
        try:
            state, effects = self.core.transition(self.config, rank.state, event)
            self.core.check(self.config, rank.state, state)
        except OdbError as error:
            raise Violation(
                name_property(error), f"rank {self.config.rank}, {type(event).__name__}: {error}"
            ) from error
        return self._perform(replace(rank, state=state), effects)

    def _perform(self, rank: Rank, effects: tuple[Effect, ...]) -> Rank:
        for effect in effects:
            rank = self._perform_one(rank, effect)
        return rank

    def _perform_one(self, rank: Rank, effect: Effect) -> Rank:
        match effect:
            case Read() | Collate() if rank.is_replaced:
                return rank
            case Read():
                self._require(not rank.reading, "FREE", "a Read while another is open")
                self._require(not rank.is_exhausted, "TERM", "a Read after the source has ended")
                return replace(rank, reading=effect.count, drawn=rank.drawn + self._draw(rank, effect))
            case Collate():
                self._require(rank.collating is None, "FREE", "a Collate while another is open")
                return replace(rank, collating=effect.round)
            case PostOffer() | PostCounts() | PostReport():
                return self._post(rank, effect)
            case Deliver():
                self._require(len(rank.queue) < self.config.depth_steps, "FREE", "a Deliver into a full queue")
                self._require(rank.finish is None, "STOP", "a Deliver after Finish")
                step = effect.step
                if rank.is_replaced:
                    held = [item for item in rank.held if item.number == step.number]
                    self._require(
                        bool(held), "RELEASE", f"step {step.number} is delivered, and it holds no batch of it"
                    )
                    step = held[0]
                return replace(rank, queue=(*rank.queue, step))
            case Finish():
                self._require(rank.finish is None, "FREE", "a second Finish")
                return replace(rank, finish=effect)
            case _:
                assert_never(effect)

    def _draw(self, rank: Rank, effect: Read) -> tuple[Sample, ...]:
        self._require((effect.first is not None) == self.bounds.is_shared, "DEAL", f"{effect} of another order")
        samples = () if effect.first is None else self.shard[effect.first : effect.first + effect.count]
        self._require(effect.first is None or len(samples) == effect.count, "DEAL", f"{effect} leaves the common order")
        return tuple(replace(sample, position=i) for i, sample in enumerate(samples, len(rank.drawn)))

    def _post(self, rank: Rank, post: Post) -> Rank:
        self._require(rank.post is None, "FREE", "a post while another is open")
        return replace(rank, post=post)

    def _require(self, holds: bool, property_: str, detail: str) -> None:
        if not holds:
            raise Violation(property_, f"rank {self.config.rank}: {detail}")


def order_events(cause: str, unanswered: tuple[Event, ...]) -> tuple[Event, ...]:
    """Returns what a stand-in handles first, in order. Spec: R7.6."""
    return (LocalFailed(cause), *unanswered)


def _require_answer(answer: Answer | None) -> Answer:
    if answer is None:
        raise TypeError("an exchange has no answer yet")
    return answer


def answer_posts(core: Core, posts: tuple[Post, ...]) -> Answer:
    """Returns what the exchange answers once all ranks have posted.

    Raises: Violation when the posts do not belong together.
    """
    try:
        return combine_posts(posts, core.reduce)
    except InvariantError as error:
        raise Violation(error.invariant, error.detail) from error
