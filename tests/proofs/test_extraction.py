"""The Python core against the proved model, extracted to OCaml: same groups, alignments, targets and whole transitions.

The proofs are of the model; these tests are its link to the Python.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from odb_ref.core.alignment import align
from odb_ref.core.config import Config
from odb_ref.core.effects import Effect, PostCounts, PostOffer, PostReport
from odb_ref.core.errors import PeerError, UsageError
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
from odb_ref.core.grouping import compute_groups
from odb_ref.core.machine import start, transition
from odb_ref.core.offer import NONE, Offer, combine, reduce_offers
from odb_ref.core.rules import RULES
from odb_ref.core.state import Phase, State
from odb_ref.core.types import Mode, Sample, StepCounts
from tests.proofs.conftest import Model
from tests.proofs.wire import (
    show_group,
    show_groups,
    show_state,
    write_config,
    write_event,
    write_integers,
    write_offer,
    write_samples,
)

SETTINGS = settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)


def _samples(lengths: list[int], resources: int = 0) -> tuple[Sample, ...]:
    return tuple(
        Sample(i, i, length, length // 2, tuple((7 * i + 3 * length + r) % 6 for r in range(resources)))
        for i, length in enumerate(lengths)
    )


lengths = st.lists(st.integers(1, 40), max_size=40)
some_limits = st.lists(st.integers(1, 30), max_size=3).map(tuple)


@SETTINGS
@given(st.lists(st.tuples(st.integers(0, 120), some_limits, lengths), min_size=20, max_size=20))
def test_the_model_groups_as_the_python_does(model: Model, cases: list[tuple[int, tuple[int, ...], list[int]]]) -> None:
    """Checks: FEWEST, BUDGET (the link from proof to code)."""
    asked, expected = [], []
    for budget, limits, items in cases:
        samples = _samples(items, len(limits))
        asked.append(f"groups {budget} {write_integers(limits)} {write_samples(samples)}")
        expected.append(show_groups(compute_groups(samples, budget, limits)))
    assert model(" ".join(asked)) == expected


@SETTINGS
@given(
    st.lists(st.tuples(st.integers(1, 120), lengths, st.integers(1, 60), st.integers(0, 40)), min_size=20, max_size=20)
)
def test_the_model_aligns_as_the_python_does(model: Model, cases: list[tuple[int, list[int], int, int]]) -> None:
    """Checks: CONSERVE, AGE (the link from proof to code)."""
    asked, expected = [], []
    for budget, items, target, due in cases:
        groups = compute_groups(_samples(items), budget)
        asked.append(f"align {target} {due} {len(groups)} " + " ".join(map(write_samples, groups)))
        emitted, carried = align(groups, target, due)
        expected.append(f"{show_groups(emitted)} {show_group(carried)}")
    assert model(" ".join(asked)) == expected


small = st.integers(0, 9)
maybe = st.one_of(st.just(NONE), small)
offers = st.builds(
    Offer,
    round_min=small, round_max=small, fingerprint_min=small, fingerprint_max=small, ready_min=st.integers(0, 1),
    failed_rank=maybe, stop_step=maybe, stop_rank=maybe, samples_min=small, samples_max=small,
    groups_min=maybe, groups_max=small, due_max=small,
)  # fmt: skip


@SETTINGS
@given(st.lists(st.tuples(offers, offers), min_size=4, max_size=4))
def test_the_model_combines_offers_and_applies_rules_as_the_python_does(
    model: Model, cases: list[tuple[Offer, Offer]]
) -> None:
    """Checks: ALIGN (the link from proof to code)."""
    asked, expected = [], []
    for left, right in cases:
        asked.append(f"combine {write_offer(left)} {write_offer(right)}")
        expected.append(write_offer(combine(left, right)))
        for name, rule in RULES.items():
            asked.append(f"rule {name} {write_offer(left)}")
            expected.append(str(rule.compute_target(left)))
    assert model(" ".join(asked)) == expected


@dataclass
class Rank:
    config: Config
    source: tuple[Sample, ...]
    state: State
    events: list[str] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)


class World:
    """The real transition function on N ranks under a random schedule, with a log of what happened to each."""

    def __init__(self, configs: list[Config], shards: list[list[int]], rng: random.Random) -> None:
        self.rng = rng
        self.is_lossy = rng.random() < 0.2
        self.is_broken = False
        self.prints = {config.shared_json: config.fingerprint for config in configs}
        self.posts: dict[int, list[Effect]] = {}
        self.ranks: list[Rank] = []
        for config, shard in zip(configs, shards, strict=True):
            state, effects = start(config)
            self.ranks.append(Rank(config, _samples(shard, len(config.limits)), state))
            self.ranks[-1].lines.append(show_state(state, effects, self.prints))
        self.pending: list[list[Event]] = [[] for _ in configs]
        self.waiting: list[Effect | None] = [None for _ in configs]

    def handle(self, index: int, event: Event) -> bool:
        """Whether the event was legal. A refused one must be refused by the model too."""
        rank = self.ranks[index]
        rank.events.append(write_event(event, self.prints))
        try:
            rank.state, effects = transition(rank.config, rank.state, event)
        except (UsageError, PeerError):
            rank.lines.append("refused")
            return False
        rank.lines.append(show_state(rank.state, effects, self.prints))
        for effect in effects:
            if isinstance(effect, PostOffer | PostCounts | PostReport):
                self.waiting[index] = effect
        return True

    def exchange(self) -> None:
        posts = self.waiting
        answer: Event
        if all(isinstance(post, PostOffer) for post in posts):
            answer = Agreed(reduce_offers(post.offer for post in posts if isinstance(post, PostOffer)))
        elif all(isinstance(post, PostCounts) for post in posts):
            rows = [post.counts for post in posts if isinstance(post, PostCounts)]
            answer = Counted(tuple(sum(column, StepCounts(0, 0, 0)) for column in zip(*rows, strict=True)))
        elif all(isinstance(post, PostReport) for post in posts):
            answer = Reported(tuple(post.report for post in posts if isinstance(post, PostReport)))
        else:
            return
        self.waiting = [None for _ in posts]
        for queue in self.pending:
            queue.append(answer)

    def one_event(self) -> None:
        """Something that may happen now, or, rarely, something that may not."""
        rng = self.rng
        index = rng.randrange(len(self.ranks))
        rank = self.ranks[index]
        state = rank.state
        dice = rng.random()
        if all(self.waiting):
            self.exchange()
        if self.is_lossy and rng.random() < (0.1 if self.is_broken else 0.01):
            self.is_broken = True
            self.handle(index, PeerLost(rng.choice((None, 0, len(self.ranks) - 1)), str(rng.randrange(1, 9))))
        elif dice < 0.01:
            self.handle(index, ConsumerStopped())
        elif dice < 0.015:
            self.handle(index, LocalFailed(str(rng.randrange(1, 9))))
        elif dice < 0.03:
            self.handle(index, Urged())
        elif dice < 0.05:
            self.handle(
                index, rng.choice((Counted(()), StepTaken(), Counted((StepCounts(1, 1, 1),)), Agreed(_any_offer())))
            )
        elif self.pending[index] and dice < 0.4:
            self.handle(index, self.pending[index].pop(0))
        elif state.wanted_samples and dice < 0.7:
            left = rank.source[state.read_samples :]
            most = min(len(left), state.wanted_samples)
            count = rng.randint(0, most)
            is_ended = count == len(left) and (count < state.wanted_samples or rng.random() < 0.3)
            self.handle(index, SamplesRead(left[:count], is_ended))
        elif not state.is_collated and dice < 0.8:
            self.handle(index, Collated(state.round - 1))
        elif state.queue:
            self.handle(index, StepTaken())

    def is_over(self) -> bool:
        return all(
            rank.state.phase is Phase.DONE
            and not (rank.state.queue and rank.state.queue[0].number < rank.state.step_limit)
            for rank in self.ranks
        )


def _any_offer() -> Offer:
    return reduce_offers([Offer(
        round_min=7, round_max=7, fingerprint_min=1, fingerprint_max=1, ready_min=1, failed_rank=NONE, stop_step=NONE,
        stop_rank=NONE, samples_min=1, samples_max=1, groups_min=1, groups_max=1, due_max=0,
    )])  # fmt: skip


def _random_world(seed: int) -> World:
    rng = random.Random(seed)
    world_size = rng.randrange(1, 5)
    mode = rng.choice((Mode.JOIN, Mode.JOIN, Mode.QUOTA))
    shared = {
        "world_size": world_size,
        "budget_tokens": rng.randrange(1, 60),
        "limits": tuple(rng.randrange(1, 30) for _ in range(rng.choice((0, 0, 1, 2)))),
        "window_samples": rng.randrange(1, 12),
        "mode": mode,
        "quota_samples": rng.randrange(1, 40) if mode is Mode.QUOTA and rng.random() < 0.7 else None,
        "max_age_rounds": rng.randrange(1, 4),
        "ramp_rounds": rng.randrange(0, 3),
        "rule": rng.choice(tuple(RULES.values())),
    }
    configs = []
    for rank in range(world_size):
        changed = {"budget_tokens": 61} if rng.random() < 0.02 else {}
        configs.append(Config(rank=rank, depth_steps=rng.randrange(1, 4), **{**shared, **changed}))
    shards = [[rng.randrange(1, 30) for _ in range(rng.choice((0, 1, 5, 20, 40)))] for _ in range(world_size)]
    return World(configs, shards, rng)


@SETTINGS
@given(st.integers(0, 2**32))
def test_the_model_makes_the_same_transitions_as_the_python(model: Model, seed: int) -> None:
    """Checks: ALIGN, CONSERVE, COVER, ONCE, QUOTA, TERM, ABORT, RELEASE, STOP, FREE (the link from proof to code)."""
    world = _random_world(seed)
    for _ in range(1500):
        if world.is_over():
            break
        world.one_event()
    asked = " ".join(
        f"machine {write_config(rank.config)} {len(rank.events)} {' '.join(rank.events)}" for rank in world.ranks
    )
    assert model(asked) == [line for rank in world.ranks for line in rank.lines]


def test_random_schedules_reach_every_phase_and_outcome() -> None:
    """The comparison above is only worth what it visits."""
    seen: set[str] = set()
    for seed in range(400):
        world = _random_world(seed)
        for _ in range(1500):
            if world.is_over():
                break
            world.one_event()
            seen.update(rank.state.phase for rank in world.ranks)
        seen.update(rank.state.outcome.kind for rank in world.ranks if rank.state.outcome)
    assert seen >= {
        "fill",
        "offer",
        "count",
        "report",
        "drain",
        "done",
        "complete",
        "stopped",
        "failed",
        "mismatch",
        "lost",
    }


def test_a_changed_configuration_is_noticed(model: Model) -> None:
    """The comparison can fail: a model with another budget does not answer as the Python."""
    differing = 0
    for seed in range(20):
        world = _random_world(seed)
        for _ in range(200):
            world.one_event()
        for rank in world.ranks:
            _, rest = write_config(rank.config).split(" ", 1)
            asked = f"machine 1 {rest} {len(rank.events)} {' '.join(rank.events)}"
            differing += model(asked) != rank.lines
    assert differing > 5
