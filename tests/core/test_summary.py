"""The summary of a state, and the stand-in made from it: what it keeps, and how it ends in each phase. Spec: R7.6."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace

import pytest

from odb_ref.core.config import Config
from odb_ref.core.effects import (
    Collate,
    Deliver,
    Effect,
    Finish,
    Outcome,
    OutcomeKind,
    PostCounts,
    PostOffer,
    PostReport,
    Read,
)
from odb_ref.core.errors import UsageError
from odb_ref.core.events import Agreed, Collated, ConsumerStopped, Counted, LocalFailed, PeerLost, Reported, StepTaken
from odb_ref.core.exchange import combine_posts
from odb_ref.core.invariants import check_transition
from odb_ref.core.machine import Machine
from odb_ref.core.offer import NONE, Offer, reduce_offers
from odb_ref.core.state import Phase, State
from odb_ref.core.summary import StateSummary, compute_summary, make_stand_in
from odb_ref.core.types import ZERO_COUNTS, Mode, Sample, Step, StepCounts
from tests.helpers.world import World, make_config, make_shards

SAMPLE = Sample(0, 0, 8, 7)
SHARDS = [[8] * 12, [8] * 9]


def walk(*, is_there: Callable[[State], bool], seed: int = 0, **options: object) -> World:
    """A world in which rank 0 has just come to a state that is asked for."""
    world = World(make_config(depth_steps=1), make_shards(SHARDS), seed=seed, **options)  # type: ignore[arg-type]
    while not is_there(world.nodes[0].machine.state):
        world.step()
    return world


def stand_in(config: Config, state: State) -> Machine:
    machine = Machine(config)
    machine.state = make_stand_in(compute_summary(state))
    return machine


def replace_machine(world: World) -> tuple[Machine, tuple[Effect, ...]]:
    """The stand-in of rank 0, which has been told, and what it asks for."""
    machine = stand_in(world.nodes[0].machine.config, world.nodes[0].machine.state)
    return machine, machine.handle(LocalFailed("loader lost"))


def make_agreement(config: Config, round_: int, **fields_: int) -> Offer:
    offer = Offer(
        round_min=round_, round_max=round_, fingerprint_min=config.fingerprint, fingerprint_max=config.fingerprint,
        ready_min=1, failed_rank=NONE, stop_step=NONE, stop_rank=NONE, samples_min=4, samples_max=4, groups_min=4,
        groups_max=4, due_max=0,
    )  # fmt: skip
    return replace(offer, **fields_)


def is_offered(state: State) -> bool:
    return state.phase is Phase.OFFER and bool(state.plan) and bool(state.queue)


def test_summary_of_the_start_is_the_default() -> None:
    """Spec: R7.6."""
    assert compute_summary(State()) == StateSummary()
    assert not StateSummary().is_ending
    assert StateSummary(outcome=Outcome(OutcomeKind.COMPLETE)).is_ending


def make_steps(*numbers: int) -> tuple[Step, ...]:
    return tuple(Step(number, 4, (), ZERO_COUNTS) for number in numbers)


def test_every_field_is_kept() -> None:
    """Spec: R7.6."""
    outcome = Outcome(OutcomeKind.STOPPED, 1, "left")
    state = State(
        phase=Phase.DRAIN, round=5, is_ended=True, aligned=((), ()), plan=make_steps(7, 8, 9), is_collated=False,
        planned_steps=10, global_samples=31, outbox=make_steps(5, 6), queue=make_steps(4), taken_steps=4, failure="broken",
        is_stopped=True, is_urged=True, step_limit=6, outcome=outcome,
    )  # fmt: skip
    summary = StateSummary(
        phase=Phase.DRAIN, round=5, aligned_steps=2, planned_steps=10, released_steps=7, delivered_steps=5, taken_steps=4,
        is_collated=False, global_samples=31, failure="broken", is_stopped=True, is_urged=True, step_limit=6,
        outcome=outcome,
    )  # fmt: skip
    assert compute_summary(state) == summary
    assert make_stand_in(summary) == state
    held = replace(state, window=(SAMPLE,), groups=((SAMPLE,),), read_samples=3, marks=(2,), wanted_samples=1)
    assert compute_summary(replace(held, taken_samples=2, is_ended=False)) == summary


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("mode", Mode)
def test_summary_of_the_stand_in_is_the_summary(seed: int, mode: Mode) -> None:
    """Spec: R7.6."""
    quota = 9 if mode is Mode.QUOTA else None
    config = make_config(mode=mode, quota_samples=quota, depth_steps=1 + seed % 2)
    stops: dict[int, int] = {0: 2} if seed % 3 == 0 else {}
    fails = {1: ("collate", 1)} if seed % 3 == 1 else {}
    world = World(config, make_shards([[3, 4, 1, 9, 2, 8, 8], [2, 7, 7], [5] * 9]), seed=seed, stops=stops, fails=fails)
    phases: set[Phase] = set()
    while world.step():
        for node in world.nodes:
            summary = compute_summary(node.machine.state)
            state = make_stand_in(summary)
            assert compute_summary(state) == summary
            check_transition(node.machine.config, State(), state)
            phases.add(summary.phase)
    assert {Phase.FILL, Phase.OFFER, Phase.COUNT, Phase.DONE} <= phases


def test_summary_holds_no_sample() -> None:
    """Spec: R7.6."""
    world = walk(is_there=is_offered)
    summary = compute_summary(world.nodes[0].machine.state)
    for item in fields(StateSummary):
        assert isinstance(getattr(summary, item.name), int | str | Outcome | None)
    state = make_stand_in(summary)
    assert state.is_ended and not state.wanted_samples and not state.window
    assert not any(step.group for step in (*state.plan, *state.outbox, *state.queue))


def test_one_that_has_not_begun_offers_its_failure_at_once() -> None:
    """Spec: R7.6, R5.8."""
    config = make_config(world_size=2)
    machine = Machine(config)
    machine.begin()
    (post,) = machine.handle(LocalFailed("loader lost"))
    assert isinstance(post, PostOffer) and post.offer.failed_rank == 0 and post.offer.round_max == 0
    other = stand_in(config, State())
    (same,) = other.handle(LocalFailed("loader lost"))
    assert isinstance(same, PostOffer) and same.offer.failed_rank == 0 and same.offer.round_max == 0


@pytest.mark.parametrize("is_collated", [False, True])
def test_in_fill_it_offers_its_failure_and_keeps_its_plan(is_collated: bool) -> None:
    """Spec: R7.6, R5.8. Checks: ABORT, RELEASE."""
    world = walk(is_there=lambda state: state.phase is Phase.FILL and bool(state.plan) and bool(state.queue))
    state = replace(world.nodes[0].machine.state, is_collated=is_collated)
    machine = stand_in(world.nodes[0].machine.config, state)
    (post,) = machine.handle(LocalFailed("loader lost"))
    assert isinstance(post, PostOffer)
    assert (post.offer.failed_rank, post.offer.round_min) == (0, state.round)
    if not is_collated:
        assert machine.handle(Collated(state.round - 1)) == ()
    with pytest.raises(UsageError, match="not under way"):
        machine.handle(Collated(state.round - 1))
    (report,) = machine.handle(Agreed(post.offer))
    assert isinstance(report, PostReport)
    assert (report.report.cause, report.report.round) == ("loader lost", state.round)
    other = replace(report.report, rank=1, cause="")
    effects = machine.handle(Reported((report.report, other)))
    limit = state.planned_steps - len(state.plan)
    assert machine.state.step_limit == limit
    effects += tuple(effect for _ in range(limit - state.taken_steps) for effect in machine.handle(StepTaken()))
    numbers = [effect.step.number for effect in effects if isinstance(effect, Deliver)]
    assert numbers == [step.number for step in state.outbox]
    finish = [effect for effect in effects if isinstance(effect, Finish)]
    assert finish == [Finish(Outcome(OutcomeKind.FAILED, 0, "loader lost"), limit)]


def test_an_offer_that_is_posted_is_not_recalled() -> None:
    """Its steps are released, the next are formed of nothing, and the next offer says it. Spec: R7.6. Checks: RELEASE."""
    world = walk(is_there=is_offered)
    state = world.nodes[0].machine.state
    machine, effects = replace_machine(world)
    assert effects == ()
    agreement = make_agreement(machine.config, state.round)
    *delivered, post = machine.handle(Agreed(agreement))
    assert all(isinstance(effect, Deliver) for effect in delivered)
    assert post == PostCounts((ZERO_COUNTS,) * 4)
    counts = (StepCounts(1, 8, 7),) * 4
    collate, offer = machine.handle(Counted(counts))
    assert isinstance(collate, Collate) and not any(step.group for step in collate.steps)
    assert isinstance(offer, PostOffer) and offer.offer.failed_rank == 0
    after = machine.state
    assert after.planned_steps - len(after.plan) == state.planned_steps
    assert [step.number for step in after.plan] == list(range(state.planned_steps, state.planned_steps + 4))


def test_an_agreement_under_way_may_end_the_epoch_first() -> None:
    """Spec: R7.6, R7.4. Checks: STOP."""
    world = walk(is_there=is_offered)
    state = world.nodes[0].machine.state
    closing, _ = replace_machine(world)
    effects = closing.handle(Agreed(make_agreement(closing.config, state.round, samples_min=0, samples_max=0)))
    assert closing.state.outcome == Outcome(OutcomeKind.COMPLETE)
    assert closing.state.step_limit == state.planned_steps
    assert not any(isinstance(effect, PostReport | PostOffer) for effect in effects)
    stopped, _ = replace_machine(world)
    taken = state.taken_steps
    stopped.handle(Agreed(make_agreement(stopped.config, state.round, stop_rank=1, stop_step=taken)))
    assert stopped.state.outcome == Outcome(OutcomeKind.STOPPED, 1, f"its consumer left after {taken} steps")
    assert stopped.state.step_limit == taken
    with pytest.raises(UsageError, match="no step is there"):
        stopped.handle(StepTaken())


def test_in_count_it_takes_the_sums_and_then_offers_its_failure() -> None:
    """Spec: R7.6. Checks: ALIGN."""
    world = walk(is_there=lambda state: state.phase is Phase.COUNT and bool(state.queue))
    state = world.nodes[0].machine.state
    machine, effects = replace_machine(world)
    assert effects == ()
    collate, offer = machine.handle(Counted((StepCounts(2, 9, 9),) * len(state.aligned)))
    assert isinstance(collate, Collate) and isinstance(offer, PostOffer)
    assert offer.offer.failed_rank == 0
    assert machine.state.planned_steps == state.planned_steps + len(state.aligned)


def test_a_quota_cuts_its_round_where_it_cuts_the_others() -> None:
    """Spec: R7.6, R4.6. Checks: ALIGN."""
    config = make_config(world_size=2, mode=Mode.QUOTA, quota_samples=7)
    machine = Machine(config)
    summary = StateSummary(
        phase=Phase.COUNT, round=1, aligned_steps=3, planned_steps=2, released_steps=2, global_samples=4
    )
    machine.state = make_stand_in(replace(summary, delivered_steps=1))
    machine.handle(LocalFailed("loader lost"))
    machine.handle(Counted((StepCounts(2, 2, 2),) * 3))
    assert (machine.state.planned_steps, machine.state.global_samples) == (4, 8)


def test_in_report_the_reports_decide_and_the_plan_is_not_handed_out() -> None:
    """Spec: R7.6, R5.5. Checks: RELEASE."""
    world = walk(is_there=lambda state: state.phase is Phase.REPORT and bool(state.plan), fails={1: ("collate", 1)})
    state = world.nodes[0].machine.state
    machine, effects = replace_machine(world)
    assert effects == ()
    node = world.nodes[1]
    while node.machine.state.phase is not Phase.REPORT:
        world.do(*next(choice for choice in world.compute_choices() if choice[1] == 1))
    reports = world.posts["report", state.round]
    machine.handle(combine_posts([reports[rank] for rank in range(2)]))
    assert machine.state.outcome == Outcome(OutcomeKind.FAILED, 1, "uncollatable")
    assert machine.state.step_limit == state.planned_steps - len(state.plan)


def test_in_drain_it_hands_out_what_is_released_and_nobody_hears_of_the_loss() -> None:
    """Spec: R7.6, R5.8, R7.1."""
    world = walk(is_there=lambda state: state.phase is Phase.DRAIN and len(state.outbox) > 1)
    state = world.nodes[0].machine.state
    machine, effects = replace_machine(world)
    assert effects == ()
    found: list[Effect] = []
    while machine.state.phase is not Phase.DONE:
        found += machine.handle(StepTaken())
    assert [effect.step.number for effect in found if isinstance(effect, Deliver)] == [
        step.number for step in state.outbox
    ]
    assert found[-1] == Finish(Outcome(OutcomeKind.COMPLETE), state.planned_steps)


def test_after_the_end_steps_are_still_taken() -> None:
    """Spec: R7.6, R5.6."""
    world = walk(is_there=lambda state: state.phase is Phase.DONE and bool(state.queue))
    machine, effects = replace_machine(world)
    assert effects == ()
    assert machine.handle(StepTaken()) == ()


def test_a_stop_before_the_loss_stays_a_stop() -> None:
    """What a consumer that has left is not given, its stand-in does not give it. Spec: R7.6, R5.7. Checks: STOP."""
    world = walk(is_there=lambda state: state.is_stopped and bool(state.queue), stops={0: 2})
    machine, _ = replace_machine(world)
    assert machine.state.is_stopped and machine.state.step_limit == 2
    with pytest.raises(UsageError, match="no step is there"):
        machine.handle(StepTaken())
    assert machine.handle(ConsumerStopped()) == ()


def test_a_lost_peer_ends_it_at_once() -> None:
    """Spec: R7.6, R7.5."""
    world = walk(is_there=lambda state: state.phase is Phase.COUNT and bool(state.queue))
    taken = world.nodes[0].machine.state.taken_steps
    machine, _ = replace_machine(world)
    assert machine.handle(PeerLost(1, "gone")) == (Finish(Outcome(OutcomeKind.LOST, 1, "gone"), taken),)


def test_told_last_it_would_close_the_epoch_over_what_is_lost() -> None:
    """Why the failure comes before the events that were not answered. Spec: R7.6."""
    config = make_config(world_size=2)
    steps = (Step(0, 0, (), ZERO_COUNTS),)
    state = State(round=1, plan=steps, is_collated=False, planned_steps=1)
    late = stand_in(config, state)
    (post,) = late.handle(Collated(0))
    assert isinstance(post, PostOffer)
    assert late.handle(LocalFailed("loader lost")) == ()
    # Another rank that has nothing left would say the same: an end, with nothing wrong.
    late.handle(Agreed(reduce_offers([post.offer, post.offer])))
    assert late.state.outcome == Outcome(OutcomeKind.COMPLETE)
    prompt = stand_in(config, state)
    (post,) = prompt.handle(LocalFailed("loader lost"))
    assert isinstance(post, PostOffer) and post.offer.failed_rank == 0
    assert prompt.handle(Collated(0)) == ()


def test_it_asks_for_nothing_to_be_read() -> None:
    """Spec: R7.6."""
    world = walk(is_there=is_offered)
    machine, _ = replace_machine(world)
    effects = machine.handle(Agreed(make_agreement(machine.config, machine.state.round)))
    assert not any(isinstance(effect, Read) for effect in effects)
