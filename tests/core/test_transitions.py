"""Each transition, whole: every field of the new state and every effect, from states in which all numbers differ."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from odb_ref.core.batching.order import StepOrder
from odb_ref.core.config import Config
from odb_ref.core.effects import Collate, Deliver, Finish, Outcome, OutcomeKind, PostCounts, PostOffer, PostReport, Read
from odb_ref.core.errors import PeerError, UsageError
from odb_ref.core.events import (
    Agreed,
    Collated,
    ConsumerStopped,
    Counted,
    LocalFailed,
    PeerLost,
    Report,
    Reported,
    SamplesRead,
    StepTaken,
    Urged,
)
from odb_ref.core.machine import compute_failure, transition
from odb_ref.core.offer import NONE
from odb_ref.core.state import Phase, State
from odb_ref.core.types import Group, Mode, Sample, Step, StepCounts
from tests.helpers.errors import refused
from tests.helpers.sizes import draw_text
from tests.helpers.world import make_offer


def make_config(**changes: Any) -> Config:
    values: dict[str, Any] = {
        "rank": 1, "world_size": 2, "budget_tokens": 10, "window_samples": 16, "depth_steps": 2, "max_age_rounds": 2,
        "ramp_rounds": 0, "order": StepOrder.FULLEST,
    }  # fmt: skip
    return Config(**(values | changes))


LENGTHS = {6: 5, 7: 5, 8: 4, 9: 9}


def make_group(*positions: int) -> Group:
    return tuple(Sample(10 * position, position, LENGTHS.get(position, 3), 2) for position in positions)


def make_step(number: int, *positions: int) -> Step:
    return Step(number, 1, make_group(*positions), StepCounts(len(positions), 30, 20))


CONFIG = make_config()
QUOTA = make_config(mode=Mode.QUOTA, quota_samples=20)
STEP_2, STEP_3, STEP_4, STEP_5 = make_step(2, 3), make_step(3, 4), make_step(4, 5), make_step(5)
IN_OFFER = State(
    phase=Phase.OFFER, round=2, read_samples=10, window=make_group(6, 7, 8, 9), marks=(3, 6),
    groups=(make_group(6, 8), make_group(7), make_group(9)), plan=(STEP_4, STEP_5), released=(STEP_3,), queue=(STEP_2,),
    planned_steps=6, global_samples=14, taken_steps=2, taken_samples=3,
)  # fmt: skip
"""Three groups, of 10, 5 and 9 padded tokens. Steps 4 and 5 are collated, 3 is released, 2 is delivered."""
AGREEMENT = make_offer(2, CONFIG.fingerprint, samples=4, samples_max=5, groups=2, groups_max=3)
IN_COUNT = replace(
    IN_OFFER, phase=Phase.COUNT, wanted_samples=15, window=make_group(7), marks=(6, 10), groups=(),
    aligned=(make_group(6, 8), make_group(9)), plan=(), released=(STEP_4, STEP_5), queue=(STEP_2, STEP_3),
)  # fmt: skip
COUNTS = (StepCounts(5, 50, 11), StepCounts(3, 29, 7))
STEP_6, STEP_7 = Step(6, 2, make_group(6, 8), COUNTS[0]), Step(7, 2, make_group(9), COUNTS[1])


def test_an_agreement_releases_aligns_reads_and_posts_counts() -> None:
    """Spec: R5.3."""
    assert transition(CONFIG, IN_OFFER, Agreed(AGREEMENT)) == (
        IN_COUNT,
        (Deliver(STEP_3), Read(15), PostCounts((StepCounts(2, 9, 4), StepCounts(1, 9, 2)))),
    )


def test_what_is_due_by_the_oldest_mark_goes_before_what_is_fuller() -> None:
    """Spec: R5.3, R4.3."""
    state, _ = transition(CONFIG, replace(IN_OFFER, marks=(8, 9)), Agreed(AGREEMENT))
    assert (state.aligned, state.window) == ((make_group(6, 8), make_group(7)), make_group(9))


@pytest.mark.parametrize(("window_samples", "wanted"), [(4, 3), (2, 1), (1, 0)])
def test_what_is_carried_counts_towards_the_next_window(window_samples: int, wanted: int) -> None:
    """Spec: R5.3, R2.3. With three groups and two steps, one sample is carried."""
    config = make_config(window_samples=window_samples)
    state, effects = transition(config, IN_OFFER, Agreed(AGREEMENT))
    assert state.wanted_samples == wanted
    assert [effect for effect in effects if isinstance(effect, Read)] == ([Read(wanted)] if wanted else [])


def test_the_last_agreement_releases_and_drains() -> None:
    """Spec: R5.3, R7.1."""
    outcome = Outcome(OutcomeKind.COMPLETE)
    drained = replace(
        IN_OFFER, phase=Phase.DRAIN, groups=(), plan=(), released=(STEP_4, STEP_5), queue=(STEP_2, STEP_3), step_limit=6,
        outcome=outcome,
    )  # fmt: skip
    closing = Agreed(replace(AGREEMENT, samples_max=0))
    assert transition(CONFIG, IN_OFFER, closing) == (drained, (Deliver(STEP_3),))
    roomy = make_config(depth_steps=9)
    assert transition(roomy, IN_OFFER, closing) == (
        replace(drained, phase=Phase.DONE, released=(), queue=(STEP_2, STEP_3, STEP_4, STEP_5)),
        (Deliver(STEP_3), Deliver(STEP_4), Deliver(STEP_5), Finish(outcome, 6)),
    )


@pytest.mark.parametrize(("stop_step", "delivered"), [(3, ()), (4, (STEP_3,)), (5, (STEP_3,))])
def test_a_stop_drops_what_is_not_released(stop_step: int, delivered: tuple[Step, ...]) -> None:
    """Spec: R5.3, R7.4."""
    state, effects = transition(CONFIG, IN_OFFER, Agreed(replace(AGREEMENT, stop_rank=0, stop_step=stop_step)))
    outcome = Outcome(OutcomeKind.STOPPED, 0, f"its consumer left after {stop_step} steps")
    assert state == replace(
        IN_OFFER, phase=Phase.DONE, groups=(), released=IN_OFFER.released[len(delivered) :], queue=(STEP_2, *delivered),
        step_limit=stop_step, outcome=outcome,
    )  # fmt: skip
    assert effects == (*map(Deliver, delivered), Finish(outcome, stop_step))


def test_a_rank_that_has_stopped_itself_keeps_its_lower_limit() -> None:
    """Spec: R5.7, R7.4."""
    stopped = replace(IN_OFFER, is_stopped=True, step_limit=2)
    state, (finish,) = transition(CONFIG, stopped, Agreed(replace(AGREEMENT, stop_rank=0, stop_step=4)))
    assert (state.step_limit, finish.step_limit, state.queue, state.released) == (2, 2, (STEP_2,), (STEP_3,))


@pytest.mark.parametrize("changes", [{"failed_rank": 0}, {"round_max": 3}, {"fingerprint_max": NONE}])
def test_a_failure_or_a_mismatch_posts_a_report(changes: dict[str, int]) -> None:
    """Spec: R5.3, R7.2, R7.3."""
    failed = replace(IN_OFFER, failure="disk")
    assert transition(CONFIG, failed, Agreed(replace(AGREEMENT, **changes))) == (
        replace(failed, phase=Phase.REPORT, groups=()),
        (PostReport(Report(1, "disk", 2, CONFIG.shared_json)),),
    )


def test_the_sums_are_planned_and_the_next_window_fills() -> None:
    """Spec: R5.4."""
    assert transition(CONFIG, IN_COUNT, Counted(COUNTS)) == (
        replace(
            IN_COUNT, phase=Phase.FILL, round=3, aligned=(), plan=(STEP_6, STEP_7), is_collated=False, planned_steps=8,
            global_samples=22,
        ),
        (Collate(2, (STEP_6, STEP_7)),),
    )  # fmt: skip


@pytest.mark.parametrize(("quota", "steps", "total"), [(15, 1, 19), (19, 1, 19), (20, 2, 22), (22, 2, 22), (23, 2, 22)])
def test_a_quota_cuts_after_the_step_that_reaches_it(quota: int, steps: int, total: int) -> None:
    """Spec: R4.6, R5.4. The samples of steps that are cut off return to the window, in order of position."""
    config = make_config(mode=Mode.QUOTA, quota_samples=quota)
    state, (collate,) = transition(config, IN_COUNT, Counted(COUNTS))
    assert state.plan == (STEP_6, STEP_7)[:steps]
    assert collate == Collate(2, state.plan)
    assert (state.planned_steps, state.global_samples) == (6 + steps, total)
    assert state.window == make_group(*((7, 9) if steps == 1 else (7,)))


def test_what_a_quota_cuts_off_returns_in_its_place() -> None:
    """Spec: R4.6. Checks: CONSERVE."""
    counting = replace(IN_COUNT, window=make_group(8), aligned=(make_group(9), make_group(7, 6)))
    state, _ = transition(make_config(mode=Mode.QUOTA, quota_samples=15), counting, Counted(COUNTS))
    assert state.window == make_group(6, 7, 8)


def test_a_failed_rank_posts_its_next_offer_with_the_sums() -> None:
    """Spec: R5.4, R3.4, R5.8."""
    state, (collate, post) = transition(CONFIG, replace(IN_COUNT, failure="disk"), Counted(COUNTS))
    assert state.phase is Phase.OFFER
    assert collate == Collate(2, (STEP_6, STEP_7))
    assert (post.offer.round_min, post.offer.failed_rank) == (3, 1)


def test_a_step_taken_leaves_the_queue_and_makes_room() -> None:
    """Spec: R5.6, R6.6."""
    two = replace(IN_COUNT, queue=(make_step(2, 3, 0), STEP_3))
    assert transition(CONFIG, two, StepTaken()) == (
        replace(two, queue=(STEP_3, STEP_4), released=(STEP_5,), taken_steps=3, taken_samples=5),
        (Deliver(STEP_4),),
    )


def test_the_last_released_step_out_lets_the_offer_go() -> None:
    """Spec: R5.6, R3.4."""
    filling = replace(IN_OFFER, phase=Phase.FILL, groups=(), queue=(STEP_2,), released=(STEP_3,))
    state, (deliver, post) = transition(make_config(depth_steps=1), filling, StepTaken())
    assert deliver == Deliver(STEP_3)
    assert isinstance(post, PostOffer)
    assert state.phase is Phase.OFFER


DRAINING = replace(
    IN_OFFER, phase=Phase.DRAIN, groups=(), plan=(), released=(STEP_3,), queue=(STEP_2,), step_limit=4,
    outcome=Outcome(OutcomeKind.FAILED, 0, "disk"),
)  # fmt: skip


def test_draining_ends_when_the_last_step_is_delivered() -> None:
    """Spec: R7.1."""
    one = make_config(depth_steps=1)
    outcome = Outcome(OutcomeKind.FAILED, 0, "disk")
    done = replace(DRAINING, phase=Phase.DONE, released=(), queue=(STEP_3,), taken_steps=3, taken_samples=4)
    assert transition(one, DRAINING, StepTaken()) == (done, (Deliver(STEP_3), Finish(outcome, 4)))
    longer = replace(DRAINING, released=(STEP_3, STEP_4), step_limit=5)
    assert transition(one, longer, StepTaken()) == (
        replace(longer, released=(STEP_4,), queue=(STEP_3,), taken_steps=3, taken_samples=4),
        (Deliver(STEP_3),),
    )


def test_steps_from_the_limit_on_are_neither_delivered_nor_taken() -> None:
    """Spec: R5.6, R6.6."""
    limited = replace(IN_COUNT, step_limit=3)
    taken, effects = transition(CONFIG, limited, StepTaken())
    assert (taken.queue, taken.released, effects) == ((STEP_3,), (STEP_4, STEP_5), ())
    with refused(UsageError, "StepTaken, but no step is there to take"):
        transition(CONFIG, taken, StepTaken())


def test_a_full_queue_takes_no_more() -> None:
    """Spec: R6.6. Checks: FREE. Steps are delivered until the queue is full, and not one more."""
    state, effects = transition(make_config(depth_steps=3), IN_COUNT, StepTaken())
    assert (state.queue, state.released) == ((STEP_3, STEP_4, STEP_5), ())
    assert effects == (Deliver(STEP_4), Deliver(STEP_5))


IN_REPORT = replace(IN_OFFER, phase=Phase.REPORT, groups=())
SAME = CONFIG.shared_json


def test_the_reports_end_the_epoch_after_what_is_released() -> None:
    """Spec: R5.5, R7.2."""
    outcome = Outcome(OutcomeKind.FAILED, 0, "disk")
    reports = (Report(0, "disk", 2, SAME), Report(1, "too late", 2, SAME))
    assert transition(CONFIG, IN_REPORT, Reported(reports)) == (
        replace(IN_REPORT, phase=Phase.DONE, released=(), queue=(STEP_2, STEP_3), step_limit=4, outcome=outcome),
        (Deliver(STEP_3), Finish(outcome, 4)),
    )


@pytest.mark.parametrize("ranks", [(), (0,), (1, 0), (0, 1, 2), (0, 0)])
def test_reports_are_one_of_each_rank_in_order(ranks: tuple[int, ...]) -> None:
    """Spec: R5.5."""
    with refused(PeerError, f"reports of round 2, field rank: {list(ranks)}, expected 0..1"):
        transition(CONFIG, IN_REPORT, Reported(tuple(Report(rank, "x", 2, SAME) for rank in ranks)))


def test_a_failure_is_the_lowest_ranks_then_a_round_then_a_configuration() -> None:
    """Spec: R7.2, R7.3."""
    other = make_config(tag="b", budget_tokens=9).shared_json
    good, late, different = Report(0, "", 2, SAME), Report(1, "", 3, other), Report(1, "", 2, other)
    failed = (good, replace(late, cause="disk"), Report(2, "net", 2, SAME))
    assert compute_failure(failed) == Outcome(OutcomeKind.FAILED, 1, "disk")
    assert compute_failure((good, late)) == Outcome(OutcomeKind.MISMATCH, 1, "round 3, rank 0 is in 2")
    cause = "budget_tokens is 9, rank 0 has 10; tag is 'b', rank 0 has ''"
    assert compute_failure((good, different)) == Outcome(OutcomeKind.MISMATCH, 1, cause)
    assert compute_failure((good, replace(good, rank=1), replace(different, rank=2))).rank == 2
    with refused(PeerError, "reports of round 2: no rank has failed and no configuration differs"):
        compute_failure((good, replace(good, rank=1)))


def test_a_key_that_only_one_rank_has_is_a_difference() -> None:
    """Spec: R7.3. Ranks may run different versions of this library."""
    reports = (Report(0, "", 0, '{"a": 1, "b": 2}'), Report(1, "", 0, '{"a": 1, "c": 3}'))
    assert compute_failure(reports).cause == "b is None, rank 0 has 2; c is 3, rank 0 has None"


def test_the_settings_of_a_tag_count_one_by_one() -> None:
    """Spec: R7.3."""
    tags = ('{"causal_shift": true, "seed": 4}', '{"causal_shift": false, "seed": 4}', "[1]")
    first, second, third = (Report(i, "", 2, make_config(tag=tag).shared_json) for i, tag in enumerate(tags))
    assert compute_failure((first, second)).cause == "causal_shift is False, rank 0 has True"
    cause = "causal_shift is None, rank 0 has True; seed is None, rank 0 has 4; tag is '[1]', rank 0 has None"
    assert compute_failure((first, replace(third, rank=1))).cause == cause


def test_a_stop_lowers_the_limit_to_what_was_taken() -> None:
    """Spec: R5.7."""
    assert transition(CONFIG, IN_COUNT, ConsumerStopped()) == (replace(IN_COUNT, is_stopped=True, step_limit=2), ())
    lower = replace(IN_COUNT, step_limit=1)
    assert transition(CONFIG, lower, ConsumerStopped())[0].step_limit == 1
    stopped = replace(IN_COUNT, is_stopped=True, step_limit=2, taken_steps=1)
    assert transition(CONFIG, stopped, ConsumerStopped()) == (stopped, ())
    done = replace(DRAINING, phase=Phase.DONE)
    assert transition(CONFIG, done, ConsumerStopped()) == (done, ())
    state, (finish,) = transition(CONFIG, DRAINING, ConsumerStopped())
    assert state == replace(DRAINING, phase=Phase.DONE, is_stopped=True, step_limit=2)
    assert finish == Finish(Outcome(OutcomeKind.FAILED, 0, "disk"), 2)
    filling = replace(IN_COUNT, phase=Phase.FILL, aligned=())
    state, (post,) = transition(CONFIG, filling, ConsumerStopped())
    assert (state.is_stopped, post.offer.stop_rank, post.offer.stop_step) == (True, 1, 2)


def test_a_lost_peer_ends_the_rank_with_what_it_has_taken() -> None:
    """Spec: R5.10, R7.5."""
    outcome = Outcome(OutcomeKind.LOST, 0, "gone")
    assert transition(CONFIG, IN_COUNT, PeerLost(0, "gone")) == (
        replace(
            IN_COUNT, phase=Phase.DONE, window=make_group(6, 7, 8, 9), aligned=(), step_limit=2, outcome=outcome
        ),
        (Finish(outcome, 2),),
    )  # fmt: skip
    assert transition(CONFIG, IN_OFFER, PeerLost(0, "gone"))[0].groups == ()
    lower = replace(IN_COUNT, step_limit=1)
    assert transition(CONFIG, lower, PeerLost(None, "gone"))[0].step_limit == 1


@pytest.mark.parametrize("phase", [Phase.FILL, Phase.OFFER, Phase.COUNT, Phase.REPORT])
@pytest.mark.parametrize("before", [{}, {"failure": "disk"}, {"is_stopped": True, "step_limit": 2}, {"is_urged": True}])
def test_a_loss_names_who_is_gone_in_every_phase(phase: Phase, before: dict[str, Any]) -> None:
    """Spec: R5.10, R7.5. Checks: ABORT. It does not matter what has happened to the rank itself."""
    state = replace(IN_COUNT, phase=phase, **before)
    found, effects = transition(CONFIG, state, PeerLost(0, "gone"))
    assert (found.phase, effects) == (Phase.DONE, (Finish(Outcome(OutcomeKind.LOST, 0, "gone"), 2),))


def test_any_cause_is_told_as_it_is() -> None:
    """Spec: R5.8, R7.2, R7.5. Checks: ABORT. A blank cause, a long one, one of several lines: what failed has failed."""
    draw = random.Random(4)
    for _ in range(60):
        cause, rank = draw_text(draw), draw.randrange(2)
        state, _ = transition(CONFIG, IN_OFFER, LocalFailed(cause))
        _, (post,) = transition(CONFIG, state, Agreed(replace(AGREEMENT, failed_rank=rank)))
        reports = [Report(0, "", 2, SAME), Report(1, "", 2, SAME)]
        reports[rank] = replace(post.report, rank=rank)
        ended, _ = transition(CONFIG, IN_REPORT, Reported(tuple(reports)))
        assert ended.outcome == Outcome(OutcomeKind.FAILED, rank, cause)
        lost, _ = transition(CONFIG, IN_OFFER, PeerLost(rank, cause))
        assert lost.outcome == Outcome(OutcomeKind.LOST, rank, cause)


@pytest.mark.parametrize("phase", [Phase.DRAIN, Phase.DONE])
@pytest.mark.parametrize("event", [PeerLost(0, "gone"), LocalFailed("disk"), Urged()])
def test_what_comes_too_late_to_matter_is_ignored(phase: Phase, event: PeerLost | LocalFailed | Urged) -> None:
    """Spec: R5.8, R5.9, R5.10."""
    state = replace(DRAINING, phase=phase)
    assert transition(CONFIG, state, event) == (state, ())


FILLING = replace(
    IN_COUNT, phase=Phase.FILL, round=3, aligned=(), plan=(STEP_6,), is_collated=False, wanted_samples=3
)  # fmt: skip


def test_failures_and_urges_are_kept() -> None:
    """Spec: R5.8, R5.9."""
    assert transition(CONFIG, IN_COUNT, LocalFailed("disk")) == (replace(IN_COUNT, failure="disk"), ())
    stopped = replace(IN_COUNT, is_stopped=True)
    assert transition(CONFIG, stopped, LocalFailed("disk")) == (replace(stopped, failure="disk"), ())
    assert transition(CONFIG, IN_COUNT, LocalFailed("")) == (replace(IN_COUNT, failure="unknown failure"), ())
    failed = replace(FILLING, failure="disk")
    assert transition(CONFIG, failed, LocalFailed("net")) == (failed, ())
    assert transition(CONFIG, FILLING, Urged()) == (replace(FILLING, is_urged=True), ())
    ready = replace(FILLING, is_collated=True, wanted_samples=0)
    state, (post,) = transition(CONFIG, ready, Urged())
    assert isinstance(post, PostOffer)
    assert (state.phase, state.is_urged) == (Phase.OFFER, True)


def test_samples_join_the_window() -> None:
    """Spec: R5.1."""
    assert transition(CONFIG, FILLING, SamplesRead(make_group(10, 11))) == (
        replace(FILLING, read_samples=12, wanted_samples=1, window=make_group(7, 10, 11)),
        (),
    )
    assert transition(CONFIG, FILLING, SamplesRead(make_group(10), True)) == (
        replace(FILLING, read_samples=11, wanted_samples=0, is_ended=True, window=make_group(7, 10)),
        (),
    )
    assert transition(CONFIG, FILLING, Collated(2)) == (replace(FILLING, is_collated=True), ())


@pytest.mark.parametrize(
    ("state", "event", "message"),
    [
        (IN_OFFER, SamplesRead(make_group(10)), "SamplesRead in phase offer: no Read is open"),
        (
            FILLING,
            SamplesRead(()),
            "SamplesRead holds no sample, and the source has not ended: an answer must say something",
        ),
        (FILLING, SamplesRead(make_group(*range(10, 14))), "SamplesRead holds 4 samples, only 3 were asked for"),
        (FILLING, SamplesRead(make_group(11)), "sample 110 has position 11, expected 10"),
        (FILLING, SamplesRead((Sample(7, 10, 0, 0),)), "sample 7: length 0, supervised 0"),
        (FILLING, Collated(3), "Collated(3) in round 3: that collation is not under way"),
        (FILLING, Collated(1), "Collated(1) in round 3: that collation is not under way"),
        (IN_OFFER, Collated(1), "Collated(1) in round 2: that collation is not under way"),
        (FILLING, Agreed(AGREEMENT), "Agreed in phase fill: no offer is open"),
        (FILLING, Counted(COUNTS), "Counted in phase fill: no counts are open"),
        (FILLING, Reported(()), "Reported in phase fill: no report is open"),
        (replace(FILLING, queue=()), StepTaken(), "StepTaken, but no step is there to take"),
    ],
)
def test_an_illegal_event_is_told_from_what_is_open(state: State, event: Any, message: str) -> None:
    """Spec: R8, R5."""
    with refused(UsageError, message):
        transition(CONFIG, state, event)


@pytest.mark.parametrize(
    ("state", "event", "message"),
    [
        (IN_OFFER, Agreed(replace(AGREEMENT, round_min=3, round_max=3)), "agreement in round 2, field round_min: 3"),
        (IN_OFFER, Agreed(replace(AGREEMENT, ready_min=0)), "agreement in round 2, field ready_min: 0, expected 1"),
        (IN_COUNT, Counted(COUNTS[:1]), "counts of round 2, field counts: 1 steps, not 2"),
        (IN_COUNT, Counted((*COUNTS, COUNTS[0])), "counts of round 2, field counts: 3 steps, not 2"),
    ],
)
def test_a_message_that_contradicts_the_protocol_names_round_and_field(state: State, event: Any, message: str) -> None:
    """Spec: R8, R5.3, R5.4."""
    with refused(PeerError, message):
        transition(CONFIG, state, event)


def test_what_is_no_event_is_not_ignored() -> None:
    with pytest.raises(AssertionError, match="'nothing'"):
        transition(CONFIG, FILLING, "nothing")  # type: ignore[arg-type]
