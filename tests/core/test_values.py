"""A value made by way of a draft is the value: of its type, equal, frozen, and it may be pickled."""

from __future__ import annotations

import pickle
from dataclasses import FrozenInstanceError, dataclass

import pytest

from odb_ref.core.types import Sample, make_sample
from odb_ref.core.values import make_copier, make_draft


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


def test_an_open_draft_is_filled_in_before_it_becomes_the_value() -> None:
    pair = Pair(3)
    draft = make_copier(Pair)(pair)
    assert type(draft) is not Pair
    draft.left = 5  # type: ignore[misc]
    draft.__class__ = Pair
    assert draft == Pair(5)
    assert pair == Pair(3)


def test_a_sample_made_quickly_is_a_sample() -> None:
    sample = make_sample(1, 2, 3, 0, (4,))
    assert type(sample) is Sample
    assert sample == Sample(1, 2, 3, 0, (4,)) == pickle.loads(pickle.dumps(sample))
    assert make_sample(1, 2, 3, 0) == Sample(1, 2, 3, 0)
    with pytest.raises(FrozenInstanceError):
        sample.length = 9  # type: ignore[misc]
    with pytest.raises(TypeError):
        make_sample(1, 2, 3)  # type: ignore[call-arg]
