"""Drives the core of one rank, as every driver does: performs effects and answers with events.

It keeps its own record of what is being read and collated, posted and delivered. So it notices a core that asks for something
impossible.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import assert_never

from odb_ref.core import machine
from odb_ref.core.batching.budgets import Acceptance
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
    BudgetAccepted,
    Collated,
    ConsumerStopped,
    Counted,
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
from odb_ref.core.resume import RoundStart, resume
from odb_ref.core.rounds import Transition, count_fitting
from odb_ref.core.state import Phase, State
from odb_ref.core.types import Group, Sample
from odb_sim.explore.bounds import Bounds
from odb_sim.explore.rank import Act, ExploredRank
from odb_sim.explore.violation import Breach, name_property


@dataclass(frozen=True, slots=True)
class Core:
    """The core functions that a world runs: the real ones, or those of a mutant."""

    resume: Callable[[Config, RoundStart, Group], Transition] = resume
    transition: Callable[[Config, State, Event], Transition] = machine.transition
    check: Callable[[Config, State, State], None] = check_transition
    reduce: Callable[[Sequence[Offer]], Offer] = reduce_offers
    acceptance: type[Acceptance] = Acceptance


@dataclass(frozen=True, slots=True)
class RankDriver:
    """Drives one core: ``begin`` once, then ``act`` for each thing that happens. Both are pure and return a new rank."""

    bounds: Bounds
    config: Config
    shard: tuple[Sample, ...]
    """The rank's samples, or those of all ranks if they share one order."""
    core: Core

    def begin(self) -> ExploredRank:
        """Returns the rank at the start of the epoch. Raises: Breach."""
        budget = self.config.budget_tokens
        acceptance = self.core.acceptance(budget_tokens=budget, schedule=self.bounds.make_schedule())
        agreed_tokens, accepted_tokens = acceptance.compute_first()
        start = RoundStart(agreed_tokens=agreed_tokens, accepted_tokens=accepted_tokens)
        state, effects = self.core.resume(self.config, start, ())
        rank = ExploredRank(
            state,
            acceptance.begin(accepted_tokens),
            coming=self.bounds.get_accepted(self.config.rank),
            budgets=self._compute_first_budget(),
        )
        return self._perform(rank, effects)

    def act(self, rank: ExploredRank, act: Act, answer: Answer | None = None, lost: int | None = None) -> ExploredRank:
        """Returns the rank after ``act``. ``answer`` is that of the exchange, and ``lost`` the rank that is gone.

        Raises: Breach when the core refuses the event, breaks an invariant or asks for something impossible.
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
                if rank.state.phase is Phase.OFFER and after.state.phase is Phase.COUNT:
                    after = replace(after, windows=(*rank.windows, rank.state.read_samples))
                    after = replace(after, budgets=self._note_budget(rank, answer))
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
                cause = f"the loader of rank {self.config.rank} is gone"
                rank = replace(rank, is_loader_lost=True, causes=(*rank.causes, cause))
                return self._handle(replace(rank, reading=0, collating=None), LocalFailed(cause))
            case Act.ACCEPT:
                told = replace(rank, coming=rank.coming[1:])
                return self._accept(told, rank.acceptance.tell(rank.coming[0]))
            case _:
                assert_never(act)

    def _accept(self, rank: ExploredRank, acceptance: Acceptance) -> ExploredRank:
        """Returns the rank after its machine is told of a changed acceptance. Spec: R15.4."""
        rank = replace(rank, acceptance=acceptance)
        is_known = acceptance.offered_tokens == rank.state.accepted_tokens
        return rank if is_known else self._handle(rank, BudgetAccepted(acceptance.tokens))

    def _compute_first_budget(self) -> tuple[tuple[int, int], ...]:
        """Returns the budget history of the first round, empty if it has the largest budget. Spec: R15.1."""
        schedule, budget = self.bounds.make_schedule(), self.config.budget_tokens
        first = budget if schedule is None else min(budget, schedule(0, budget))
        return ((0, first),) if first < budget else ()

    def _note_budget(self, rank: ExploredRank, answer: Answer | None) -> tuple[tuple[int, int], ...]:
        """Returns the history of budgets after an agreement that continues the epoch. Spec: R15.3."""
        if not isinstance(answer, Agreed):
            return rank.budgets
        before = rank.budgets[-1][1] if rank.budgets else self.config.budget_tokens
        agreed = min(self.config.budget_tokens, answer.agreement.budget_min)
        return rank.budgets if agreed == before else (*rank.budgets, (rank.state.round + 1, agreed))

    def _read_places(self, rank: ExploredRank) -> tuple[ExploredRank, SamplesRead]:
        """Answers with the samples at the requested places. If some are set aside, the last part shows it. Spec: R16.5."""
        rest = rank.drawn[rank.state.read_samples :]
        samples = rest[:1] if self.bounds.is_single_reads else rest
        is_last = len(samples) == len(rest)
        is_short = is_last and len(samples) < rank.reading
        beyond = rank.read_end - len(self.shard)
        is_over = is_last and (beyond > 0 or (beyond == 0 and self.bounds.is_eager_end))
        is_ended = is_short if self.bounds.is_shared else is_over
        left = 0 if is_last else rank.reading - len(samples)
        is_full = is_short and not is_ended
        is_exhausted = is_ended and not self.bounds.is_shared
        return replace(rank, reading=left, is_exhausted=is_exhausted), SamplesRead(samples, is_ended, is_full)

    def _read(self, rank: ExploredRank) -> tuple[ExploredRank, SamplesRead]:
        if self.config.update_samples is not None:
            return self._read_places(rank)
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

    def _handle(self, rank: ExploredRank, event: Event) -> ExploredRank:
        try:
            state, effects = self.core.transition(self.config, rank.state, event)
            self.core.check(self.config, rank.state, state)
        except OdbError as error:
            raise Breach(name_property(error), f"rank {self.config.rank}, {type(event).__name__}: {error}") from error
        # Another offer follows, unless the rank has posted its last one or loses the exchange.
        is_due = bool(rank.causes) and not {rank.state.phase, state.phase}.isdisjoint((Phase.FILL, Phase.COUNT))
        rank = replace(rank, state=state, is_due=rank.is_due or is_due)
        if isinstance(event, Counted):
            # Before the effects, so that the schedule's answer for the round that begins now is in its offer.
            rank = self._accept(rank, rank.acceptance.ask(state.planned_steps, state.agreed_tokens))
        return self._perform(rank, effects)

    def _perform(self, rank: ExploredRank, effects: tuple[Effect, ...]) -> ExploredRank:
        for effect in effects:
            rank = self._perform_one(rank, effect)
        return rank

    def _perform_one(self, rank: ExploredRank, effect: Effect) -> ExploredRank:
        match effect:
            case Read():
                self._require(not rank.reading, "FREE", "a Read while another is open")
                self._require(not rank.is_exhausted, "TERM", "a Read after the source has ended")
                asked = 0 if rank.is_loader_lost else effect.count
                end = 0 if effect.first is None else effect.first + effect.count
                return replace(rank, reading=asked, drawn=rank.drawn + self._draw(rank, effect), read_end=end)
            case Collate():
                self._require(rank.collating is None, "FREE", "a Collate while another is open")
                return replace(rank, collating=None if rank.is_loader_lost else effect.round)
            case PostOffer(offer):
                self._check_offer(rank, offer)
                return self._post(rank, effect)
            case PostCounts() | PostReport():
                return self._post(rank, effect)
            case Deliver():
                self._require(len(rank.queue) < self.config.depth_steps, "FREE", "a Deliver into a full queue")
                self._require(rank.finish is None, "STOP", "a Deliver after Finish")
                return replace(rank, queue=(*rank.queue, effect.step))
            case Finish():
                self._require(rank.finish is None, "FREE", "a second Finish")
                is_last = effect.outcome.kind is not OutcomeKind.LOST or effect.step_limit <= len(rank.taken)
                self._require(is_last, "ABORT", "gets a further step after a loss")
                return replace(rank, finish=effect)
            case _:
                assert_never(effect)

    def _draw(self, rank: ExploredRank, effect: Read) -> tuple[Sample, ...]:
        is_named = self.bounds.is_shared or self.config.update_samples is not None
        self._require((effect.first is not None) == is_named, "DEAL", f"{effect} of another order")
        samples = () if effect.first is None else self.shard[effect.first : effect.first + effect.count]
        is_there = not self.bounds.is_shared or len(samples) == effect.count
        self._require(is_there, "DEAL", f"{effect} leaves the common order")
        good = [sample for sample in samples if sample.id not in self.bounds.bad]
        return tuple(replace(sample, position=i) for i, sample in enumerate(good, len(rank.drawn)))

    def _check_offer(self, rank: ExploredRank, offer: Offer) -> None:
        """Checks that the rank offers the budget it accepts now, or that of the schedule if it is less. Spec: R15.2."""
        state = rank.state
        if state.failure or state.is_stopped:
            return  # the agreement ends the epoch, so the budget of a next round does not matter
        given = self.bounds.get_accepted(self.config.rank)
        told = given[: len(given) - len(rank.coming)][-1:]
        schedule = self.bounds.make_schedule()
        scheduled = () if schedule is None else (schedule(state.planned_steps, 0),)
        tokens = min((self.config.budget_tokens, *told, *scheduled))
        offered = min(self.config.budget_tokens, offer.budget_min)
        self._require(offered == tokens, "BUDGET", f"it offers {offered} tokens, and accepts {tokens}")

    def _post(self, rank: ExploredRank, post: Post) -> ExploredRank:
        self._require(rank.post is None, "FREE", "a post while another is open")
        return replace(rank, post=post)

    def _require(self, holds: bool, property_: str, detail: str) -> None:
        if not holds:
            raise Breach(property_, f"rank {self.config.rank}: {detail}")


def _require_answer(answer: Answer | None) -> Answer:
    if answer is None:
        raise TypeError("an exchange has no answer yet")
    return answer


def answer_posts(core: Core, posts: tuple[Post, ...]) -> Answer:
    """Returns the exchange's answer once all ranks have posted. Raises: Breach when the posts do not fit together."""
    try:
        answer = combine_posts(posts, core.reduce)
    except InvariantError as error:
        raise Breach(error.invariant, error.detail) from error
    if isinstance(answer, Agreed):
        least = min(post.offer.budget_min for post in posts if isinstance(post, PostOffer))
        if answer.agreement.budget_min != least:
            raise Breach(
                "BUDGET", f"the ranks offer {least} tokens or more, and agree on {answer.agreement.budget_min}"
            )
    return answer
