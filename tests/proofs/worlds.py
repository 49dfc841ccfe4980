"""Random worlds for the comparison with the extracted model, and counts of the cases that they reached.

A world depends only on its seed. A difference is reported by the first event that shows it, so nothing has to be shrunk.

This is not the world of `tests.helpers.world`, where only possible events happen. Here a function is asked about any event in
any state. Consumers take steps without a collective, a rank continues after its exchange is broken, illegal events come, and
the functions are a `Core`, which may be a mutant. So there is no `Machine`, no invariant is checked, and nothing has to end.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Self

from odb_sim.explore.bounds import Bounds
from odb_sim.explore.driver import Core

from odb_ref.core.batching.budgets import compute_offered
from odb_ref.core.batching.cost import TOKENS, Cost, make_attention_cost, make_own_cost
from odb_ref.core.batching.layouts import Layout
from odb_ref.core.batching.order import StepOrder
from odb_ref.core.batching.rules import RULES
from odb_ref.core.config import Config
from odb_ref.core.effects import Post, PostOffer
from odb_ref.core.errors import PeerError, UsageError
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
from odb_ref.core.exchange import combine_posts
from odb_ref.core.offer import NONE, Offer
from odb_ref.core.resume import RoundStart
from odb_ref.core.rounds import Transition
from odb_ref.core.state import Phase, State
from odb_ref.core.types import Mode, Sample, StepCounts
from tests.mutants.loader import Mutant
from tests.proofs.wire import Budgets, Stairs, show_state, write_config, write_event

MOST_EVENTS = 6_000

LEAST = {
    "due": 35, "due and carried": 20, "a due group that is not the fullest": 30, "carried": 90, "ended source carries": 30,
    "quota cut inside a round": 7, "quota met exactly": 12, "report with steps released": 4, "round 20": 35, "round 100": 5,
    "more than 16 ranks": 50, "a failed rank beyond 16": 5, "a stopped rank beyond 16": 5, "65,536 tokens": 35,
    "split": 65, "split by cost": 60, "split packed": 30,
    "a window that is full": 40, "full at once": 9, "carried in sampler order": 40, "split in sampler order": 30,
    "a group kept back": 160, "kept back packed": 50, "kept back in sampler order": 50,
    "kept back under a smaller budget": 70, "half of a smaller budget, not of the whole": 45, "half full exactly": 35,
    "one group, less than half full": 110,
    "carried packed": 35, "lined up otherwise than by tokens": 70,
    "begins under a budget of its own": 120, "the budget falls": 110, "the budget rises": 60, "limits shrink": 50,
    "idle": 40, "a step waits for room": 90, "urged": 80, "refused": 200, "no fault at all": 60,
    "two failures": 2, "two stops": 3,
    "complete": 180, "stopped": 40, "failed": 40, "mismatch": 15, "lost": 20,
    "failed while in offer": 15, "failed while in count": 15, "failed while in fill": 15, "failed while in report": 2,
    "stopped while in offer": 20, "stopped while in count": 15, "stopped while in fill": 15, "stopped while in report": 1,
    "stopped while in drain": 4,
    "lost while in offer": 15, "lost while in count": 12, "lost while in fill": 6, "lost while in report": 1,
}  # fmt: skip
"""The minimum number of worlds in a test run that meet each case, well below the actual counts, because seeds may change."""


def make_samples(lengths: Sequence[int], resources: int = 0) -> tuple[Sample, ...]:
    """Returns samples of these lengths, in this order."""
    return tuple(
        Sample(i, i, length, length // 2, tuple((7 * i + 3 * length + r) % 6 for r in range(resources)))
        for i, length in enumerate(lengths)
    )


def begin(core: Core, config: Config, budgets: Budgets) -> Transition:
    """Starts a rank with its own budget."""
    agreed_tokens, accepted_tokens = budgets
    return core.resume(config, RoundStart(agreed_tokens=agreed_tokens, accepted_tokens=accepted_tokens), ())


@dataclass
class Rank:
    """One rank, and the log of its events."""

    config: Config
    budgets: Budgets
    source: tuple[Sample, ...]
    state: State
    events: list[str] = field(default_factory=list)
    log: list[Event] = field(default_factory=list)
    """The same log as values."""
    lines: list[str] = field(default_factory=list)
    pending: list[Event] = field(default_factory=list)
    waiting: Post | None = None


@dataclass(frozen=True, kw_only=True)
class Rates:
    """The probability at each event of a world that something goes wrong or comes at the wrong time."""

    stop: float
    fail: float
    urge: float
    lose: float
    illegal: float
    first_rank: int = 0
    """Consumers of lower ranks do not leave, and these ranks do not fail."""
    accept: float = 0.0
    """A rank accepts another budget."""
    full: float = 0.0
    """A read reports a full window, whether that is allowed or not."""


class World:
    """The real transition function on W ranks under a random schedule, with a log of each rank's events."""

    def __init__(
        self, configs: Sequence[Config], shards: Sequence[Sequence[int]], rates: Rates, rng: random.Random, core: Core
    ) -> None:
        self.rng = rng
        self.budget_rng = random.Random(f"budgets: {configs[0].order_seed}")
        self.full_rng = random.Random(f"full: {configs[0].order_seed}")
        self.rates = rates
        self.core = core
        self.is_broken = False
        self.reached = Counter[str]()
        self.prints = {config.shared_json: config.fingerprint for config in configs}
        self.ranks: list[Rank] = []
        for config, shard in zip(configs, shards, strict=True):
            budgets = self._draw_budget(config), self._draw_budget(config)
            state, effects = begin(core, config, budgets)
            self.ranks.append(Rank(config, budgets, make_samples(shard, len(config.limits)), state))
            self._reach("begins under a budget of its own", budgets[0] != NONE)
            self.ranks[-1].lines.append(show_state(state, effects, self.prints))
            self.ranks[-1].waiting = next((effect for effect in effects if isinstance(effect, Post)), None)
        self._reach("more than 16 ranks", len(configs) > 16)

    def _draw_budget(self, config: Config) -> int:
        """Draws what a rank may accept at its start: usually the whole budget if no budget changes."""
        if not self.rates.accept:
            return NONE
        tokens = config.budget_tokens * self.budget_rng.randint(1, 12) // 8
        return compute_offered(max(1, tokens), config.budget_tokens)

    def _reach(self, case: str, holds: bool) -> None:
        if holds:
            self.reached[case] = 1

    def handle(self, index: int, event: Event) -> None:
        """Makes the event happen. If it is refused, the model must refuse it too."""
        rank = self.ranks[index]
        rank.events.append(write_event(event, self.prints))
        rank.log.append(event)
        before = rank.state
        try:
            rank.state, effects = self.core.transition(rank.config, before, event)
        except (UsageError, PeerError):
            rank.lines.append("refused")
            self._reach("refused", True)
            return
        rank.lines.append(show_state(rank.state, effects, self.prints))
        self._note(rank, before, event)
        for effect in effects:
            if isinstance(effect, Post):
                rank.waiting = effect
            if isinstance(effect, PostOffer):
                self._note_offer(rank, effect.offer)

    def _note(self, rank: Rank, before: State, event: Event) -> None:
        """Counts the cases that were reached."""
        after, config = rank.state, rank.config
        reach = self._reach
        reach("round 20", after.round >= 20)
        reach("round 100", after.round >= 100)
        reach("a step waits for room", bool(after.released) and after.phase is Phase.FILL)
        reach("report with steps released", after.phase is Phase.REPORT and bool(after.released))
        if before.phase is Phase.OFFER and after.phase is Phase.COUNT:
            self._note_alignment(rank, before)
            reach("a round without a step", not after.aligned)
            reach("a step of an update", bool(after.aligned) and config.update_samples is not None)
        if isinstance(event, Counted) and before.phase is Phase.COUNT:
            quota = config.quota_samples
            cut = len(after.plan) < len(before.aligned)
            reach("quota cut inside a round", cut)
            reach("quota met exactly", quota is not None and after.global_samples == quota)
        if isinstance(event, ConsumerStopped | LocalFailed | PeerLost) and after != before:
            word = {ConsumerStopped: "stopped", LocalFailed: "failed", PeerLost: "lost"}[type(event)]
            reach(f"{word} while in {before.phase}", True)
        if after.outcome is not None and before.outcome is None:
            reach(str(after.outcome.kind), True)
            reach("a failed rank beyond 16", after.outcome.kind == "failed" and (after.outcome.rank or 0) >= 16)
            reach("a stopped rank beyond 16", after.outcome.kind == "stopped" and (after.outcome.rank or 0) >= 16)
        reach("urged", after.is_urged)
        if before.phase is Phase.OFFER and after.phase is Phase.COUNT:
            reach("the budget falls", after.agreed_tokens < before.agreed_tokens)
            reach("the budget rises", after.agreed_tokens > before.agreed_tokens)
            reach("limits shrink", after.agreed_tokens < config.budget_tokens and bool(config.limits))

    def _note_offer(self, rank: Rank, offer: Offer) -> None:
        """Notes how the groups to emit were counted. The core may be a mutant, so its offer is taken as it is."""
        config, state = rank.config, rank.state
        if offer.groups_min == NONE or not state.groups:
            return
        budget_tokens, _ = config.compute_round_bounds(state.agreed_tokens)
        least = 2 * min(map(config.layout.compute_tokens, state.groups))
        is_one_kept = offer.groups_min < offer.groups_max
        reach = self._reach
        reach("a group kept back", is_one_kept)
        reach("kept back packed", is_one_kept and config.layout is Layout.PACKED)
        reach("kept back in sampler order", is_one_kept and config.order == StepOrder.SAMPLER)
        reach("kept back under a smaller budget", is_one_kept and budget_tokens < config.budget_tokens)
        reach(
            "half of a smaller budget, not of the whole",
            len(state.groups) > 1 and budget_tokens <= least < config.budget_tokens,
        )
        reach("half full exactly", len(state.groups) > 1 and least == budget_tokens)
        reach("one group, less than half full", len(state.groups) == 1 and least < budget_tokens)

    def _note_alignment(self, rank: Rank, before: State) -> None:
        after, config = rank.state, rank.config
        marks = before.marks
        due_before = marks[0] if len(marks) == config.max_age_rounds else 0
        due = [group for group in before.groups if any(sample.position < due_before for sample in group)]
        reach = self._reach
        reach("due", bool(due))
        reach("due and carried", bool(due) and bool(after.window))
        layout, cost = config.layout, config.cost
        fullest = max(map(layout.compute_tokens, before.groups), default=0)
        reach("a due group that is not the fullest", any(layout.compute_tokens(group) < fullest for group in due))
        reach("carried packed", bool(after.window) and layout is Layout.PACKED)
        is_sampler = config.order == StepOrder.SAMPLER
        reach("carried in sampler order", bool(after.window) and is_sampler)
        reach("split in sampler order", sum(map(bool, after.aligned)) > len(before.groups) and is_sampler)
        filled = [group for group in after.aligned if group]
        by_cost = sorted(filled, key=lambda group: -layout.compute_cost(group, cost))
        reach("lined up otherwise than by tokens", by_cost != sorted(filled, key=lambda g: -layout.compute_tokens(g)))
        reach("carried", bool(after.window))
        reach("ended source carries", bool(after.window) and before.is_ended)
        reach("idle", () in after.aligned and bool(before.groups))
        reach("split", len(filled) > len(before.groups))
        reach("split by cost", len(filled) > len(before.groups) and cost != TOKENS)
        reach("split packed", len(filled) > len(before.groups) and layout is Layout.PACKED)
        reach("65,536 tokens", fullest > 65_536)

    def _exchange(self) -> None:
        posts = [rank.waiting for rank in self.ranks if rank.waiting is not None]
        if len({type(post) for post in posts}) > 1:
            return
        offers = [post.offer for post in posts if isinstance(post, PostOffer)]
        self._reach("two failures", sum(offer.failed_rank != NONE for offer in offers) > 1)
        self._reach("two stops", sum(offer.stop_rank != NONE for offer in offers) > 1)
        answer = combine_posts(posts, self.core.reduce)
        for rank in self.ranks:
            rank.waiting = None
            rank.pending.append(answer)

    def one_event(self) -> None:
        """Makes one possible event happen, or, as often as the rates say, something that goes wrong."""
        rng, rates = self.rng, self.rates
        if rates.accept and self.budget_rng.random() < rates.accept:
            chosen = self.budget_rng.randrange(len(self.ranks))
            most = self.ranks[chosen].config.budget_tokens * 5 // 4
            self.handle(chosen, BudgetAccepted(self.budget_rng.randint(0, most)))
            return
        if all(rank.waiting for rank in self.ranks):
            self._exchange()
        index = rng.randrange(len(self.ranks))
        rank = self.ranks[index]
        # Cases that are rare by themselves: a failure while steps wait for room, a consumer that leaves at the very end.
        stop = rates.stop * (40 if rank.state.phase is Phase.DRAIN else 1)
        fail = rates.fail * (20 if rank.state.released else 1)
        if rng.random() < (0.1 if self.is_broken else rates.lose):
            self.is_broken = True
            self.handle(index, PeerLost(rng.choice((None, 0, len(self.ranks) - 1)), str(rng.randrange(1, 9))))
        elif index >= rates.first_rank and rng.random() < stop:
            self.handle(index, ConsumerStopped())
        elif index >= rates.first_rank and rng.random() < fail:
            self.handle(index, LocalFailed(str(rng.randrange(1, 9))))
        elif rng.random() < rates.urge:
            self.handle(index, Urged())
        elif rng.random() < rates.illegal:
            self.handle(
                index,
                rng.choice((Counted(()), StepTaken(), Counted((StepCounts(1, 1, 1),)), Agreed(_ANY))),
            )
        else:
            self._go_on(index, rank)

    def _go_on(self, index: int, rank: Rank) -> None:
        """Makes something happen that must happen some time: the first thing possible, in a new random order."""
        state = rank.state
        for what in self.rng.sample(("answer", "read", "collate", "take"), 4):
            if what == "answer" and rank.pending:
                self.handle(index, rank.pending.pop(0))
                return
            if what == "read" and state.wanted_samples:
                self.handle(index, self._read(index, state))
                return
            if what == "collate" and not state.is_collated:
                self.handle(index, Collated(state.round - 1))
                return
            if what == "take" and state.queue and state.queue[0].number < state.step_limit:
                self.handle(index, StepTaken())
                return

    def _read(self, index: int, state: State) -> SamplesRead:
        """Returns part of what was asked for from the rank's own source."""
        rng, left = self.rng, self.ranks[index].source[state.read_samples :]
        most = min(len(left), state.wanted_samples)
        count = most if rng.random() < 0.7 else rng.randint(0, most)
        is_ended = count == len(left) and (count < state.wanted_samples or rng.random() < 0.3)
        is_full = self.full_rng.random() < self.rates.full
        self._reach("a window that is full", is_full and not is_ended and 0 < count < state.wanted_samples)
        self._reach("full at once", is_full and not is_ended and not count and bool(state.window))
        return SamplesRead(left[:count], is_ended, is_full)

    def run(self, most_events: int = MOST_EVENTS) -> Self:
        """Runs to the end, or for ``most_events`` events."""
        for _ in range(most_events):
            if self.is_over():
                break
            self.one_event()
        return self

    def is_over(self) -> bool:
        """True if every rank is done and its steps are taken."""
        return all(
            rank.state.phase is Phase.DONE
            and not (rank.state.queue and rank.state.queue[0].number < rank.state.step_limit)
            for rank in self.ranks
        )


_ANY = Offer(
    round_min=7, round_max=7, fingerprint_min=1, fingerprint_max=1, ready_min=1, failed_rank=NONE, stop_step=NONE,
    stop_rank=NONE, samples_min=1, samples_max=1, groups_min=1, groups_max=1, due_max=0,
)  # fmt: skip


def _draw_measures(seed: int, layouts: type[Layout]) -> dict[str, Layout | Cost]:
    """Draws a layout and a cost from a separate generator, so that the worlds are otherwise those of the seed without them."""
    rng = random.Random(f"{seed}: layout and cost")
    layout = rng.choice((layouts.PADDED, layouts.PADDED, layouts.PACKED))
    width = rng.choice((1, 2, 5, 20, 1_000))
    return {"layout": layout, "cost": rng.choice((TOKENS, make_attention_cost(width), make_own_cost(Stairs(width))))}


def _draw_order(seed: int, otherwise: StepOrder) -> StepOrder:
    """Chooses the sampler's order in one world of three, likewise."""
    return random.Random(f"{seed}: order").choice((StepOrder.SAMPLER, otherwise, otherwise))


def _draw_accepting(seed: int) -> float:
    """Draws how often a rank accepts another budget: never, rarely or often, likewise."""
    return random.Random(f"{seed}: budgets").choice((0.0, 0.0, 0.005, 0.05))


def _draw_full(seed: int) -> float:
    """Draws how often a window is full in bytes: never or often, likewise."""
    return random.Random(f"{seed}: full").choice((0.0, 0.0, 0.3))


def make_world(seed: int, core: Core, layouts: type[Layout] = Layout) -> World:
    """Makes the world of a seed: few ranks with many rounds, or many ranks; small budgets or large; faults often or never.

    ``layouts`` are a mutant's own if the core is one.
    """
    rng = random.Random(seed)
    shape = rng.choice(("small", "small", "long", "long", "wide", "large"))
    world_size = {"small": rng.randint(1, 4), "long": rng.randint(1, 3), "wide": rng.randint(17, 24)}.get(
        shape, rng.randint(2, 4)
    )
    budget = rng.randint(66_000, 400_000) if shape == "large" else rng.randint(1, 60)
    mode = rng.choice((Mode.JOIN, Mode.JOIN, Mode.QUOTA))
    most = {"small": 40, "long": 160, "wide": 8, "large": 40}[shape]
    sizes = [rng.choice((most, most, most // 2, 5, 1 if mode is Mode.QUOTA else 0)) for _ in range(world_size)]
    # Some ranks have longer samples, and so more groups. They carry those for which the others do not wait.
    longest = [max(2, budget // rng.choice((1, 1, 2, 4, 8)) + 1) for _ in range(world_size)]
    windows = (rng.randint(1, 2), rng.randint(2, 8)) if shape == "long" else (rng.randint(1, 12), rng.randint(12, 40))
    shared = {
        "world_size": world_size,
        "budget_tokens": budget,
        **_draw_measures(seed, layouts),
        "order": _draw_order(seed, rng.choice((StepOrder.SHUFFLED, StepOrder.FULLEST))),
        "order_seed": rng.randrange(2**63),
        "limits": tuple(rng.randrange(1, 30) for _ in range(rng.choice((0, 0, 1, 2)))),
        "window_samples": rng.choice(windows),
        "mode": mode,
        "quota_samples": rng.randint(1, max(1, sum(sizes))) if mode is Mode.QUOTA and rng.random() < 0.8 else None,
        "max_age_rounds": rng.choice((1, 1, 2, 3)),
        "ramp_rounds": rng.randrange(0, 3),
        "rule": RULES[rng.choice(("odb", "odb", "paper"))],
    }
    is_odd = rng.random() < 0.08
    configs = []
    for rank in range(world_size):
        changed = {"budget_tokens": budget + 1} if is_odd and rng.random() < 0.5 else {}
        configs.append(Config(rank=rank, depth_steps=rng.randint(1, 3), **{**shared, **changed}))
    shards = [[rng.randint(1, most) for _ in range(size)] for most, size in zip(longest, sizes, strict=True)]
    usual = 0.0 if rng.random() < 0.4 else 1.0
    rates = Rates(
        stop=usual * rng.choice((0.0, 0.001, 0.02)),
        fail=usual * rng.choice((0.0, 0.001, 0.02)),
        urge=rng.choice((0.0, 0.0, 0.02)),
        lose=usual * rng.choice((0.0, 0.0, 0.005)),
        illegal=rng.choice((0.0, 0.02)),
        accept=_draw_accepting(seed),
        full=_draw_full(seed),
        first_rank=16 if shape == "wide" and rng.random() < 0.7 else 0,
    )
    world = World(configs, shards, rates, rng, core)
    world._reach("no fault at all", rates.stop + rates.fail + rates.lose + rates.illegal == 0)
    return world


class UpdateWorld(World):
    """The ranks of another world, in updates. No window is full in bytes: an update is read whole."""

    def __init__(self, world: World, update_samples: int) -> None:
        configs = [
            replace(rank.config, update_samples=update_samples, quota_samples=None, padding_share=update_samples)
            for rank in world.ranks
        ]
        shards = [[sample.length for sample in rank.source] for rank in world.ranks]
        super().__init__(configs, shards, replace(world.rates, full=0.0), world.rng, world.core)


def make_update_world(seed: int, core: Core, layouts: type[Layout] = Layout) -> UpdateWorld:
    """Makes the world of a seed in updates, of a few samples on each rank or of many."""
    world = make_world(seed, core, layouts)
    per_rank = random.Random(f"{seed}: updates").choice((1, 2, 3, 8, 20))
    return UpdateWorld(world, per_rank * len(world.ranks) + seed % len(world.ranks))


def make_long_world(seed: int, samples: int) -> World:
    """Makes a world of few ranks with up to ``samples`` samples each and small windows, in which faults are very rare."""
    rng = random.Random(seed)
    world_size = rng.randint(1, 3)
    budget = rng.choice((rng.randint(1, 60), rng.randint(66_000, 400_000)))
    mode = rng.choice((Mode.JOIN, Mode.QUOTA))
    sizes = [rng.choice((samples, samples // 2)) for _ in range(world_size)]
    config = Config(
        rank=0,
        world_size=world_size,
        budget_tokens=budget,
        **_draw_measures(seed, Layout),
        order=_draw_order(seed, StepOrder.SHUFFLED),
        order_seed=rng.randrange(2**63),
        window_samples=rng.randint(1, 5),
        depth_steps=rng.randint(1, 3),
        mode=mode,
        quota_samples=rng.randint(1, sum(sizes)) if mode is Mode.QUOTA else None,
        max_age_rounds=rng.randint(1, 4),
        ramp_rounds=rng.randint(0, 2),
        rule=RULES[rng.choice(("odb", "paper"))],
    )
    rare = rng.choice((0.0, 1e-5))
    rates = Rates(
        stop=rare,
        fail=rare,
        urge=rng.choice((0.0, 1e-3)),
        lose=rare,
        illegal=1e-3,
        accept=_draw_accepting(seed),
        full=_draw_full(seed),
    )
    shards = [[rng.randint(1, max(2, budget // rng.choice((1, 4)))) for _ in range(size)] for size in sizes]
    return World([replace(config, rank=rank) for rank in range(world_size)], shards, rates, rng, Core())


def run_world(
    seed: int, core: Core | None = None, layouts: type[Layout] = Layout, *, most_events: int = MOST_EVENTS
) -> World:
    """Runs the world of a seed to its end or for ``most_events`` events."""
    return make_world(seed, core or Core(), layouts).run(most_events)


def find_difference(
    model: Callable[[str], list[str]], worlds: Iterable[World], *, budget_tokens: int | None = None
) -> str | None:
    """Returns the first event after which the model and the Python differ, with both answers. All worlds are one question.

    ``budget_tokens`` gives the model another budget.
    """
    ranks = [rank for world in worlds for rank in world.ranks]
    configs = [
        rank.config if budget_tokens is None else replace(rank.config, budget_tokens=budget_tokens) for rank in ranks
    ]
    prints = [rank.config.fingerprint for rank in ranks]
    asked = " ".join(
        f"machine {_with_print(write_config(config, rank.budgets), config, own)} {len(rank.events)} {' '.join(rank.events)}"
        for rank, config, own in zip(ranks, configs, prints, strict=True)
    )
    said = model(asked)
    expected = [line for rank in ranks for line in rank.lines]
    if said == expected:
        return None
    place = 0
    for rank in ranks:
        for number, line in enumerate(rank.lines):
            answer = said[place] if place < len(said) else "nothing"
            if answer != line:
                event = "the start" if number == 0 else f"event {number}, {rank.events[number - 1][:200]}"
                return (
                    f"rank {rank.config.rank} of {rank.config.world_size}, {event}:\n python {line}\n model  {answer}"
                )
            place += 1
    return "the model says more than it was asked"


def _with_print(words: str, config: Config, fingerprint: int) -> str:
    """Returns a written configuration with the fingerprint of another."""
    return words.replace(f" {config.fingerprint} ", f" {fingerprint} ")


def make_mutants(property_: str, *slips: tuple[str, str, str, str]) -> list[Mutant]:
    """Makes a mutant of each name, module, and text with another in its place."""
    bounds = Bounds(lengths=((1,),))
    return [Mutant(name=n, module=m, old=old, new=new, property=property_, bounds=bounds) for n, m, old, new in slips]
