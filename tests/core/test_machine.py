"""The machine: its table of phases, what it refuses, and that refusing changes nothing."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from odb_ref.core.config import Config
from odb_ref.core.effects import Effect, Finish, OutcomeKind, PostOffer, Read
from odb_ref.core.errors import InvariantError, PeerError, RuleError, UsageError
from odb_ref.core.events import (
    Agreed,
    Collated,
    ConsumerStopped,
    Counted,
    Event,
    LocalFailed,
    PeerLost,
    Report,
    Reported,
    SamplesRead,
    StepTaken,
    Urged,
)
from odb_ref.core.invariants import check_transition
from odb_ref.core.machine import Machine, start, transition
from odb_ref.core.offer import NONE, Offer
from odb_ref.core.state import Phase, State
from odb_ref.core.types import Mode, Sample, StepCounts
from tests.helpers.effort import IS_MUTATED, few
from tests.helpers.world import Fault, make_configs, run_by_arrival

FILL, OFFER, COUNT, REPORT, DRAIN, DONE = Phase
Edge = tuple[Phase, str, Phase]

TABLE: dict[Phase, dict[str, set[Phase]]] = {
    FILL: {
        "SamplesRead": {FILL, OFFER},
        "Collated": {FILL, OFFER},
        "StepTaken": {FILL, OFFER},
        "ConsumerStopped": {OFFER},
        "LocalFailed": {OFFER},
        "Urged": {FILL, OFFER},
        "PeerLost": {DONE},
    },
    OFFER: {
        "Agreed": {COUNT, REPORT, DRAIN, DONE},
        "SamplesRead": {OFFER},
        "Collated": {OFFER},
        "StepTaken": {OFFER},
        "ConsumerStopped": {OFFER},
        "LocalFailed": {OFFER},
        "Urged": {OFFER},
        "PeerLost": {DONE},
    },
    COUNT: {
        "Counted": {FILL, OFFER},
        "SamplesRead": {COUNT},
        "StepTaken": {COUNT},
        "ConsumerStopped": {COUNT},
        "LocalFailed": {COUNT},
        "Urged": {COUNT},
        "PeerLost": {DONE},
    },
    REPORT: {
        "Reported": {DRAIN, DONE},
        "SamplesRead": {REPORT},
        "Collated": {REPORT},
        "StepTaken": {REPORT},
        "ConsumerStopped": {REPORT},
        "LocalFailed": {REPORT},
        "Urged": {REPORT},
        "PeerLost": {DONE},
    },
    DRAIN: {
        "StepTaken": {DRAIN, DONE},
        "ConsumerStopped": {DONE},
        "SamplesRead": {DRAIN},
        "Collated": {DRAIN},
        "LocalFailed": {DRAIN},
        "Urged": {DRAIN},
        "PeerLost": {DRAIN},
    },
    DONE: {
        "SamplesRead": {DONE},
        "Collated": {DONE},
        "StepTaken": {DONE},
        "ConsumerStopped": {DONE},
        "LocalFailed": {DONE},
        "Urged": {DONE},
        "PeerLost": {DONE},
    },
}
"""Every edge between phases, by hand, from the table at the top of `machine`."""


Walk = list[tuple[Config, State, Event, State, tuple[Effect, ...]]]


class Recorder(Machine):
    """Keeps every transition of every machine made."""

    seen: Walk = []  # noqa: RUF012

    def handle(self, event: Event) -> tuple[Effect, ...]:
        before = self.state
        effects = super().handle(event)
        self.seen.append((self.config, before, event, self.state, effects))
        return effects


@pytest.fixture(scope="module")
def walked() -> Walk:
    """The transitions of a few hundred random worlds, the same in every test run."""
    rng = random.Random(7)
    Recorder.seen = []
    for seed in range(few(400)):
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
    edges = {(phase, event, after) for phase, row in TABLE.items() for event, afters in row.items() for after in afters}
    assert taken - edges == set()
    # What is rare is reached by the tests below and by the scenarios.
    assert len(edges - taken) <= (len(edges) if IS_MUTATED else 12), sorted(edges - taken)


def is_legal(state: State, event: Event) -> bool:
    """When an event may happen, in the words of the spec (R5.1 to R5.10)."""
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
        candidates.append(Agreed(make_agreement(config, state)))
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


def make_agreement(config: Config, state: State, **changes: int) -> Offer:
    values = {
        "round_min": state.round, "round_max": state.round, "fingerprint_min": config.fingerprint,
        "fingerprint_max": config.fingerprint, "ready_min": 1, "failed_rank": NONE, "stop_step": NONE,
        "stop_rank": NONE, "samples_min": 2, "samples_max": 2, "groups_min": 1, "groups_max": 1, "due_max": 0,
    }  # fmt: skip
    return Offer(**(values | changes))


def test_the_same_state_and_event_give_the_same_result(walked: Walk) -> None:
    for config, before, event, after, effects in walked[:3000]:
        assert transition(config, before, event) == (after, effects)


def test_what_ends_is_said_exactly_once(walked: Walk) -> None:
    for _, before, _, after, effects in walked:
        is_finishing = before.phase is not DONE and after.phase is DONE
        assert sum(isinstance(effect, Finish) for effect in effects) == is_finishing


# States of each phase, made by hand ----------------------------------------------------------------------------------


def make_config(**changes: Any) -> Config:
    values: dict[str, Any] = {
        "rank": 0, "world_size": 2, "budget_tokens": 10, "window_samples": 2, "depth_steps": 1, "ramp_rounds": 0,
    }  # fmt: skip
    return Config(**(values | changes))


def make_machine(*events: Event, **changes: Any) -> Machine:
    machine = Machine(make_config(**changes))
    machine.begin()
    for event in events:
        machine.handle(event)
    return machine


def read(*lengths: int, first: int = 0, is_ended: bool = False) -> SamplesRead:
    return SamplesRead(tuple(Sample(p, p, length, 1) for p, length in enumerate(lengths, first)), is_ended)


def in_offer(**changes: Any) -> Machine:
    machine = make_machine(read(5, 5), **changes)
    assert machine.state.phase is OFFER
    return machine


def in_count(**changes: Any) -> Machine:
    machine = in_offer(**changes)
    machine.handle(Agreed(make_agreement(machine.config, machine.state)))
    assert machine.state.phase is COUNT
    return machine


def in_report() -> Machine:
    machine = in_offer()
    machine.handle(Agreed(make_agreement(machine.config, machine.state, failed_rank=1, ready_min=0)))
    assert machine.state.phase is REPORT
    return machine


def test_an_epoch_begins_with_a_read_of_the_first_window() -> None:
    config = make_config(window_samples=8, ramp_rounds=1)
    assert start(config) == (State(wanted_samples=4), (Read(4),))
    machine = Machine(config)
    assert machine.begin() == (Read(4),)
    with pytest.raises(UsageError, match="has begun"):
        machine.begin()


def test_an_agreement_of_the_wrong_round_is_a_peers_error() -> None:
    machine = in_offer()
    before = machine.state
    with pytest.raises(PeerError, match="round 0, field round_min: 3"):
        machine.handle(Agreed(make_agreement(machine.config, before, round_min=3, round_max=3)))
    assert machine.state is before


def test_an_agreement_that_is_not_ready_for_no_reason_is_a_peers_error() -> None:
    machine = in_offer()
    before = machine.state
    with pytest.raises(PeerError, match="field ready_min"):
        machine.handle(Agreed(make_agreement(machine.config, before, ready_min=0)))
    assert machine.state is before


@pytest.mark.parametrize("changes", [{"round_max": 1}, {"fingerprint_max": 2**60}, {"failed_rank": 1}])
def test_failure_or_mismatch_goes_to_report(changes: dict[str, int]) -> None:
    machine = in_offer()
    (effect,) = machine.handle(Agreed(make_agreement(machine.config, machine.state, **changes)))
    assert machine.state.phase is REPORT
    assert type(effect).__name__ == "PostReport"


def test_an_agreement_on_a_stop_ends_the_rank() -> None:
    machine = in_offer()
    agreement = make_agreement(machine.config, machine.state, stop_rank=1, stop_step=0, ready_min=0)
    (finish,) = machine.handle(Agreed(agreement))
    assert isinstance(finish, Finish)
    assert (finish.outcome.kind, finish.outcome.rank, finish.step_limit) == (OutcomeKind.STOPPED, 1, 0)


def test_a_failure_is_told_before_a_stop() -> None:
    machine = in_offer()
    agreement = make_agreement(machine.config, machine.state, stop_rank=1, stop_step=0, failed_rank=0, ready_min=0)
    machine.handle(Agreed(agreement))
    assert machine.state.phase is REPORT


def test_nothing_left_closes() -> None:
    machine = make_machine(read(is_ended=True))
    (finish,) = machine.handle(Agreed(make_agreement(machine.config, machine.state, samples_min=0, samples_max=0)))
    assert isinstance(finish, Finish)
    assert finish.outcome.kind is OutcomeKind.COMPLETE
    assert machine.state.phase is DONE


def test_a_rule_outside_its_bounds_leaves_the_state() -> None:
    class Never:
        name = "never"

        def compute_target(self, agreement: Offer) -> int:
            return 0

    machine = in_offer(rule=Never())
    before = machine.state
    with pytest.raises(RuleError, match="never"):
        machine.handle(Agreed(make_agreement(machine.config, before)))
    assert machine.state is before


@pytest.mark.parametrize("rows", [0, 2])
def test_counts_of_another_number_of_steps_are_a_peers_error(rows: int) -> None:
    machine = in_count()
    before = machine.state
    with pytest.raises(PeerError, match=f"round 0, field counts: {rows} steps, not 1"):
        machine.handle(Counted((StepCounts(1, 1, 1),) * rows))
    assert machine.state is before


def test_reports_of_other_ranks_than_there_are_is_a_peers_error() -> None:
    machine = in_report()
    before = machine.state
    with pytest.raises(PeerError, match=r"field rank: \[1\]"):
        machine.handle(Reported((Report(1, "x", 0, ""),)))
    assert machine.state is before


def test_reports_without_a_cause_are_a_peers_error() -> None:
    machine = in_report()
    same = machine.config.shared_json
    with pytest.raises(PeerError, match="no rank has failed"):
        machine.handle(Reported((Report(0, "", 0, same), Report(1, "", 0, same))))


def test_a_report_of_another_round_is_a_mismatch_that_names_it() -> None:
    machine = in_report()
    same = machine.config.shared_json
    (finish,) = machine.handle(Reported((Report(0, "", 0, same), Report(1, "", 4, same))))
    assert isinstance(finish, Finish)
    assert (finish.outcome.kind, finish.outcome.rank) == (OutcomeKind.MISMATCH, 1)
    assert finish.outcome.cause == "round 4, rank 0 is in 0"


@pytest.mark.parametrize("length", [0, -1])
def test_a_sample_without_tokens_is_refused(length: int) -> None:
    machine = make_machine()
    with pytest.raises(UsageError, match=f"length {length}"):
        machine.handle(read(length))


@pytest.mark.parametrize("supervised", [-1, 6])
def test_supervised_tokens_lie_within_the_length(supervised: int) -> None:
    machine = make_machine()
    with pytest.raises(UsageError, match=f"supervised {supervised}"):
        machine.handle(SamplesRead((Sample(0, 0, 5, supervised),)))


def test_positions_have_no_gap() -> None:
    machine = make_machine()
    with pytest.raises(UsageError, match="has position 1, expected 0"):
        machine.handle(read(5, first=1))


def test_a_read_may_be_answered_in_parts() -> None:
    machine = make_machine(read(5))
    assert machine.state.wanted_samples == 1
    (effect,) = machine.handle(read(5, first=1))
    assert isinstance(effect, PostOffer)


def test_a_failure_without_a_cause_still_is_one() -> None:
    machine = make_machine(LocalFailed(""))
    assert machine.state.failure == "unknown failure"


def test_the_first_failure_counts() -> None:
    machine = make_machine(LocalFailed("first"))
    assert machine.handle(LocalFailed("second")) == ()
    assert machine.state.failure == "first"


def test_a_failure_after_the_offer_is_told_with_the_next_one() -> None:
    machine = in_offer()
    assert machine.handle(LocalFailed("late")) == ()
    machine.handle(Agreed(make_agreement(machine.config, machine.state)))
    *_, post = machine.handle(Counted((StepCounts(4, 20, 4),)))
    assert isinstance(post, PostOffer)
    assert (post.offer.round_min, post.offer.failed_rank, post.offer.ready_min) == (1, 0, 0)


@pytest.mark.parametrize("make", [make_machine, in_offer, in_count, in_report])
def test_a_lost_peer_ends_the_rank_in_any_phase(make: Any) -> None:
    machine = make()
    (finish,) = machine.handle(PeerLost(1, "gone"))
    assert isinstance(finish, Finish)
    assert (finish.outcome.kind, finish.outcome.rank, finish.outcome.cause) == (OutcomeKind.LOST, 1, "gone")
    assert machine.state.phase is DONE
    assert machine.handle(PeerLost(1, "gone")) == ()


def test_the_observer_is_told_of_every_transition_that_happened() -> None:
    told: list[tuple[int, Event | None, tuple[Effect, ...]]] = []
    machine = Machine(make_config(rank=1), lambda rank, event, effects: told.append((rank, event, effects)))
    begun = machine.begin()
    with pytest.raises(UsageError):
        machine.handle(StepTaken())
    event = read(5, 5)
    posted = machine.handle(event)
    assert told == [(1, None, begun), (1, event, posted)]


def test_a_broken_invariant_names_its_id_and_leaves_the_state(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = in_offer()
    before = machine.state

    def lossy(config: Config, state: State, target: int) -> Any:
        return (state.groups[0][1:],), ()

    monkeypatch.setattr("odb_ref.core.machine.form_steps", lossy)
    with pytest.raises(InvariantError, match=r"I1: CONSERVE: not true that .* rank 0 round 0") as caught:
        machine.handle(Agreed(make_agreement(machine.config, before)))
    assert caught.value.invariant == "I1"
    assert machine.state is before


def test_every_state_reached_satisfies_the_invariants(walked: Walk) -> None:
    for config, before, _, after, _ in walked:
        check_transition(config, before, after)
