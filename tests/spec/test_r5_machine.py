"""R5: one test, at least, for each event."""

from __future__ import annotations

from dataclasses import replace

import pytest

from odb_ref.core.effects import Collate, Deliver, Effect, Finish, OutcomeKind, PostCounts, PostOffer, PostReport, Read
from odb_ref.core.errors import PeerError, UsageError
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
from odb_ref.core.machine import start, transition
from odb_ref.core.offer import NONE, Offer
from odb_ref.core.state import Phase, State
from odb_ref.core.types import StepCounts
from tests.helpers.world import World, make_config, make_shard, make_shards, run

CONFIG = make_config(window_samples=2)
SHARD = make_shard([8, 7, 6, 5])


def _drive(*events: Event, config: object = CONFIG) -> tuple[State, tuple[Effect, ...]]:
    """One rank alone: its own offer is the agreement, its own counts the sums, where the event is one of the two blanks."""
    state, effects = start(config)  # type: ignore[arg-type]
    posted = list(effects)
    for blank in events:
        event = blank
        if blank is OWN_OFFER:
            event = Agreed([effect.offer for effect in posted if isinstance(effect, PostOffer)][-1])
        elif blank is OWN_COUNTS:
            event = Counted([effect.counts for effect in posted if isinstance(effect, PostCounts)][-1])
        state, effects = transition(config, state, event)  # type: ignore[arg-type]
        posted += effects
    return state, effects


OWN_OFFER = Agreed(Offer(**dict.fromkeys(Offer.__slots__, 0)))
OWN_COUNTS = Counted(())
FIRST = SamplesRead(SHARD[:2])
IN_FILL = ()
IN_OFFER = (FIRST,)
IN_COUNT = (FIRST, OWN_OFFER)
IN_FILL_1 = (FIRST, OWN_OFFER, OWN_COUNTS)
IN_OFFER_1 = (*IN_FILL_1, SamplesRead(SHARD[2:]), Collated(0))
IN_COUNT_1 = (*IN_OFFER_1, OWN_OFFER)
IN_REPORT = (FIRST, LocalFailed("bad"), OWN_OFFER, OWN_COUNTS, OWN_OFFER)
IN_DRAIN = (*IN_FILL_1, SamplesRead((), True), Collated(0), OWN_OFFER)
REACHED = {
    "fill": (IN_FILL, Phase.FILL),
    "offer": (IN_OFFER, Phase.OFFER),
    "count": (IN_COUNT, Phase.COUNT),
    "fill 1": (IN_FILL_1, Phase.FILL),
    "offer 1": (IN_OFFER_1, Phase.OFFER),
    "count 1": (IN_COUNT_1, Phase.COUNT),
    "report": (IN_REPORT, Phase.REPORT),
    "done": (IN_DRAIN, Phase.DONE),
}
EVENTS: tuple[Event, ...] = (
    SamplesRead((), True), Collated(0), OWN_OFFER, OWN_COUNTS, Reported(()), StepTaken(), ConsumerStopped(), LocalFailed("x"),
    Urged(), PeerLost(0, "x"),
)  # fmt: skip
LEGAL = {
    "fill": {SamplesRead, ConsumerStopped, LocalFailed, Urged, PeerLost},
    "offer": {Agreed, ConsumerStopped, LocalFailed, Urged, PeerLost},
    "count": {SamplesRead, Counted, ConsumerStopped, LocalFailed, Urged, PeerLost},
    "fill 1": {SamplesRead, Collated, ConsumerStopped, LocalFailed, Urged, PeerLost},
    "offer 1": {Agreed, ConsumerStopped, LocalFailed, Urged, PeerLost},
    "count 1": {SamplesRead, StepTaken, Counted, ConsumerStopped, LocalFailed, Urged, PeerLost},
    "report": {SamplesRead, Reported, Collated, ConsumerStopped, LocalFailed, Urged, PeerLost},
    "done": {StepTaken, ConsumerStopped, LocalFailed, Urged, PeerLost},
}


@pytest.mark.parametrize("place", REACHED)
def test_the_table_of_phases(place: str) -> None:
    """Spec: R5. Each place is reached, and exactly the legal events are taken there."""
    events, phase = REACHED[place]
    state, _ = _drive(*events)
    assert state.phase is phase
    legal = set()
    for event in EVENTS:
        before = replace(state)
        try:
            transition(CONFIG, state, event)
        except UsageError:
            pass
        except PeerError:
            legal.add(type(event))  # the kind is expected here, this content is not
        else:
            legal.add(type(event))
        assert state == before
    assert legal == LEGAL[place]


def test_the_same_input_gives_the_same_output() -> None:
    """Spec: R5. Checks: REPLAY."""
    assert _drive(*IN_COUNT_1) == _drive(*IN_COUNT_1)


def test_an_epoch_starts_with_a_read_of_its_first_window() -> None:
    """Spec: R5.0, R6.1."""
    state, effects = start(CONFIG)
    assert effects == (Read(2),)
    assert (state.phase, state.round, state.window, state.wanted_samples) == (Phase.FILL, 0, (), 2)


def test_a_read_may_be_answered_in_parts() -> None:
    """Spec: R5.1."""
    state, effects = _drive(SamplesRead(SHARD[:1]))
    assert (effects, state.wanted_samples, state.window) == ((), 1, SHARD[:1])
    with pytest.raises(UsageError, match="only 1 were asked for"):
        transition(CONFIG, state, SamplesRead(SHARD[1:3]))
    with pytest.raises(UsageError, match="must say something"):
        transition(CONFIG, state, SamplesRead(()))
    ended, (post,) = transition(CONFIG, state, SamplesRead((), True))
    assert isinstance(post, PostOffer)
    assert ended.is_ended
    assert ended.wanted_samples == 0


def test_a_read_ends_where_the_window_is_full() -> None:
    """Spec: R2.3, R5.1."""
    full, (post,) = _drive(SamplesRead(SHARD[:1], is_full=True))
    assert isinstance(post, PostOffer)
    assert (full.wanted_samples, full.is_ended, post.offer.groups_min) == (0, False, 1)
    state, _ = _drive(SamplesRead(SHARD[:1]))
    assert transition(CONFIG, state, SamplesRead((), is_full=True)) == (full, (post,))
    for event in (
        SamplesRead(SHARD[:2], is_full=True),  # nothing is left out
        SamplesRead(SHARD[:1], is_ended=True, is_full=True),
        SamplesRead((), is_full=True),  # nothing is held
    ):
        with pytest.raises(UsageError, match="SamplesRead is full, but"):
            transition(CONFIG, _drive()[0], event)


def test_collated_is_legal_once_and_for_the_round_before() -> None:
    """Spec: R5.2."""
    state, _ = _drive(*IN_FILL_1)
    with pytest.raises(UsageError, match="not under way"):
        transition(CONFIG, state, Collated(1))
    ready, effects = transition(CONFIG, state, Collated(0))
    assert (ready.is_collated, effects) == (True, ())
    with pytest.raises(UsageError, match="not under way"):
        transition(CONFIG, ready, Collated(0))


def test_an_agreement_aligns_reads_on_and_posts_counts() -> None:
    """Spec: R5.3, R6.1, R6.3."""
    state, effects = _drive(*IN_COUNT)
    assert effects == (Read(2), PostCounts((StepCounts(1, 8, 7), StepCounts(1, 7, 6))))
    assert state.marks == (2,)
    assert [len(group) for group in state.aligned] == [1, 1]


def test_the_next_agreement_releases() -> None:
    """Spec: R5.3, R6.6. Checks: RELEASE."""
    state, effects = _drive(*IN_OFFER_1)
    assert len(state.plan) == 2
    assert not any(isinstance(effect, Deliver) for effect in effects)
    released, effects = _drive(*IN_COUNT_1)
    assert [effect.step.number for effect in effects if isinstance(effect, Deliver)] == [0, 1]
    assert released.plan == ()


def test_an_agreement_is_judged_in_the_order_of_the_rule() -> None:
    """Spec: R5.3, R7.4. Failure, then mismatch, then a wrong round, then stop, then not ready, then closing."""
    state, (post,) = _drive(*IN_OFFER)
    assert isinstance(post, PostOffer)
    own = post.offer
    everything = replace(
        own, failed_rank=0, stop_rank=0, stop_step=0, ready_min=0, samples_max=0, round_min=9, round_max=9
    )
    assert transition(CONFIG, state, Agreed(everything))[0].phase is Phase.REPORT
    unfailed = replace(everything, failed_rank=NONE)
    with pytest.raises(PeerError, match="round_min"):
        transition(CONFIG, state, Agreed(unfailed))
    assert transition(CONFIG, state, Agreed(replace(unfailed, round_min=0)))[0].phase is Phase.REPORT
    in_round = replace(unfailed, round_min=0, round_max=0)
    outcome = transition(CONFIG, state, Agreed(in_round))[0].outcome
    assert outcome is not None
    assert outcome.kind is OutcomeKind.STOPPED
    with pytest.raises(PeerError, match="ready_min"):
        transition(CONFIG, state, Agreed(replace(in_round, stop_rank=NONE, stop_step=NONE)))
    closing = transition(CONFIG, state, Agreed(replace(in_round, stop_rank=NONE, stop_step=NONE, ready_min=1)))[0]
    assert closing.outcome is not None
    assert closing.outcome.kind is OutcomeKind.COMPLETE


def test_the_sums_are_planned_and_collated() -> None:
    """Spec: R5.4, R6.5."""
    state, effects = _drive(*IN_FILL_1)
    (collate,) = effects
    assert isinstance(collate, Collate)
    assert (collate.round, [step.number for step in collate.steps]) == (0, [0, 1])
    assert collate.steps == state.plan
    assert (state.round, state.planned_steps, state.is_collated) == (1, 2, False)
    counting, _ = _drive(*IN_COUNT)
    with pytest.raises(PeerError, match="field counts"):
        transition(CONFIG, counting, Counted((StepCounts(1, 1, 1),)))


def test_reports_must_be_one_a_rank_and_explain_something() -> None:
    """Spec: R5.5, R6.4."""
    state, effects = _drive(*IN_REPORT)
    assert effects == (PostReport(Report(0, "bad", 1, CONFIG.shared_json)),)
    with pytest.raises(PeerError, match="field rank"):
        transition(CONFIG, state, Reported(()))
    with pytest.raises(PeerError, match="no rank has failed"):
        transition(CONFIG, state, Reported((Report(0, "", 1, CONFIG.shared_json),)))
    done, effects = transition(CONFIG, state, Reported((Report(0, "bad", 1, CONFIG.shared_json),)))
    assert done.phase is Phase.DONE
    assert isinstance(effects[-1], Finish)


def test_taking_a_step_makes_room_for_the_next() -> None:
    """Spec: R5.6, R6.6."""
    config = make_config(window_samples=2, depth_steps=1)
    state, effects = _drive(*IN_COUNT_1, config=config)
    assert [effect.step.number for effect in effects if isinstance(effect, Deliver)] == [0]
    state, effects = transition(config, state, StepTaken())
    assert [effect.step.number for effect in effects if isinstance(effect, Deliver)] == [1]
    assert (state.taken_steps, state.taken_samples) == (1, 1)
    state, _ = transition(config, state, StepTaken())
    with pytest.raises(UsageError, match="no step is there"):
        transition(config, state, StepTaken())


def test_after_a_stop_nothing_more_is_delivered_or_taken() -> None:
    """Spec: R5.7. Checks: STOP."""
    config = make_config(window_samples=2, depth_steps=1)
    state, _ = _drive(*IN_COUNT_1, StepTaken(), ConsumerStopped(), config=config)
    assert state.step_limit == 1
    with pytest.raises(UsageError, match="no step is there"):
        transition(config, state, StepTaken())
    assert transition(config, state, ConsumerStopped()) == (state, ())
    filling, effects = transition(config, state, Counted((StepCounts(1, 1, 1),) * 2))
    assert filling.phase is Phase.OFFER
    assert not any(isinstance(effect, Deliver) for effect in effects)
    assert [effect.offer.stop_step for effect in effects if isinstance(effect, PostOffer)] == [1]


def test_a_stop_while_draining_finishes() -> None:
    """Spec: R5.7, R7.1."""
    config = make_config(window_samples=2, depth_steps=1)
    state, effects = _drive(*IN_DRAIN, config=config)
    assert state.phase is Phase.DRAIN
    assert not any(isinstance(effect, Finish) for effect in effects)
    done, (finish,) = transition(config, state, ConsumerStopped())
    assert done.phase is Phase.DONE
    assert isinstance(finish, Finish)
    assert (finish.outcome.kind, finish.step_limit) == (OutcomeKind.COMPLETE, 0)


def test_the_first_failure_stays() -> None:
    """Spec: R5.8. Checks: ABORT."""
    state, effects = _drive(LocalFailed("first"), LocalFailed("second"))
    assert (state.failure, effects) == ("first", ())
    counting, _ = _drive(*IN_COUNT, LocalFailed("x"))
    assert counting.phase is Phase.COUNT
    offering, effects = transition(CONFIG, counting, Counted((StepCounts(1, 1, 1),) * 2))
    assert offering.phase is Phase.OFFER
    assert [effect.offer.failed_rank for effect in effects if isinstance(effect, PostOffer)] == [0]
    done, _ = _drive(*IN_DRAIN)
    assert transition(CONFIG, done, LocalFailed("late")) == (done, ())


def test_an_urge_frees_a_rank_whose_consumer_waits_for_one_that_left() -> None:
    """Spec: R5.9. Checks: FREE, STOP."""
    shards = [[8] * 6, [8] * 6]
    free = stuck = 0
    for seed in range(40):
        options = {"seed": seed, "stops": {0: 1}}
        config = make_config(depth_steps=1)
        free += run(shards, config, **options).is_over
        stuck += not run(shards, config, **options, is_urging=False).is_over
    assert free == 40
    assert stuck > 0


def test_a_lost_peer_ends_the_rank_at_once() -> None:
    """Spec: R5.10, R7.5. Checks: ABORT."""
    for place in ("fill", "offer", "count 1", "report"):
        state, _ = _drive(*REACHED[place][0])
        done, effects = transition(CONFIG, state, PeerLost(3, "gone"))
        assert done.phase is Phase.DONE
        (finish,) = effects
        assert isinstance(finish, Finish)
        assert (finish.outcome.kind, finish.outcome.rank, finish.outcome.cause) == (OutcomeKind.LOST, 3, "gone")
        assert finish.step_limit == state.taken_steps
    done, _ = _drive(*IN_DRAIN)
    assert transition(CONFIG, done, PeerLost(3, "gone")) == (done, ())


def test_a_failure_is_said_in_the_round_that_follows_an_open_offer() -> None:
    """Spec: R5.8."""
    world = World(CONFIG, make_shards([[8] * 4]))
    world.do("read", 0)
    while world.nodes[0].machine.state.phase is not Phase.OFFER:
        world.do("read", 0)
    world.send(0, LocalFailed("late"))
    world.run()
    (finish,) = world.get_finishes()
    assert (finish.outcome.kind, finish.outcome.cause) == (OutcomeKind.FAILED, "late")
