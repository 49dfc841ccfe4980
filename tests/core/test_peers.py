"""Ranks of several processes, on the real machine: whatever only one peer is told, all form the same steps."""

from __future__ import annotations

import random
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from odb_ref.core.config import Config
from odb_ref.core.effects import Collate, Finish, Outcome, OutcomeKind, Post, PostCounts, PostOffer, PostReport, Read
from odb_ref.core.events import (
    Agreed,
    BudgetAccepted,
    Collated,
    ConsumerStopped,
    Event,
    LocalFailed,
    SamplesRead,
    StepTaken,
)
from odb_ref.core.exchange import Answer, combine_posts
from odb_ref.core.machine import Machine
from odb_ref.core.offer import WIRE_SIZE, Offer, reduce_offers
from odb_ref.core.peers import compute_digest, describe_held, settle, to_wire
from odb_ref.core.types import Sample
from tests.helpers.world import make_offer

WORLD, PEERS = 2, 3
BASE = Config(rank=0, world_size=WORLD, peers=PEERS, budget_tokens=60, window_samples=6, depth_steps=64)


def merge_peers(posts: Sequence[PostOffer]) -> Offer:
    """Merges the offers of a rank's peers as a transport does. Spec: R17.2."""
    merged = [max(column) for column in zip(*map(to_wire, posts), strict=True)]
    return Offer.from_wire(settle(merged)[:WIRE_SIZE])


def combine(posts: list[Post]) -> Answer:
    """Returns the exchange's answer to all processes, given their posts in order. Spec: R17.2, R17.3."""
    offers = [post for post in posts if isinstance(post, PostOffer)]
    if len(offers) == len(posts):
        return Agreed(
            reduce_offers(merge_peers(offers[first : first + PEERS]) for first in range(0, len(offers), PEERS))
        )
    # Each rank's first peer provides the counts: all have formed the same steps, or the next agreement fails.
    return combine_posts(posts[::PEERS] if isinstance(posts[0], PostCounts) else posts)


def make_samples(rank: int, count: int) -> list[Sample]:
    choose = random.Random(rank)
    return [Sample(100 * rank + i, i, choose.randint(1, 30), 1) for i in range(count)]


class Job:
    """All processes of a job, each with its own copy of its rank's samples, run to the end."""

    def __init__(self, sources: list[list[Sample]], shuffle: random.Random) -> None:
        self.sources = sources
        self.shuffle = shuffle
        self.held: set[int] = set()
        """Processes whose reads return half of what they should, and then nothing."""
        configs = [replace(BASE, rank=rank, peer=peer) for rank in range(WORLD) for peer in range(PEERS)]
        self.machines = [Machine(config) for config in configs]
        self.plans: list[list[Any]] = [[] for _ in configs]
        self.posts: dict[int, Post] = {}
        self.outcomes: dict[int, Outcome] = {}
        for place, machine in enumerate(self.machines):
            self.perform(place, machine.begin())

    def perform(self, place: int, effects: Any) -> None:
        for effect in effects:
            match effect:
                case Read(count):
                    read = self.machines[place].state.read_samples
                    if place in self.held:
                        self.handle(place, SamplesRead(tuple(self.sources[place][read : read + count // 2])))
                        continue
                    samples = self.sources[place][read : read + count]
                    self.handle(place, SamplesRead(tuple(samples), read + count >= len(self.sources[place])))
                case Collate(round_, steps):
                    self.plans[place].append(steps)
                    self.handle(place, Collated(round_))
                case Finish(outcome):
                    self.outcomes[place] = outcome
                case PostOffer() | PostCounts() | PostReport():
                    self.posts[place] = effect

    def handle(self, place: int, event: Event) -> None:
        self.perform(place, self.machines[place].handle(event))

    def take(self) -> None:
        for place in self.shuffle.sample(range(len(self.machines)), len(self.machines)):
            while self.machines[place].state.queue and not self.machines[place].state.is_stopped:
                if self.machines[place].state.queue[0].number >= self.machines[place].state.step_limit:
                    break
                self.handle(place, StepTaken())

    def run(self, told: dict[int, list[tuple[int, Event]]], held: Collection[int] = ()) -> None:
        """Runs to the end. Before exchange n each (process, event) of ``told[n]`` happens. The reads of ``held`` soon block."""
        for number in range(200):
            self.held = set(held) if number else set()
            self.take()
            for place, event in told.get(number, []):
                self.handle(place, event)
            self.take()
            if len(self.outcomes) == len(self.machines):
                return
            assert len(self.posts) == len(self.machines), "not all are in the exchange"
            answer = combine([post for _, post in sorted(self.posts.items())])
            self.posts.clear()
            for place in self.shuffle.sample(range(len(self.machines)), len(self.machines)):
                self.handle(place, answer)
        raise AssertionError("no end")

    def check(self) -> Outcome:
        """Checks that all ended alike, and that the peers of each rank formed the same steps."""
        assert len(set(self.outcomes.values())) == 1, self.outcomes
        for first in range(0, len(self.plans), PEERS):
            assert all(plan == self.plans[first] for plan in self.plans[first : first + PEERS])
        return self.outcomes[0]


def make_sources(counts: tuple[int, int] = (25, 17)) -> list[list[Sample]]:
    return [make_samples(rank, counts[rank]) for rank in range(WORLD) for _ in range(PEERS)]


PLACES = st.integers(0, WORLD * PEERS - 1)
EVENTS = st.one_of(st.integers(1, 80).map(BudgetAccepted), st.just(LocalFailed("it fell")), st.just(ConsumerStopped()))


@given(
    told=st.dictionaries(st.integers(0, 12), st.lists(st.tuples(PLACES, EVENTS), max_size=2), max_size=4),
    counts=st.tuples(st.integers(0, 30), st.integers(0, 30)),
    seed=st.integers(0, 99),
)
def test_peers_form_the_same_steps_whatever_one_of_them_is_told(
    told: dict[int, list[tuple[int, Event]]], counts: tuple[int, int], seed: int
) -> None:
    """Spec: R17, R17.1, R17.2. Checks: PEERS."""
    job = Job(make_sources(counts), random.Random(seed))
    job.run(told)
    job.check()


@given(place=PLACES, number=st.integers(0, 16), seed=st.integers(0, 99))
def test_other_samples_on_one_peer_end_the_epoch_before_a_step_of_them_is_released(
    place: int, number: int, seed: int
) -> None:
    """Spec: R17.3, R17.4. Checks: PEERS, ABORT."""
    sources = make_sources()
    rank = place // PEERS
    sources[place] = list(sources[place])
    other = sources[place][number]
    sources[place][number] = replace(other, length=other.length + 1)
    job = Job(sources, random.Random(seed))
    job.run({})
    outcome = job.check()
    assert (outcome.kind, outcome.rank) == (OutcomeKind.MISMATCH, rank)
    named = {f"peer {max(place % PEERS, 1)}", "peer 0"}
    assert all(name in outcome.cause for name in named), outcome
    assert all(number not in {sample.position for step in plan for sample in step.group} for plan in job.plans[place])


def test_a_peer_that_stops_in_the_middle_of_a_read_has_stopped() -> None:
    """It holds other samples than its peers, which no longer matters."""
    job = Job(make_sources((40, 40)), random.Random(0))
    job.run({2: [(4, ConsumerStopped())]}, held={4})
    assert job.check().kind is OutcomeKind.STOPPED


def test_a_failure_names_the_peer() -> None:
    job = Job(make_sources(), random.Random(0))
    job.run({1: [(4, LocalFailed("it fell"))]})
    assert job.check() == Outcome(OutcomeKind.FAILED, 1, "it fell (on its peer 1)")


def test_a_round_that_differs_names_the_peer() -> None:
    job = Job(make_sources(), random.Random(0))
    job.machines[2].config = replace(job.machines[2].config, tag="step 7")
    job.run({})
    outcome = job.check()
    assert (outcome.kind, outcome.rank) == (OutcomeKind.MISMATCH, 0)
    assert outcome.cause == "on its peer 2 tag is 'step 7', rank 0 has ''"


OFFER = make_offer(fingerprint=7, samples=4, groups=2)


def test_of_equal_peers_the_offer_is_that_of_each() -> None:
    assert merge_peers([PostOffer(OFFER, 5)] * 3) == OFFER
    assert merge_peers([PostOffer(OFFER)]) == OFFER


@pytest.mark.parametrize("digests", [(5, 6), (6, 5), (5, 5, 4)])
def test_peers_of_other_digests_differ_from_every_rank(digests: tuple[int, ...]) -> None:
    merged = merge_peers([PostOffer(OFFER, digest) for digest in digests])
    for agreement in (merged, reduce_offers([merged, OFFER])):
        assert agreement.fingerprint_min != agreement.fingerprint_max


def test_a_peer_that_has_failed_is_compared_with_nobody() -> None:
    failed = replace(OFFER, failed_rank=1)
    assert merge_peers([PostOffer(OFFER, 5), PostOffer(failed)]) == failed


def test_what_one_peer_says_holds_for_the_rank() -> None:
    said = replace(OFFER, ready_min=0, stop_step=3, stop_rank=1, budget_min=40)
    assert merge_peers([PostOffer(OFFER, 5), PostOffer(said, 5)]) == said


def test_the_digest_follows_from_every_number_of_every_sample() -> None:
    window = (Sample(3, 0, 12, 5, (2,)), Sample(4, 1, 9, 0, (0,)))
    changed = [
        (replace(window[0], **{name: value}), window[1])
        for name, value in {"id": 9, "position": 5, "length": 13, "supervised": 4, "costs": (3,)}.items()
    ]
    digests = [compute_digest(item, is_ended=False) for item in (window, window[:1], window[::-1], *changed)]
    digests.append(compute_digest(window, is_ended=True))
    assert len(set(digests)) == len(digests)
    assert all(0 <= digest < 2**56 for digest in digests)
    assert describe_held(window, is_ended=True).startswith(
        "2 samples of 21 tokens, from sample 3 to sample 4, the last"
    )
    assert describe_held((), is_ended=False).startswith("0 samples of 0 tokens (digest")
