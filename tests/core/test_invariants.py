"""Each clause of each invariant fails by itself on states made by hand. Where it does not apply, nothing fails."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from odb_ref.core.batching.order import StepOrder
from odb_ref.core.batching.shards import Draw
from odb_ref.core.batching.sizes import Sizes
from odb_ref.core.config import Config
from odb_ref.core.effects import Outcome, OutcomeKind
from odb_ref.core.errors import InvariantError
from odb_ref.core.invariants import INVARIANTS, check_transition
from odb_ref.core.machine import start, transition
from odb_ref.core.offer import NONE
from odb_ref.core.state import Phase, State
from odb_ref.core.types import ZERO_COUNTS, Group, Mode, Sample, Step
from tests.helpers.world import World, make_config, make_shard, make_shards

BY_ID = {invariant.id: invariant for invariant in INVARIANTS}
CONFIG = Config(rank=1, world_size=2, budget_tokens=10, window_samples=4, depth_steps=2, max_age_rounds=2)
START = State()


def make_group(*positions: int, length: int = 1) -> Group:
    return tuple(Sample(0, position, length, 0) for position in positions)


def make_step(number: int, *positions: int) -> Step:
    return Step(number, 0, make_group(*positions), ZERO_COUNTS)


def holds(name: str, before: State, after: State, config: Config = CONFIG) -> bool:
    return BY_ID[name].holds(config, before, after)


FULL = State(
    read_samples=10,
    window=make_group(9),
    aligned=(make_group(7), make_group(8)),
    plan=(make_step(3, 5, 6), make_step(4)),
    released=(make_step(2, 4),),
    queue=(make_step(1, 2, 3),),
    taken_steps=1,
    taken_samples=2,
    planned_steps=5,
)


def test_every_sample_read_is_somewhere() -> None:
    """Checks: CONSERVE."""
    assert holds("I1", START, FULL)


@pytest.mark.parametrize(
    "change",
    [
        {"read_samples": 11},
        {"window": ()},
        {"aligned": (make_group(7),)},
        {"plan": FULL.plan[1:]},
        {"released": ()},
        {"queue": (make_step(1, 2),)},
        {"taken_samples": 1},
    ],
    ids=lambda change: next(iter(change)),
)
def test_a_sample_lost_from_any_place_is_noticed(change: dict[str, Any]) -> None:
    """Checks: CONSERVE."""
    assert not holds("I1", START, replace(FULL, **change))


LATER = replace(
    FULL,
    queue=(make_step(2, 4),),
    released=FULL.plan,
    plan=(make_step(5, 7), make_step(6, 8)),
    aligned=(),
    taken_steps=2,
    taken_samples=4,
    planned_steps=7,
)
"""One step was taken and two were added. What stays is not judged again."""


def test_what_stays_in_the_queue_need_not_be_judged_again() -> None:
    """Checks: CONSERVE, ALIGN."""
    assert holds("I1", FULL, LATER)
    assert holds("I4", FULL, LATER)
    assert holds("I1", LATER, replace(LATER, round=1))
    assert holds("I4", LATER, replace(LATER, round=1))


@pytest.mark.parametrize(
    ("change", "names"),
    [
        ({"read_samples": 11}, "I1"),
        ({"window": ()}, "I1"),
        ({"aligned": (make_group(7),)}, "I1"),
        ({"taken_samples": 3}, "I1"),
        ({"plan": (make_step(5, 7), make_step(6, 8, 9))}, "I1"),
        ({"plan": (make_step(5, 7), make_step(7, 8))}, "I4"),
        ({"plan": (make_step(4, 7), make_step(5, 8))}, "I4"),
        ({"plan": (make_step(5, 7),)}, "I1 I4"),
        ({"planned_steps": 8}, "I4"),
        ({"queue": FULL.queue + LATER.queue}, "I1 I4"),
        ({"queue": ()}, "I1 I4"),
        ({"released": FULL.plan[::-1]}, "I4"),
        ({"released": (make_step(3, 5), FULL.plan[1])}, "I1"),
        ({"taken_steps": 3}, "I4"),
        ({"taken_steps": 1}, "I4"),
    ],
    ids=lambda value: value if isinstance(value, str) else next(iter(value)),
)
def test_what_moves_wrongly_is_noticed(change: dict[str, Any], names: str) -> None:
    """Checks: CONSERVE, ALIGN."""
    wrong = replace(LATER, **change)
    assert [name for name in ("I1", "I4") if not holds(name, FULL, wrong)] == names.split()


HANDED = replace(FULL, released=(*FULL.released, FULL.plan[0]), plan=FULL.plan[1:])
TAKEN = replace(HANDED, queue=FULL.released, released=FULL.plan[:1], taken_steps=2, taken_samples=4)
"""One step of `HANDED` was taken, and another delivered in its place."""


@pytest.mark.parametrize(
    ("change", "names"),
    [
        ({}, ""),
        ({"queue": ()}, "I1 I4"),
        ({"queue": (make_step(2),)}, "I1"),
        ({"released": HANDED.released}, "I1 I4"),
        ({"released": (make_step(3, 5),)}, "I1"),
        ({"released": (make_step(4, 5, 6),)}, "I4"),
        ({"plan": ()}, "I4"),
        ({"taken_samples": 3}, "I1"),
        ({"taken_steps": 1}, "I4"),
        ({"queue": (), "released": HANDED.released, "taken_steps": 3}, "I4"),
        ({"queue": HANDED.queue, "released": HANDED.released, "taken_steps": 0, "taken_samples": 2}, "I4"),
        ({"queue": (), "taken_steps": 3, "taken_samples": 5}, ""),
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(value),
)
def test_a_take_that_moves_wrongly_is_noticed(change: dict[str, Any], names: str) -> None:
    """Checks: CONSERVE, ALIGN."""
    after = replace(TAKEN, **change)
    assert [name for name in ("I1", "I4") if not holds(name, HANDED, after)] == names.split()


OFFERED = State(phase=Phase.OFFER, window=make_group(3, 4, 5))
COUNTING = State(phase=Phase.COUNT, aligned=(make_group(5, 3),), window=make_group(4))


@pytest.mark.parametrize(
    "change",
    [{"aligned": (make_group(5),)}, {"aligned": (make_group(5, 3, 4),)}, {"window": make_group(6)}, {"window": ()}],
)
def test_an_alignment_loses_and_invents_nothing(change: dict[str, Any]) -> None:
    """Checks: ONCE."""
    assert holds("I2", OFFERED, COUNTING)
    assert not holds("I2", OFFERED, replace(COUNTING, **change))


def test_only_an_alignment_is_compared_with_the_window() -> None:
    """Checks: ONCE."""
    other = replace(COUNTING, window=())
    assert not holds("I2", OFFERED, other)
    assert holds("I2", replace(OFFERED, phase=Phase.COUNT), other)
    assert holds("I2", OFFERED, replace(other, phase=Phase.REPORT))


def test_a_new_window_is_in_order_without_repeats() -> None:
    """Checks: REPLAY."""
    assert holds("I3", START, State(window=make_group(1, 2, 9)))
    assert not holds("I3", START, State(window=make_group(1, 1)))
    assert not holds("I3", START, State(window=make_group(2, 1)))
    unchanged = State(window=make_group(2, 1))
    assert holds("I3", unchanged, replace(unchanged, round=1)), "judged when it was made"


@pytest.mark.parametrize(
    "change",
    [
        {"taken_steps": 0},
        {"planned_steps": 6},
        {"planned_steps": 4},
        {"queue": ()},
        {"released": ()},
        {"plan": FULL.plan[:1]},
        {"queue": FULL.released, "released": FULL.queue},
        {"released": FULL.plan, "plan": FULL.released},
    ],
)
def test_steps_are_numbered_from_the_queue_to_the_plan(change: dict[str, Any]) -> None:
    """Checks: ALIGN."""
    assert holds("I4", START, FULL)
    assert not holds("I4", START, replace(FULL, **change))


def test_a_plan_leaves_whole_collated_and_on_an_agreement() -> None:
    """Checks: RELEASE."""
    before = State(phase=Phase.OFFER, plan=FULL.plan, is_collated=True)
    after = State(phase=Phase.COUNT)
    assert holds("I5", before, after)
    assert not holds("I5", replace(before, is_collated=False), after)
    assert not holds("I5", replace(before, phase=Phase.FILL), after)
    assert not holds("I5", before, replace(after, plan=FULL.plan[1:]))


def test_a_plan_that_stays_or_is_new_is_no_release() -> None:
    """Checks: RELEASE."""
    waiting = State(phase=Phase.FILL, plan=FULL.plan, is_collated=False)
    assert holds("I5", waiting, replace(waiting, is_stopped=True))
    assert holds("I5", State(phase=Phase.COUNT), waiting)


def test_a_group_of_two_fills_the_budget_and_no_more() -> None:
    """Checks: BUDGET."""
    assert holds("I6", START, State(aligned=(make_group(1), make_group(2, 3, length=5))))
    assert not holds("I6", START, State(aligned=(make_group(1), make_group(2, 3, length=6))))
    assert holds("I6", START, State(aligned=(make_group(1, length=99), ()))), "a long sample alone, and an idle step"
    old = State(aligned=(make_group(2, 3, length=6),))
    assert holds("I6", old, replace(old, round=1)), "judged when it was made"


def test_a_group_of_two_keeps_every_limit() -> None:
    """Checks: BUDGET."""
    config = replace(CONFIG, limits=(4, 6))

    def fits(*costs: tuple[int, int]) -> bool:
        group = tuple(Sample(0, position, 1, 0, cost) for position, cost in enumerate(costs))
        return holds("I6", START, State(aligned=(group,)), config)

    assert fits((1, 3), (3, 3))
    assert not fits((2, 3), (3, 3))
    assert not fits((1, 3), (3, 4))
    assert fits((9, 9)), "alone"


def test_a_group_of_two_fits_the_budget_in_force() -> None:
    """Checks: BUDGET. Every limit is in proportion (R15.1)."""
    config = replace(CONFIG, limits=(20, 5))
    for agreed, length, costs in product((1, 4, 5, 9, 10, 11, NONE), range(1, 6), ((1, 0), (5, 1), (0, 2))):
        force = min(agreed, 10)
        group = tuple(Sample(0, position, length, 0, costs) for position in range(2))
        fits = 2 * length <= force and all(
            2 * cost <= max(1, most * force // 10) for cost, most in zip(costs, (20, 5), strict=True)
        )
        assert holds("I6", State(agreed_tokens=agreed), State(aligned=(group,)), config) == fits, (
            agreed,
            length,
            costs,
        )


DUE = State(phase=Phase.OFFER, marks=(4, 8))


def test_nothing_due_is_carried() -> None:
    """Checks: AGE."""
    assert holds("I7", DUE, State(phase=Phase.COUNT, window=make_group(4, 5)))
    assert not holds("I7", DUE, State(phase=Phase.COUNT, window=make_group(3, 5)))
    assert holds("I7", DUE, State(phase=Phase.COUNT)), "nothing is carried at all"


LATE = State(phase=Phase.COUNT, window=make_group(3, 5))


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (replace(DUE, phase=Phase.COUNT), LATE),
        (DUE, replace(LATE, phase=Phase.REPORT)),
        (replace(DUE, marks=(4,)), LATE),
    ],
    ids=["not from an offer", "not to counts", "fewer rounds than the age"],
)
def test_only_what_an_alignment_carries_can_be_late(before: State, after: State) -> None:
    """Checks: AGE."""
    assert not holds("I7", DUE, LATE)
    assert holds("I7", before, after)


def test_what_the_last_quota_round_leaves_cannot_be_late() -> None:
    """Checks: AGE."""
    assert holds("I7", DUE, LATE, replace(CONFIG, mode=Mode.QUOTA))


LONG, MIDDLE, SHORT = make_group(0, 1, length=5), make_group(2, length=4), make_group(3, length=3)
IN_ROUND_1 = State(phase=Phase.OFFER, round=1)


@pytest.mark.parametrize(
    ("order", "aligned", "window", "is_right"),
    [
        (StepOrder.FULLEST, (LONG, MIDDLE, SHORT, ()), (), True),
        (StepOrder.FULLEST, (MIDDLE, LONG, SHORT), (), False),
        (StepOrder.FULLEST, (LONG, (), MIDDLE), (), False),
        # The permutation of four in round 1 is 3, 0, 1, 2. With an idle step in place 3 the others move up.
        (StepOrder.SHUFFLED, (make_group(9), LONG, MIDDLE, SHORT), (), True),
        (StepOrder.SHUFFLED, (LONG, MIDDLE, SHORT, make_group(9)), (), False),
        (StepOrder.SHUFFLED, (LONG, MIDDLE, SHORT, ()), (), True),
        (StepOrder.SHUFFLED, ((), LONG, MIDDLE, SHORT), (), False),
        (StepOrder.SAMPLER, (LONG, MIDDLE, SHORT), make_group(4), True),
        (StepOrder.SAMPLER, (LONG, SHORT, MIDDLE), (), False),
        (StepOrder.SAMPLER, (LONG, SHORT), make_group(2), False),
        (StepOrder.SAMPLER, (make_group(1, 0),), (), False),
    ],
)
def test_steps_follow_each_other_as_the_order_says(
    order: StepOrder, aligned: tuple[Group, ...], window: Group, is_right: bool
) -> None:
    """Checks: ORDER."""
    config = replace(CONFIG, order=order)
    after = State(phase=Phase.COUNT, round=1, aligned=aligned, window=window)
    assert holds("I10", IN_ROUND_1, after, config) == is_right
    assert holds("I10", replace(IN_ROUND_1, phase=Phase.COUNT), after, config), "only an alignment is judged"


def test_the_queue_may_be_full() -> None:
    """Checks: FREE."""
    steps = tuple(make_step(number) for number in range(3))
    assert holds("I8", START, State(queue=steps[:2]))
    assert not holds("I8", START, State(queue=steps))


ENDED = Outcome(OutcomeKind.COMPLETE)


@pytest.mark.parametrize(
    ("state", "is_consistent"),
    [
        (State(phase=Phase.FILL), True),
        (State(phase=Phase.FILL, outcome=ENDED), False),
        (State(phase=Phase.DRAIN), False),
        (State(phase=Phase.DRAIN, outcome=ENDED), True),
        (State(phase=Phase.DONE), False),
        (State(phase=Phase.DONE, outcome=ENDED), True),
        (State(phase=Phase.OFFER), True),
        (State(phase=Phase.OFFER, groups=(make_group(1),)), True),
        (State(phase=Phase.FILL, groups=(make_group(1),)), False),
        (State(phase=Phase.COUNT, aligned=(make_group(1),)), True),
        (State(phase=Phase.COUNT), False),
        (State(phase=Phase.REPORT, aligned=(make_group(1),)), False),
        (State(phase=Phase.COUNT, aligned=(make_group(1),), outcome=ENDED), False),
    ],
)
def test_the_phase_says_which_fields_are_in_use(state: State, is_consistent: bool) -> None:
    """Checks: TERM."""
    assert holds("I9", START, state) is is_consistent


def test_what_fails_is_told_with_its_statement_and_place() -> None:
    """Spec: R8."""
    wrong = State(phase=Phase.OFFER, round=3, queue=tuple(make_step(number) for number in range(3)), planned_steps=3)
    with pytest.raises(InvariantError) as caught:
        check_transition(CONFIG, START, wrong)
    assert str(caught.value) == (
        "I8: FREE: not true that the queue holds at most depth_steps, rank 1 round 3 phase offer"
    )
    assert (caught.value.invariant, caught.value.detail) == ("I8", str(caught.value).removeprefix("I8: "))


def test_a_take_is_not_asked_what_it_cannot_break() -> None:
    """If phase, window, aligned steps and plan stay, the checks left out hold for any content. Otherwise all are made."""
    odd = State(window=make_group(2, 1), aligned=(make_group(5, 6, length=9),), marks=(7, 8))
    for phase in Phase:
        before = replace(odd, phase=phase)
        after = replace(before, marks=(), queue=FULL.queue, taken_steps=4, planned_steps=9)
        for name in ("I2", "I3", "I5", "I6", "I7"):
            assert holds(name, before, after)


IDLE_FIRST = State(phase=Phase.COUNT, round=1, aligned=((), LONG), read_samples=2)
PLANNED = State(plan=(make_step(0),), planned_steps=1, is_collated=False)


@pytest.mark.parametrize(
    ("name", "before", "after"),
    [
        ("I1", START, replace(FULL, window=())),
        ("I4", START, replace(FULL, planned_steps=6)),
        ("I10", replace(IN_ROUND_1, window=LONG, read_samples=2), IDLE_FIRST),
        ("I2", OFFERED, replace(COUNTING, window=make_group(6))),
        ("I3", START, State(read_samples=2, window=make_group(2, 1))),
        ("I6", START, State(read_samples=2, aligned=(make_group(5, 6, length=9),))),
        ("I7", replace(OFFERED, marks=(4, 5)), replace(COUNTING, aligned=(make_group(5, 4),), window=make_group(3))),
        ("I5", PLANNED, replace(PLANNED, plan=(), released=PLANNED.plan)),
        ("I9", START, State(groups=(make_group(1),))),
        ("I9", START, State(outcome=ENDED)),
        ("I9", START, State(phase=Phase.DRAIN)),
    ],
)
def test_a_transition_that_can_break_an_invariant_is_asked(name: str, before: State, after: State) -> None:
    """Checks: ONCE, REPLAY, BUDGET, AGE, RELEASE, TERM."""
    with pytest.raises(InvariantError) as caught:
        check_transition(CONFIG, before, after)
    assert caught.value.invariant == name


def test_every_invariant_holds_in_a_run() -> None:
    """Spec: I1, I2, I3, I4, I5, I6, I7, I8, I9, I10, I11, I12, I13. Samples are carried in this run."""
    node = World(make_config(max_age_rounds=1), make_shards([[8, 8, 7, 8] * 3, [1] * 20])).run().nodes[0]
    state, _ = start(node.machine.config)
    for event, _ in node.events:
        after, _ = transition(node.machine.config, state, event)
        check_transition(node.machine.config, state, after)
        state = after
    assert [invariant.id for invariant in INVARIANTS] == [f"I{i}" for i in range(1, 14)]


@pytest.mark.parametrize("draw", [Draw(4, 3, 7), Draw(6, 3, 8), Draw(6, 2, 13), Draw(7, -1, 8)])
def test_a_draw_of_what_is_drawn_or_is_not_there_breaks_i11(draw: Draw) -> None:
    """Spec: I11. Checks: DEAL."""
    config = make_config(shared_samples=12)
    before = State(draw=Draw(0, 3, 6))
    assert holds("I11", before, State(draw=Draw(8, 4, 12)), config)
    assert holds("I11", before, before, config)
    assert not holds("I11", before, State(draw=draw), config)
    assert not holds("I11", before, State(draw=Draw(8, 4, 12)), make_config())


def test_a_group_of_an_unfriendly_number_breaks_i12() -> None:
    """Spec: I12. Checks: SIZES."""
    config = make_config(sizes=Sizes.POWERS)
    right, wrong = ((make_shard([1] * count), ()) for count in (4, 3))
    assert holds("I12", State(), State(aligned=right), config)
    assert not holds("I12", State(), State(aligned=wrong), config)
    assert holds("I12", State(), State(aligned=wrong), make_config())


def test_an_update_in_parts_breaks_i13() -> None:
    """Spec: I13. Checks: UPDATE."""
    own, shared = make_config(update_samples=4), make_config(update_samples=6, shared_samples=9)
    offer, samples = State(phase=Phase.OFFER), make_shard([1] * 5)
    whole, carried = (State(phase=Phase.COUNT, aligned=(samples[:1],), window=window) for window in ((), samples[1:2]))
    assert holds("I13", replace(offer, round=1), whole, own)
    assert not holds("I13", replace(offer, round=1), carried, own), "a sample slips into the next update"
    assert not holds("I13", offer, whole, own), "round 0 of two only releases"
    assert not holds("I13", replace(offer, round=1), whole, shared), "round 1 of three only draws"
    assert holds("I13", replace(offer, round=2), whole, shared)
    for window, is_right in (
        (State(window=samples[:3], wanted_samples=1), True),
        (State(window=samples[:3], wanted_samples=2), False),
    ):
        assert holds("I13", State(), replace(window, round=1), own) == is_right, "5 are more than an update's"
        assert not holds("I13", State(), window, own), "nothing is read in round 0"
    assert not holds("I13", replace(whole, round=1), replace(whole, round=1, window=samples), own)
    assert holds("I13", offer, carried, make_config())
