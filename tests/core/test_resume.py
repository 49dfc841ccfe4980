"""Resuming, field by field: where a round began, what a checkpoint counts as taken, what a ledger keeps."""

from __future__ import annotations

from dataclasses import replace

import pytest

from odb_ref.core.batching.shards import Draw
from odb_ref.core.config import Config
from odb_ref.core.effects import Effect, Read
from odb_ref.core.errors import UsageError
from odb_ref.core.events import Event
from odb_ref.core.machine import Machine
from odb_ref.core.resume import Checkpoint, Ledger, Resumed, RoundStart, compute_round_start, resume
from odb_ref.core.state import Phase, State
from odb_ref.core.types import Group, Sample
from tests.helpers.errors import refused

CONFIG = Config(rank=0, world_size=1, budget_tokens=10, window_samples=4, ramp_rounds=0)
START = RoundStart(
    round=2, read_samples=7, is_ended=False, carried=(3, 5), marks=(4, 7), planned_steps=6, global_samples=13
)


def make_group(*positions: int) -> Group:
    return tuple(Sample(10 * position, position, 2, 1) for position in positions)


STATE = State(
    round=2, read_samples=9, is_ended=True, window=make_group(3, 5, 7, 8), marks=(4, 7), planned_steps=6, taken_steps=5,
    global_samples=13,
)  # fmt: skip


def test_a_round_began_where_the_last_window_ended() -> None:
    """Spec: R10.1. What was read since then is read again, even if that was the end of the source."""
    assert compute_round_start(STATE) == START


def test_a_source_that_had_ended_before_the_round_has_ended() -> None:
    """Spec: R10.1."""
    ended = replace(STATE, read_samples=7, window=make_group(3, 5))
    assert compute_round_start(ended) == replace(START, is_ended=True)
    assert not compute_round_start(replace(ended, is_ended=False)).is_ended


def test_before_the_first_agreement_nothing_has_been_read() -> None:
    """Spec: R10.1."""
    assert compute_round_start(State(read_samples=2, window=make_group(0, 1))) == RoundStart()
    assert not compute_round_start(State(read_samples=2, window=make_group(0, 1), is_ended=True)).is_ended
    assert compute_round_start(State(is_ended=True)).is_ended, "an empty source"


def test_the_state_at_a_start_is_as_if_nothing_had_happened_since() -> None:
    """Spec: R10.2. Checks: RESUME."""
    state, effects = resume(CONFIG, START, make_group(3, 5))
    assert effects == (Read(2),), "a window of four, of which two are carried"
    assert state == State(
        round=2, read_samples=7, wanted_samples=2, window=make_group(3, 5), marks=(4, 7), planned_steps=6, taken_steps=6,
        taken_samples=5, global_samples=13,
    )  # fmt: skip


@pytest.mark.parametrize("is_ended", [True, False])
def test_a_window_that_needs_no_reading_is_offered_at_once(is_ended: bool) -> None:
    """Spec: R10.2, R3.4."""
    positions = (3,) if is_ended else (2, 3, 4, 5, 6)
    start = replace(START, is_ended=is_ended, carried=positions)
    state, (post,) = resume(CONFIG, start, make_group(*positions))
    assert (state.phase, state.wanted_samples, state.is_ended) == (Phase.OFFER, 0, is_ended)
    assert (post.offer.round_min, post.offer.samples_min, post.offer.ready_min) == (2, len(positions), 1)


def test_other_samples_than_the_carried_ones_are_refused() -> None:
    """Spec: R10.2."""
    with refused(UsageError, "resume: expected the samples at positions (3, 5)"):
        resume(CONFIG, START, make_group(3))


def test_a_carried_sample_that_makes_no_sense_is_refused() -> None:
    """Spec: R10.2, R1.1."""
    with refused(UsageError, "sample 30: length 0, supervised 0"):
        resume(CONFIG, replace(START, carried=(3,)), (Sample(30, 3, 0, 0),))


IMPOSSIBLE: dict[str, tuple[RoundStart, str]] = {
    "a number below 0": (
        RoundStart(round=-1),
        "round -1, 0 samples read and 0 steps planned; none of these is below 0",
    ),
    "read before the first round": (RoundStart(read_samples=3), "3 samples are read before round 0"),
    "planned before the first round": (
        RoundStart(planned_steps=5, global_samples=9),
        "5 steps and 9 samples are planned before round 0",
    ),
    "emitted before the first round": (
        RoundStart(global_samples=9),
        "0 steps and 9 samples are planned before round 0",
    ),
    "steps without a sample": (
        replace(START, global_samples=5),
        "6 steps are planned with 5 samples, but each step holds one",
    ),
    "a mark of the first round": (RoundStart(marks=(0,)), "round 0 has 1 marks, one for each round before it at most"),
    "more marks than rounds": (
        replace(START, marks=(1, 4, 7)),
        "round 2 has 3 marks, one for each round before it at most",
    ),
    "marks that fall": (replace(START, marks=(8, 7)), "the marks [8, 7] do not rise to 7, the number of samples read"),
    "a mark below 0": (replace(START, marks=(-1, 7)), "the marks [-1, 7] do not rise to 7, the number of samples read"),
    "a mark of another number": (
        replace(START, marks=(4, 6)),
        "the marks [4, 6] do not rise to 7, the number of samples read",
    ),
    "a draw from a source that is not shared": (
        replace(START, draw=Draw(0, 0, 1)),
        "a draw is named, but each rank has its own source",
    ),
}


@pytest.mark.parametrize("name", IMPOSSIBLE)
def test_a_start_that_no_rank_can_have_saved_is_refused(name: str) -> None:
    """Spec: R10.6. Checks: RESUME."""
    start, why = IMPOSSIBLE[name]
    with refused(UsageError, f"resume: no rank can have saved this start: {why}"):
        resume(CONFIG, start, make_group(*start.carried))


def test_inside_its_first_update_an_epoch_may_go_on_at_round_0() -> None:
    """Spec: R10.6, R16.6. The steps that others took of the update are planned, and each holds a sample at least."""
    config = replace(CONFIG, update_samples=9)
    state, _ = resume(config, RoundStart(planned_steps=2, global_samples=2), ())
    assert (state.round, state.planned_steps, state.global_samples) == (0, 2, 2)
    with pytest.raises(UsageError, match="2 steps are planned with 1 samples"):
        resume(config, RoundStart(planned_steps=2, global_samples=1), ())


def test_a_machine_goes_on_once() -> None:
    """Spec: R10.2."""
    machine = Machine(CONFIG)
    assert machine.begin(START, make_group(3, 5)) == (Read(2),)
    assert machine.state == resume(CONFIG, START, make_group(3, 5))[0]
    with refused(UsageError, "begin: the epoch has begun"):
        machine.begin(START, make_group(3, 5))


def test_an_observer_is_told_where_a_machine_goes_on() -> None:
    """Spec: R9.4."""
    told: list[tuple[int, Event | Resumed | None, tuple[Effect, ...]]] = []
    machine = Machine(CONFIG, lambda rank, event, effects: told.append((rank, event, effects)))
    effects = machine.begin(START, make_group(3, 5))
    assert told == [(0, Resumed(START, make_group(3, 5)), effects)]


def test_what_was_read_and_not_carried_was_taken() -> None:
    """Spec: R10.3. Checks: ONCE."""
    checkpoint = Checkpoint(start=START, taken_steps=1, taken=(5, 8))
    assert [position for position in range(10) if checkpoint.is_taken(position)] == [0, 1, 2, 4, 5, 6, 8]


def take(ledger: Ledger, number: int, *positions: int) -> None:
    ledger.note_taken(number, positions)


def test_a_ledger_answers_with_the_round_of_the_last_taken_step() -> None:
    """Spec: R10.3."""
    ledger = Ledger()
    assert ledger.compute_checkpoint() == Checkpoint(start=RoundStart())
    first = replace(STATE, round=1, planned_steps=2, marks=(4,), window=(), is_ended=False)
    second = replace(STATE, round=2, planned_steps=3)
    ledger.note_round(compute_round_start(first))
    ledger.note_round(compute_round_start(second))
    take(ledger, 0, 1, 0)
    take(ledger, 1, 2)
    assert ledger.compute_checkpoint() == Checkpoint(start=RoundStart(), taken_steps=2, taken=(1, 0, 2))
    take(ledger, 2, 4, 6)
    assert ledger.compute_checkpoint() == Checkpoint(start=compute_round_start(first), taken_steps=1, taken=(4, 6))
    take(ledger, 3)
    assert ledger.compute_checkpoint() == Checkpoint(start=compute_round_start(second), taken_steps=1, taken=())


def test_a_ledger_of_a_resumed_epoch_counts_from_its_start() -> None:
    """Spec: R10.3. The rounds have one step each, and all are in flight at once."""
    ledger = Ledger(START)
    assert ledger.compute_checkpoint() == Checkpoint(start=START)
    for round_ in (3, 4):
        ledger.note_round(compute_round_start(replace(STATE, round=round_, planned_steps=4 + round_)))
    take(ledger, 6, 3)
    assert ledger.compute_checkpoint() == Checkpoint(start=START, taken_steps=1, taken=(3,))
    take(ledger, 7, 5)
    take(ledger, 8, 7)
    checkpoint = ledger.compute_checkpoint()
    assert (checkpoint.start.round, checkpoint.taken_steps, checkpoint.taken) == (4, 1, (7,))
