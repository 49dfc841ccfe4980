"""If nothing is drawn, nothing is seeded. Draws are the same as with a seed for each sample. Checks: REPLAY."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import Dataset

from odb_ref.torch import ODBDataLoader
from odb_ref.torch.reading import datasets
from odb_ref.torch.reading.datasets import KeyChunk, SeededDataset
from odb_ref.torch.reading.quarantine import BadSample
from odb_ref.torch.reading.seeding import DrawDetector, Use, compute_seed, isolate, seed_generators
from tests.torch.data import make_sample

COUNT = 40
SEED = 77

DRAWS: dict[str, Callable[[int], Any]] = {
    "random": lambda number: random.random(),
    "gauss": lambda number: random.gauss(0, 1),
    "numpy": lambda number: float(np.random.random()),
    "randn": lambda number: float(np.random.randn()),
    "torch": lambda number: float(torch.rand(())),
    "normal": lambda number: float(torch.normal(0.0, 1.0, (1,))),
    "shuffle": lambda number: random.sample(range(9), 9),
    "one bit": lambda number: random.getrandbits(1),
    "all": lambda number: (random.random(), float(np.random.random()), float(torch.rand(()))),
}
"""Ways to draw."""


def reseed(number: int) -> Any:
    """Sets a seed, and leaves it set."""
    random.seed(number)
    np.random.seed(number)
    torch.manual_seed(number)
    return random.random(), float(np.random.random()), float(torch.rand(()))


def put_back(number: int) -> Any:
    """Sets a seed, and restores the state."""
    with isolate():
        return reseed(number)


def seed_only(number: int) -> Any:
    random.seed(number)


def draw_and_raise(number: int) -> Any:
    """Sometimes raises, depending on what it draws."""
    drawn = random.random()
    if drawn < 0.3:
        raise ValueError(f"{number}: {drawn}")
    return drawn


OTHERS: dict[str, Callable[[int], Any]] = {"reseed": reseed, "put back": put_back, "seed only": seed_only}


class Drawing(Dataset[Any]):
    """A data set in which the samples at ``where`` draw."""

    def __init__(self, where: frozenset[int], draw: Callable[[int], Any]) -> None:
        self.where, self.draw = where, draw
        self.reads: list[int] = []

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> Any:
        self.reads.append(index)
        return index, self.draw(index) if index in self.where else None


def read_seeded(dataset: Drawing, number: int) -> Any:
    """Returns a sample as R12.1 defines it, or what it raises."""
    seed_generators(compute_seed(Use.SAMPLE, SEED, number))
    try:
        return dataset[number]
    except ValueError as error:
        return str(error)


@pytest.fixture(autouse=True)
def kept() -> Iterator[None]:
    with isolate():
        yield


class AtOnce(Drawing):
    """Reads several at once, as a Subset does."""

    def __getitems__(self, numbers: list[int]) -> list[Any]:
        return [self[number] for number in numbers]


class AtOnceAlone(Drawing):
    """Can only read several at once."""

    __getitem__ = Dataset.__getitem__

    def __getitems__(self, numbers: list[int]) -> list[Any]:
        return [Drawing.__getitem__(self, number) for number in numbers]


KINDS = (Drawing, AtOnce, AtOnceAlone)


def cut(sizes: list[int]) -> Iterator[range]:
    """Yields chunks of these sizes. The last size repeats for the rest."""
    first = 0
    while first < COUNT:
        size = sizes.pop(0) if len(sizes) > 1 else sizes[0]
        yield range(first, min(COUNT, first + size))
        first += size


def read_chunk(seeded: SeededDataset, numbers: Iterable[int]) -> list[Any]:
    return [item for _, item in seeded[KeyChunk(SEED, [(number, number) for number in numbers])]]


@given(
    where=st.frozensets(st.integers(0, COUNT - 1)),
    how=st.sampled_from(sorted(DRAWS | OTHERS)),
    sizes=st.lists(st.integers(1, COUNT), min_size=1),
    kind=st.sampled_from(KINDS),
)
@settings(deadline=None)
def test_what_is_drawn_is_what_the_sample_s_own_seed_gives(
    where: frozenset[int], how: str, sizes: list[int], kind: type[Drawing]
) -> None:
    """This holds however samples are read together, and whichever of them draw. Spec: R12.1, R12.3."""
    draw = (DRAWS | OTHERS)[how]
    expected = [read_seeded(Drawing(where, draw), number) for number in range(COUNT)]
    seeded = SeededDataset(kind(where, draw), list)
    assert [item for numbers in cut(sizes) for item in read_chunk(seeded, numbers)] == expected


@given(where=st.frozensets(st.integers(0, COUNT - 1)), size=st.integers(1, COUNT), kind=st.sampled_from(KINDS))
@settings(deadline=None)
def test_a_sample_that_raises_for_what_it_draws_does_so_with_its_own_seed(
    where: frozenset[int], size: int, kind: type[Drawing]
) -> None:
    expected = [read_seeded(Drawing(where, draw_and_raise), number) for number in range(COUNT)]
    seeded = SeededDataset(kind(where, draw_and_raise), list, is_guarded=True)
    found = [item for numbers in cut([size]) for item in read_chunk(seeded, numbers)]
    causes = [item.cause.removeprefix("ValueError: ") if isinstance(item, BadSample) else item for item in found]
    assert causes == expected


@pytest.mark.parametrize("where", [frozenset[int](), frozenset({25})], ids=["nobody", "one"])
def test_nothing_is_seeded_for_samples_that_do_not_draw(where: frozenset[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is read twice either, except what was read together with the first that draws."""
    seeds: list[int] = []
    monkeypatch.setattr(datasets, "seed_generators", seeds.append)
    armed: list[DrawDetector] = []
    arm = DrawDetector.arm
    monkeypatch.setattr(DrawDetector, "arm", lambda self: (armed.append(self), arm(self)))
    dataset = Drawing(where, DRAWS["random"])
    seeded = SeededDataset(dataset, list)
    for first in range(0, COUNT, 10):
        read_chunk(seeded, range(first, first + 10))
    if where:
        assert dataset.reads == [*range(26), *range(26, 30), *range(20, 40)]
        assert len(seeds) == 20
    else:
        assert dataset.reads == list(range(COUNT))
        assert not seeds
        assert len(armed) <= 2 * 2 + COUNT // 10


class OfTheSeed(Dataset[Any]):
    """Draws nothing, but its samples depend on the process's first seed."""

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> Any:
        return make_sample(index) | {"drawn": torch.initial_seed() + index}


def test_what_follows_from_the_seed_alone_is_the_same_with_any_number_of_workers() -> None:
    found = []
    for num_workers in (0, 1, 3):
        loader = ODBDataLoader(OfTheSeed(), token_budget=60, collate_fn=list, num_workers=num_workers)
        with loader, warnings.catch_warnings(action="ignore"):  # more workers than cores
            found.append([sample["drawn"] for batch in loader for sample in batch])
    assert found[0] == found[1] == found[2]


def test_what_draws_for_its_first_sample_is_read_again_for_that_one_alone() -> None:
    dataset = Drawing(frozenset(range(COUNT)), DRAWS["random"])
    read_chunk(SeededDataset(dataset, list), range(COUNT))
    assert dataset.reads == [0, *range(COUNT)]


def test_a_detector_shows_each_way_to_draw() -> None:
    detector = DrawDetector(5)
    for name, draw in (DRAWS | OTHERS).items():
        detector.arm()
        draw(3)
        assert detector.has_drawn() is (name != "put back"), name
        detector.arm()
        assert not detector.has_drawn()


def read_numpy() -> tuple[bytes, int, int, float]:
    state: Any = np.random.get_state()
    return state[1].tobytes(), *state[2:]


STEPS: dict[str, Callable[[], object]] = {
    "seed": lambda: np.random.seed(3),
    "random": np.random.random,
    "randn": np.random.randn,
    "many": lambda: np.random.randn(701),
    "shuffle": lambda: np.random.permutation(50),
}


@given(before=st.lists(st.sampled_from(sorted(STEPS))), inside=st.lists(st.sampled_from(sorted(STEPS))))
@settings(deadline=None)
def test_numpy_s_state_is_put_back_to_the_last_bit(before: list[str], inside: list[str]) -> None:
    """This includes the second number of a normal pair. Spec: R12.2."""
    for step in before:
        STEPS[step]()
    found = read_numpy()
    with isolate():
        assert read_numpy()[:2] == found[:2]
        for step in inside:
            STEPS[step]()
    assert read_numpy()[:3] == found[:3]
    assert not found[2] or read_numpy()[3] == found[3]
