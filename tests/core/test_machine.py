"""The machine: its table of phases, what it refuses, and that a refusal changes nothing."""

from __future__ import annotations

import random
from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from odb_ref.core.config import Config
from odb_ref.core.effects import Effect, Finish, Read
from odb_ref.core.errors import InvariantError, RuleError, UsageError
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
from odb_ref.core.machine import Machine, start, transition
from odb_ref.core.offer import Offer
from odb_ref.core.state import Phase, State
from odb_ref.core.types import Mode, Sample
from tests.helpers import world as helpers
from tests.helpers.effort import IS_MUTATED
from tests.helpers.world import Fault, make_configs, make_offer, run_by_arrival

FILL, OFFER, COUNT, REPORT, DRAIN, DONE = Phase
Edge = tuple[Phase, str, Phase]


def list_edges(phase: Phase, *rows: tuple[str, set[Phase]]) -> set[Edge]:
    return {(phase, event, after) for events, afters in rows for event in events.split() for after in afters}


KEPT = "SamplesRead StepTaken ConsumerStopped LocalFailed Urged"
"""What ends no phase in the table's other rows."""
TABLE = (
    list_edges(
        FILL,
        ("SamplesRead Collated StepTaken Urged", {FILL, OFFER}),
        ("ConsumerStopped LocalFailed", {OFFER}),
        ("PeerLost", {DONE}),
    )
    | list_edges(OFFER, ("Agreed", {COUNT, REPORT, DRAIN, DONE}), (f"Collated {KEPT}", {OFFER}), ("PeerLost", {DONE}))
    | list_edges(COUNT, ("Counted", {FILL, OFFER}), (KEPT, {COUNT}), ("PeerLost", {DONE}))
    | list_edges(REPORT, ("Reported", {DRAIN, DONE}), (f"Collated {KEPT}", {REPORT}), ("PeerLost", {DONE}))
    | list_edges(
        DRAIN,
        ("SamplesRead Collated LocalFailed Urged PeerLost", {DRAIN}),
        ("StepTaken", {DRAIN, DONE}),
        ("ConsumerStopped", {DONE}),
    )
    | list_edges(DONE, (f"Collated {KEPT} PeerLost", {DONE}))
)
"""Every edge between phases, written by hand from the table at the top of `machine`."""


Walk = list[tuple[Config, State, Event, State, tuple[Effect, ...]]]


class Recorder(Machine):
    """Records every transition of every machine."""

    seen: Walk = []  # noqa: RUF012

    def handle(self, event: Event) -> tuple[Effect, ...]:
        before = self.state
        effects = super().handle(event)
        self.seen.append((self.config, before, event, self.state, effects))
        return effects


@pytest.fixture(scope="module")
def walked() -> Walk:
    """Returns the transitions of a few hundred random worlds, the same in every test run."""
    rng = random.Random(7)
    Recorder.seen = []
    for seed in range(40 if IS_MUTATED else 400):
        world_size = rng.randint(1, 3)
        mode = rng.choice(tuple(Mode))
        settings: dict[str, Any] = {
            "budget_tokens": rng.randint(5, 50),
            "window_samples": rng.randint(1, 6),
            "depth_steps": rng.randint(1, 3),
            "max_age_rounds": rng.randint(1, 3),
            "ramp_rounds": rng.randint(0, 2),
            "mode": mode,
            "quota_samples": rng.randint(1, 20) if mode is Mode.QUOTA and rng.random() < 0.5 else None,
        }
        kinds = ["fail", "stop", "kill", "urge"]
        faults = [
            Fault(rng.choice(kinds), rng.randrange(world_size), rng.randint(0, 90)) for _ in range(rng.randint(0, 2))
        ]
        shards = [[rng.randint(1, 25) for _ in range(rng.randint(0, 12))] for _ in range(world_size)]
        configs = make_configs(world_size, rng.choice(["odb", "paper"]), **settings)
        run_by_arrival(shards, configs, seed=seed, faults=faults, machine_class=Recorder)
    return Recorder.seen


def test_random_worlds_walk_only_edges_of_the_table_and_nearly_all_of_them(walked: Walk) -> None:
    taken: set[Edge] = {(before.phase, type(event).__name__, after.phase) for _, before, event, after, _ in walked}
    assert taken - TABLE == set()
    # The tests below and the scenarios reach rare edges.
    assert len(TABLE - taken) <= (len(TABLE) if IS_MUTATED else 12), sorted(TABLE - taken)


def is_legal(state: State, event: Event) -> bool:
    """Returns whether an event may happen, according to the spec (R5.1 to R5.10)."""
    match event:
        case SamplesRead(samples, is_ended, is_full):
            is_something = bool(samples) or is_ended or is_full
            is_bounded = not is_ended and len(samples) < state.wanted_samples and bool(samples or state.window)
            return is_something and 0 < state.wanted_samples >= len(samples) and (is_bounded or not is_full)
        case Collated(round):
            return not state.is_collated and round == state.round - 1
        case Agreed():
            return state.phase is OFFER
        case Counted():
            return state.phase is COUNT
        case Reported():
            return state.phase is REPORT
        case StepTaken():
            return bool(state.queue) and state.queue[0].number < state.step_limit
        case _:
            return True


@given(data=st.data())
def test_an_illegal_event_raises_and_a_legal_one_does_not(walked: Walk, data: st.DataObject) -> None:
    """Spec: R5, R5.2, R8."""
    config, _, _, state, _ = walked[data.draw(st.integers(0, len(walked) - 1))]
    count = data.draw(st.integers(0, 7))
    samples = tuple(Sample(0, state.read_samples + i, 4, 2) for i in range(count))
    candidates: list[Event] = [
        SamplesRead(samples, data.draw(st.booleans()), data.draw(st.booleans())),
        Collated(data.draw(st.sampled_from([state.round - 2, state.round - 1, state.round]))),
        StepTaken(),
        ConsumerStopped(),
        LocalFailed("x"),
        Urged(),
        PeerLost(None, "x"),
    ]
    if state.phase is not OFFER:
        candidates.append(Agreed(make_offer(state.round, config.fingerprint, samples=2)))
    if state.phase is not COUNT:
        candidates.append(Counted(()))
    if state.phase is not REPORT:
        candidates.append(Reported(()))
    event = data.draw(st.sampled_from(candidates))
    machine = Machine(config)
    machine.state = state
    if is_legal(state, event):
        machine.handle(event)
        return
    with pytest.raises(UsageError):
        machine.handle(event)
    assert machine.state is state


def test_the_same_state_and_event_give_the_same_result(walked: Walk) -> None:
    """Spec: R5. Checks: REPLAY."""
    for config, before, event, after, effects in walked[:3000]:
        assert transition(config, before, event) == (after, effects)


def test_what_ends_is_said_exactly_once(walked: Walk) -> None:
    """Spec: R6.7, R7.1."""
    for _, before, _, after, effects in walked:
        is_finishing = before.phase is not DONE and after.phase is DONE
        assert sum(isinstance(effect, Finish) for effect in effects) == is_finishing


# States of each phase, made by hand ----------------------------------------------------------------------------------


make_config = partial(helpers.make_config, world_size=2, budget_tokens=10, window_samples=2, depth_steps=1)


READ = SamplesRead((Sample(0, 0, 5, 1), Sample(1, 1, 5, 1)))


def in_offer(**changes: Any) -> Machine:
    machine = Machine(make_config(**changes))
    machine.begin()
    machine.handle(READ)
    assert machine.state.phase is OFFER
    return machine


def test_an_epoch_begins_with_a_read_of_the_first_window() -> None:
    """Spec: R5.0, R6.1."""
    config = make_config(window_samples=8, ramp_rounds=1)
    assert start(config) == (State(wanted_samples=4), (Read(4),))
    machine = Machine(config)
    assert machine.begin() == (Read(4),)
    with pytest.raises(UsageError, match="has begun"):
        machine.begin()


def test_a_rule_outside_its_bounds_leaves_the_state() -> None:
    class Never:
        name = "never"

        def compute_target(self, agreement: Offer) -> int:
            return 0

    machine = in_offer(rule=Never())
    before = machine.state
    with pytest.raises(RuleError, match="never"):
        machine.handle(Agreed(make_offer(before.round, machine.config.fingerprint, samples=2)))
    assert machine.state is before


def test_the_observer_is_told_of_every_transition_that_happened() -> None:
    told: list[tuple[int, Event | None, tuple[Effect, ...]]] = []
    machine = Machine(make_config(rank=1), lambda rank, event, effects: told.append((rank, event, effects)))
    begun = machine.begin()
    with pytest.raises(UsageError):
        machine.handle(StepTaken())
    posted = machine.handle(READ)
    assert told == [(1, None, begun), (1, READ, posted)]


def test_a_broken_invariant_names_its_id_and_leaves_the_state(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = in_offer()
    before = machine.state

    def lossy(config: Config, state: State, target: int) -> Any:
        return (state.groups[0][1:],), ()

    monkeypatch.setattr("odb_ref.core.machine.form_steps", lossy)
    with pytest.raises(InvariantError, match=r"I1: CONSERVE: not true that .* rank 0 round 0") as caught:
        machine.handle(Agreed(make_offer(before.round, machine.config.fingerprint, samples=2)))
    assert caught.value.invariant == "I1"
    assert machine.state is before
