"""Batches are trained on when every rank has collated them."""

from __future__ import annotations

import pytest
from odb_sim.engine.batches import Shelf, count_batches

from odb_ref.core.errors import InvariantError
from odb_ref.core.types import ZERO_COUNTS, Group, Sample, Step


def test_a_step_that_a_rank_has_not_collated_is_not_there() -> None:
    """Checks: RELEASE."""
    row: list[Group] = [(Sample(0, 0, 4, 0),), ()]
    steps = [Step(number, 3, group, ZERO_COUNTS) for number, group in enumerate(row)]
    shelf = Shelf(2)
    shelf.put(1, steps, count_batches(row))
    with pytest.raises(InvariantError, match="RELEASE: step 0 is taken, and not collated on every rank"):
        shelf.take(0)
    shelf.put(0, [], count_batches([]))
    with pytest.raises(InvariantError, match="RELEASE"):
        shelf.take(0)
    shelf.put(0, steps, count_batches(row))
    assert shelf.take(1).samples.tolist() == [0, 0]
    assert shelf.take(0).samples.tolist() == [1, 1]
    with pytest.raises(InvariantError, match="RELEASE: step 0"):
        shelf.take(0)
