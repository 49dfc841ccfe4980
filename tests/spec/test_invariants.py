"""I1 to I13 hold in a run, and I11 to I13 can fail. `tests/core/test_invariants.py` shows that I1 to I10 can."""

from __future__ import annotations

from dataclasses import replace

import pytest

from odb_ref.core.batching.shards import Draw
from odb_ref.core.batching.sizes import Sizes
from odb_ref.core.config import Config
from odb_ref.core.invariants import INVARIANTS, check_transition
from odb_ref.core.machine import start, transition
from odb_ref.core.state import Phase, State
from tests.helpers.world import World, make_config, make_shard, make_shards

CONFIG = make_config(max_age_rounds=1)


def holds(name: str, before: State, after: State, config: Config = CONFIG) -> bool:
    (invariant,) = (invariant for invariant in INVARIANTS if invariant.id == name)
    return invariant.holds(config, before, after)


def test_every_invariant_holds_in_a_run() -> None:
    """Spec: I1, I2, I3, I4, I5, I6, I7, I8, I9, I10, I11, I12, I13. Samples are carried in this run."""
    node = World(CONFIG, make_shards([[8, 8, 7, 8] * 3, [1] * 20])).run().nodes[0]
    state, _ = start(node.machine.config)
    for event, _ in node.events:
        after, _ = transition(node.machine.config, state, event)
        check_transition(CONFIG, state, after)
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
