"""When an offer is posted, what it contains, and what an agreement decides: every field and every boundary."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest

from odb_ref.core.batching.grouping import compute_groups
from odb_ref.core.batching.rules import PaperRule
from odb_ref.core.batching.shards import Draw
from odb_ref.core.config import Config, choose_ramp
from odb_ref.core.effects import PostOffer
from odb_ref.core.offer import NONE, Offer
from odb_ref.core.rounds import (
    compute_due_before,
    compute_round_target,
    compute_wanted_samples,
    count_fitting,
    draw_samples,
    foresee_draw,
    is_closing,
    is_quota_met,
    post_when_ready,
)
from odb_ref.core.state import Phase, State
from odb_ref.core.types import ZERO_COUNTS, Group, Mode, Sample, Step
from tests.helpers.world import make_offer


def make_config(**changes: Any) -> Config:
    values: dict[str, Any] = {"rank": 1, "world_size": 3, "budget_tokens": 10, "window_samples": 4, "max_age_rounds": 2}
    return Config(**(values | changes))


def make_window(*positions: int) -> Group:
    return tuple(Sample(0, position, 5, 1) for position in positions)


CONFIG = make_config()
QUOTA = make_config(mode=Mode.QUOTA, quota_samples=8)
STATE = State(round=3, read_samples=20, window=make_window(14, 15, 18, 19), marks=(15, 18), taken_steps=6)
OFFER = make_offer(3, CONFIG.fingerprint, samples=4, groups=2, due_max=1)


def post(state: State, config: Config = CONFIG) -> Offer:
    _, (effect,) = post_when_ready(config, state)
    return effect.offer


def test_a_rank_that_has_nothing_to_release_does_not_wait_for_its_consumer() -> None:
    """Spec: R3.4. So the portions of an update are drawn while the previous update is trained on."""
    state = replace(STATE, is_collated=True, released=(Step(6, 1, (), ZERO_COUNTS),))
    _, effects = post_when_ready(CONFIG, state)
    assert effects


@pytest.mark.parametrize(
    ("is_collated", "wanted", "has_released", "is_urged", "failure", "is_stopped"),
    list(itertools.product([True, False], [0, 1], [False, True], [False, True], ["", "x"], [False, True])),
)
def test_an_offer_waits_for_its_input_and_its_consumer_unless_the_epoch_is_to_end(
    is_collated: bool, wanted: int, has_released: bool, is_urged: bool, failure: str, is_stopped: bool
) -> None:
    """Spec: R3.4."""
    released = (Step(6, 1, (), ZERO_COUNTS),) if has_released else ()
    plan = (Step(7, 2, (), ZERO_COUNTS),)
    state = replace(
        STATE, is_collated=is_collated, wanted_samples=wanted, released=released, plan=plan, is_urged=is_urged, failure=failure,
        is_stopped=is_stopped,
    )  # fmt: skip
    is_ready = is_collated and wanted == 0
    is_posted = (is_ready and (is_urged or not has_released)) or failure == "x" or is_stopped
    after, effects = post_when_ready(CONFIG, state)
    if not is_posted:
        assert (after, effects) == (state, ())
        return
    groups = compute_groups(state.window, 10)
    assert after == replace(state, phase=Phase.OFFER, groups=groups)
    expected = replace(
        OFFER,
        ready_min=int(is_ready),
        failed_rank=1 if failure else NONE,
        stop_rank=1 if is_stopped else NONE,
        stop_step=6 if is_stopped else NONE,
    )
    assert effects == (PostOffer(expected),)


@pytest.mark.parametrize("phase", [phase for phase in Phase if phase is not Phase.FILL])
def test_only_a_rank_that_fills_its_window_posts_an_offer(phase: Phase) -> None:
    """Spec: R3.4."""
    state = replace(STATE, phase=phase, failure="x")
    assert post_when_ready(CONFIG, state) == (state, ())


def test_a_rank_whose_source_has_ended_does_not_hold_the_others_back() -> None:
    """Spec: R3.1."""
    assert post(replace(STATE, is_ended=True)) == replace(OFFER, groups_min=NONE)


def test_every_group_with_a_due_sample_counts() -> None:
    """Spec: R3.1, R4.3."""
    assert post(replace(STATE, marks=(14, 18))).due_max == 0
    assert post(replace(STATE, marks=(15, 18))).due_max == 1
    assert post(replace(STATE, marks=(19, 20))).due_max == 2
    assert post(replace(STATE, marks=(19,))).due_max == 0, "fewer rounds than the age"


def test_what_is_held_when_the_quota_is_met_is_offered_no_more() -> None:
    """Spec: R3.1, R4.6."""
    open_, met = (post(replace(STATE, global_samples=samples), QUOTA) for samples in (7, 8))
    assert (open_.samples_min, open_.samples_max, open_.groups_max) == (4, 4, 2)
    assert (met.samples_min, met.samples_max, met.groups_max) == (0, 0, 2)


def test_marks_say_what_is_due_once_there_are_as_many_as_the_age() -> None:
    """Spec: R4.3."""
    window = (Sample(0, 3, 1, 0), Sample(0, 9, 1, 0))
    states = [State(marks=marks, window=window) for marks in ((), (4,), (4, 9), (3, 9))]
    assert [compute_due_before(CONFIG, state) for state in states] == [0, 0, 4, 0]
    assert compute_due_before(CONFIG, State(marks=(4, 9))) == 0, "nothing is held"


def test_a_quota_is_met_at_its_number() -> None:
    """Spec: R4.6."""
    assert [is_quota_met(QUOTA, State(global_samples=samples)) for samples in (7, 8, 9)] == [False, True, True]
    assert not is_quota_met(CONFIG, State(global_samples=99))


@pytest.mark.parametrize(
    ("mode", "samples_min", "samples_max", "target"),
    [
        (Mode.JOIN, 0, 0, 0),
        (Mode.JOIN, 0, 4, 3),
        (Mode.JOIN, 2, 4, 3),
        (Mode.QUOTA, 0, 0, 0),
        (Mode.QUOTA, 0, 4, 0),
        (Mode.QUOTA, 1, 4, 1),
        (Mode.QUOTA, 3, 4, 3),
        (Mode.QUOTA, 4, 4, 3),
    ],
)
def test_a_round_has_the_target_of_the_rule_unless_the_epoch_closes(
    mode: Mode, samples_min: int, samples_max: int, target: int
) -> None:
    """Spec: R3.3, R3.5. In quota mode there are no more steps than the poorest rank can fill."""
    agreement = replace(OFFER, samples_min=samples_min, samples_max=samples_max, groups_max=3)
    config = make_config(mode=mode, rule=PaperRule())
    assert compute_round_target(config, agreement) == target
    assert is_closing(config, agreement) == (not target)


@pytest.mark.parametrize(
    ("round_", "groups_min", "due_max", "target"),
    [(1, 12, 0, 3), (1, 7, 0, 1), (1, 3, 0, 1), (1, 12, 5, 5), (1, NONE, 0, 14), (2, 12, 0, 12)],
)
def test_a_round_of_the_ramp_forms_a_quarter_of_the_steps(
    round_: int, groups_min: int, due_max: int, target: int
) -> None:
    """Spec: R3.3. If no source continues, this does not apply, because no larger window follows to carry anything into."""
    agreement = replace(
        OFFER, round_min=round_, round_max=round_, groups_min=groups_min, groups_max=14, due_max=due_max, samples_max=40
    )
    assert compute_round_target(make_config(ramp_rounds=2), agreement) == target


@pytest.mark.parametrize(("samples", "ramp"), [(None, 3), (0, 1), (2047.5, 1), (2048, 3), (10**9, 3)])
def test_a_short_epoch_has_a_short_ramp(samples: float | None, ramp: int) -> None:
    """Spec: R2.3."""
    assert choose_ramp(1024, samples) == ramp


def test_a_window_wants_what_it_lacks_while_there_is_something_to_read() -> None:
    """Spec: R2.3."""
    config = make_config(window_samples=8, ramp_rounds=1)
    assert compute_wanted_samples(config, 0, 1, is_ended=False) == 3
    assert compute_wanted_samples(config, 1, 1, is_ended=False) == 7
    assert compute_wanted_samples(config, 1, 9, is_ended=False) == 0
    assert compute_wanted_samples(config, 1, 1, is_ended=True) == 0


def test_a_window_with_a_bound_takes_what_fits_and_one_sample_in_any_case() -> None:
    """Spec: R2.3."""
    assert count_fitting([4, 3, 2], 9, is_empty=True) == 3
    assert count_fitting([4, 3, 2], 8, is_empty=True) == 2
    assert count_fitting([4, 3, 0], 6, is_empty=True) == 1  # in order: samples after one that does not fit wait
    assert count_fitting([4, 3], 3, is_empty=True) == 1
    assert count_fitting([4, 3], 3, is_empty=False) == 0
    assert count_fitting([4], -5, is_empty=False) == 0
    assert count_fitting([], 9, is_empty=True) == 0


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_what_is_foreseen_of_the_next_update_is_what_is_then_drawn(world_size: int) -> None:
    """Also if the next update is the epoch's last, and smaller, or there is none. Spec: R16.4. Checks: DEAL."""
    for total, rank in itertools.product(range(1, 30), range(world_size)):
        config = make_config(rank=rank, world_size=world_size, update_samples=6, shared_samples=total)
        for update in range(-(-total // 6)):
            first = (update + 1) * config.update_rounds
            before = State(round=first + 1, draw=Draw(0, 0, min(total, 6 * (update + 1))))
            assert foresee_draw(config, first - 1) == draw_samples(config, before, [0] * world_size)[0].draw
