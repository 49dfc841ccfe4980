"""I1 to I10: each holds in runs (the machine checks them), and each can fail."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from odb_ref.core.batching.shards import Draw
from odb_ref.core.batching.sizes import Sizes
from odb_ref.core.errors import InvariantError
from odb_ref.core.events import Event
from odb_ref.core.invariants import INVARIANTS, check_transition
from odb_ref.core.machine import start, transition
from odb_ref.core.state import Phase, State
from odb_ref.core.types import Group
from tests.helpers.world import World, make_config, make_shard, make_shards

CONFIG = make_config(max_age_rounds=1)
Change = Callable[[State, State], State]


def sum_tokens(group: Group) -> int:
    return sum(sample.length for sample in group)


def _collect() -> list[tuple[State, State]]:
    """Every transition of rank 0 in a run with carries."""
    world = World(CONFIG, make_shards([[8, 8, 7, 8] * 3, [1] * 20])).run()
    config = world.nodes[0].machine.config
    state, _ = start(config)
    pairs = []
    event: Event
    for event, _ in world.nodes[0].events:
        after, _ = transition(config, state, event)
        pairs.append((state, after))
        state = after
    return pairs


PAIRS = _collect()


def _drop_a_sample(_before: State, after: State) -> State:
    return replace(after, window=after.window[1:])


def _emit_another_sample(_before: State, after: State) -> State:
    (first, *rest), groups = after.aligned[0], after.aligned[1:]
    return replace(after, aligned=((replace(first, position=99), *rest), *groups))


def _repeat_a_position(_before: State, after: State) -> State:
    return replace(after, window=(after.window[0], after.window[0], *after.window[2:]))


def _skip_a_number(_before: State, after: State) -> State:
    return replace(after, planned_steps=after.planned_steps + 1)


def _release_early(before: State, after: State) -> State:
    return replace(after, plan=(), planned_steps=after.planned_steps)


def _overfill(_before: State, after: State) -> State:
    long = tuple(replace(sample, length=8) for sample in (*after.aligned[0], *after.aligned[0]))
    return replace(after, aligned=(long, *after.aligned[1:]))


def _carry_what_is_due(_before: State, after: State) -> State:
    return replace(after, window=(replace(after.window[0], position=-1), *after.window[1:]))


def _overfill_the_queue(_before: State, after: State) -> State:
    return replace(after, queue=after.queue * 4)


def _forget_the_groups(_before: State, after: State) -> State:
    return replace(after, groups=((),))


def _turn_around(_before: State, after: State) -> State:
    return replace(after, aligned=after.aligned[::-1])


CHANGES: dict[str, tuple[Change, Callable[[State, State], bool]]] = {
    "I1": (_drop_a_sample, lambda b, a: bool(a.window)),
    "I2": (_emit_another_sample, lambda b, a: a.phase is Phase.COUNT and b.phase is Phase.OFFER and bool(a.aligned[0])),
    "I3": (_repeat_a_position, lambda b, a: len(a.window) > 1 and a.window is not b.window),
    "I4": (_skip_a_number, lambda b, a: bool(a.plan)),
    "I5": (_release_early, lambda b, a: bool(b.plan) and b.plan is a.plan),
    "I6": (_overfill, lambda b, a: a.aligned is not b.aligned and bool(a.aligned) and bool(a.aligned[0])),
    "I7": (
        _carry_what_is_due,
        lambda b, a: b.phase is Phase.OFFER and a.phase is Phase.COUNT and bool(a.window) and len(b.marks) == 1,
    ),
    "I8": (_overfill_the_queue, lambda b, a: len(a.queue) > 0),
    "I9": (_forget_the_groups, lambda b, a: a.phase is Phase.FILL),
    "I10": (_turn_around, lambda b, a: b.phase is Phase.OFFER and len(set(map(sum_tokens, a.aligned))) > 1),
}


def test_every_invariant_holds_in_a_run() -> None:
    """Spec: I1, I2, I3, I4, I5, I6, I7, I8, I9, I10, I11, I12, I13."""
    for before, after in PAIRS:
        check_transition(CONFIG, before, after)
    assert [invariant.id for invariant in INVARIANTS] == [f"I{i}" for i in range(1, 14)]


@pytest.mark.parametrize("draw", [Draw(4, 3, 7), Draw(6, 3, 8), Draw(6, 2, 13), Draw(7, -1, 8)])
def test_a_draw_of_what_is_drawn_or_is_not_there_breaks_i11(draw: Draw) -> None:
    """Spec: I11. Checks: DEAL."""
    config = make_config(shared_samples=12)
    (invariant,) = (invariant for invariant in INVARIANTS if invariant.id == "I11")
    before = State(draw=Draw(0, 3, 6))
    assert invariant.holds(config, before, State(draw=Draw(8, 4, 12)))
    assert invariant.holds(config, before, before)
    assert not invariant.holds(config, before, State(draw=draw))
    assert not invariant.holds(make_config(), before, State(draw=Draw(8, 4, 12)))


def test_a_group_of_an_unfriendly_number_breaks_i12() -> None:
    """Spec: I12. Checks: SIZES."""
    config = make_config(sizes=Sizes.POWERS)
    (invariant,) = (invariant for invariant in INVARIANTS if invariant.id == "I12")
    right, wrong = ((make_shard([1] * count), ()) for count in (4, 3))
    assert invariant.holds(config, State(), State(aligned=right))
    assert not invariant.holds(config, State(), State(aligned=wrong))
    assert invariant.holds(make_config(), State(), State(aligned=wrong))


def test_an_update_in_parts_breaks_i13() -> None:
    """Spec: I13. Checks: UPDATE."""
    own, shared = make_config(update_samples=4), make_config(update_samples=6, shared_samples=9)
    (invariant,) = (invariant for invariant in INVARIANTS if invariant.id == "I13")
    offer, samples = State(phase=Phase.OFFER), make_shard([1] * 5)
    whole, carried = (State(phase=Phase.COUNT, aligned=(samples[:1],), window=window) for window in ((), samples[1:2]))
    assert invariant.holds(own, replace(offer, round=1), whole)
    assert not invariant.holds(own, replace(offer, round=1), carried), "a sample slips into the next update"
    assert not invariant.holds(own, offer, whole), "round 0 of two only releases"
    assert not invariant.holds(shared, replace(offer, round=1), whole), "round 1 of three only draws"
    assert invariant.holds(shared, replace(offer, round=2), whole)
    for window, holds in (
        (State(window=samples[:3], wanted_samples=1), True),
        (State(window=samples[:3], wanted_samples=2), False),
    ):
        assert invariant.holds(own, State(), replace(window, round=1)) == holds, "5 are more than an update's"
        assert not invariant.holds(own, State(), window), "nothing is read in round 0"
    assert not invariant.holds(own, replace(whole, round=1), replace(whole, round=1, window=samples))
    assert invariant.holds(make_config(), offer, carried)


def test_a_group_over_a_limit_breaks_i6() -> None:
    """Spec: I6. Checks: BUDGET."""
    config = make_config(limits=(9, 4))
    (invariant,) = (invariant for invariant in INVARIANTS if invariant.id == "I6")
    right, wrong = (make_shard([1, 1], costs=[(2, 1), (2, amount)]) for amount in (3, 4))
    assert invariant.holds(config, State(), State(aligned=(right, wrong[1:])))
    assert not invariant.holds(config, State(), State(aligned=(right, wrong)))


@pytest.mark.parametrize("name", CHANGES)
def test_each_invariant_can_fail(name: str) -> None:
    """Spec: I1 to I10."""
    change, fits = CHANGES[name]
    before, after = next((b, a) for b, a in PAIRS if fits(b, a))
    (invariant,) = (invariant for invariant in INVARIANTS if invariant.id == name)
    broken = change(before, after)
    assert invariant.holds(CONFIG, before, after)
    assert not invariant.holds(CONFIG, before, broken)
    with pytest.raises(InvariantError):
        check_transition(CONFIG, before, broken)
