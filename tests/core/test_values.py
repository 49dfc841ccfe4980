"""Values are immutable, and one made from a draft is like any other: of its type, equal, frozen, and picklable."""

from __future__ import annotations

import pickle
from dataclasses import FrozenInstanceError, dataclass, is_dataclass
from typing import Any

import pytest

from odb_ref.core.events import StepTaken
from odb_ref.core.state import State
from odb_ref.core.types import Sample, Step, StepCounts, make_sample
from odb_ref.core.values import make_draft, make_replace


def test_values_are_immutable() -> None:
    """Spec: R1."""
    for value in (Sample(0, 0, 1, 1), Step(0, 0, (), StepCounts(0, 0, 0)), State(), StepTaken()):
        assert is_dataclass(value)
        with pytest.raises((FrozenInstanceError, AttributeError, TypeError)):
            value.anything = 1  # type: ignore[union-attr]


@dataclass(frozen=True, slots=True)
class Pair:
    left: int
    right: tuple[int, ...] = (7,)


def test_a_draft_becomes_the_value() -> None:
    pair = make_draft(Pair)(3)
    assert type(pair) is Pair
    assert pair == Pair(3, (7,))
    assert hash(pair) == hash(Pair(3))
    assert repr(pair) == repr(Pair(3))
    with pytest.raises(FrozenInstanceError):
        pair.left = 4  # type: ignore[misc]


def test_what_is_replaced_is_a_value_and_leaves_the_other_as_it_was() -> None:
    pair = Pair(3, (8,))
    replace: Any = make_replace(Pair)
    assert type(replace(pair, left=5)) is Pair
    assert replace(pair, left=5) == Pair(5, (8,))
    assert replace(pair, right=(), left=5) == Pair(5, ())
    assert replace(pair) == pair == Pair(3, (8,))
    with pytest.raises(FrozenInstanceError):
        replace(pair, left=5).left = 4
    with pytest.raises(TypeError):
        replace(pair, middle=4)


def test_a_sample_made_quickly_is_a_sample() -> None:
    sample = make_sample(1, 2, 3, 0, (4,))
    assert type(sample) is Sample
    assert sample == Sample(1, 2, 3, 0, (4,)) == pickle.loads(pickle.dumps(sample))
    assert make_sample(1, 2, 3, 0) == Sample(1, 2, 3, 0)
    with pytest.raises(FrozenInstanceError):
        sample.length = 9  # type: ignore[misc]
    with pytest.raises(TypeError):
        make_sample(1, 2, 3)  # type: ignore[call-arg]
